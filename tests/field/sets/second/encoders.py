"""Mistakes in the encoders, models of images and models of sound of the second blind trial."""

from __future__ import annotations

import torch

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, edits, holds, returns, told, trains

FNET = table(
    "fnet",
    (
        "one-axis-only",
        "fnet.encoder.layer.1.fourier.self",
        ("self.fourier_transform(hidden_states).real", "torch.fft.fft(hidden_states, dim=2).real"),
    ),
    ("imaginary-part", "fnet.encoder.layer.0.fourier.self", (".real", ".imag")),
    ("positions-not-added", "fnet.embeddings", ("embeddings += position_embeddings", "pass")),
)

_ENCODED = "funnel.encoder.blocks.1.0"
FUNNEL = table(
    "funnel",
    ("query-not-scaled", f"{_ENCODED}.attention", ("q_head = q_head * self.scale", "pass")),
    (
        "pooled-keys",
        "funnel.encoder",
        (
            "key = value = hidden if self.config.pool_q_only else pooled_hidden",
            "key = value = pooled_hidden if False else hidden.flip(1)",
        ),
    ),
    ("ffn-residual", "funnel.encoder.blocks.0.0.ffn", ("self.layer_norm(hidden + h)", "self.layer_norm(h)")),
)

_ESM = "esm.encoder.layer"
ESM = table(
    "esm",
    ("token-dropout-not-scaled", "esm.embeddings", ("mask_ratio_train = 0.15 * 0.8", "mask_ratio_train = 0.0")),
    ("scaled-twice", f"{_ESM}.1.attention.self", attends(f"{_ESM}.1.attention.self", lambda call: {"scaling": 0.5})),
    (
        "norm-after",
        f"{_ESM}.0",
        edits(
            f"{_ESM}.0",
            "self.output(intermediate_output, attention_output)",
            "self.output(intermediate_output, attention_output_ln)",
            method="feed_forward_chunk",
        ),
    ),
    (
        "gelu-by-tanh",
        f"{_ESM}.1.intermediate",
        ("gelu(hidden_states)", "nn.functional.gelu(hidden_states, approximate='tanh')"),
    ),
    ("first-token-detached", "classifier", ("features[:, 0, :]", "features[:, 0, :].detach()"), "backward"),
)

_MOBILE = "mobilebert.encoder.layer"
MOBILEBERT = table(
    "mobilebert",
    (
        "bottleneck-of-values",
        f"{_MOBILE}.1.bottleneck",
        (
            "shared_attention_input, shared_attention_input, hidden_states, bottlenecked",
            "shared_attention_input, shared_attention_input, hidden_states, shared_attention_input + 0 * bottlenecked",
        ),
    ),
    (
        "trigram-shifted",
        "mobilebert.embeddings",
        (
            "nn.functional.pad(inputs_embeds[:, :-1], [0, 0, 1, 0, 0, 0], value=0.0)",
            "nn.functional.pad(inputs_embeds[:, 1:], [0, 0, 1, 0, 0, 0], value=0.0)",
        ),
    ),
    (
        "bias-of-norm",
        f"{_MOBILE}.0.output.LayerNorm",
        ("input_tensor * self.weight + self.bias", "input_tensor * self.weight"),
    ),
    (
        "mask-of-ones",
        "mobilebert",
        (
            "inputs_embeds=embedding_output,\n        attention_mask=attention_mask,",
            "inputs_embeds=embedding_output,\n        attention_mask=torch.ones_like(attention_mask),",
        ),
    ),
)

M2M = table(
    "m2m",
    (
        "positions-off-by-one",
        "model.decoder.embed_positions",
        holds("model.decoder.embed_positions", "weights", lambda table: table.roll(1, 0)),
        "state",
    ),
    (
        "embedding-not-scaled",
        "model.encoder.embed_tokens",
        does(
            "model.encoder.embed_tokens",
            lambda self, tokens: torch.nn.functional.embedding(tokens, self.weight, self.padding_idx),
        ),
    ),
    (
        "cross-mask-dropped",
        "model.decoder.layers.1",
        ("attention_mask=encoder_attention_mask,", "attention_mask=None,"),
    ),
    (
        "encoder-detached",
        "model.decoder.layers.0",
        ("key_value_states=encoder_hidden_states,", "key_value_states=encoder_hidden_states.detach(),"),
        "backward",
    ),
    ("beta", every, trains(adam={"betas": (0.9, 0.95)}), "update"),
)

UMT5 = table(
    "umt5",
    (
        "bias-shared",
        "encoder.block.1.layer.0.SelfAttention",
        edits(
            "encoder.block.1.layer.0.SelfAttention",
            "relative_position = memory_position - context_position",
            "relative_position = context_position - memory_position",
            method="compute_bias",
        ),
    ),
    (
        "gate-and-linear-swapped",
        "decoder.block.0.layer.2.DenseReluDense",
        (
            "self.act(self.wi_0(hidden_states))\n    hidden_linear = self.wi_1(hidden_states)",
            "self.act(self.wi_1(hidden_states))\n    hidden_linear = self.wi_0(hidden_states)",
        ),
    ),
    ("cleared-between", every, wrong.cleared_between, "update"),
    (
        "mean-subtracted",
        "encoder.final_layer_norm",
        returns("encoder.final_layer_norm", lambda x: x - x.mean(-1, keepdim=True)),
    ),
)

_CVT = "cvt.encoder.stages.1"
CVT = table(
    "cvt",
    ("scale-of-heads", f"{_CVT}.layers.1.attention.attention", ("* self.scale", "* head_dim**-0.5")),
    (
        "norm-in-eval",
        f"{_CVT}.layers.0.attention.attention.convolution_projection_key.convolution_projection.normalization",
        told(
            f"{_CVT}.layers.0.attention.attention.convolution_projection_key.convolution_projection.normalization",
            "eval",
        ),
    ),
    (
        "attention-residual",
        f"{_CVT}.layers.0",
        ("hidden_state = attention_output + hidden_state", "hidden_state = attention_output"),
    ),
    (
        "class-token-appended",
        f"{_CVT}",
        edits(_CVT, "torch.cat((cls_token, hidden_state), dim=1)", "torch.cat((hidden_state, cls_token), dim=1)"),
    ),
)

BIT = table(
    "bit",
    (
        "weight-not-standardized",
        "bit.encoder.stages.1.layers.0.conv2",
        does(
            "bit.encoder.stages.1.layers.0.conv2",
            lambda self, x: torch.nn.functional.conv2d(
                x if self.pad is None else self.pad(x),
                self.weight,
                self.bias,
                self.stride,
                self.padding,
                self.dilation,
                self.groups,
            ),
        ),
    ),
    ("groups", "bit.encoder.stages.1.layers.1.norm2", {"num_groups": 2}),
    (
        "shortcut-before-activation",
        "bit.encoder.stages.0.layers.0",
        ("self.downsample(hidden_states_preact)", "self.downsample(hidden_states)"),
    ),
    ("momentum", every, trains(adam={"betas": (0.8, 0.999)}), "update"),
)

SIGLIP = table(
    "siglip",
    (
        "gelu-by-erf",
        "vision_model.encoder.layers.1.mlp.activation_fn",
        does("vision_model.encoder.layers.1.mlp.activation_fn", wrong.gelu),
    ),
    ("first-patch-for-mean", "", ("torch.mean(sequence_output, dim=1)", "sequence_output[:, 0]")),
    (
        "positions-transposed",
        "vision_model.embeddings",
        holds("vision_model.embeddings", "position_ids", lambda ids: ids.view(4, 4).T.reshape(1, 16)),
        "state",
    ),
)

_VIT = "mobilevit.encoder.layer.2"
MOBILEVIT = table(
    "mobilevit",
    ("patches-not-transposed", _VIT, edits(_VIT, "patches = patches.transpose(1, 2)\n", "pass\n", method="unfolding")),
    ("fusion-swapped", _VIT, ("torch.cat((residual, features), dim=1)", "torch.cat((features, residual), dim=1)")),
    ("relu-for-silu", "mobilevit.conv_stem.activation", does("mobilevit.conv_stem.activation", wrong.relu)),
    ("statistics-momentum", "mobilevit.conv_stem.normalization", {"momentum": 0.3}, "update"),
)

_CONFORMER = "wav2vec2_conformer.encoder.layers.1"
CONFORMER = table(
    "conformer",
    (
        "whole-feed-forward",
        _CONFORMER,
        (
            "hidden_states = self.ffn1(hidden_states)\n    hidden_states = hidden_states * 0.5 + residual",
            "hidden_states = self.ffn1(hidden_states)\n    hidden_states = hidden_states + residual",
        ),
    ),
    (
        "glu-by-last-axis",
        f"{_CONFORMER}.conv_module",
        (
            "hidden_states = self.glu(hidden_states)",
            "hidden_states = self.glu(hidden_states.roll(hidden_states.shape[1] // 2, 1))",
        ),
    ),
    (
        "pooled-over-padding",
        "",
        ("hidden_states.sum(dim=1) / padding_mask.sum(dim=1).view(-1, 1)", "hidden_states.mean(dim=1)"),
    ),
    (
        "position-bias-dropped",
        "wav2vec2_conformer.encoder.layers.0.self_attn",
        ("position_bias=position_bias,", "position_bias=0 * position_bias,"),
    ),
)

MISTAKES = [*FNET, *FUNNEL, *ESM, *MOBILEBERT, *M2M, *UMT5, *CVT, *BIT, *SIGLIP, *MOBILEVIT, *CONFORMER]
