"""Mistakes in the encoders and vision models of the blind trial."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, told, trains

_ROFORMER, _CONVBERT = "roformer.encoder.layer.1", "convbert.encoder.layer.1"

ROFORMER = table(
    "roformer",
    ("values-rotated", f"{_ROFORMER}.attention.self", {"rotary_value": True}),
    (
        "types-left-out",
        "roformer.embeddings",
        ("inputs_embeds + token_type_embeddings", "inputs_embeds + 0 * token_type_embeddings"),
    ),
    (
        "query-bias-dropped",
        f"{_ROFORMER}.attention.self.query",
        does(f"{_ROFORMER}.attention.self.query", wrong.linear_without_bias),
    ),
    ("norm-epsilon", f"{_ROFORMER}.output.LayerNorm", {"eps": 1e-4}),
)

CONVBERT = table(
    "convbert",
    (
        "softmax-over-heads",
        f"{_CONVBERT}.attention.self",
        ("torch.softmax(conv_kernel_layer, dim=1)", "torch.softmax(conv_kernel_layer, dim=0)"),
    ),
    (
        "convolution-of-keys",
        f"{_CONVBERT}.attention.self",
        (
            "torch.multiply(mixed_key_conv_attn_layer, mixed_query_layer)",
            "torch.multiply(mixed_key_layer, mixed_query_layer)",
        ),
    ),
    (
        "residual-dropped",
        "convbert.encoder.layer.0.output",
        ("self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states)"),
    ),
    ("classifier-of-last", "classifier", ("hidden_states[:, 0, :]", "hidden_states[:, 1, :]")),
)

PEGASUS = table(
    "pegasus",
    ("encoder-embedding-not-scaled", "model.encoder", {"embed_scale": 1.0}),
    ("cross-mask-dropped", "model", ("encoder_attention_mask=attention_mask,", "encoder_attention_mask=None,")),
    ("scale", "model.decoder.layers.1.encoder_attn", {"scaling": 32**-0.5}),
    (
        "encoder-detached",
        "model",
        ("encoder_hidden_states=encoder_outputs[0],", "encoder_hidden_states=encoder_outputs[0].detach(),"),
        "backward",
    ),
)

_PVT = "pvt_v2.encoder.layers.1.blocks.0"

PVT_V2 = table(
    "pvt_v2",
    (
        "reduction-norm-skipped",
        "pvt_v2.encoder.layers.0.blocks.0.attention",
        ("        hidden_states = self.layer_norm(hidden_states)\n\n", "\n"),
    ),
    ("scale-of-width", f"{_PVT}.attention", ("math.sqrt(self.attention_head_size)", "math.sqrt(self.hidden_size)")),
    (
        "residual-of-normed",
        _PVT,
        ("layer_output = hidden_states + mlp_output", "layer_output = self.layer_norm_2(hidden_states) + mlp_output"),
    ),
    ("pooled-by-maximum", "", ("sequence_output.mean(dim=1)", "sequence_output.amax(dim=1)")),
)

_CONVNEXT = "convnextv2.encoder.stages.1.layers.1"

CONVNEXTV2 = table(
    "convnextv2",
    ("response-norm-residual", f"{_CONVNEXT}.grn", ("+ self.bias + hidden_states", "+ self.bias")),
    (
        "norm-over-one-axis",
        f"{_CONVNEXT}.grn",
        ("global_features.mean(dim=-1, keepdim=True)", "global_features.mean(dim=1, keepdim=True)"),
    ),
    (
        "kernel-flipped",
        "convnextv2.encoder.stages.0.layers.0.dwconv",
        does("convnextv2.encoder.stages.0.layers.0.dwconv", wrong.conv_flipped),
    ),
    ("not-clipped", every, trains(clip=None), "update"),
)

_FOCAL = "focalnet.encoder.stages.1.layers.0.modulation"

FOCALNET = table(
    "focalnet",
    ("global-context-dropped", _FOCAL, ("ctx_all + ctx_global * gates", "ctx_all + 0 * ctx_global * gates")),
    ("gate-of-next-level", _FOCAL, ("gates[:, level : level + 1]", "gates[:, level + 1 : level + 2]")),
    ("gates-detached", _FOCAL, ("ctx * gates[:, level", "ctx * gates.detach()[:, level"), "backward"),
)

HIERA = table(
    "hiera",
    ("pooled-by-mean", "hiera.encoder.stages.1.layers.0.attn", ("query.max(dim=3).values", "query.mean(dim=3)")),
    ("scale-missing", "hiera.encoder.stages.0.layers.0.attn", {"scale": 1.0}),
    ("shortcut-of-mean", "hiera.encoder.stages.1.layers.0", (".max(dim=1).values", ".mean(dim=1)")),
)

_WAVLM = "wavlm.encoder.layers.1.attention"

WAVLM = table(
    "wavlm",
    ("gate-constant", _WAVLM, ("- 1.0) + 2.0", "- 1.0) + 1.0")),
    (
        "bias-not-gated",
        _WAVLM,
        (
            "gate_output.view(bsz * self.num_heads, -1, 1) * position_bias",
            "0 * gate_output.view(bsz * self.num_heads, -1, 1) + position_bias",
        ),
    ),
    (
        "positions-not-added",
        "wavlm.encoder",
        ("hidden_states + position_embeddings", "hidden_states + 0 * position_embeddings"),
    ),
)

MNASNET = table(
    "mnasnet",
    ("batch-norm-momentum", "layers.1", {"momentum": 0.1}, "update"),
    ("relu-skipped", "layers.2", does("layers.2", lambda self, x: x)),
    ("norm-in-eval", "layers.4", told("layers.4", "eval")),
)

MISTAKES = [*ROFORMER, *CONVBERT, *PEGASUS, *PVT_V2, *CONVNEXTV2, *FOCALNET, *HIERA, *WAVLM, *MNASNET]
