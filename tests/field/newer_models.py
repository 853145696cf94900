"""Further families, each with something that the others lack: latent attention, sinks, multipliers, shared layers."""

from __future__ import annotations

import functools

import torch

from .building import (
    CLASSES,
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    PLAIN,
    ROWS,
    TEXT,
    WIDTH,
    WINDOW,
    WITH_ROUTER,
    WORDS,
    Batch,
    Family,
    classified,
    decoder,
    encoder,
    hf,
    own_loss,
    seeing,
)


def recordings(random: torch.Generator) -> Batch:
    """Sound, and its class."""
    return {
        "input_values": torch.randn(ROWS, 200, generator=random),
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


NEWER: dict[str, Family] = {
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
    "gptj": TEXT(
        hf(
            "gptj",
            vocab_size=WORDS,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=32,
            rotary_dim=4,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
        ),
        attention=False,
    ),
    "bart": TEXT(
        hf(
            "bart",
            "AutoModelForSeq2SeqLM",
            vocab_size=WORDS,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            max_position_embeddings=32,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            use_cache=False,
        )
    ),
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
    "beit": IMAGES(
        seeing(
            "beit",
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            drop_path_rate=0.0,
            use_relative_position_bias=True,
        ),
        held_out=True,
    ),
    "wav2vec2": Family(
        hf(
            "wav2vec2",
            "AutoModelForAudioClassification",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            conv_dim=[16, 16],
            conv_stride=[5, 2],
            conv_kernel=[10, 3],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            feat_proj_dropout=0.0,
            activation_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            mask_time_prob=0.0,
            num_labels=CLASSES,
            classifier_proj_size=16,
        ),
        recordings,
        own_loss,
        held_out=True,
    ),
}
