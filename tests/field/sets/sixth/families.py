"""The families of the sixth blind trial, which were run once before any rule was changed for them.

Their batches follow habits that earlier trials did not have: packed texts, rows of padding alone, one row, labels of
padding, and losses that read positions which see nothing. Four of the families are held out.
"""

from __future__ import annotations

import functools
from typing import Any

from field.kit.building import (
    HEADS,
    INNER,
    LAYERS,
    LEFT,
    WIDTH,
    WITH_ROUTER,
    Family,
    decoder,
    encoder,
    fused_or_not,
    hf,
    outer_loss,
    own_loss,
    sequences,
)
from field.kit.data import (
    WORDS,
    alone,
    asked,
    listened,
    packed,
    padded_left,
    padding_labelled,
    pictures,
    read_padding,
    translated,
    with_empty_row,
)

_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

FAMILIES: dict[str, Family] = {
    "bitnet": LEFT(
        decoder("bitnet", hidden_size=64, intermediate_size=96, num_key_value_heads=2),
        batch=functools.partial(padded_left, length=64),
    ),
    "cwm": Family(
        decoder(
            "cwm",
            **_GROUPED,
            max_position_embeddings=128,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        alone,
        own_loss,
        held_out=True,
    ),
    "flex_olmo": LEFT(
        decoder("flex_olmo", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.1),
        loss=WITH_ROUTER,
    ),
    "minimax_m2": LEFT(
        decoder(
            "minimax_m2",
            **_GROUPED,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        micros=2,
        held_out=True,
    ),
    "afmoe": LEFT(
        decoder(
            "afmoe",
            **_GROUPED,
            num_experts=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            num_dense_layers=1,
            moe_intermediate_size=24,
            route_scale=2.5,
            mup_enabled=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
        ),
        batch=functools.partial(padded_left, length=24),
    ),
    "hunyuan_moe": Family(decoder("hunyuan_v1_moe", **_GROUPED, num_experts=4, moe_topk=2), padding_labelled, own_loss),
    "jais2": Family(decoder("jais2", **_GROUPED), read_padding, own_loss),
    "granitemoeshared": Family(
        decoder(
            "granitemoeshared",
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
            attention_multiplier=0.25,
            residual_multiplier=0.5,
            embedding_multiplier=2.0,
            logits_scaling=2.0,
        ),
        with_empty_row,
        own_loss,
    ),
    "youtu": LEFT(decoder("youtu", **_LATENT), steps=4),
    "minicpm3": Family(decoder("minicpm3", **_LATENT, scale_emb=3, dim_model_base=16), packed, own_loss),
    "lfm2_moe": LEFT(
        decoder(
            "lfm2_moe",
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            num_dense_layers=1,
            layer_types=["conv", "full_attention"],
        )
    ),
    "blenderbot_small": Family(sequences("blenderbot-small"), translated, own_loss, held_out=True),
    "moonshine": Family(
        hf(
            "moonshine",
            "MoonshineForConditionalGeneration",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            encoder_num_hidden_layers=LAYERS,
            decoder_num_hidden_layers=LAYERS,
            encoder_num_attention_heads=HEADS,
            decoder_num_attention_heads=HEADS,
            max_position_embeddings=64,
            partial_rotary_factor=0.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
        ),
        listened,
        own_loss,
    ),
    "xlm_roberta_xl": Family(encoder("xlm-roberta-xl", pad_token_id=1), functools.partial(asked, pad=1), own_loss),
    "xmod": Family(
        encoder(
            "xmod",
            pad_token_id=1,
            max_position_embeddings=64,
            languages=["en_XX", "de_DE"],
            default_language="en_XX",
            adapter_reduction_factor=2,
        ),
        functools.partial(asked, pad=1, length=48, empty=False, languages=2),
        own_loss,
        held_out=True,
        short=False,  # its adapters write bfloat16 into float32
    ),
    "eva": Family(
        functools.partial(
            fused_or_not, "eva02_tiny_patch14_224", img_size=56, embed_dim=WIDTH, depth=LAYERS, num_heads=HEADS
        ),
        functools.partial(pictures, size=56),
        outer_loss,
    ),
}
