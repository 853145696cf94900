"""Mistakes in the encoders, and in the models of images and sound, of the fifth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, edits, holds, optimizes, told, trains, uses

_XLM = "roberta.encoder.layer"
XLM_ROBERTA = table(
    "xlm_roberta",
    (
        "positions-from-zero",
        "roberta.embeddings",
        ("self.position_embeddings(position_ids)", "self.position_embeddings((position_ids - 2).clamp(min=0))"),
    ),
    ("keys-from-values", f"{_XLM}.1.attention.self", ("key_layer = self.key(", "key_layer = self.value(")),
    (
        "gelu-by-tanh",
        f"{_XLM}.0.intermediate.intermediate_act_fn",
        does(f"{_XLM}.0.intermediate.intermediate_act_fn", wrong.gelu_by_tanh),
    ),
    ("epsilon", "roberta.embeddings.LayerNorm", {"eps": 1e-1}),
    ("padding-dropped", "roberta", ("(\n        attention_mask=attention_mask,", "(\n        attention_mask=None,")),
    (
        "residual-lost",
        f"{_XLM}.1.output",
        ("self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states)"),
    ),
    ("last-for-first", "classifier", ("features[:, 0, :]", "features[:, -1, :]")),
    ("second-moment", every, trains(adam={"betas": (0.9, 0.95)}), "update"),
)

_BOXES = "layoutlm.embeddings"
LAYOUTLM = table(
    "layoutlm",
    (
        "rows-as-columns",
        _BOXES,
        ("= self.y_position_embeddings(bbox[:, :, 1])", "= self.x_position_embeddings(bbox[:, :, 1])"),
    ),
    (
        "width-as-height",
        _BOXES,
        (
            "self.h_position_embeddings(bbox[:, :, 3] - bbox[:, :, 1])",
            "self.h_position_embeddings(bbox[:, :, 2] - bbox[:, :, 0])",
        ),
    ),
    (
        "mask-as-ones",
        "layoutlm",
        ("(1.0 - extended_attention_mask) * torch.finfo(self.dtype).min", "1.0 - extended_attention_mask"),
    ),
    (
        "heads-not-transposed",
        "layoutlm.encoder.layer.0.attention.self",
        ("attn_output.reshape(*input_shape, -1)", "attn_output.transpose(1, 2).reshape(*input_shape, -1)"),
    ),
    ("padding-counted", "", ("labels.view(-1)", "labels.view(-1).clamp(min=0)")),
    (
        "bias-added-twice",
        "layoutlm.encoder.layer.1.output.dense",
        does("layoutlm.encoder.layer.1.output.dense", wrong.linear_with_two_biases),
    ),
    (
        "widths-not-loaded",
        f"{_BOXES}.w_position_embeddings",
        holds(f"{_BOXES}.w_position_embeddings", "weight", torch.zeros_like),
        "state",
    ),
    ("detached", "", ("self.classifier(sequence_output)", "self.classifier(sequence_output.detach())"), "backward"),
)

_LOCAL = "longformer.encoder.layer.0.attention.self"
LONGFORMER = table(
    "longformer",
    ("window-wider", _LOCAL, {"one_sided_attn_window_size": 3}),
    (
        "global-query-from-local",
        _LOCAL,
        edits(_LOCAL, "self.query_global(", "self.query(", "_compute_global_attn_output_from_hidden"),
    ),
    (
        "scale-missing",
        _LOCAL,
        ("query_vectors /= math.sqrt(self.head_dim)", "pass"),
    ),
    ("no-token-is-global", "", ("global_attention_mask[:, 0] = 1", "pass")),
    (
        "positions-from-zero",
        "longformer.embeddings",
        ("self.position_embeddings(position_ids)", "self.position_embeddings((position_ids - 2).clamp(min=0))"),
    ),
    ("tanh-skipped", "classifier", ("hidden_states = torch.tanh(hidden_states)", "pass")),
    ("padding-not-hidden", _LOCAL, ("attn_scores += diagonal_mask", "pass")),
)


def _of_head(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("classifier.")


DEIT = table(
    "deit",
    (
        "tokens-swapped",
        "deit.embeddings",
        ("(cls_tokens, distillation_tokens, embeddings)", "(distillation_tokens, cls_tokens, embeddings)"),
    ),
    ("distillation-pooled", "", ("sequence_output[:, 0, :]", "sequence_output[:, 1, :]")),
    ("gelu-by-tanh", "deit.layers.1.mlp.activation_fn", does("deit.layers.1.mlp.activation_fn", wrong.gelu_by_tanh)),
    (
        "patches-transposed",
        "deit.embeddings.patch_embeddings",
        ("self.projection(pixel_values).flatten(2)", "self.projection(pixel_values).transpose(2, 3).flatten(2)"),
    ),
    (
        "bias-missing",
        "deit.layers.0.attention.q_proj",
        does("deit.layers.0.attention.q_proj", wrong.linear_without_bias),
    ),
    (
        "norm-ignored",
        "deit.layers.1",
        (
            "self.attention(hidden_states, attention_mask, **kwargs)",
            "self.attention(residual, attention_mask, **kwargs)",
        ),
    ),
    ("head-learns-faster", _of_head, optimizes(_of_head, {"lr": 2e-3}), "update"),
)


def _all_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The tokens at the beginning are turned, and the last patches are not."""
    from transformers.models.dinov3_vit.modeling_dinov3_vit import rotate_half

    count = sin.shape[-2]

    def turned(x: Tensor) -> Tensor:
        first, rest = x[..., :count, :], x[..., count:, :]
        return torch.cat((first * cos + rotate_half(first) * sin, rest), -2)

    return turned(q), turned(k)


def _unscaled(self: Any, hidden_state: Tensor) -> Tensor:
    return hidden_state * 1.0


def _scales(name: str, parameter: nn.Parameter) -> bool:
    return "lambda1" in name


DINOV3 = table(
    "dinov3",
    ("registers-turned", "model.layer.0.attention", uses("model.layer.0.attention", apply_rotary_pos_emb=_all_turned)),
    ("branch-not-scaled", "model.layer.0.layer_scale1", does("model.layer.0.layer_scale1", _unscaled)),
    (
        "bias-missing",
        "model.layer.1.attention.v_proj",
        does("model.layer.1.attention.v_proj", wrong.linear_without_bias),
    ),
    (
        "registers-first",
        "embeddings",
        ("[cls_token, register_tokens, patch_embeddings]", "[register_tokens, cls_token, patch_embeddings]"),
    ),
    ("angles-halved", "rope_embeddings", ("2 * math.pi * patch_coords", "math.pi * patch_coords")),
    ("norm-skipped", "", ("self.norm(encoder_outputs.last_hidden_state)", "encoder_outputs.last_hidden_state")),
    (
        "gate-and-up-swapped",
        "model.layer.1.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * self.act_fn(self.up_proj(x))"),
    ),
    ("scales-decayed", _scales, optimizes(_scales, {"weight_decay": 0.1}), "update"),
)

_BACKBONE = "model.backbone.model"
DETR = table(
    "detr",
    (
        "positions-in-values",
        "model.encoder.layers.0.self_attn",
        ("self.v_proj(hidden_states)", "self.v_proj(query_key_input)"),
    ),
    (
        "positions-of-queries-missing",
        "model.decoder.layers.1",
        (
            "position_embeddings=object_queries_position_embeddings,\n            encoder_position_embeddings",
            "position_embeddings=None,\n            encoder_position_embeddings",
        ),
    ),
    ("margin-attended", "model", ("encoder_attention_mask=flattened_mask,", "encoder_attention_mask=None,")),
    (
        "boxes-not-squashed",
        "",
        (
            "pred_boxes = self.bbox_predictor(sequence_output).sigmoid()",
            "pred_boxes = self.bbox_predictor(sequence_output)",
        ),
    ),
    ("temperature-of-positions", "model.position_embedding", {"temperature": 100}),
    (
        "statistics-not-loaded",
        f"{_BACKBONE}.embedder.embedder.normalization",
        holds(f"{_BACKBONE}.embedder.embedder.normalization", "running_var", lambda variance: 4 * variance),
        "state",
    ),
    (
        "norm-skipped",
        "model.decoder",
        (
            "hidden_states = self.layernorm(hidden_states)\n\n    # stack",
            "pass\n\n    # stack",
        ),
    ),
    (
        "relu-after-last",
        "bbox_predictor",
        ("if i < self.num_layers - 1 else", "if i < self.num_layers else"),
    ),
)

_TV = "encoder.layers.encoder_layer_1"
_TV_FIRST = "encoder.layers.encoder_layer_0"
TV_VIT = table(
    "tv_vit",
    ("positions-missing", "encoder", ("input + self.pos_embedding", "input + 0 * self.pos_embedding")),
    ("mean-for-first", "", ("x = x[:, 0]", "x = x.mean(1)")),
    ("residual-lost", _TV, ("x = x + input", "x = 1 * x")),
    ("wrong-norm", _TV, ("self.ln_2(x)", "self.ln_1(x)")),
    (
        "bias-not-loaded",
        f"{_TV_FIRST}.self_attention",
        holds(f"{_TV_FIRST}.self_attention", "in_proj_bias", torch.zeros_like),
        "state",
    ),
    ("gelu-by-tanh", f"{_TV_FIRST}.mlp.1", {"approximate": "tanh"}),
    ("labels-smoothed", "", trains(loss=wrong.smoothed_loss), "backward"),
)

_LOCAL_PATCHES = "x = x + self.drop_path3(self.gamma3 * self.local_mp(self.norm3(x), H, W))"
XCIT = table(
    "xcit",
    ("keys-as-values", "blocks.0.attn", ("q, k, v = qkv.unbind(0)", "q, v, k = qkv.unbind(0)")),
    (
        "local-part-of-input",
        "blocks.1",
        (
            "x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x)))",
            "x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x.roll(1, 1))))",
        ),
    ),
    ("norm-in-eval", "blocks.0.local_mp.bn", told("blocks.0.local_mp.bn", "eval")),
    (
        "class-not-scaled",
        "cls_attn_blocks.0",
        ("self.gamma2 * self.mlp(cls_token)", "self.mlp(cls_token)"),
    ),
    ("residual-lost", "blocks.1", (_LOCAL_PATCHES, _LOCAL_PATCHES.replace("x + ", "", 1))),
    ("temperature-of-positions", "pos_embed", {"temperature": 100}),
    ("momentum", "blocks.1.local_mp.bn", {"momentum": 0.01}, "update"),
    ("kernel-flipped", "blocks.0.local_mp.conv1", does("blocks.0.local_mp.conv1", wrong.conv_flipped)),
)

_SOUND = "data2vec_audio"
DATA2VEC = table(
    "data2vec",
    ("positions-once", f"{_SOUND}.encoder.pos_conv_embed", ("in self.layers:", "in self.layers[:1]:")),
    (
        "first-cut-off",
        f"{_SOUND}.encoder.pos_conv_embed.layers.0.padding",
        ("hidden_states[:, :, : -self.num_pad_remove]", "hidden_states[:, :, self.num_pad_remove :]"),
    ),
    (
        "padding-averaged",
        "",
        ("hidden_states.sum(dim=1) / padding_mask.sum(dim=1).view(-1, 1)", "hidden_states.mean(dim=1)"),
    ),
    (
        "norm-skipped",
        f"{_SOUND}.feature_projection",
        ("norm_hidden_states = self.layer_norm(hidden_states)", "norm_hidden_states = hidden_states"),
    ),
    ("scale-doubled", f"{_SOUND}.encoder.layers.0.attention", {"scaling": 2 * 8**-0.5}),
    (
        "residual-lost",
        f"{_SOUND}.encoder.layers.1",
        ("hidden_states + self.feed_forward(hidden_states)", "self.feed_forward(hidden_states)"),
    ),
    (
        "positions-detached",
        f"{_SOUND}.encoder",
        ("position_embeddings.to(hidden_states.device)", "position_embeddings.detach()"),
        "backward",
    ),
)

MISTAKES = [
    *XLM_ROBERTA,
    *LAYOUTLM,
    *LONGFORMER,
    *DEIT,
    *DINOV3,
    *DETR,
    *TV_VIT,
    *XCIT,
    *DATA2VEC,
]
