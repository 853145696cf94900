"""Mistakes in the decoders of the ninth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, does, edits, holds, optimizes, trains, uses

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"


def _sees_one_of_padding(**options: Any) -> Any:
    """The mask of padding is one position too short: the last token of padding is seen."""
    from transformers.masking_utils import create_causal_mask

    mask = options["attention_mask"]
    return create_causal_mask(**options | {"attention_mask": mask | mask.roll(-1, 1)})


# --- sinks and windows, keys wider than values ------------------------------------------------------------------------


def _without_sink(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


_ROUTER = f"{_LAYER}.mlp.gate"
MIMO_V2 = table(
    "mimo_v2",
    ("values-not-scaled", _FIRST_ATTENTION, {"v_scale": 1.0}),
    ("sink-ignored", _FIRST_ATTENTION, uses(_FIRST_ATTENTION, eager_attention_forward=_without_sink)),
    ("scaled-by-values", _ATTENTION, {"scaling": 8**-0.5}),
    ("any-group", _ROUTER, {"topk_group": 2}),
    ("weights-with-bias", _ROUTER, ("scores.gather(1, topk_indices)", "(scores + 0.2).gather(1, topk_indices)")),
    ("softmax-for-sigmoid", _ROUTER, ("router_logits.sigmoid()", "router_logits.softmax(-1)")),
    (
        "window-for-full",
        "model",
        ("create_causal_mask(**mask_kwargs)", "create_sliding_window_causal_mask(**mask_kwargs)"),
    ),
    ("last-padding-seen", "model", uses("model", create_causal_mask=_sees_one_of_padding)),
    (
        "cast-before-weight",
        f"{_FIRST}.post_attention_layernorm",
        ("self.weight * hidden_states.to(input_dtype)", "self.weight * hidden_states.bfloat16().to(input_dtype)"),
        "precision",
    ),
    ("gate-and-up-swapped", f"{_LAYER}.mlp.experts", ("gate, up = nn", "up, gate = nn")),
    ("second-moment", every, trains(adam={"betas": (0.9, 0.99)}), "update"),
)


# --- a delta rule with experts ----------------------------------------------------------------------------------------

_RULE, _LATENT = _FIRST_ATTENTION, _ATTENTION
KIMI_LINEAR = table(
    "kimi_linear",
    ("decay-without-exponent", f"{_RULE}.forget_gate", ("torch.exp(A_log)", "A_log.abs()")),
    ("rate-without-sigmoid", _RULE, ("torch.sigmoid(self.b_proj(hidden_states))", "self.b_proj(hidden_states)")),
    ("gate-normed", _RULE, ("self.o_norm(core_attn_out, gate)", "self.o_norm(gate, core_attn_out)")),
    ("silu-for-sigmoid", f"{_RULE}.o_norm", {"activation": "silu"}),
    ("norm-epsilon", f"{_RULE}.o_norm", {"variance_epsilon": 1e-2}),
    ("scaled-by-part", _LATENT, {"scaling": 4**-0.5}),
    ("latent-not-normed", _LATENT, ("kv_nope = self.kv_a_layernorm(kv_nope)", "pass")),
    ("shared-of-routed", f"{_LAYER}.mlp", ("self.shared_experts(residuals)", "self.shared_experts(hidden_states)")),
    (
        "shared-detached",
        f"{_FIRST}.mlp",
        ("self.shared_experts(residuals)", "self.shared_experts(residuals.detach())"),
        "backward",
    ),
    ("weights-not-normalised", f"{_LAYER}.mlp.gate", {"norm_topk_prob": False}),
    ("loss-divided-twice", "", trains(share=0.25), "backward"),
)


# --- an attention that layers share; held out -------------------------------------------------------------------------

_BLOCK = "model.layers.3.shared_transformer"
_SCAN = "model.layers.1.mamba_decoder.mamba"


def _of_adapters(name: str, parameter: nn.Parameter) -> bool:
    return "adapter_list" in name


ZAMBA2 = table(
    "zamba2",
    (
        "adapter-of-other-layer",
        f"{_BLOCK}.feed_forward",
        ("layer_idx = self.layer_dic[layer_idx]", "layer_idx = 1 - self.layer_dic[layer_idx]"),
    ),
    (
        "originals-second",
        _BLOCK,
        ("[hidden_states, original_hidden_states]", "[original_hidden_states, hidden_states]"),
    ),
    (
        "originals-of-layer",
        "model",
        ("            original_hidden_states,\n", "            hidden_states,\n"),
    ),
    (
        "block-added-twice",
        "model.layers.1.mamba_decoder",
        ("residual = hidden_states\n", "residual = hidden_states + transformer_hidden_states\n"),
    ),
    (
        "step-not-softplus",
        "model.layers.0.mamba",
        ("dt_softplus=True,\n            initial", "dt_softplus=False,\n            initial"),
    ),
    ("input-and-output-swapped", _SCAN, ("hidden_states, B, C = torch.split", "hidden_states, C, B = torch.split")),
    ("rotary-lost", f"{_BLOCK}.self_attn", ("if self.config.use_mem_rope:", "if False:")),
    (
        "block-detached",
        "model.layers.1",
        ("self.linear(transformer_hidden_states)", "self.linear(transformer_hidden_states.detach())"),
        "backward",
    ),
    ("groups-normed-together", "model.layers.2.mamba.norm", {"group_size": 64}),
    ("adapters-frozen", _of_adapters, optimizes(_of_adapters, None), "update"),
)


# --- recurrent cells with exponential gates ---------------------------------------------------------------------------

_CELL, _LAST_CELL = "backbone.blocks.0.mlstm_layer", "backbone.blocks.1.mlstm_layer"


def _cap_by_clamp(values: Tensor, cap_value: float | None = None) -> Tensor:
    return values if cap_value is None else values.clamp(-cap_value, cap_value)


XLSTM = table(
    "xlstm",
    ("gates-swapped", _CELL, ("igate=i_preact,\n        fgate=f_preact", "igate=f_preact,\n        fgate=i_preact")),
    ("gates-clamped", _LAST_CELL, uses(_LAST_CELL, soft_cap=_cap_by_clamp)),
    ("output-gate-tanh", _CELL, ("self.ogate_act_fn(o_preact)", "o_preact.tanh()")),
    ("heads-reversed", _LAST_CELL, ("self.multihead_norm(h)", "self.multihead_norm(h.flip(2))")),
    ("values-of-other-rows", _CELL, ("value = self.v(x)", "value = self.v(x.flip(0))")),
    ("residual-normed", "backbone.blocks.1", ("x = x + x_ffn", "x = self.norm_ffn(x) + x_ffn")),
    (
        "gate-and-up-swapped",
        "backbone.blocks.0.ffn",
        ("self.act_fn(self.proj_up_gate(x)) * self.proj_up(x)", "self.proj_up_gate(x) * self.act_fn(self.proj_up(x))"),
    ),
    ("logits-not-capped", "", ("logits = soft_cap(logits, self.config.output_logit_soft_cap)", "pass")),
    ("norm-epsilon", "backbone.blocks.1.norm_mlstm", {"eps": 1e-1}),
    (
        "gate-bias-not-loaded",
        f"{_LAST_CELL}.fgate_preact",
        holds(f"{_LAST_CELL}.fgate_preact", "bias", torch.zeros_like),
        "state",
    ),
    (
        "labels-smoothed",
        "",
        (
            "self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)",
            "nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)",
        ),
    ),
    ("vectors-too-fast", vectors, optimizes(vectors, {"lr": 3e-3}), "update"),
)


# --- images of several sizes before a text; held out ------------------------------------------------------------------

_SEES, _READS = "model.visual", "model.language_model"


def _of_eye(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("model.visual.")


QWEN3_VL = table(
    "qwen3_vl",
    ("features-not-added", _READS, ("if deepstack_visual_embeds is not None and", "if False and")),
    (
        "features-detached",
        _SEES,
        (
            "                hidden_states\n            )\n            deepstack",
            "                hidden_states.detach()\n            )\n            deepstack",
        ),
        "backward",
    ),
    ("positions-of-text-alone", "model", ("if position_ids is None:", "if False:")),
    (
        "sections-not-mixed",
        f"{_READS}.rotary_emb",
        edits(
            f"{_READS}.rotary_emb",
            "enumerate((1, 2), start=1)",
            "enumerate((2, 1), start=1)",
            "recomposition_frequencies",
        ),
    ),
    ("images-see-each-other", _SEES, ("cu_seqlens=cu_seqlens,", "cu_seqlens=cu_seqlens[[0, -1]],")),
    (
        "keys-not-normed",
        f"{_READS}.layers.1.self_attn",
        ("self.k_norm(self.k_proj(hidden_states).view(hidden_shape))", "self.k_proj(hidden_states).view(hidden_shape)"),
    ),
    ("next-token-seen", _READS, uses(_READS, create_causal_mask=wrong.mask_that_sees_next)),
    (
        "activation-missing",
        f"{_SEES}.merger",
        ("self.linear_fc2(self.act_fn(self.linear_fc1(x)))", "self.linear_fc2(self.linear_fc1(x))"),
    ),
    ("erf-for-tanh", f"{_SEES}.blocks.1.mlp.act_fn", does(f"{_SEES}.blocks.1.mlp.act_fn", wrong.gelu)),
    (
        "images-detached",
        "model",
        (
            "inputs_embeds.masked_scatter(image_mask, image_embeds)",
            "inputs_embeds.masked_scatter(image_mask, image_embeds.detach())",
        ),
        "backward",
    ),
    ("eye-too-slow", _of_eye, optimizes(_of_eye, {"lr": 5e-4}), "update"),
)


# --- an agent's episodes ----------------------------------------------------------------------------------------------


def _both_ways(config: Any, inputs_embeds: Tensor, attention_mask: Tensor, **_: Any) -> Any:
    from transformers.masking_utils import create_bidirectional_mask

    return create_bidirectional_mask(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask)


_ACTS = "encoder.h"
DECISION_TRANSFORMER = table(
    "decision_transformer",
    (
        "actions-before-states",
        "",
        (
            "(returns_embeddings, state_embeddings, action_embeddings)",
            "(returns_embeddings, action_embeddings, state_embeddings)",
        ),
    ),
    ("action-from-return", "", ("self.predict_action(x[:, 1])", "self.predict_action(x[:, 0])")),
    (
        "padding-seen",
        "",
        ("attention_mask=stacked_attention_mask,", "attention_mask=torch.ones_like(stacked_attention_mask),"),
    ),
    ("mask-not-interleaved", "", ("        .permute(0, 2, 1)\n", "")),
    ("returns-without-time", "", ("returns_embeddings = returns_embeddings + time_embeddings", "pass")),
    ("time-one-later", "", ("self.embed_timestep(timesteps)", "self.embed_timestep(timesteps + 1)")),
    ("not-causal", "encoder", uses("encoder", create_causal_mask=_both_ways)),
    (
        "queries-scaled-twice",
        f"{_ACTS}.1.attn",
        attends(f"{_ACTS}.1.attn", lambda call: {"query": call["query"] * 8**-0.5}),
    ),
    (
        "residual-doubled",
        f"{_ACTS}.0",
        (
            "hidden_states = residual + feed_forward_hidden_states",
            "hidden_states = 2 * residual + feed_forward_hidden_states",
        ),
    ),
    (
        "norm-detached",
        f"{_ACTS}.1",
        ("hidden_states = self.ln_2(hidden_states)", "hidden_states = self.ln_2(hidden_states.detach())"),
        "backward",
    ),
    ("not-clipped", every, trains(clip=None), "update"),
)

MISTAKES = [*MIMO_V2, *KIMI_LINEAR, *ZAMBA2, *XLSTM, *QWEN3_VL, *DECISION_TRANSFORMER]
