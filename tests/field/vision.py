"""Mistakes in models of images that the comparison's rules may be tuned on."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake
from .patches import does, edits, has, holds, told, trains

VIT = [
    Mistake(
        "positions-before-class-token",
        "vit",
        "vit.embeddings",
        "forward",
        edits(
            "vit.embeddings",
            "embeddings = embeddings + self.position_embeddings",
            "embeddings = embeddings + self.position_embeddings.roll(1, 1)",
        ),
    ),
    Mistake(
        "patches-column-first",
        "vit",
        "vit.embeddings.patch_embeddings",
        "forward",
        edits("vit.embeddings.patch_embeddings", ".flatten(2)", ".transpose(2, 3).flatten(2)"),
    ),
    Mistake(
        "gelu-by-tanh",
        "vit",
        "vit.layers.1.mlp.activation_fn",
        "forward",
        does("vit.layers.1.mlp.activation_fn", wrong.gelu_by_tanh),
    ),
    Mistake("pooled-by-mean", "vit", "", "forward", edits("", "sequence_output[:, 0, :]", "sequence_output.mean(1)")),
    Mistake(
        "norm-skipped",
        "vit",
        "vit.layers.0",
        "forward",
        edits("vit.layers.0", "hidden_states = self.layernorm_after(hidden_states)", "pass"),
    ),
    Mistake(
        "key-detached",
        "vit",
        "vit.layers.1.attention",
        "backward",
        edits("vit.layers.1.attention", "self.k_proj(hidden_states)", "self.k_proj(hidden_states).detach()"),
    ),
    Mistake("loss-doubled", "vit", "", "backward", trains(share=2.0)),
]

_STAGES = "resnet.encoder.stages"

RESNET = [
    Mistake(
        "batch-norm-momentum",
        "resnet",
        f"{_STAGES}.1.layers.0.layer.0.normalization",
        "update",
        has(f"{_STAGES}.1.layers.0.layer.0.normalization", momentum=0.01),
    ),
    Mistake(
        "batch-norm-epsilon",
        "resnet",
        f"{_STAGES}.0.layers.0.layer.1.normalization",
        "forward",
        has(f"{_STAGES}.0.layers.0.layer.1.normalization", eps=1e-3),
    ),
    Mistake(
        "padding-mode",
        "resnet",
        f"{_STAGES}.1.layers.1.layer.0.convolution",
        "forward",
        has(
            f"{_STAGES}.1.layers.1.layer.0.convolution",
            padding_mode="circular",
            _reversed_padding_repeated_twice=[1] * 4,
        ),
    ),
    Mistake(
        "shortcut-not-normed",
        "resnet",
        f"{_STAGES}.1.layers.0.shortcut",
        "forward",
        edits(f"{_STAGES}.1.layers.0.shortcut", "hidden_state = self.normalization(hidden_state)", "pass"),
    ),
    Mistake(
        "activation-before-sum",
        "resnet",
        f"{_STAGES}.2.layers.0",
        "forward",
        edits(
            f"{_STAGES}.2.layers.0",
            "hidden_state += residual\n    hidden_state = self.activation(hidden_state)",
            "hidden_state = self.activation(hidden_state) + residual",
        ),
    ),
    Mistake(
        "batch-norm-in-eval",
        "resnet",
        f"{_STAGES}.2.layers.0.layer.0.normalization",
        "forward",
        told(f"{_STAGES}.2.layers.0.layer.0.normalization", "eval"),
    ),
    Mistake(
        "shortcut-cut",
        "resnet",
        f"{_STAGES}.1.layers.1",
        "backward",
        edits(f"{_STAGES}.1.layers.1", "hidden_state += residual", "hidden_state += residual.detach()"),
    ),
]

MOBILENET = [
    Mistake("residual-dropped", "mobilenet_v2", "features.3", "forward", has("features.3", use_res_connect=False)),
    Mistake(
        "convolution-flipped",
        "mobilenet_v2",
        "features.5.conv.1.0",
        "forward",
        does("features.5.conv.1.0", wrong.conv_flipped),
    ),
    Mistake(
        "statistics-not-tracked", "mobilenet_v2", "features.8.conv.3", "update", has("features.8.conv.3", momentum=0.0)
    ),
    Mistake(
        "running-variance-stale",
        "mobilenet_v2",
        "features.2.conv.0.1",
        "state",
        holds("features.2.conv.0.1", "running_var", lambda variance: 2 * variance),
    ),
]

CONVNEXT = [
    Mistake(
        "layer-scale-dropped",
        "convnext",
        "convnext.encoder.stages.2.layers.1",
        "forward",
        edits("convnext.encoder.stages.2.layers.1", "self.layer_scale_parameter * features", "features"),
    ),
    Mistake(
        "norm-epsilon",
        "convnext",
        "convnext.encoder.stages.1.layers.0.layernorm",
        "forward",
        has("convnext.encoder.stages.1.layers.0.layernorm", eps=1e-3),
    ),
    Mistake(
        "scale-not-learned",
        "convnext",
        "convnext.encoder.stages.0.layers.0",
        "backward",
        edits(
            "convnext.encoder.stages.0.layers.0",
            "self.layer_scale_parameter * features",
            "self.layer_scale_parameter.detach() * features",
        ),
    ),
]

SWIN = [
    Mistake(
        "shift-not-undone",
        "swin",
        "swin.encoder.layers.0.blocks.1",
        "forward",
        edits("swin.encoder.layers.0.blocks.1", "reverse=True", "reverse=False"),
    ),
    Mistake(
        "patches-merged-row-first",
        "swin",
        "swin.encoder.layers.0.downsample",
        "forward",
        edits(
            "swin.encoder.layers.0.downsample",
            "for col in range(2) for row in range(2)",
            "for row in range(2) for col in range(2)",
        ),
    ),
    Mistake(
        "position-index-transposed",
        "swin",
        "swin.encoder.layers.1.blocks.0.attention.relative_position_bias",
        "state",
        holds(
            "swin.encoder.layers.1.blocks.0.attention.relative_position_bias",
            "relative_position_index",
            lambda index: index.view(16, 16).T.flatten(),
        ),
    ),
    Mistake(
        "window-mask-missing",
        "swin",
        "swin.encoder.layers.0.blocks.1",
        "forward",
        does("swin.encoder.layers.0.blocks.1", lambda self, *a, **k: None, "get_attn_mask"),
    ),
]

VISION = [*VIT, *RESNET, *MOBILENET, *CONVNEXT, *SWIN]
