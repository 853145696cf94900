"""Mistakes in the encoders, models of images and models of sound of the second blind trial."""

from __future__ import annotations

import torch

from . import wrong
from .mistake import Mistake, every
from .patches import attends, does, edits, has, holds, returns, told, trains

FNET = [
    Mistake(
        "one-axis-only",
        "fnet",
        "fnet.encoder.layer.1.fourier.self",
        "forward",
        edits(
            "fnet.encoder.layer.1.fourier.self",
            "self.fourier_transform(hidden_states).real",
            "torch.fft.fft(hidden_states, dim=2).real",
        ),
    ),
    Mistake(
        "imaginary-part",
        "fnet",
        "fnet.encoder.layer.0.fourier.self",
        "forward",
        edits("fnet.encoder.layer.0.fourier.self", ".real", ".imag"),
    ),
    Mistake(
        "positions-not-added",
        "fnet",
        "fnet.embeddings",
        "forward",
        edits("fnet.embeddings", "embeddings += position_embeddings", "pass"),
    ),
]

_ENCODED = "funnel.encoder.blocks.1.0"
FUNNEL = [
    Mistake(
        "query-not-scaled",
        "funnel",
        f"{_ENCODED}.attention",
        "forward",
        edits(f"{_ENCODED}.attention", "q_head = q_head * self.scale", "pass"),
    ),
    Mistake(
        "pooled-keys",
        "funnel",
        "funnel.encoder",
        "forward",
        edits(
            "funnel.encoder",
            "key = value = hidden if self.config.pool_q_only else pooled_hidden",
            "key = value = pooled_hidden if False else hidden.flip(1)",
        ),
    ),
    Mistake(
        "ffn-residual",
        "funnel",
        "funnel.encoder.blocks.0.0.ffn",
        "forward",
        edits("funnel.encoder.blocks.0.0.ffn", "self.layer_norm(hidden + h)", "self.layer_norm(h)"),
    ),
]

_ESM = "esm.encoder.layer"
ESM = [
    Mistake(
        "token-dropout-not-scaled",
        "esm",
        "esm.embeddings",
        "forward",
        edits("esm.embeddings", "mask_ratio_train = 0.15 * 0.8", "mask_ratio_train = 0.0"),
    ),
    Mistake(
        "scaled-twice",
        "esm",
        f"{_ESM}.1.attention.self",
        "forward",
        attends(f"{_ESM}.1.attention.self", lambda call: {"scaling": 0.5}),
    ),
    Mistake(
        "norm-after",
        "esm",
        f"{_ESM}.0",
        "forward",
        edits(
            f"{_ESM}.0",
            "self.output(intermediate_output, attention_output)",
            "self.output(intermediate_output, attention_output_ln)",
            method="feed_forward_chunk",
        ),
    ),
    Mistake(
        "gelu-by-tanh",
        "esm",
        f"{_ESM}.1.intermediate",
        "forward",
        edits(f"{_ESM}.1.intermediate", "gelu(hidden_states)", "nn.functional.gelu(hidden_states, approximate='tanh')"),
    ),
    Mistake(
        "first-token-detached",
        "esm",
        "classifier",
        "backward",
        edits("classifier", "features[:, 0, :]", "features[:, 0, :].detach()"),
    ),
]

_MOBILE = "mobilebert.encoder.layer"
MOBILEBERT = [
    Mistake(
        "bottleneck-of-values",
        "mobilebert",
        f"{_MOBILE}.1.bottleneck",
        "forward",
        edits(
            f"{_MOBILE}.1.bottleneck",
            "shared_attention_input, shared_attention_input, hidden_states, bottlenecked",
            "shared_attention_input, shared_attention_input, hidden_states, shared_attention_input + 0 * bottlenecked",
        ),
    ),
    Mistake(
        "trigram-shifted",
        "mobilebert",
        "mobilebert.embeddings",
        "forward",
        edits(
            "mobilebert.embeddings",
            "nn.functional.pad(inputs_embeds[:, :-1], [0, 0, 1, 0, 0, 0], value=0.0)",
            "nn.functional.pad(inputs_embeds[:, 1:], [0, 0, 1, 0, 0, 0], value=0.0)",
        ),
    ),
    Mistake(
        "bias-of-norm",
        "mobilebert",
        f"{_MOBILE}.0.output.LayerNorm",
        "forward",
        edits(f"{_MOBILE}.0.output.LayerNorm", "input_tensor * self.weight + self.bias", "input_tensor * self.weight"),
    ),
    Mistake(
        "mask-of-ones",
        "mobilebert",
        "mobilebert",
        "forward",
        edits(
            "mobilebert",
            "inputs_embeds=embedding_output,\n        attention_mask=attention_mask,",
            "inputs_embeds=embedding_output,\n        attention_mask=torch.ones_like(attention_mask),",
        ),
    ),
]

M2M = [
    Mistake(
        "positions-off-by-one",
        "m2m",
        "model.decoder.embed_positions",
        "state",
        holds("model.decoder.embed_positions", "weights", lambda table: table.roll(1, 0)),
    ),
    Mistake(
        "embedding-not-scaled",
        "m2m",
        "model.encoder.embed_tokens",
        "forward",
        does(
            "model.encoder.embed_tokens",
            lambda self, tokens: torch.nn.functional.embedding(tokens, self.weight, self.padding_idx),
        ),
    ),
    Mistake(
        "cross-mask-dropped",
        "m2m",
        "model.decoder.layers.1",
        "forward",
        edits("model.decoder.layers.1", "attention_mask=encoder_attention_mask,", "attention_mask=None,"),
    ),
    Mistake(
        "encoder-detached",
        "m2m",
        "model.decoder.layers.0",
        "backward",
        edits(
            "model.decoder.layers.0",
            "key_value_states=encoder_hidden_states,",
            "key_value_states=encoder_hidden_states.detach(),",
        ),
    ),
    Mistake("beta", "m2m", every, "update", trains(adam={"betas": (0.9, 0.95)})),
]

UMT5 = [
    Mistake(
        "bias-shared",
        "umt5",
        "encoder.block.1.layer.0.SelfAttention",
        "forward",
        edits(
            "encoder.block.1.layer.0.SelfAttention",
            "relative_position = memory_position - context_position",
            "relative_position = context_position - memory_position",
            method="compute_bias",
        ),
    ),
    Mistake(
        "gate-and-linear-swapped",
        "umt5",
        "decoder.block.0.layer.2.DenseReluDense",
        "forward",
        edits(
            "decoder.block.0.layer.2.DenseReluDense",
            "self.act(self.wi_0(hidden_states))\n    hidden_linear = self.wi_1(hidden_states)",
            "self.act(self.wi_1(hidden_states))\n    hidden_linear = self.wi_0(hidden_states)",
        ),
    ),
    Mistake("cleared-between", "umt5", every, "update", wrong.cleared_between),
    Mistake(
        "mean-subtracted",
        "umt5",
        "encoder.final_layer_norm",
        "forward",
        returns("encoder.final_layer_norm", lambda x: x - x.mean(-1, keepdim=True)),
    ),
]

_CVT = "cvt.encoder.stages.1"
CVT = [
    Mistake(
        "scale-of-heads",
        "cvt",
        f"{_CVT}.layers.1.attention.attention",
        "forward",
        edits(f"{_CVT}.layers.1.attention.attention", "* self.scale", "* head_dim**-0.5"),
    ),
    Mistake(
        "norm-in-eval",
        "cvt",
        f"{_CVT}.layers.0.attention.attention.convolution_projection_key.convolution_projection.normalization",
        "forward",
        told(
            f"{_CVT}.layers.0.attention.attention.convolution_projection_key.convolution_projection.normalization",
            "eval",
        ),
    ),
    Mistake(
        "attention-residual",
        "cvt",
        f"{_CVT}.layers.0",
        "forward",
        edits(f"{_CVT}.layers.0", "hidden_state = attention_output + hidden_state", "hidden_state = attention_output"),
    ),
    Mistake(
        "class-token-appended",
        "cvt",
        f"{_CVT}",
        "forward",
        edits(_CVT, "torch.cat((cls_token, hidden_state), dim=1)", "torch.cat((hidden_state, cls_token), dim=1)"),
    ),
]

BIT = [
    Mistake(
        "weight-not-standardized",
        "bit",
        "bit.encoder.stages.1.layers.0.conv2",
        "forward",
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
    Mistake(
        "groups",
        "bit",
        "bit.encoder.stages.1.layers.1.norm2",
        "forward",
        has("bit.encoder.stages.1.layers.1.norm2", num_groups=2),
    ),
    Mistake(
        "shortcut-before-activation",
        "bit",
        "bit.encoder.stages.0.layers.0",
        "forward",
        edits(
            "bit.encoder.stages.0.layers.0", "self.downsample(hidden_states_preact)", "self.downsample(hidden_states)"
        ),
    ),
    Mistake("momentum", "bit", every, "update", trains(adam={"betas": (0.8, 0.999)})),
]

SIGLIP = [
    Mistake(
        "gelu-by-erf",
        "siglip",
        "vision_model.encoder.layers.1.mlp.activation_fn",
        "forward",
        does("vision_model.encoder.layers.1.mlp.activation_fn", wrong.gelu),
    ),
    Mistake(
        "first-patch-for-mean",
        "siglip",
        "",
        "forward",
        edits("", "torch.mean(sequence_output, dim=1)", "sequence_output[:, 0]"),
    ),
    Mistake(
        "positions-transposed",
        "siglip",
        "vision_model.embeddings",
        "state",
        holds("vision_model.embeddings", "position_ids", lambda ids: ids.view(4, 4).T.reshape(1, 16)),
    ),
]

_VIT = "mobilevit.encoder.layer.2"
MOBILEVIT = [
    Mistake(
        "patches-not-transposed",
        "mobilevit",
        _VIT,
        "forward",
        edits(_VIT, "patches = patches.transpose(1, 2)\n", "pass\n", method="unfolding"),
    ),
    Mistake(
        "fusion-swapped",
        "mobilevit",
        _VIT,
        "forward",
        edits(_VIT, "torch.cat((residual, features), dim=1)", "torch.cat((features, residual), dim=1)"),
    ),
    Mistake(
        "relu-for-silu",
        "mobilevit",
        "mobilevit.conv_stem.activation",
        "forward",
        does("mobilevit.conv_stem.activation", wrong.relu),
    ),
    Mistake(
        "statistics-momentum",
        "mobilevit",
        "mobilevit.conv_stem.normalization",
        "update",
        has("mobilevit.conv_stem.normalization", momentum=0.3),
    ),
]

_CONFORMER = "wav2vec2_conformer.encoder.layers.1"
CONFORMER = [
    Mistake(
        "whole-feed-forward",
        "conformer",
        _CONFORMER,
        "forward",
        edits(
            _CONFORMER,
            "hidden_states = self.ffn1(hidden_states)\n    hidden_states = hidden_states * 0.5 + residual",
            "hidden_states = self.ffn1(hidden_states)\n    hidden_states = hidden_states + residual",
        ),
    ),
    Mistake(
        "glu-by-last-axis",
        "conformer",
        f"{_CONFORMER}.conv_module",
        "forward",
        edits(
            f"{_CONFORMER}.conv_module",
            "hidden_states = self.glu(hidden_states)",
            "hidden_states = self.glu(hidden_states.roll(hidden_states.shape[1] // 2, 1))",
        ),
    ),
    Mistake(
        "pooled-over-padding",
        "conformer",
        "",
        "forward",
        edits("", "hidden_states.sum(dim=1) / padding_mask.sum(dim=1).view(-1, 1)", "hidden_states.mean(dim=1)"),
    ),
    Mistake(
        "position-bias-dropped",
        "conformer",
        "wav2vec2_conformer.encoder.layers.0.self_attn",
        "forward",
        edits(
            "wav2vec2_conformer.encoder.layers.0.self_attn",
            "position_bias=position_bias,",
            "position_bias=0 * position_bias,",
        ),
    ),
]

SECOND_ENCODERS = [*FNET, *FUNNEL, *ESM, *MOBILEBERT, *M2M, *UMT5, *CVT, *BIT, *SIGLIP, *MOBILEVIT, *CONFORMER]
