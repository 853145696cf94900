"""The families of the eighth blind trial, which were run once before any rule was changed for them.

They have layers that earlier trials did not have: attention and a state space side by side, stacks that run several
times and partly without gradients, experts that return their input, sinks, keys of a text and its source in one
attention, patches that are hidden from an encoder, and images of several sizes in one batch. Four are held out.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from field.kit.building import (
    HEADS,
    INNER,
    LAYERS,
    LEFT,
    PATCHES,
    TEXT,
    WIDTH,
    Family,
    decoder,
    hf,
    object_loss,
    own_loss,
)
from field.kit.data import (
    CLASSES,
    WORDS,
    Batch,
    dictated,
    forecast,
    forms,
    framed,
    hidden_patches,
    masked_words,
    padded_left,
    prefixed,
    questions,
    recorded,
    sized_images,
    translated,
)

_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_WORDS: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}


def series_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Each series has a length of its own."""
    series = [row[-int(length) :] for row, length in zip(batch["past_values"], batch["lengths"], strict=True)]
    loss: Tensor = model(past_values=series, freq=batch["freq"].tolist(), future_values=batch["future_values"]).loss
    return loss


def _spoken_words(attention: str) -> nn.Module:
    """The projection that both sums of the loss share is tied to the first one."""
    build = hf(
        "granite_speech5_ctc",
        "GraniteSpeech5ForCTC",
        vocab_size=WORDS,
        pad_token_id=0,
        encoder_config={
            "vocab_size": WORDS,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_mel_bins": 4,  # four frames of sound make one
            "max_position_embeddings": 16,
            "context_size": 12,
            "conv_kernel_size": 3,
            "subsample_layers": [0],
        },
    )
    return build(attention)


FAMILIES: dict[str, Family] = {
    "falcon_h1": LEFT(
        decoder(
            "falcon_h1",
            num_key_value_heads=2,
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=2,
            mamba_d_state=4,
            mamba_chunk_size=8,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            ssm_multipliers=[1.2, 0.8, 0.7, 1.1, 0.9],
            mlp_multipliers=[1.3, 0.8],
            key_multiplier=0.7,
            ssm_out_multiplier=0.6,
            attention_out_multiplier=0.9,
            lm_head_multiplier=0.5,
            embedding_multiplier=1.5,
        ),
        batch=functools.partial(padded_left, length=20),
    ),
    "zaya": TEXT(
        decoder(
            "zaya",
            **_GROUPED,
            num_experts=4,
            num_experts_per_tok=1,
            moe_intermediate_size=24,
            router_hidden_size=16,
            layer_types=["hybrid", "hybrid_sliding"],
            sliding_window=6,
        ),
        micros=2,
    ),
    "granite_swa": LEFT(
        decoder(
            "granite_swa",
            num_key_value_heads=2,
            **_MIXED,
            layer_rope_theta=[10000.0, 0],
            embedding_multiplier=2.0,
            logits_scaling=4.0,
            residual_multiplier=0.5,
            attention_multiplier=0.25,
        ),
        attention=False,
    ),
    "olmo_hybrid": LEFT(
        decoder(
            "olmo_hybrid",
            num_key_value_heads=2,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        batch=functools.partial(padded_left, length=18),
        held_out=True,
    ),
    "longcat_flash": LEFT(
        hf(
            "longcat_flash",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_layers=1,
            num_attention_heads=HEADS,
            ffn_hidden_size=INNER,
            q_lora_rank=16,
            kv_lora_rank=8,
            qk_nope_head_dim=4,
            qk_rope_head_dim=4,
            head_dim=4,
            v_head_dim=8,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
            expert_ffn_hidden_size=24,
            routed_scaling_factor=1.5,
            max_position_embeddings=64,
            pad_token_id=0,
            use_cache=False,
        ),
        micros=2,
    ),
    "hrm_text": Family(
        decoder(
            "hrm_text",
            head_dim=8,
            num_layers_per_stack=1,
            H_cycles=2,
            L_cycles=3,
            L_bp_cycles=[1, 2],
            embedding_scale=3.0,
        ),
        questions,
        own_loss,
    ),
    "ultrabert": Family(
        hf(
            "ultrabert",
            "UltrabertForMaskedLM",
            **_WORDS,
            **_MIXED,
            num_key_value_heads=2,
            prediction_head_size=24,
            tie_word_embeddings=False,
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
        masked_words,
        own_loss,
    ),
    "lilt": Family(
        hf(
            "lilt",
            "LiltForTokenClassification",
            **(_WORDS | {"hidden_size": 48}),
            pad_token_id=0,
            max_2d_position_embeddings=64,
            channel_shrink_ratio=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        forms,
        own_loss,
        attention=False,
    ),
    "t5gemma2": Family(
        hf(
            "t5gemma2",
            "T5Gemma2ForConditionalGeneration",
            encoder={
                "text_config": _WORDS | _GROUPED | _MIXED | {"query_pre_attn_scalar": 8},
                "vision_config": PATCHES | {"model_type": "siglip_vision_model", "num_hidden_layers": 1},
                "eoi_token_index": WORDS - 1,
                "image_token_index": WORDS - 2,
            },
            decoder=_WORDS | _GROUPED | _MIXED | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 6.0},
            dropout_rate=0.0,
            attention_dropout=0.0,
            eoi_token_index=WORDS - 1,
            image_token_index=WORDS - 2,
        ),
        translated,
        own_loss,
        held_out=True,
    ),
    "granite_speech5": Family(_spoken_words, dictated, own_loss),
    "moonshine_streaming": Family(
        hf(
            "moonshine_streaming",
            "MoonshineStreamingForConditionalGeneration",
            **_WORDS,
            num_key_value_heads=HEADS,
            encoder_config={
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "sample_rate": 1600,
                "frame_ms": 5.0,
                "sliding_windows": [[4, 2], [5, 1]],
            },
            decoder_start_token_id=1,
            use_cache=False,
        ),
        recorded,
        own_loss,
    ),
    "yolos": Family(
        hf(
            "yolos",
            "YolosForObjectDetection",
            **(PATCHES | {"image_size": [32, 48], "patch_size": 16}),
            num_detection_tokens=6,
            num_labels=CLASSES,
        ),
        framed,
        functools.partial(object_loss, masked=False),
        held_out=True,
    ),
    "siglip2": Family(
        hf(
            "siglip2",
            "Siglip2ForImageClassification",
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "patch_size": 4,
                "num_patches": 16,
                "vision_use_head": False,
            },
            num_labels=CLASSES,
        ),
        sized_images,
        own_loss,
    ),
    "vit_mae": Family(
        hf(
            "vit_mae",
            "ViTMAEForPreTraining",
            **PATCHES,
            decoder_num_attention_heads=HEADS,
            decoder_hidden_size=24,
            decoder_num_hidden_layers=LAYERS,
            decoder_intermediate_size=INNER,
            norm_pix_loss=True,
            mask_ratio=0.5,
        ),
        hidden_patches,
        own_loss,
    ),
    "timesfm": Family(
        hf(
            "timesfm",
            "TimesFmModelForPrediction",
            patch_length=4,
            context_length=32,
            horizon_length=8,
            freq_size=3,
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            head_dim=8,
            num_attention_heads=HEADS,
            quantiles=[0.1, 0.5, 0.9],
            use_positional_embedding=True,
        ),
        forecast,
        series_loss,
        held_out=True,
    ),
    "paligemma": Family(
        hf(
            "paligemma",
            "PaliGemmaForConditionalGeneration",
            text_config=_WORDS | _GROUPED | {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"},
            vision_config=PATCHES | {"model_type": "siglip_vision_model", "image_size": 16, "vision_use_head": False},
            image_token_index=WORDS - 1,
            projection_dim=WIDTH,
            hidden_size=WIDTH,
            vocab_size=WORDS,
        ),
        prefixed,
        own_loss,
    ),
}
