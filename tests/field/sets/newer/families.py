"""Further families, each with something that the others lack: latent attention, sinks, multipliers, shared layers."""

from __future__ import annotations

import functools

from field.kit.building import (
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    PLAIN,
    TEXT,
    WIDTH,
    WINDOW,
    WITH_ROUTER,
    Family,
    decoder,
    encoder,
    gpt,
    hearing,
    hf,
    own_loss,
    patched,
    seeing,
    sequences,
)
from field.kit.data import (
    CLASSES,
    WORDS,
    classified,
    recordings,
)

FAMILIES: dict[str, Family] = {
    "stablelm": TEXT(
        decoder("stablelm", num_key_value_heads=2, partial_rotary_factor=0.5, attention_dropout=0.0, hidden_dropout=0.0)
    ),
    "phi3": TEXT(decoder("phi3", num_key_value_heads=2, resid_pdrop=0.0, embd_pdrop=0.0), micros=2),
    "granite": TEXT(
        decoder(
            "granite",
            num_key_value_heads=2,
            embedding_multiplier=6.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
            logits_scaling=2.0,
        )
    ),
    "olmo2": TEXT(decoder("olmo2", num_key_value_heads=2)),
    "cohere": TEXT(decoder("cohere", num_key_value_heads=2, logit_scale=0.25)),
    "qwen2_moe": TEXT(
        decoder(
            "qwen2_moe",
            num_key_value_heads=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        loss=WITH_ROUTER,
    ),
    "deepseek_v3": TEXT(
        decoder(
            "deepseek_v3",
            num_key_value_heads=HEADS,
            moe_intermediate_size=24,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            num_hidden_layers=3,
        )
    ),
    "gpt_oss": TEXT(
        decoder(
            "gpt_oss",
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
        ),
        loss=WITH_ROUTER,
        attention=False,
    ),
    "gptj": TEXT(gpt("gptj", rotary_dim=4), attention=False),
    "bart": TEXT(sequences("bart", decoder_start_token_id=2)),
    "electra": CLASSIFIED(encoder("electra", embedding_size=16)),
    "albert": CLASSIFIED(encoder("albert", embedding_size=16, classifier_dropout_prob=0.0)),
    "dinov2": IMAGES(
        seeing(
            "dinov2",
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "regnet": PLAIN(
        seeing("regnet", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], groups_width=8, layer_type="y"),
        loss=own_loss,
    ),
    # --- held out
    "glm4": TEXT(decoder("glm4", num_key_value_heads=2, head_dim=8), held_out=True),
    "starcoder2": TEXT(
        decoder(
            "starcoder2", num_key_value_heads=2, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0
        ),
        held_out=True,
        micros=2,
    ),
    "granitemoe": TEXT(
        decoder("granitemoe", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
        loss=WITH_ROUTER,
        held_out=True,
    ),
    "gpt_neo": TEXT(
        hf(
            "gpt_neo",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_layers=LAYERS,
            attention_types=[[["global", "local"], 1]],
            num_heads=HEADS,
            intermediate_size=INNER,
            max_position_embeddings=32,
            window_size=WINDOW,
            embed_dropout=0.0,
            attention_dropout=0.0,
            resid_dropout=0.0,
            use_cache=False,
        ),
        attention=False,
        held_out=True,
    ),
    "distilbert": CLASSIFIED(
        hf(
            "distilbert",
            "AutoModelForSequenceClassification",
            vocab_size=WORDS,
            dim=WIDTH,
            hidden_dim=INNER,
            n_layers=LAYERS,
            n_heads=HEADS,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            num_labels=CLASSES,
            max_position_embeddings=40,
        ),
        held_out=True,
    ),
    "mpnet": Family(
        encoder("mpnet", pad_token_id=1), functools.partial(classified, pad=1), own_loss, attention=False, held_out=True
    ),
    "beit": IMAGES(patched("beit", drop_path_rate=0.0, use_relative_position_bias=True), held_out=True),
    "wav2vec2": Family(hearing("wav2vec2", vocab_size=WORDS), recordings, own_loss, held_out=True),
}
