"""The families of the fifth blind trial, which were run once before any rule was changed for them.

Some are larger than those of earlier trials: their activations have 50,000 to 260,000 elements.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.building import (
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    LEFT,
    PATCHES,
    PLAIN,
    TEXT,
    WIDTH,
    WITH_ROUTER,
    Family,
    decoder,
    encoder,
    fused_or_not,
    gpt,
    hearing,
    hf,
    object_loss,
    outer_loss,
    own_loss,
    patched,
    sequences,
    tv,
)
from field.kit.data import CLASSES, WORDS, Batch, classified, forms, framed, language, padded_left, pictures, waves

LONG = 128
_LARGE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 256}
_LONG_LEFT = functools.partial(padded_left, length=LONG)


def _pooled_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The first channels of the pooled state are the scores of the classes."""
    return F.cross_entropy(model(batch["pixel_values"]).pooler_output[:, :CLASSES].float(), batch["labels"])


_SCALED_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.2,
}

FAMILIES: dict[str, Family] = {
    "ministral3": Family(
        decoder("ministral3", **_LARGE, head_dim=32, sliding_window=48, rope_parameters=_SCALED_ROPE),
        _LONG_LEFT,
        own_loss,
    ),
    "arcee": Family(decoder("arcee", **_LARGE, attention_bias=True, mlp_bias=True), _LONG_LEFT, own_loss),
    "llama4": TEXT(
        decoder(
            "llama4_text",
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size_mlp=INNER,
            num_experts_per_tok=1,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            attention_chunk_size=8,
            floor_scale=4,
        ),
        batch=functools.partial(language, length=24),
    ),
    "minimax": LEFT(
        decoder(
            "minimax",
            num_key_value_heads=2,
            head_dim=8,
            block_size=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"],
            full_attn_alpha_factor=2.0,
            linear_attn_alpha_factor=2.0,
            mlp_alpha_factor=2.0,
            router_aux_loss_coef=0.1,
        ),
        loss=WITH_ROUTER,
    ),
    "gemma3n": TEXT(
        decoder(
            "gemma3n_text",
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            vocab_size_per_layer_input=WORDS,
            hidden_size_per_layer_input=8,
            altup_num_inputs=3,
            num_kv_shared_layers=2,
            laurel_rank=8,
            activation_sparsity_pattern=[0.8, 0.0, 0.0, 0.0],
            final_logit_softcapping=5.0,
        ),
    ),
    "openai_gpt": TEXT(gpt("openai-gpt"), attention=False),
    "xlm_roberta": Family(
        encoder("xlm-roberta", hidden_size=128, intermediate_size=256, max_position_embeddings=160, pad_token_id=1),
        functools.partial(classified, pad=1, length=LONG),
        own_loss,
    ),
    "layoutlm": Family(
        hf(
            "layoutlm",
            "AutoModelForTokenClassification",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=40,
            max_2d_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        forms,
        own_loss,
    ),
    "longformer": Family(
        encoder("longformer", attention_window=[4, 4], pad_token_id=1),
        functools.partial(classified, pad=1),
        own_loss,
        attention=False,
    ),
    "blenderbot": TEXT(sequences("blenderbot", scale_embedding=True), micros=2),
    "prophetnet": TEXT(
        hf(
            "prophetnet",
            "ProphetNetForConditionalGeneration",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            num_encoder_layers=LAYERS,
            num_decoder_layers=LAYERS,
            num_encoder_attention_heads=HEADS,
            num_decoder_attention_heads=HEADS,
            max_position_embeddings=32,
            num_buckets=8,
            relative_max_distance=16,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            eps=0.1,
            pad_token_id=0,
            use_cache=False,
        ),
        attention=False,
    ),
    "deit": IMAGES(
        patched(
            "deit",
            hidden_size=64,
            intermediate_size=128,
            image_size=64,
            architectures=["DeiTForImageClassification"],
        ),
        batch=functools.partial(pictures, size=64),
    ),
    "dinov3": Family(
        hf("dinov3_vit", "AutoModel", **PATCHES, num_register_tokens=2, use_gated_mlp=True, pos_embed_rescale=None),
        pictures,
        _pooled_loss,
    ),
    "detr": Family(
        hf(
            "detr",
            "AutoModelForObjectDetection",
            backbone_config={
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 16],
                "depths": [1, 1],
                "layer_type": "basic",
                "out_features": ["stage2"],
            },
            num_queries=6,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            dropout=0.0,
            num_labels=CLASSES,
        ),
        framed,
        object_loss,
        attention=False,
    ),
    "tv_vit": PLAIN(
        tv(
            "VisionTransformer",
            image_size=32,
            patch_size=8,
            num_layers=LAYERS,
            num_heads=HEADS,
            hidden_dim=WIDTH,
            mlp_dim=INNER,
        )
    ),
    "xcit": Family(
        functools.partial(
            fused_or_not,
            "xcit_nano_12_p16_224",
            img_size=64,
            embed_dim=WIDTH,
            depth=LAYERS,
            num_heads=HEADS,
            cls_attn_layers=1,
        ),
        functools.partial(pictures, size=64),
        outer_loss,
    ),
    "data2vec": Family(hearing("data2vec-audio", conv_pos_kernel_size=8, num_conv_pos_embeddings=2), waves, own_loss),
}
