"""Mistakes in the encoders and vision models of the blind trial."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every
from .patches import does, edits, has, told, trains

_ROFORMER, _CONVBERT = "roformer.encoder.layer.1", "convbert.encoder.layer.1"

ROFORMER = [
    Mistake(
        "values-rotated",
        "roformer",
        f"{_ROFORMER}.attention.self",
        "forward",
        has(f"{_ROFORMER}.attention.self", rotary_value=True),
    ),
    Mistake(
        "types-left-out",
        "roformer",
        "roformer.embeddings",
        "forward",
        edits(
            "roformer.embeddings", "inputs_embeds + token_type_embeddings", "inputs_embeds + 0 * token_type_embeddings"
        ),
    ),
    Mistake(
        "query-bias-dropped",
        "roformer",
        f"{_ROFORMER}.attention.self.query",
        "forward",
        does(f"{_ROFORMER}.attention.self.query", wrong.linear_without_bias),
    ),
    Mistake(
        "norm-epsilon",
        "roformer",
        f"{_ROFORMER}.output.LayerNorm",
        "forward",
        has(f"{_ROFORMER}.output.LayerNorm", eps=1e-4),
    ),
]

CONVBERT = [
    Mistake(
        "softmax-over-heads",
        "convbert",
        f"{_CONVBERT}.attention.self",
        "forward",
        edits(
            f"{_CONVBERT}.attention.self",
            "torch.softmax(conv_kernel_layer, dim=1)",
            "torch.softmax(conv_kernel_layer, dim=0)",
        ),
    ),
    Mistake(
        "convolution-of-keys",
        "convbert",
        f"{_CONVBERT}.attention.self",
        "forward",
        edits(
            f"{_CONVBERT}.attention.self",
            "torch.multiply(mixed_key_conv_attn_layer, mixed_query_layer)",
            "torch.multiply(mixed_key_layer, mixed_query_layer)",
        ),
    ),
    Mistake(
        "residual-dropped",
        "convbert",
        "convbert.encoder.layer.0.output",
        "forward",
        edits(
            "convbert.encoder.layer.0.output",
            "self.LayerNorm(hidden_states + input_tensor)",
            "self.LayerNorm(hidden_states)",
        ),
    ),
    Mistake(
        "classifier-of-last",
        "convbert",
        "classifier",
        "forward",
        edits("classifier", "hidden_states[:, 0, :]", "hidden_states[:, 1, :]"),
    ),
]

PEGASUS = [
    Mistake(
        "encoder-embedding-not-scaled", "pegasus", "model.encoder", "forward", has("model.encoder", embed_scale=1.0)
    ),
    Mistake(
        "cross-mask-dropped",
        "pegasus",
        "model",
        "forward",
        edits("model", "encoder_attention_mask=attention_mask,", "encoder_attention_mask=None,"),
    ),
    Mistake(
        "scale",
        "pegasus",
        "model.decoder.layers.1.encoder_attn",
        "forward",
        has("model.decoder.layers.1.encoder_attn", scaling=32**-0.5),
    ),
    Mistake(
        "encoder-detached",
        "pegasus",
        "model",
        "backward",
        edits(
            "model", "encoder_hidden_states=encoder_outputs[0],", "encoder_hidden_states=encoder_outputs[0].detach(),"
        ),
    ),
]

_PVT = "pvt_v2.encoder.layers.1.blocks.0"

PVT_V2 = [
    Mistake(
        "reduction-norm-skipped",
        "pvt_v2",
        "pvt_v2.encoder.layers.0.blocks.0.attention",
        "forward",
        edits(
            "pvt_v2.encoder.layers.0.blocks.0.attention",
            "        hidden_states = self.layer_norm(hidden_states)\n\n",
            "\n",
        ),
    ),
    Mistake(
        "scale-of-width",
        "pvt_v2",
        f"{_PVT}.attention",
        "forward",
        edits(f"{_PVT}.attention", "math.sqrt(self.attention_head_size)", "math.sqrt(self.hidden_size)"),
    ),
    Mistake(
        "residual-of-normed",
        "pvt_v2",
        _PVT,
        "forward",
        edits(
            _PVT,
            "layer_output = hidden_states + mlp_output",
            "layer_output = self.layer_norm_2(hidden_states) + mlp_output",
        ),
    ),
    Mistake(
        "pooled-by-maximum",
        "pvt_v2",
        "",
        "forward",
        edits("", "sequence_output.mean(dim=1)", "sequence_output.amax(dim=1)"),
    ),
]

_CONVNEXT = "convnextv2.encoder.stages.1.layers.1"

CONVNEXTV2 = [
    Mistake(
        "response-norm-residual",
        "convnextv2",
        f"{_CONVNEXT}.grn",
        "forward",
        edits(f"{_CONVNEXT}.grn", "+ self.bias + hidden_states", "+ self.bias"),
    ),
    Mistake(
        "norm-over-one-axis",
        "convnextv2",
        f"{_CONVNEXT}.grn",
        "forward",
        edits(
            f"{_CONVNEXT}.grn",
            "global_features.mean(dim=-1, keepdim=True)",
            "global_features.mean(dim=1, keepdim=True)",
        ),
    ),
    Mistake(
        "kernel-flipped",
        "convnextv2",
        "convnextv2.encoder.stages.0.layers.0.dwconv",
        "forward",
        does("convnextv2.encoder.stages.0.layers.0.dwconv", wrong.conv_flipped),
    ),
    Mistake("not-clipped", "convnextv2", every, "update", trains(clip=None)),
]

_FOCAL = "focalnet.encoder.stages.1.layers.0.modulation"

FOCALNET = [
    Mistake(
        "global-context-dropped",
        "focalnet",
        _FOCAL,
        "forward",
        edits(_FOCAL, "ctx_all + ctx_global * gates", "ctx_all + 0 * ctx_global * gates"),
    ),
    Mistake(
        "gate-of-next-level",
        "focalnet",
        _FOCAL,
        "forward",
        edits(_FOCAL, "gates[:, level : level + 1]", "gates[:, level + 1 : level + 2]"),
    ),
    Mistake(
        "gates-detached",
        "focalnet",
        _FOCAL,
        "backward",
        edits(_FOCAL, "ctx * gates[:, level", "ctx * gates.detach()[:, level"),
    ),
]

HIERA = [
    Mistake(
        "pooled-by-mean",
        "hiera",
        "hiera.encoder.stages.1.layers.0.attn",
        "forward",
        edits("hiera.encoder.stages.1.layers.0.attn", "query.max(dim=3).values", "query.mean(dim=3)"),
    ),
    Mistake(
        "scale-missing",
        "hiera",
        "hiera.encoder.stages.0.layers.0.attn",
        "forward",
        has("hiera.encoder.stages.0.layers.0.attn", scale=1.0),
    ),
    Mistake(
        "shortcut-of-mean",
        "hiera",
        "hiera.encoder.stages.1.layers.0",
        "forward",
        edits("hiera.encoder.stages.1.layers.0", ".max(dim=1).values", ".mean(dim=1)"),
    ),
]

_WAVLM = "wavlm.encoder.layers.1.attention"

WAVLM = [
    Mistake("gate-constant", "wavlm", _WAVLM, "forward", edits(_WAVLM, "- 1.0) + 2.0", "- 1.0) + 1.0")),
    Mistake(
        "bias-not-gated",
        "wavlm",
        _WAVLM,
        "forward",
        edits(
            _WAVLM,
            "gate_output.view(bsz * self.num_heads, -1, 1) * position_bias",
            "0 * gate_output.view(bsz * self.num_heads, -1, 1) + position_bias",
        ),
    ),
    Mistake(
        "positions-not-added",
        "wavlm",
        "wavlm.encoder",
        "forward",
        edits("wavlm.encoder", "hidden_states + position_embeddings", "hidden_states + 0 * position_embeddings"),
    ),
]

MNASNET = [
    Mistake("batch-norm-momentum", "mnasnet", "layers.1", "update", has("layers.1", momentum=0.1)),
    Mistake("relu-skipped", "mnasnet", "layers.2", "forward", does("layers.2", lambda self, x: x)),
    Mistake("norm-in-eval", "mnasnet", "layers.4", "forward", told("layers.4", "eval")),
]

BLIND_ENCODERS = [*ROFORMER, *CONVBERT, *PEGASUS, *PVT_V2, *CONVNEXTV2, *FOCALNET, *HIERA, *WAVLM, *MNASNET]
