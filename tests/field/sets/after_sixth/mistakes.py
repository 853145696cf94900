"""Mistakes that were written after the rules were changed for the sixth blind trial, and run once."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, holds, trains, uses

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"
_MLP = "hidden_states = self.mlp(hidden_states)\n"
_SUM = "    hidden_states = residual + hidden_states"

SOLAR_OPEN = table(
    "solar_open",
    ("keys-of-next-head", _ATTENTION, attends(_ATTENTION, lambda call: {"key": call["key"].flip(1)})),
    ("shared-experts-lost", f"{_LAYER}.mlp", ("hidden_states + self.shared_experts(residuals)", "1 * hidden_states")),
    ("weights-not-normalised", f"{_FIRST}.mlp.gate", {"norm_topk_prob": False}),
    ("gate-and-up-swapped", f"{_FIRST}.mlp.experts", ("self.act_fn(gate) * up", "gate * self.act_fn(up)")),
    ("gelu-for-silu", f"{_LAYER}.mlp.shared_experts.act_fn", does(f"{_LAYER}.mlp.shared_experts.act_fn", wrong.gelu)),
    ("sees-next", "model", uses("model", create_causal_mask=wrong.mask_that_sees_next)),
    ("residual-lost", _FIRST, (f"{_MLP}{_SUM}", _MLP)),
    ("rotary-of-neighbours", _ATTENTION, uses(_ATTENTION, apply_rotary_pos_emb=wrong.rotary_interleaved)),
)

EXAONE_MOE = table(
    "exaone_moe",
    ("keys-not-normed", _FIRST_ATTENTION, ("key_states = self.k_norm(key_states)", "pass")),
    ("rotary-everywhere", _ATTENTION, {"sliding_window": None}),
    (
        "window-everywhere",
        "model",
        ("causal_mask_mapping[self.config.layer_types[i]]", "causal_mask_mapping['sliding_attention']"),
    ),
    (
        "experts-in-other-order",
        f"{_LAYER}.mlp.experts",
        holds(f"{_LAYER}.mlp.experts", "down_proj", lambda weight: weight.flip(0)),
        "state",
    ),
    ("weights-doubled", f"{_LAYER}.mlp.gate", {"routed_scaling_factor": 5.0}),
    ("epsilon", f"{_LAYER}.post_attention_layernorm", {"variance_epsilon": 1e-1}),
    ("scale-halved", _FIRST_ATTENTION, {"scaling": 0.5 * 8**-0.5}),
    ("clipped-further", every, trains(clip=0.2), "update"),
)

MELLUM = table(
    "mellum",
    (
        "queries-not-normed",
        _ATTENTION,
        ("self.q_norm(self.q_proj(hidden_states).view(hidden_shape))", "self.q_proj(hidden_states).view(hidden_shape)"),
    ),
    (
        "gate-skipped",
        f"{_FIRST}.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * self.up_proj(x)"),
    ),
    ("weights-not-normalised", f"{_LAYER}.mlp.gate", {"norm_topk_prob": False}),
    ("norm-skipped", _LAYER, ("hidden_states = self.post_attention_layernorm(hidden_states)", "pass")),
    ("padding-dropped", "", ("attention_mask=attention_mask,", "attention_mask=None,")),
    ("final-norm-skipped", "model", ("hidden_states = self.norm(hidden_states)", "pass")),
    ("values-reversed", _FIRST_ATTENTION, attends(_FIRST_ATTENTION, lambda call: {"value": call["value"].flip(-1)})),
)

_GTE = "gte.layers"
GTE = table(
    "gte",
    ("padding-dropped", "gte", ("attention_mask=attention_mask,\n    )", "attention_mask=None,\n    )")),
    (
        "residual-lost",
        f"{_GTE}.0",
        ("residual + self.post_mlp_dropout(hidden_states)", "self.post_mlp_dropout(hidden_states)"),
    ),
    ("scale-doubled", f"{_GTE}.1.self_attn", {"scaling": 2 * 8**-0.5}),
    ("bias-missing", f"{_GTE}.1.self_attn.v_proj", does(f"{_GTE}.1.self_attn.v_proj", wrong.linear_without_bias)),
    (
        "values-from-keys",
        f"{_GTE}.0.self_attn",
        ("value_states = self.v_proj(hidden_states)", "value_states = self.k_proj(hidden_states)"),
    ),
    (
        "norm-bias-missing",
        f"{_GTE}.0.post_mlp_layernorm",
        does(f"{_GTE}.0.post_mlp_layernorm", wrong.norm_without_bias),
    ),
)

MISTAKES = [*SOLAR_OPEN, *EXAONE_MOE, *MELLUM, *GTE]
