"""Mistakes in the models of sound, videos and images of the tenth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, edits, has, holds, optimizes, told, trains, uses

# --- a codec: residuals of codebooks ----------------------------------------------------------------------------------


def _of_codebooks(name: str, parameter: nn.Parameter) -> bool:
    return "codebook" in name


_CODES = "quantizer.quantizers"
DAC = table(
    "dac",
    (
        "commitment-not-detached",
        f"{_CODES}.0",
        (
            "F.mse_loss(projected_latents, quantized_representation.detach()",
            "F.mse_loss(projected_latents, quantized_representation",
        ),
        "backward",
    ),
    (
        "straight-through-lost",
        f"{_CODES}.1",
        ("projected_latents + (quantized_representation - projected_latents).detach()", "quantized_representation"),
        "backward",
    ),
    (
        "codes-not-normalised",
        f"{_CODES}.0",
        edits(f"{_CODES}.0", "codebook = F.normalize(codebook)", "pass", "decode_latents"),
    ),
    (
        "residual-of-input",
        "quantizer",
        ("residual = residual - quantized_representation_i", "residual = hidden_state - quantized_representation_i"),
    ),
    ("all-codebooks", "quantizer", (" < n_quantizers\n", " < self.n_codebooks + 1\n")),
    (
        "losses-of-all",
        "quantizer",
        ("commitment_loss += commitment_loss_i * mask", "commitment_loss += commitment_loss_i"),
    ),
    (
        "residual-detached",
        "quantizer",
        (
            "residual = residual - quantized_representation_i",
            "residual = residual - quantized_representation_i.detach()",
        ),
        "backward",
    ),
    (
        "sine-not-squared",
        "encoder.block.0.snake1",
        ("torch.sin(self.alpha * hidden_states).pow(2)", "torch.sin(self.alpha * hidden_states).abs()"),
    ),
    ("alpha-not-inverted", "decoder.block.1.res_unit1.snake2", ("(self.alpha + 1e-9).reciprocal()", "self.alpha")),
    ("unit-without-residual", "decoder.block.0.res_unit2", ("output_tensor = hidden_state + output_tensor", "pass")),
    ("not-bounded", "decoder", ("hidden_state = self.tanh(hidden_state)", "pass")),
    (
        "dilation-missing",
        "encoder.block.1.res_unit3.conv1",
        has("encoder.block.1.res_unit3.conv1", dilation=(3,), padding=(9,)),
    ),
    (
        "commitment-not-weighted",
        "",
        edits("", "self.config.commitment_loss_weight * commitment_loss", "commitment_loss", "encode"),
    ),
    ("codebooks-frozen", _of_codebooks, optimizes(_of_codebooks, None), "update"),
)


# --- phonemes with durations ------------------------------------------------------------------------------------------

_TEXT, _SOUND = "encoder.conformer_layers.0", "decoder.conformer_layers.0"


def _repeated_one_late(embeddings: Tensor, durations: Tensor, speaking_speed: float = 1.0) -> Tensor:
    """Each phoneme lasts as long as the one before it."""
    made = torch.zeros(len(embeddings), int(durations.sum(1).max()), embeddings.shape[2])
    for row, (embedding, duration) in enumerate(zip(embeddings, durations, strict=True)):
        repeated = torch.repeat_interleave(embedding, duration.roll(1), dim=0)
        made[row, : len(repeated)] = repeated
    return made


FASTSPEECH2 = table(
    "fastspeech2",
    ("durations-rolled", "", uses("", length_regulator=_repeated_one_late)),
    (
        "durations-not-logarithmic",
        "criterion",
        ("torch.log(duration_labels.float() + self.log_domain_offset)", "duration_labels.float()"),
    ),
    (
        "squares-for-l1",
        "criterion.l1_criterion",
        does("criterion.l1_criterion", lambda self, x, y: nn.functional.mse_loss(x, y)),
    ),
    (
        "first-loss-missing",
        "criterion",
        (
            "l1_loss = l1_loss + self.l1_criterion(outputs_after_postnet",
            "l1_loss = self.l1_criterion(outputs_after_postnet",
        ),
    ),
    (
        "pitch-not-detached",
        "",
        (
            "self.pitch_predictor(hidden_states.detach(), duration_mask",
            "self.pitch_predictor(hidden_states, duration_mask",
        ),
        "backward",
    ),
    ("energy-of-pitch", "", ("self.energy_embed(energy_labels)", "self.energy_embed(pitch_labels)")),
    ("speaker-missing", "", ("hidden_states = hidden_states + speaker_id_embeddings.unsqueeze(1)", "pass")),
    (
        "distances-not-shifted",
        f"{_TEXT}.self_attn",
        ("matrix_bd = self.shift_relative_position_tensor(matrix_bd)", "matrix_bd = matrix_bd[..., : q_len]"),
    ),
    (
        "biases-swapped",
        f"{_SOUND}.self_attn",
        (
            "query_with_bias_u = (query_states + self.pos_bias_u)",
            "query_with_bias_u = (query_states + self.pos_bias_v)",
        ),
    ),
    (
        "macaron-not-halved",
        f"{_SOUND}",
        (
            "residual + self.ff_scale * self.dropout(self.feed_forward_macaron(hidden_states))",
            "residual + self.dropout(self.feed_forward_macaron(hidden_states))",
        ),
    ),
    (
        "gate-and-value-swapped",
        f"{_TEXT}.conv_module",
        (
            "nn.functional.glu(hidden_states, dim=1)",
            "nn.functional.glu(hidden_states.roll(hidden_states.shape[1] // 2, 1), dim=1)",
        ),
    ),
    ("padding-of-sound-heard", "", ("hidden_mask = spectrogram_mask.unsqueeze(-2)", "hidden_mask = None")),
    ("input-not-scaled", "encoder.pos_enc", {"input_scale": 1.0}),
    ("statistics-of-population", f"{_SOUND}.conv_module.norm", told(f"{_SOUND}.conv_module.norm", "eval")),
    ("epsilon-of-optimizer", every, trains(adam={"eps": 1e-4}), "update"),
)


# --- videos with positions in three directions; held out --------------------------------------------------------------

_FRAMES = "vjepa2.encoder.layer"


def _turned_by_halves(x: Tensor, pos: Tensor) -> Tensor:
    """Pairs halves, where neighbours are paired."""
    width = x.shape[-1]
    omega = 10000.0 ** -(torch.arange(width // 2, dtype=x.dtype) / (width / 2.0))
    angle = (pos.unsqueeze(-1) * omega).repeat(1, 1, 1, 2)
    half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
    return x * angle.cos() + half * angle.sin()


VJEPA2 = table(
    "vjepa2",
    (
        "halves-paired",
        f"{_FRAMES}.0.attention",
        uses(f"{_FRAMES}.0.attention", "apply_rotary_embeddings", rotate_queries_or_keys=_turned_by_halves),
    ),
    (
        "height-and-width-swapped",
        f"{_FRAMES}.1.attention",
        edits(
            f"{_FRAMES}.1.attention",
            "d_mask, h_mask, w_mask = pos_ids",
            "d_mask, w_mask, h_mask = pos_ids",
            "apply_rotary_embeddings",
        ),
    ),
    (
        "queries-not-turned",
        f"{_FRAMES}.0.attention",
        ("query_layer = self.apply_rotary_embeddings(query_layer, pos_ids)", "pass"),
    ),
    ("frames-of-other-size", f"{_FRAMES}.1.attention", {"grid_size": 4}),
    (
        "values-reversed",
        f"{_FRAMES}.0.attention",
        attends(f"{_FRAMES}.0.attention", lambda call: {"value": call["value"].flip(2)}),
    ),
    ("scale-doubled", f"{_FRAMES}.1.attention", {"scaling": 2 / 4}),
    (
        "residual-after-norm",
        f"{_FRAMES}.0",
        (
            "hidden_states = self.drop_path(hidden_states) + residual",
            "hidden_states = self.drop_path(hidden_states) + self.norm2(residual)",
        ),
    ),
    (
        "queries-of-pooler-normed",
        "pooler.cross_attention_layer",
        ("residual = queries\n", "residual = self.layer_norm1(queries)\n"),
    ),
    (
        "pooler-detached",
        "pooler",
        (
            "self.cross_attention_layer(queries, hidden_state)",
            "self.cross_attention_layer(queries, hidden_state.detach())",
        ),
        "backward",
    ),
    ("last-norm-skipped", "vjepa2.encoder", ("hidden_states = self.layernorm(hidden_states)", "pass")),
    ("frames-reversed", "vjepa2.encoder.embeddings", ("permute(0, 2, 1, 3, 4)", "flip(1).permute(0, 2, 1, 3, 4)")),
    ("norm-epsilon", f"{_FRAMES}.1.norm2", {"eps": 1e-2}),
    ("loss-doubled", "", trains(share=2.0), "backward"),
)


# --- a text that sees an image through gates; held out ----------------------------------------------------------------

_EYE, _READER = "model.vision_model", "model.language_model"
_CROSS = f"{_READER}.layers.1"


def _of_gates(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith("gate")


def _seen_from_everywhere(mask: Tensor, num_vision_tokens: int, dtype: Any) -> tuple[Tensor, Tensor]:
    from transformers.models.mllama.modeling_mllama import _prepare_cross_attention_mask

    return _prepare_cross_attention_mask(torch.ones_like(mask), num_vision_tokens, dtype)


def _padding_seen(aspect_ratio_mask: Tensor, num_patches: int, target_length: int, dtype: Any) -> Tensor:
    """Padding of patches is not hidden."""
    rows, tiles = aspect_ratio_mask.shape
    hidden = 1 - aspect_ratio_mask.view(rows, tiles, 1).to(dtype).repeat(1, 1, target_length).reshape(rows, -1, 1)
    return (hidden @ hidden.transpose(-1, -2) * torch.finfo(dtype).min).unsqueeze(1)


MLLAMA = table(
    "mllama",
    (
        "gate-without-tanh",
        _CROSS,
        (
            "residual + self.cross_attn_attn_gate.tanh() * hidden_states",
            "residual + self.cross_attn_attn_gate.sigmoid() * hidden_states",
        ),
    ),
    ("rows-not-masked", _CROSS, ("hidden_states = full_text_row_masked_out_mask[:, 0] * hidden_states", "pass")),
    ("image-seen-before", "model", uses("model", _prepare_cross_attention_mask=_seen_from_everywhere)),
    ("padded-patches-seen", _EYE, uses(_EYE, _prepare_aspect_ratio_attention_mask=_padding_seen)),
    (
        "tiles-not-embedded",
        _EYE,
        ("hidden_state = self.post_tile_positional_embedding(hidden_state, aspect_ratio_ids)", "pass"),
    ),
    (
        "gate-of-positions",
        f"{_EYE}.gated_positional_embedding",
        ("(1 - self.gate.tanh()) * self.embedding", "self.gate.tanh() * self.embedding"),
    ),
    ("intermediate-of-last", _EYE, ("output.hidden_states[i] for i in", "output.hidden_states[i + 1] for i in")),
    ("global-not-gated", f"{_EYE}.global_transformer.layers.0", {"is_gated": False}),
    ("keys-not-normed", f"{_CROSS}.cross_attn", ("key_states = self.k_norm(key_states)", "pass")),
    (
        "image-detached",
        "model",
        (
            "self.multi_modal_projector(cross_attention_states)",
            "self.multi_modal_projector(cross_attention_states.detach())",
        ),
        "backward",
    ),
    (
        "rotary-base",
        f"{_READER}.rotary_emb",
        holds(f"{_READER}.rotary_emb", "inv_freq", wrong.base_of_rotary(500.0)),
        "state",
    ),
    ("next-token-seen", _READER, uses(_READER, create_causal_mask=wrong.mask_that_sees_next)),
    (
        "gate-and-up-swapped",
        f"{_READER}.layers.2.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * self.act_fn(self.up_proj(x))"),
    ),
    ("gates-frozen", _of_gates, optimizes(_of_gates, None), "update"),
)

MISTAKES = [*DAC, *FASTSPEECH2, *VJEPA2, *MLLAMA]
