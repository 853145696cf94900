"""Mistakes in the models of images and of sound of the seventh blind trial."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, edits, holds, optimizes, told, trains
from field.kit.running import Training


def _of_registers(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith("register_tokens")


_DINO = "dinov2_with_registers"
_REGISTERS = "self.register_tokens.expand(embeddings.shape[0], -1, -1)"
DINOV2 = table(
    "dinov2_registers",
    (
        "registers-last",
        f"{_DINO}.embeddings",
        (f"(embeddings[:, :1], {_REGISTERS}, embeddings[:, 1:])", f"(embeddings, {_REGISTERS})"),
    ),
    (
        "registers-pooled",
        "",
        ("sequence_output[:, 1 + self.config.num_register_tokens :]", "sequence_output[:, 1:]"),
    ),
    ("scale-skipped", f"{_DINO}.encoder.layer.1", ("hidden_states = self.layer_scale2(hidden_states)", "pass")),
    (
        "positions-reversed",
        f"{_DINO}.embeddings",
        (
            "self.interpolate_pos_encoding(embeddings, height, width)",
            "self.interpolate_pos_encoding(embeddings, height, width).flip(1)",
        ),
    ),
    (
        "norm-skipped",
        _DINO,
        ("self.layernorm(encoder_outputs.last_hidden_state)", "1 * encoder_outputs.last_hidden_state"),
    ),
    ("scaled-twice", f"{_DINO}.encoder.layer.0.attention", {"scaling": 1 / 8}),
    (
        "input-detached",
        f"{_DINO}.encoder.layer.0",
        ("self.norm2(hidden_states)", "self.norm2(hidden_states.detach())"),
        "backward",
    ),
    ("registers-not-trained", _of_registers, optimizes(_of_registers, None), "update"),
)


def _clipped_by_value(training: Training) -> None:
    """Each element of a gradient is clipped, instead of the norm of all."""
    parameters = list(training.model.parameters())
    training.clip = None
    training.after_backward = lambda optimizer: torch.nn.utils.clip_grad_value_(parameters, 0.01)


VIVIT = table(
    "vivit",
    (
        "frames-reversed",
        "vivit.embeddings.patch_embeddings",
        ("pixel_values.transpose(1, 2)", "pixel_values.transpose(1, 2).flip(2)"),
    ),
    ("time-after-height", "vivit.embeddings.patch_embeddings", (".flatten(2)", ".transpose(2, 3).flatten(2)")),
    (
        "channels-before-heads",
        "vivit.layers.1.attention",
        ("attn_output.reshape(*input_shape, -1)", "attn_output.transpose(-1, -2).reshape(*input_shape, -1)"),
    ),
    ("relu-for-gelu", "vivit.layers.0.mlp.activation_fn", does("vivit.layers.0.mlp.activation_fn", wrong.relu)),
    ("patches-averaged", "", ("sequence_output[:, 0, :]", "sequence_output[:, 1:, :].mean(1)")),
    ("epsilon", "vivit.layers.0.layernorm_after", {"eps": 5e-2}),
    (
        "attention-not-in-residual",
        "vivit.layers.1",
        (
            "residual = hidden_states\n    hidden_states = self.layernorm_after(hidden_states)",
            "hidden_states = self.layernorm_after(hidden_states)",
        ),
    ),
    (
        "bias-not-loaded",
        "vivit.layers.0.attention.q_proj",
        holds("vivit.layers.0.attention.q_proj", "bias", torch.zeros_like),
        "state",
    ),
    ("clipped-by-value", every, _clipped_by_value, "update"),
)

PARAKEET = table(
    "parakeet",
    ("input-not-scaled", "encoder", {"input_scale": 1.0}),
    (
        "padding-attended",
        "encoder",
        (
            "attention_mask = attention_mask & attention_mask.transpose(1, 2)",
            "attention_mask = torch.ones_like(attention_mask)",
        ),
    ),
    (
        "padding-counted",
        "",
        (
            "encoder_lengths = encoder_outputs.attention_mask.sum(-1)",
            "encoder_lengths = torch.full_like(encoder_outputs.attention_mask[:, 0], logits.shape[1])",
        ),
    ),
    (
        "other-blank",
        "",
        ("blank_token_id=self.config.pad_token_id", "blank_token_id=self.config.vocab_size - 1"),
    ),
    (
        "halves-swapped",
        "encoder.layers.0.conv",
        ("nn.functional.glu(hidden_states, dim=1)", "nn.functional.glu(hidden_states.roll(32, 1), dim=1)"),
    ),
    ("padding-convolved", "encoder.layers.1.conv", ("if attention_mask is not None:", "if False:")),
    (
        "positions-forward",
        "encoder.encode_positions",
        ("torch.arange(seq_length - 1, -seq_length, -1,", "torch.arange(1 - seq_length, seq_length, 1,"),
    ),
    (
        "cosine-first",
        "encoder.encode_positions",
        ("torch.stack([sin, cos], dim=-1)", "torch.stack([cos, sin], dim=-1)"),
    ),
    ("loss-summed", "", ("reduction=self.config.ctc_loss_reduction", "reduction='sum'")),
)

_SOUND = "wav2vec2_bert.encoder.layers"
W2V_BERT = table(
    "w2v_bert",
    ("distances-shifted", f"{_SOUND}.0.self_attn", {"left_max_position_embeddings": 3}),
    ("distances-ignored", f"{_SOUND}.1.self_attn", ("position_bias=position_bias,", "position_bias=None,")),
    (
        "convolution-centred",
        f"{_SOUND}.0.conv_module",
        ("(self.depthwise_conv.kernel_size[0] - 1, 0)", "(2, 2)"),
    ),
    (
        "padding-averaged",
        "",
        ("hidden_states.sum(dim=1) / padding_mask.sum(dim=1).view(-1, 1)", "hidden_states.mean(dim=1)"),
    ),
    (
        "features-not-normed",
        "wav2vec2_bert.feature_projection",
        ("self.projection(norm_hidden_states)", "self.projection(hidden_states)"),
    ),
    ("half-missing", f"{_SOUND}.1", ("self.ffn2(hidden_states)", "2 * self.ffn2(hidden_states)")),
    ("norm-skipped", f"{_SOUND}.0", ("hidden_states = self.final_layer_norm(hidden_states)", "pass")),
    (
        "padding-attended",
        "wav2vec2_bert.encoder",
        (
            "inputs_embeds=hidden_states, attention_mask=attention_mask",
            "inputs_embeds=hidden_states, attention_mask=None",
        ),
    ),
    ("projector-frozen", "projector", told("projector", "requires_grad_", False), "backward"),
)


def _capped_at_one(self: Any, x: Tensor) -> Tensor:
    return x.clamp(0, 1)


def _without_bias(self: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, self.running_mean, self.running_var, self.weight, None, True, self.momentum, self.eps)


def _of_stem(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("mobilenet_v1.conv_stem.")


_CONV = "mobilenet_v1.layer"
MOBILENET_V1 = table(
    "mobilenet_v1",
    (
        "padded-before",
        "mobilenet_v1.conv_stem",
        ("apply_tf_padding(features, self.convolution)", "nn.functional.pad(features, (1, 0, 1, 0))"),
    ),
    ("capped-at-one", f"{_CONV}.6.activation", does(f"{_CONV}.6.activation", _capped_at_one)),
    ("momentum", f"{_CONV}.3.normalization", {"momentum": 0.1}, "update"),
    ("epsilon", f"{_CONV}.10.normalization", {"eps": 1e-1}),
    (
        "weight-not-loaded",
        f"{_CONV}.5.normalization",
        holds(f"{_CONV}.5.normalization", "weight", torch.ones_like),
        "state",
    ),
    (
        "maximum-for-mean",
        "mobilenet_v1",
        ("torch.flatten(self.pooler(last_hidden_state), start_dim=1)", "last_hidden_state.amax((2, 3))"),
    ),
    ("bias-of-norm-missing", f"{_CONV}.8.normalization", does(f"{_CONV}.8.normalization", _without_bias)),
    (
        "kernel-transposed",
        f"{_CONV}.12.convolution",
        holds(f"{_CONV}.12.convolution", "weight", lambda weight: weight.transpose(2, 3)),
        "state",
    ),
    ("stem-not-trained", _of_stem, optimizes(_of_stem, None), "update"),
)


def _summed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"], reduction="sum")


TWINS = table(
    "twins",
    (
        "windows-not-joined",
        "blocks.0.0.attn",
        ("x = x.transpose(2, 3).reshape(B, _h * self.ws,", "x = x.reshape(B, _h * self.ws,"),
    ),
    ("positions-alone", "pos_block.0", ("if self.stride == 1:", "if False:")),
    ("keys-as-values", "blocks.0.1.attn", ("k, v = kv.unbind(0)", "v, k = kv.unbind(0)")),
    ("norm-left-out", "blocks.1.0", ("self.mlp(self.norm2(x))", "self.mlp(x)")),
    ("positions-after-second", "", edits("", "if j == 0:", "if j == 1:", "forward_features")),
    ("pooled-by-maximum", "", edits("", "x = x.mean(dim=1)", "x = x.amax(dim=1)", "forward_head")),
    ("gelu-by-tanh", "blocks.1.1.mlp.act", does("blocks.1.1.mlp.act", wrong.gelu_by_tanh)),
    ("loss-summed", "", trains(loss=_summed_loss), "backward"),
)

MISTAKES = [*DINOV2, *VIVIT, *PARAKEET, *W2V_BERT, *MOBILENET_V1, *TWINS]
