"""The families of the ninth blind trial, which were run once before any rule was changed for them.

They have layers that earlier trials did not have: a block of attention that several layers share, experts behind a
delta rule, several signs for a word, characters and molecules, blocks of keys, periods instead of positions, points
that are sampled from an image, attention over time and space in turns, several sizes of images in one list, and an
agent's episodes. Four are held out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812 - as everyone writes it
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
    t5,
)
from field.kit.data import (
    CLASSES,
    WORDS,
    Batch,
    clips,
    framed,
    illustrated,
    labelled,
    padded_left,
    pages,
    played,
    read_aloud,
    sharpened,
    sold,
    spelled,
    translated,
)

_WORDS: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ROUTED: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5}
_STACKS = {
    f"{stack}_{name}": value
    for stack in ("encoder", "decoder")
    for name, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", INNER), ("layerdrop", 0.0))
}


def target_loss(model: nn.Module, batch: Batch, *, of: str) -> Tensor:
    """How far one of the values that a model returns is from its target, where nothing is padding."""
    made = model(**{name: value for name, value in batch.items() if name != "targets"})[of].float()
    kept = batch["attention_mask"] == 1 if "attention_mask" in batch else slice(None)
    return F.mse_loss(made[kept], batch["targets"][kept])


def _with_eyes(build: Callable[..., nn.Module], attention: str) -> nn.Module:
    """A model whose backbone knows no attention."""
    model = build("eager")
    model.set_attn_implementation({"": attention})
    return model


FAMILIES: dict[str, Family] = {
    "mimo_v2": LEFT(
        decoder(
            "mimo_v2_flash",
            num_key_value_heads=2,
            head_dim=12,
            v_head_dim=8,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
            n_routed_experts=6,
            n_group=2,
            **_ROUTED,
        ),
        attention=False,
    ),
    "kimi_linear": LEFT(
        decoder(
            "kimi_linear",
            num_key_value_heads=HEADS,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_shared_experts=1,
            num_local_experts=4,
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["sparse", "sparse"],
            linear_head_dim=8,
            linear_num_heads=HEADS,
            **_ROUTED,
        ),
        batch=functools.partial(padded_left, length=16),
        micros=2,
    ),
    "zamba2": LEFT(
        decoder(
            "zamba2",
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            num_key_value_heads=HEADS,
            n_mamba_heads=4,
            mamba_d_state=4,
            mamba_ngroups=2,
            chunk_size=8,
            num_mem_blocks=1,
            use_shared_attention_adapter=True,
            adapter_rank=4,
            use_mem_rope=True,
        ),
        batch=functools.partial(padded_left, length=18),
        held_out=True,
    ),
    "xlstm": TEXT(
        decoder(
            "xlstm",
            num_heads=HEADS,
            num_blocks=LAYERS,
            chunk_size=4,
            mode="train",
            gate_soft_cap=2.0,
            output_logit_soft_cap=3.0,
            ffn_round_up_to_multiple_of=8,
        ),
        attention=False,
    ),
    "privacy_filter": Family(
        hf(
            "openai_privacy_filter",
            "OpenAIPrivacyFilterForTokenClassification",
            **_WORDS,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=3,
            max_position_embeddings=64,
            swiglu_limit=1.0,
            num_labels=CLASSES,
        ),
        labelled,
        own_loss,
        attention=False,
    ),
    "roc_bert": Family(
        hf(
            "roc_bert",
            "RoCBertForMaskedLM",
            **_WORDS,
            max_position_embeddings=24,
            pronunciation_embed_dim=12,
            pronunciation_vocab_size=WORDS,
            shape_embed_dim=8,
            shape_vocab_size=WORDS,
        ),
        spelled,
        own_loss,
    ),
    "canine": Family(
        hf(
            "canine",
            "CanineForTokenClassification",
            **_WORDS,
            max_position_embeddings=32,
            type_vocab_size=2,
            num_hash_functions=4,
            num_hash_buckets=24,
            local_transformer_stride=8,
            num_labels=CLASSES,
        ),
        functools.partial(labelled, length=22),
        own_loss,
        attention=False,
        held_out=True,
    ),
    "layoutlmv3": Family(
        hf(
            "layoutlmv3",
            "LayoutLMv3ForTokenClassification",
            **_WORDS,
            max_position_embeddings=40,
            max_2d_position_embeddings=1024,
            coordinate_size=6,
            shape_size=4,
            rel_pos_bins=8,
            max_rel_pos=12,
            rel_2d_pos_bins=8,
            max_rel_2d_pos=64,
            input_size=16,
            patch_size=8,
            num_labels=CLASSES,
        ),
        pages,
        own_loss,
        attention=False,
    ),
    "longt5": Family(
        t5("longt5", local_radius=4, feed_forward_proj="gated-gelu", relative_attention_num_buckets=8),
        translated,
        own_loss,
        attention=False,
    ),
    "autoformer": Family(
        hf(
            "autoformer",
            "AutoformerForPrediction",
            **_STACKS,
            prediction_length=6,
            context_length=16,
            label_length=6,
            lags_sequence=[1, 3, 6],
            num_time_features=2,
            num_static_categorical_features=1,
            cardinality=[3],
            embedding_dimension=[3],
            d_model=WIDTH,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            moving_average=5,
            autocorrelation_factor=2,
        ),
        sold,
        own_loss,
        attention=False,
        short=False,  # its Fourier transform has no bfloat16
    ),
    "deformable_detr": Family(
        functools.partial(
            _with_eyes,
            hf(
                "deformable_detr",
                "DeformableDetrForObjectDetection",
                backbone_config={
                    "model_type": "resnet",
                    "embedding_size": 8,
                    "hidden_sizes": [8, 12, 16],
                    "depths": [1, 1, 1],
                    "layer_type": "basic",
                    "out_features": ["stage2", "stage3"],
                },
                **_STACKS,
                num_queries=6,
                d_model=WIDTH,
                num_feature_levels=3,
                encoder_n_points=2,
                decoder_n_points=2,
                dropout=0.0,
                with_box_refine=True,
                num_labels=CLASSES,
            ),
        ),
        framed,
        object_loss,
    ),
    "timesformer": Family(
        hf(
            "timesformer",
            "TimesformerForVideoClassification",
            **(PATCHES | {"image_size": 16}),
            num_frames=4,
            num_labels=CLASSES,
        ),
        clips,
        own_loss,
        attention=False,
    ),
    "swin2sr": Family(
        hf(
            "swin2sr",
            "Swin2SRForImageSuperResolution",
            image_size=16,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            drop_path_rate=0.0,
            upscale=2,
            upsampler="pixelshuffle",
        ),
        sharpened,
        functools.partial(target_loss, of="reconstruction"),
        attention=False,
        held_out=True,
    ),
    "speecht5": Family(
        hf(
            "speecht5",
            "SpeechT5ForTextToSpeech",
            **_STACKS,
            vocab_size=WORDS,
            hidden_size=WIDTH,
            pad_token_id=0,
            positional_dropout=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            num_mel_bins=8,
            speech_decoder_prenet_units=24,
            speaker_embedding_dim=6,
            speech_decoder_postnet_layers=3,
            speech_decoder_postnet_units=12,
            speech_decoder_postnet_dropout=0.0,
            reduction_factor=1,
            max_text_positions=16,
            encoder_max_relative_position=6,
        ),
        read_aloud,
        own_loss,
        attention=False,
        dropout=True,
    ),
    "qwen3_vl": Family(
        hf(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            text_config={
                "vocab_size": WORDS,
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "max_position_embeddings": 64,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            },
            vision_config={
                "depth": LAYERS,
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_heads": HEADS,
                "patch_size": 4,
                "out_hidden_size": WIDTH,
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=WORDS - 1,
            video_token_id=WORDS,
            vision_start_token_id=WORDS,
            vision_end_token_id=WORDS,
        ),
        illustrated,
        own_loss,
        held_out=True,
    ),
    "decision_transformer": Family(
        hf(
            "decision_transformer",
            "DecisionTransformerModel",
            state_dim=6,
            act_dim=3,
            hidden_size=WIDTH,
            max_ep_len=16,
            n_positions=32,
            n_layer=LAYERS,
            n_head=HEADS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        played,
        functools.partial(target_loss, of="action_preds"),
    ),
}
