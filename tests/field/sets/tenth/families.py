"""The families of the tenth blind trial, which were run once before any rule was changed for them.

They have layers that earlier trials did not have: streams of residuals that are mixed, keys that are compressed and
chosen, experts that a token's number chooses, embeddings for each layer, keys and values of an earlier layer, experts
in a smaller space, attention by landmarks, queries by the kind of token, an array of latents, codebooks, durations of
phonemes, channels that are mixed, a likelihood as loss, and gates on attention to an image. Four are held out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.building import HEADS, INNER, LAYERS, LEFT, WIDTH, Family, decoder, encoder, hf, own_loss
from field.kit.data import (
    CLASSES,
    WORDS,
    Batch,
    channels,
    classified,
    films,
    language,
    phonemes,
    related,
    tiled,
    tones,
)

_NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _sixteen(random: torch.Generator) -> Batch:
    return language(random, length=16)


def _sixteen_unmasked(random: torch.Generator) -> Batch:
    """Full rows: the model's code takes no mask where it has fewer landmarks than tokens."""
    batch = classified(random, length=16)
    tokens = torch.randint(3, WORDS, batch["input_ids"].shape, generator=random)
    return {"input_ids": tokens, "labels": batch["labels"]}


def _hashed(build: Callable[..., nn.Module], attention: str) -> nn.Module:
    """A model in which the numbers of tokens choose experts, as a checkpoint says."""
    model = build(attention)
    for module in model.modules():
        if hasattr(module, "tid2eid"):
            table = torch.arange(module.tid2eid.numel()).view_as(module.tid2eid)
            module.tid2eid.copy_((table * 5 // 2) % 4)
    return model


def coded_loss(model: nn.Module, batch: Batch) -> Tensor:
    """How far the decoded sound is from the sound, and the codes from what they stand for."""
    made = model(**batch)
    loss: Tensor = F.l1_loss(made.audio_values.float(), batch["input_values"][:, 0].float()) + made.loss.mean()
    return loss


_DEEPSEEK_V4 = decoder(
    "deepseek_v4",
    num_key_value_heads=1,
    head_dim=16,
    partial_rotary_factor=0.5,
    q_lora_rank=16,
    layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
    mlp_layer_types=["hash_moe", "moe"],
    compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    sliding_window=6,
    o_groups=2,
    o_lora_rank=8,
    index_n_heads=2,
    index_head_dim=8,
    index_topk=2,
    hc_mult=2,
    hc_sinkhorn_iters=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    swiglu_limit=1.0,
)

FAMILIES: dict[str, Family] = {
    "deepseek_v4": Family(lambda attention: _hashed(_DEEPSEEK_V4, attention), _sixteen, own_loss, attention=False),
    "gemma4": LEFT(
        decoder(
            "gemma4_text",
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=8,
            global_head_dim=16,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=6,
            vocab_size_per_layer_input=WORDS,
            hidden_size_per_layer_input=8,
            final_logit_softcapping=5.0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=16,
        )
    ),
    "nemotron_h": LEFT(
        decoder(
            "nemotron_h",
            num_hidden_layers=4,
            layer_types=["linear_attention", "moe", "full_attention", "mlp"],
            num_key_value_heads=2,
            head_dim=8,
            ssm_state_size=4,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=2,
            chunk_size=8,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=24,
            moe_latent_size=16,
            routed_scaling_factor=2.0,
        ),
        micros=2,
    ),
    "modernbert_decoder": LEFT(
        decoder(
            "modernbert-decoder",
            num_hidden_layers=3,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            local_attention=10,
            cls_token_id=1,
            sep_token_id=2,
            norm_bias=True,
        ),
        held_out=True,
    ),
    "nystromformer": Family(
        encoder(
            "nystromformer",
            pad_token_id=0,
            segment_means_seq_len=16,
            num_landmarks=4,
            conv_kernel_size=5,
            max_position_embeddings=40,
        ),
        _sixteen_unmasked,
        own_loss,
        attention=False,
        held_out=True,
    ),
    "luke": Family(
        hf(
            "luke",
            "LukeForEntityPairClassification",
            vocab_size=WORDS,
            entity_vocab_size=12,
            hidden_size=WIDTH,
            entity_emb_size=16,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=40,
            pad_token_id=0,
            num_labels=CLASSES,
            **_NO_DROPOUT,
        ),
        related,
        own_loss,
        attention=False,
    ),
    "perceiver": Family(
        hf(
            "perceiver",
            "PerceiverForSequenceClassification",
            vocab_size=WORDS,
            max_position_embeddings=24,
            num_latents=6,
            d_latents=WIDTH,
            d_model=24,
            num_blocks=2,
            num_self_attends_per_block=2,
            num_self_attention_heads=HEADS,
            num_cross_attention_heads=2,
            self_attention_widening_factor=2,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        classified,
        own_loss,
        attention=False,
    ),
    "patchtsmixer": Family(
        hf(
            "patchtsmixer",
            "PatchTSMixerForPrediction",
            context_length=24,
            patch_length=6,
            patch_stride=4,
            num_input_channels=3,
            prediction_length=6,
            d_model=16,
            num_layers=2,
            mode="mix_channel",
            gated_attn=True,
            self_attn=True,
            self_attn_heads=2,
            norm_mlp="BatchNorm",
            use_positional_encoding=True,
            scaling="std",
            loss="nll",
            distribution_output="student_t",
            dropout=0.0,
            head_dropout=0.0,
        ),
        channels,
        own_loss,
        attention=False,
    ),
    "dac": Family(
        hf(
            "dac",
            "DacModel",
            encoder_hidden_size=4,
            downsampling_ratios=[2, 4],
            decoder_hidden_size=16,
            n_codebooks=3,
            codebook_size=16,
            codebook_dim=4,
            quantizer_dropout=0.5,
        ),
        tones,
        coded_loss,
        attention=False,
    ),
    "fastspeech2": Family(
        hf(
            "fastspeech2_conformer",
            "FastSpeech2ConformerModel",
            hidden_size=WIDTH,
            vocab_size=WORDS,
            num_mel_bins=8,
            **{
                f"{stack}_{name}": value
                for stack in ("encoder", "decoder")
                for name, value in (
                    ("num_attention_heads", HEADS),
                    ("layers", 1),
                    ("linear_units", INNER),
                    ("kernel_size", 5),
                    ("dropout_rate", 0.0),
                    ("positional_dropout_rate", 0.0),
                    ("attention_dropout_rate", 0.0),
                )
            },
            speech_decoder_postnet_layers=2,
            speech_decoder_postnet_units=12,
            speech_decoder_postnet_dropout=0.0,
            duration_predictor_channels=12,
            duration_predictor_dropout_rate=0.0,
            energy_predictor_channels=12,
            energy_predictor_dropout=0.0,
            pitch_predictor_layers=2,
            pitch_predictor_channels=12,
            pitch_predictor_kernel_size=3,
            pitch_predictor_dropout=0.0,
            max_source_positions=64,
            num_speakers=3,
        ),
        phonemes,
        own_loss,
        attention=False,
    ),
    "vjepa2": Family(
        hf(
            "vjepa2",
            "VJEPA2ForVideoClassification",
            patch_size=8,
            crop_size=16,
            frames_per_clip=4,
            tubelet_size=2,
            hidden_size=WIDTH,
            num_attention_heads=2,
            num_hidden_layers=LAYERS,
            mlp_ratio=2.0,
            num_pooler_layers=1,
            pred_hidden_size=WIDTH,
            pred_num_attention_heads=2,
            pred_num_hidden_layers=1,
            pred_num_mask_tokens=1,
            num_labels=CLASSES,
        ),
        films,
        own_loss,
        held_out=True,
    ),
    "mllama": Family(
        hf(
            "mllama",
            "MllamaForConditionalGeneration",
            text_config={
                "vocab_size": WORDS,
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": 3,
                "num_attention_heads": HEADS,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "cross_attention_layers": [1],
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "use_cache": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_global_layers": 1,
                "attention_heads": HEADS,
                "image_size": 16,
                "patch_size": 8,
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
                "intermediate_layers_indices": [0],
                "vision_output_dim": 2 * WIDTH,
            },
            image_token_index=WORDS - 1,
        ),
        tiled,
        own_loss,
        held_out=True,
    ),
}
