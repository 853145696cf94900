"""Models as people train them, with tiny configurations, and their data.

A third of the families is held out: rules of the comparison are never tuned on them.
"""

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
    UNPADDED,
    WIDTH,
    WINDOW,
    WITH_ROUTER,
    Family,
    decoder,
    efficientnet,
    encoder,
    fused_or_not,
    gpt,
    hf,
    outer_loss,
    own_loss,
    patched,
    seeing,
    t5,
    tv,
)
from field.kit.data import (
    WORDS,
    captioned,
    classified,
    pictures,
    speech,
)

FAMILIES: dict[str, Family] = {
    "llama": TEXT(decoder("llama", num_key_value_heads=2), micros=2),
    "gpt2": TEXT(gpt("gpt2", embd_pdrop=0.1, resid_pdrop=0.1), dropout=True),
    "bert": CLASSIFIED(encoder("bert", hidden_dropout_prob=0.1), dropout=True),
    "t5": TEXT(t5("t5"), attention=False, micros=2),
    "mistral": TEXT(decoder("mistral", num_key_value_heads=2, sliding_window=WINDOW)),
    "qwen2": TEXT(decoder("qwen2", num_key_value_heads=2, tie_word_embeddings=True)),
    "mixtral": TEXT(
        decoder("mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        loss=WITH_ROUTER,
    ),
    "gemma2": TEXT(
        decoder(
            "gemma2",
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            num_hidden_layers=3,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        attention=False,
    ),
    "opt": UNPADDED(decoder("opt", ffn_dim=INNER, dropout=0.0, word_embed_proj_dim=WIDTH)),
    "bloom": TEXT(
        hf(
            "bloom",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            hidden_dropout=0.0,
            use_cache=False,
        ),
        attention=False,
    ),
    "vit": IMAGES(patched("vit")),
    "whisper": Family(
        hf(
            "whisper",
            "AutoModelForSpeechSeq2Seq",
            vocab_size=WORDS,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            num_mel_bins=8,
            max_source_positions=12,
            max_target_positions=16,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            use_cache=False,
        ),
        speech,
        own_loss,
    ),
    "deberta": CLASSIFIED(
        encoder("deberta-v2", pos_att_type=["p2c", "c2p"], relative_attention=True, pad_token_id=0), attention=False
    ),
    "resnet": PLAIN(
        seeing("resnet", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], layer_type="basic"),
        loss=own_loss,
    ),
    "mobilenet_v2": PLAIN(
        tv("mobilenet_v2", width_mult=0.25, dropout=0.0), batch=functools.partial(pictures, rows=8, size=64)
    ),
    "convnext": PLAIN(
        seeing("convnext", hidden_sizes=[16, 24, 32, 32], depths=[1, 1, 2, 1], image_size=32, drop_path_rate=0.0),
        loss=own_loss,
    ),
    "swin": IMAGES(
        seeing(
            "swin",
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            image_size=32,
            patch_size=2,
            drop_path_rate=0.0,
        ),
        attention=False,
    ),
    # --- held out
    "qwen3": TEXT(decoder("qwen3", num_key_value_heads=2, head_dim=8), held_out=True, micros=2),
    "phi": UNPADDED(decoder("phi", resid_pdrop=0.0, embd_pdrop=0.0), held_out=True),
    "gpt_neox": TEXT(decoder("gpt_neox", rotary_pct=0.5, hidden_dropout=0.0), held_out=True),
    "falcon": TEXT(
        decoder("falcon", alibi=False, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
        held_out=True,
    ),
    "gemma3": TEXT(
        decoder("gemma3_text", num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8),
        held_out=True,
    ),
    "roberta": Family(
        encoder("roberta", pad_token_id=1), functools.partial(classified, pad=1), own_loss, held_out=True
    ),
    "olmoe": TEXT(
        decoder("olmoe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True), loss=WITH_ROUTER, held_out=True
    ),
    "clip": Family(
        hf(
            "clip",
            "AutoModel",
            text_config={
                "vocab_size": WORDS,
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "max_position_embeddings": 16,
                "eos_token_id": WORDS - 1,
            },
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "image_size": 16,
                "patch_size": 8,
            },
            projection_dim=16,
        ),
        captioned,
        functools.partial(own_loss, return_loss=True),
        held_out=True,
    ),
    "mamba": TEXT(
        hf("mamba", vocab_size=WORDS, hidden_size=WIDTH, state_size=4, num_hidden_layers=LAYERS, use_cache=False),
        attention=False,
        held_out=True,
    ),
    "efficientnet": PLAIN(efficientnet, held_out=True),
    "tv_swin": PLAIN(
        tv(
            "SwinTransformer",
            patch_size=[2, 2],
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            stochastic_depth_prob=0.0,
        ),
        held_out=True,
    ),
    "timm_vit": Family(
        functools.partial(
            fused_or_not,
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=WIDTH,
            depth=LAYERS,
            num_heads=HEADS,
        ),
        pictures,
        outer_loss,
        held_out=True,
    ),
}
