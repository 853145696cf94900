"""Mistakes in models of images that the comparison's rules may be tuned on."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import table
from field.kit.patches import does, holds, told, trains

VIT = table(
    "vit",
    (
        "positions-before-class-token",
        "vit.embeddings",
        (
            "embeddings = embeddings + self.position_embeddings",
            "embeddings = embeddings + self.position_embeddings.roll(1, 1)",
        ),
    ),
    ("patches-column-first", "vit.embeddings.patch_embeddings", (".flatten(2)", ".transpose(2, 3).flatten(2)")),
    ("gelu-by-tanh", "vit.layers.1.mlp.activation_fn", does("vit.layers.1.mlp.activation_fn", wrong.gelu_by_tanh)),
    ("pooled-by-mean", "", ("sequence_output[:, 0, :]", "sequence_output.mean(1)")),
    ("norm-skipped", "vit.layers.0", ("hidden_states = self.layernorm_after(hidden_states)", "pass")),
    (
        "key-detached",
        "vit.layers.1.attention",
        ("self.k_proj(hidden_states)", "self.k_proj(hidden_states).detach()"),
        "backward",
    ),
    ("loss-doubled", "", trains(share=2.0), "backward"),
)

_STAGES = "resnet.encoder.stages"

RESNET = table(
    "resnet",
    ("batch-norm-momentum", f"{_STAGES}.1.layers.0.layer.0.normalization", {"momentum": 0.01}, "update"),
    ("batch-norm-epsilon", f"{_STAGES}.0.layers.0.layer.1.normalization", {"eps": 1e-3}),
    (
        "padding-mode",
        f"{_STAGES}.1.layers.1.layer.0.convolution",
        {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1] * 4},
    ),
    (
        "shortcut-not-normed",
        f"{_STAGES}.1.layers.0.shortcut",
        ("hidden_state = self.normalization(hidden_state)", "pass"),
    ),
    (
        "activation-before-sum",
        f"{_STAGES}.2.layers.0",
        (
            "hidden_state += residual\n    hidden_state = self.activation(hidden_state)",
            "hidden_state = self.activation(hidden_state) + residual",
        ),
    ),
    (
        "batch-norm-in-eval",
        f"{_STAGES}.2.layers.0.layer.0.normalization",
        told(f"{_STAGES}.2.layers.0.layer.0.normalization", "eval"),
    ),
    (
        "shortcut-cut",
        f"{_STAGES}.1.layers.1",
        ("hidden_state += residual", "hidden_state += residual.detach()"),
        "backward",
    ),
)

MOBILENET = table(
    "mobilenet_v2",
    ("residual-dropped", "features.3", {"use_res_connect": False}),
    ("convolution-flipped", "features.5.conv.1.0", does("features.5.conv.1.0", wrong.conv_flipped)),
    ("statistics-not-tracked", "features.8.conv.3", {"momentum": 0.0}, "update"),
    (
        "running-variance-stale",
        "features.2.conv.0.1",
        holds("features.2.conv.0.1", "running_var", lambda variance: 2 * variance),
        "state",
    ),
)

CONVNEXT = table(
    "convnext",
    (
        "layer-scale-dropped",
        "convnext.encoder.stages.2.layers.1",
        ("self.layer_scale_parameter * features", "features"),
    ),
    ("norm-epsilon", "convnext.encoder.stages.1.layers.0.layernorm", {"eps": 1e-3}),
    (
        "scale-not-learned",
        "convnext.encoder.stages.0.layers.0",
        ("self.layer_scale_parameter * features", "self.layer_scale_parameter.detach() * features"),
        "backward",
    ),
)

SWIN = table(
    "swin",
    ("shift-not-undone", "swin.encoder.layers.0.blocks.1", ("reverse=True", "reverse=False")),
    (
        "patches-merged-row-first",
        "swin.encoder.layers.0.downsample",
        ("for col in range(2) for row in range(2)", "for row in range(2) for col in range(2)"),
    ),
    (
        "position-index-transposed",
        "swin.encoder.layers.1.blocks.0.attention.relative_position_bias",
        holds(
            "swin.encoder.layers.1.blocks.0.attention.relative_position_bias",
            "relative_position_index",
            lambda index: index.view(16, 16).T.flatten(),
        ),
        "state",
    ),
    (
        "window-mask-missing",
        "swin.encoder.layers.0.blocks.1",
        does("swin.encoder.layers.0.blocks.1", lambda self, *a, **k: None, "get_attn_mask"),
    ),
)

MISTAKES = [*VIT, *RESNET, *MOBILENET, *CONVNEXT, *SWIN]
