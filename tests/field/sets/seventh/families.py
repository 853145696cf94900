"""The families of the seventh blind trial, which were run once before any rule was changed for them.

Their batches follow habits that earlier trials did not have: labels of a few masked tokens, chains told apart by a
number for each token, a class for each token beside padding, and labels that a loss aligns with frames of sound.
Four of the families are held out.
"""

from __future__ import annotations

import functools
from typing import Any

from field.kit.building import (
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    LEFT,
    PATCHES,
    PLAIN,
    TEXT,
    WIDTH,
    Family,
    decoder,
    encoder,
    fused_or_not,
    hearing,
    hf,
    outer_loss,
    own_loss,
    seeing,
)
from field.kit.data import (
    CLASSES,
    WORDS,
    chained,
    clips,
    dictated,
    packed,
    padded_left,
    pictures,
    sounds,
    tagged,
    transcribed,
    with_empty_row,
)

_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIXED_LAYERS = ["sliding_attention", "full_attention"]
_FRAMES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "conv_kernel_size": 3,
    "subsampling_factor": 4,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "dropout": 0.0,
    "layerdrop": 0.0,
    "activation_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""A small encoder of sound that joins frames, with Parakeet's names."""

FAMILIES: dict[str, Family] = {
    "ministral": LEFT(
        decoder(
            "ministral",
            hidden_size=64,
            intermediate_size=96,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=9,
            layer_types=["full_attention", "sliding_attention"],
        ),
        batch=functools.partial(padded_left, length=40),
    ),
    "doge": TEXT(
        decoder("doge", num_key_value_heads=2, keep_window_size=8, is_moe=True, num_experts=16, num_experts_per_tok=4)
    ),
    "dbrx": LEFT(
        hf(
            "dbrx",
            vocab_size=WORDS,
            d_model=WIDTH,
            n_heads=HEADS,
            n_layers=LAYERS,
            max_seq_len=64,
            attn_config={"clip_qkv": 2.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            ffn_config={"hidden_size": WIDTH, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
            pad_token_id=0,
            use_cache=False,
        ),
        micros=2,
        short=False,  # its experts add bfloat16 to float32
    ),
    "laguna": LEFT(
        decoder(
            "laguna",
            **_GROUPED,
            **_ROUTED,
            shared_expert_intermediate_size=24,
            sliding_window=6,
            layer_types=_MIXED_LAYERS,
            mlp_layer_types=["dense", "sparse"],
            num_attention_heads_per_layer=[HEADS, 2 * HEADS],
            moe_routed_scaling_factor=2.0,
            moe_router_logit_softcapping=2.0,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            },
        ),
        batch=functools.partial(padded_left, length=24),
        held_out=True,
    ),
    "glm4_moe_lite": LEFT(
        decoder(
            "glm4_moe_lite",
            num_key_value_heads=HEADS,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            mlp_layer_types=["dense", "sparse"],
        ),
        steps=3,
    ),
    "cohere2_moe": Family(
        decoder(
            "cohere2_moe",
            **_GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            expert_selection_fn="sigmoid",
            sliding_window=6,
            layer_types=_MIXED_LAYERS,
            mlp_layer_types=["dense", "sparse"],
            prefix_dense_intermediate_size=INNER,
            logit_scale=0.25,
        ),
        with_empty_row,
        own_loss,
    ),
    "hy_v3": Family(
        decoder("hy_v3", **_GROUPED, **_ROUTED, num_shared_experts=1, mlp_layer_types=["dense", "sparse"]),
        packed,
        own_loss,
    ),
    "qwen3_5": LEFT(
        decoder(
            "qwen3_5_text",
            **_GROUPED,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
        ),
        batch=functools.partial(padded_left, length=20),
    ),
    "ernie": Family(
        hf(
            "ernie",
            "AutoModelForTokenClassification",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=40,
            use_task_id=True,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        tagged,
        own_loss,
    ),
    "jina_v3": CLASSIFIED(encoder("jina_embeddings_v3", pad_token_id=0), micros=2, held_out=True),
    "esmc": Family(
        hf(
            "esmc",
            "AutoModelForMaskedLM",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=64,
        ),
        chained,
        own_loss,
    ),
    "canary": Family(
        hf(
            "canary",
            "CanaryForConditionalGeneration",
            encoder_config=_FRAMES | {"scale_input": False},
            decoder_config={
                "vocab_size": WORDS,
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "head_dim": 8,
                "max_position_embeddings": 32,
            },
            vocab_size=WORDS,
            use_cache=False,
        ),
        transcribed,
        own_loss,
        held_out=True,
    ),
    "dinov2_registers": IMAGES(
        seeing(
            "dinov2_with_registers",
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            mlp_ratio=2,
            image_size=32,
            patch_size=8,
            num_register_tokens=3,
        )
    ),
    "vivit": Family(
        hf(
            "vivit",
            "VivitForVideoClassification",
            **(PATCHES | {"image_size": 16}),
            num_frames=4,
            tubelet_size=[2, 8, 8],
            num_labels=CLASSES,
        ),
        clips,
        own_loss,
        held_out=True,
    ),
    "parakeet": Family(
        hf("parakeet_ctc", "ParakeetForCTC", vocab_size=WORDS, pad_token_id=0, encoder_config=_FRAMES),
        dictated,
        own_loss,
    ),
    "w2v_bert": Family(
        hearing(
            "wav2vec2-bert",
            feature_projection_input_dim=8,
            conv_depthwise_kernel_size=5,
            conformer_conv_dropout=0.0,
            left_max_position_embeddings=4,
            right_max_position_embeddings=2,
        ),
        sounds,
        own_loss,
    ),
    "mobilenet_v1": PLAIN(
        seeing("mobilenet_v1", depth_multiplier=0.25, image_size=64, classifier_dropout_prob=0.0),
        batch=functools.partial(pictures, rows=8, size=64),
        loss=own_loss,
    ),
    "twins": Family(
        functools.partial(
            fused_or_not,
            "twins_svt_small",
            img_size=64,
            embed_dims=[16, 32],
            num_heads=[2, 4],
            mlp_ratios=[2, 2],
            depths=[2, 2],
            wss=[4, 4],
            sr_ratios=[4, 2],
        ),
        functools.partial(pictures, size=64),
        outer_loss,
    ),
}
