"""The families that were written after the rules were changed for the sixth blind trial, and run once."""

from __future__ import annotations

import functools
from typing import Any

from field.kit.building import (
    HEADS,
    LEFT,
    Family,
    decoder,
    encoder,
    own_loss,
)
from field.kit.data import (
    asked,
    padded_left,
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

_ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, Family] = {
    "solar_open": LEFT(decoder("solar_open", **_GROUPED, **_ROUTED, n_routed_experts=4, n_shared_experts=1)),
    "exaone_moe": LEFT(
        decoder(
            "exaone_moe",
            **_GROUPED,
            **_ROUTED,
            num_experts=4,
            num_shared_experts=1,
            sliding_window=6,
            layer_types=_MIXED_LAYERS,
            mlp_layer_types=["dense", "sparse"],
        ),
        batch=functools.partial(padded_left, length=24),
    ),
    "mellum": Family(
        decoder(
            "mellum",
            **_GROUPED,
            **_ROUTED,
            num_experts=4,
            sliding_window=6,
            layer_types=_MIXED_LAYERS,
            mlp_layer_types=["dense", "sparse"],
        ),
        with_empty_row,
        own_loss,
    ),
    "gte": Family(encoder("gte", pad_token_id=0), asked, own_loss),
}
"""Families that were written after the rules were changed for the sixth trial, and run once."""
