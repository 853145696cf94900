"""The families of the fourth blind trial, which were run once before any rule was changed for them."""

from __future__ import annotations

import functools

from field.kit.building import (
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    LEFT,
    PATCHES,
    TEXT,
    WIDTH,
    Family,
    decoder,
    encoder,
    hf,
    own_loss,
    seeing,
    sequences,
)
from field.kit.data import CLASSES, WORDS, clips, dialogues, histories, pictures, spectra, spoken

_PARTS = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
"""The configuration of a decoder, or of one half of a model of two."""

_CAPPED = {"query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 5.0}

FAMILIES: dict[str, Family] = {
    "gemma": LEFT(decoder("gemma", num_key_value_heads=1, head_dim=16)),
    "ernie4_5": LEFT(decoder("ernie4_5", num_key_value_heads=2, head_dim=8, use_bias=True), micros=2),
    "hunyuan": TEXT(decoder("hunyuan_v1_dense", num_key_value_heads=2, head_dim=8)),
    "bert_decoder": LEFT(
        decoder("modernbert-decoder", local_attention=8, global_attn_every_n_layers=2, norm_bias=True, mlp_bias=True)
    ),
    "glm4_moe": LEFT(
        decoder(
            "glm4_moe",
            num_key_value_heads=2,
            head_dim=8,
            use_qk_norm=True,
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            n_group=2,
            topk_group=1,
            norm_topk_prob=True,
        )
    ),
    "jamba": TEXT(
        decoder(
            "jamba",
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
    ),
    "t5gemma": TEXT(
        hf(
            "t5gemma",
            "AutoModelForSeq2SeqLM",
            vocab_size=WORDS,
            encoder=_PARTS | _CAPPED,
            decoder=_PARTS | _CAPPED | {"cross_attention_hidden_size": WIDTH},
            dropout_rate=0.0,
            attention_dropout=0.0,
            pad_token_id=0,
            use_cache=False,
        ),
        attention=False,
    ),
    "plbart": TEXT(sequences("plbart", scale_embedding=True)),
    "prelayernorm": CLASSIFIED(
        encoder("roberta-prelayernorm", pad_token_id=0, max_position_embeddings=40, type_vocab_size=2)
    ),
    "nomic_bert": CLASSIFIED(encoder("nomic_bert", pad_token_id=0, head_dim=8)),
    "llava": Family(
        hf(
            "llava",
            "AutoModelForImageTextToText",
            text_config=_PARTS | {"model_type": "qwen2", "pad_token_id": 0},
            vision_config=PATCHES | {"model_type": "clip_vision_model", "image_size": 16, "num_hidden_layers": 3},
            image_token_index=WORDS - 1,
            image_token_id=WORDS - 1,
            image_seq_length=4,
        ),
        dialogues,
        own_loss,
    ),
    "videomae": Family(
        hf(
            "videomae",
            "AutoModelForVideoClassification",
            **PATCHES | {"image_size": 16},
            num_frames=4,
            tubelet_size=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        clips,
        own_loss,
    ),
    "ast": Family(
        hf(
            "audio-spectrogram-transformer",
            "AutoModelForAudioClassification",
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            patch_size=8,
            frequency_stride=6,
            time_stride=6,
            max_length=32,
            num_mel_bins=16,
            num_labels=CLASSES,
        ),
        spectra,
        own_loss,
    ),
    "patchtst": Family(
        hf(
            "patchtst",
            "PatchTSTForPrediction",
            num_input_channels=2,
            context_length=32,
            prediction_length=4,
            patch_length=8,
            patch_stride=4,
            num_hidden_layers=LAYERS,
            d_model=WIDTH,
            ffn_dim=INNER,
            num_attention_heads=HEADS,
            attention_dropout=0.0,
            ff_dropout=0.0,
            head_dropout=0.0,
            positional_dropout=0.0,
            path_dropout=0.0,
            loss="mse",
        ),
        histories,
        own_loss,
    ),
    "speech": Family(
        sequences(
            "speech_to_text",
            "AutoModelForSpeechSeq2Seq",
            input_feat_per_channel=8,
            input_channels=1,
            conv_channels=16,
            num_conv_layers=2,
            conv_kernel_sizes=(3, 3),
            max_source_positions=32,
            max_target_positions=32,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        spoken,
        own_loss,
        attention=False,
    ),
    "levit": IMAGES(
        seeing(
            "levit",
            image_size=64,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[2, 3, 4],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
            mlp_ratio=[2, 2, 2],
            attention_ratio=[2, 2, 2],
            kernel_size=3,
            stride=2,
            drop_path_rate=0,
            architectures=["LevitForImageClassification"],
        ),
        batch=functools.partial(pictures, size=64),
        attention=False,
    ),
    "mobilevitv2": IMAGES(
        seeing(
            "mobilevitv2",
            image_size=64,
            width_multiplier=0.25,
            n_attn_blocks=[1, 1, 1],
            ffn_dropout=0.0,
            classifier_dropout_prob=0.0,
        ),
        batch=functools.partial(pictures, size=64),
        attention=False,
    ),
}
