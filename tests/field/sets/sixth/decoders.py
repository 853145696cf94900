"""Mistakes in the decoders of the sixth blind trial."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, does, edits, holds, optimizes, trains, untied, uses

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"
_NORMED = "hidden_states = self.post_attention_layernorm(hidden_states)"
_MLP = "hidden_states = self.mlp(hidden_states)\n"
_VALUES = "value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)"


def _queries_alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The keys are not turned."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)[0], k


def _hidden_from_itself(**options: Any) -> Any:
    """A causal mask whose diagonal is off by one."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(and_mask_function=wrong.hides_itself, **options)


def _narrower_window(**options: Any) -> Any:
    """A window that shows one token less."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = options["config"]
    narrower = wrong.other_config(config, sliding_window=config.sliding_window - 1)
    return create_sliding_window_causal_mask(**(options | {"config": narrower}))


BITNET = table(
    "bitnet",
    ("sub-norm-skipped", _ATTENTION, ("attn_output = self.attn_sub_norm(attn_output)", "pass")),
    ("relu-not-squared", f"{_FIRST}.mlp.act_fn", does(f"{_FIRST}.mlp.act_fn", wrong.relu)),
    (
        "gate-alone-normed",
        f"{_LAYER}.mlp",
        (
            "self.ffn_sub_norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",
            "self.ffn_sub_norm(self.act_fn(self.gate_proj(x))) * self.up_proj(x)",
        ),
    ),
    ("padding-dropped", "model", ("attention_mask=attention_mask,", "attention_mask=None,")),
    ("rotary-of-neighbours", _FIRST_ATTENTION, uses(_FIRST_ATTENTION, apply_rotary_pos_emb=wrong.rotary_interleaved)),
    (
        "branch-doubled",
        _LAYER,
        (
            "hidden_states = residual + hidden_states\n\n    # Fully",
            "hidden_states = residual + 2 * hidden_states\n\n    # Fully",
        ),
    ),
    ("values-detached", _FIRST_ATTENTION, (_VALUES, f"{_VALUES}.detach()"), "backward"),
    ("vectors-decayed", vectors, optimizes(vectors, {"weight_decay": 0.1, "lr": 1e-3}), "update"),
)

CWM = table(
    "cwm",
    ("window-narrower", "model", uses("model", create_sliding_window_causal_mask=_narrower_window)),
    (
        "masks-swapped",
        "model",
        ("causal_mask_mapping[self.config.layer_types[i]]", "causal_mask_mapping[self.config.layer_types[1 - i]]"),
    ),
    (
        "values-of-other-heads",
        _ATTENTION,
        attends(_ATTENTION, lambda call: {"value": call["value"].roll(1, 1)}),
    ),
    ("epsilon", f"{_LAYER}.input_layernorm", {"variance_epsilon": 1e-2}),
    (
        "gate-added",
        f"{_FIRST}.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.gate_proj(x)) + self.up_proj(x)"),
    ),
    (
        "residual-normed",
        _FIRST,
        (
            "residual = hidden_states\n    hidden_states = self.input_layernorm(hidden_states)",
            "residual = hidden_states = self.input_layernorm(hidden_states)",
        ),
    ),
    ("clipped-further", every, trains(clip=0.1), "update"),
)

FLEX_OLMO = table(
    "flex_olmo",
    ("queries-not-normed", _ATTENTION, ("self.q_norm(self.q_proj(hidden_states))", "self.q_proj(hidden_states)")),
    (
        "sum-normed",
        _FIRST,
        (
            f"{_NORMED}\n    hidden_states = residual + hidden_states",
            "hidden_states = self.post_attention_layernorm(residual + hidden_states)",
        ),
    ),
    ("weights-normalised", f"{_LAYER}.mlp.gate", {"norm_topk_prob": True}),
    ("gate-and-up-swapped", f"{_FIRST}.mlp.experts", ("self.act_fn(gate) * up", "gate * self.act_fn(up)")),
    ("one-expert", f"{_LAYER}.mlp.gate", {"top_k": 1}),
    ("padding-balanced", "", ("            attention_mask,\n", "            None,\n")),
    ("sees-next", "model", uses("model", create_causal_mask=wrong.mask_that_sees_next)),
    ("scale-missing", _FIRST_ATTENTION, {"scaling": 1.0}),
)

MINIMAX_M2 = table(
    "minimax_m2",
    (
        "softmax-for-sigmoid",
        f"{_FIRST}.mlp.gate",
        ("nn.functional.sigmoid(router_logits.float())", "nn.functional.softmax(router_logits.float(), dim=-1)"),
    ),
    (
        "weights-not-normalised",
        f"{_LAYER}.mlp.gate",
        ("top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)", "pass"),
    ),
    ("keys-not-normed", _ATTENTION, ("self.k_norm(self.k_proj(hidden_states))", "self.k_proj(hidden_states)")),
    ("queries-turned-back", _FIRST_ATTENTION, uses(_FIRST_ATTENTION, apply_rotary_pos_emb=wrong.rotary_reversed)),
    ("queries-of-last-token", _ATTENTION, attends(_ATTENTION, lambda call: {"query": call["query"].roll(1, 2)})),
    ("hidden-from-itself", "model", uses("model", create_causal_mask=_hidden_from_itself)),
    ("residual-lost", _LAYER, (f"{_MLP}    hidden_states = residual + hidden_states", _MLP)),
    ("cleared-between", every, wrong.cleared_between, "update"),
)

AFMOE = table(
    "afmoe",
    ("gate-not-applied", _ATTENTION, ("output = output * torch.sigmoid(gate_states)", "pass")),
    ("rotary-everywhere", _ATTENTION, {"is_local_attention": True}),
    ("embedding-not-scaled", "model", ("if self.config.mup_enabled:", "if False:")),
    (
        "window-everywhere",
        "model",
        ("causal_mask_mapping[self.config.layer_types[i]]", "causal_mask_mapping['sliding_attention']"),
    ),
    ("shared-experts-lost", f"{_LAYER}.mlp", ("return shared_output + routed_output", "return routed_output")),
    ("scores-not-scaled", f"{_LAYER}.mlp.router", {"route_scale": 1.0}),
    ("norm-skipped", _FIRST, ("hidden_states = self.post_mlp_layernorm(hidden_states)", "pass")),
    (
        "router-detached",
        f"{_LAYER}.mlp.router",
        ("torch.sigmoid(router_logits)", "torch.sigmoid(router_logits.detach())"),
        "backward",
    ),
)

HUNYUAN_MOE = table(
    "hunyuan_moe",
    ("queries-not-normed", _FIRST_ATTENTION, ("query_states = self.query_layernorm(query_states)", "pass")),
    (
        "weights-not-normalised",
        f"{_LAYER}.mlp.gate",
        ("routing_weights /= routing_weights.sum(dim=-1, keepdim=True)", "pass"),
    ),
    (
        "shared-expert-doubled",
        f"{_FIRST}.mlp",
        ("final_hidden_states + hidden_states_mlp", "final_hidden_states + 2 * hidden_states_mlp"),
    ),
    ("padding-left-out", "", ("labels=labels,", "labels=labels.masked_fill(labels == 0, -100),")),
    (
        "experts-in-other-order",
        f"{_LAYER}.mlp.experts",
        holds(f"{_LAYER}.mlp.experts", "gate_up_proj", lambda weight: weight.flip(0)),
        "state",
    ),
    ("sees-next", "model", uses("model", create_causal_mask=wrong.mask_that_sees_next)),
    ("keys-not-turned", _ATTENTION, uses(_ATTENTION, apply_rotary_pos_emb=_queries_alone)),
)

JAIS2 = table(
    "jais2",
    ("relu-not-squared", f"{_LAYER}.mlp.act_fn", does(f"{_LAYER}.mlp.act_fn", wrong.relu)),
    ("bias-missing", f"{_LAYER}.mlp.down_proj", does(f"{_LAYER}.mlp.down_proj", wrong.linear_without_bias)),
    ("norm-bias-missing", f"{_FIRST}.input_layernorm", does(f"{_FIRST}.input_layernorm", wrong.norm_without_bias)),
    ("scale-doubled", _ATTENTION, {"scaling": 2 * 8**-0.5}),
    ("residual-lost", _FIRST, (f"{_MLP}    hidden_states = residual + hidden_states", _MLP)),
    ("final-norm-skipped", "model", ("hidden_states = self.norm(hidden_states)", "pass")),
    ("labels-not-shifted", "", ("labels=labels,", "labels=labels, shift_labels=labels,")),
    ("rate-halved", every, trains(schedule=lambda step: 0.5 if step else 1.0), "update"),
)

_CHUNKS = "self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]"
GRANITE_SHARED = table(
    "granitemoeshared",
    ("branches-not-scaled", _LAYER, {"residual_multiplier": 1.0}),
    ("embedding-not-scaled", "model", {"embedding_multiplier": 1.0}),
    ("usual-scale", _FIRST_ATTENTION, {"scaling": 8**-0.5}),
    ("logits-not-scaled", "", ("logits = logits / self.config.logits_scaling", "pass")),
    ("shared-expert-of-residual", _LAYER, ("self.shared_mlp(hidden_states)", "self.shared_mlp(residual)")),
    (
        "softmax-over-all",
        f"{_FIRST}.block_sparse_moe.router",
        ("torch.softmax(top_k_logits, dim=-1)", "torch.softmax(router_logits, dim=-1).gather(1, top_k_index)"),
    ),
    ("padding-dropped", "model", ("attention_mask=attention_mask,", "attention_mask=None,")),
    (
        "halves-swapped",
        f"{_FIRST}.shared_mlp",
        (_CHUNKS, "chunked_hidden_states[0] * self.activation(chunked_hidden_states[1])"),
    ),
)

YOUTU = table(
    "youtu",
    ("latent-not-normed", _ATTENTION, ("kv_nope = self.kv_a_layernorm(kv_nope)", "kv_nope = kv_nope.contiguous()")),
    ("scale-of-one-part", _FIRST_ATTENTION, {"scaling": 4**-0.5}),
    (
        "interleaving-ignored",
        _FIRST_ATTENTION,
        ("if self.config.rope_interleave:", "if not self.config.rope_interleave:"),
    ),
    (
        "turned-keys-flipped",
        _ATTENTION,
        edits(_ATTENTION, ".copy_(k_rot)", ".copy_(k_rot.flip(-1))", "expand_kv"),
    ),
    (
        "queries-not-normed",
        _ATTENTION,
        ("self.q_a_layernorm(self.q_a_proj(hidden_states))", "self.q_a_proj(hidden_states)"),
    ),
    ("gelu-for-silu", f"{_FIRST}.mlp.act_fn", does(f"{_FIRST}.mlp.act_fn", wrong.gelu)),
    ("norm-skipped", _LAYER, (_NORMED, "pass")),
    ("not-cleared", every, trains(clear=False), "update"),
)


def _unscaled(self: Any, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, self.weight, self.padding_idx)


MINICPM3 = table(
    "minicpm3",
    ("texts-not-separated", "model", ("position_ids=position_ids,\n    )", "position_ids=None,\n    )")),
    ("branches-not-scaled", _LAYER, {"residual_scale": 1.0}),
    ("logits-not-scaled", "", ("hidden_states = hidden_states / self.config.logits_scaling", "pass")),
    ("embedding-not-scaled", "model.embed_tokens", does("model.embed_tokens", _unscaled)),
    ("rotary-of-neighbours", _FIRST_ATTENTION, uses(_FIRST_ATTENTION, apply_rotary_pos_emb=wrong.rotary_interleaved)),
    ("latent-not-normed", _ATTENTION, ("self.kv_a_layernorm(kv_pass).view(", "kv_pass.reshape(")),
    ("positions-lost", "", ("position_ids=position_ids,", "position_ids=None,")),
)

LFM2_MOE = table(
    "lfm2_moe",
    (
        "padding-convolved",
        f"{_FIRST}.conv",
        ("hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)", "pass"),
    ),
    ("gate-of-output-missing", f"{_FIRST}.conv", ("y = C * hidden_states", "y = 1 * hidden_states")),
    (
        "keys-not-normed",
        _ATTENTION,
        (
            "self.k_layernorm(self.k_proj(hidden_states).view(*hidden_shape))",
            "self.k_proj(hidden_states).view(*hidden_shape)",
        ),
    ),
    ("weights-doubled", f"{_LAYER}.feed_forward.gate", {"routed_scaling_factor": 2.0}),
    (
        "gate-and-up-swapped",
        f"{_FIRST}.feed_forward",
        ("F.silu(self.w1(x)) * self.w3(x)", "F.silu(self.w3(x)) * self.w1(x)"),
    ),
    ("wrong-norm", _LAYER, ("self.ffn_norm(hidden_states)", "self.operator_norm(hidden_states)")),
    ("tie-lost", ("model.embed_tokens", "lm_head"), untied("lm_head"), "backward"),
    ("second-moment", every, trains(adam={"betas": (0.9, 0.95)}), "update"),
)

MISTAKES = [
    *BITNET,
    *CWM,
    *FLEX_OLMO,
    *MINIMAX_M2,
    *AFMOE,
    *HUNYUAN_MOE,
    *JAIS2,
    *GRANITE_SHARED,
    *YOUTU,
    *MINICPM3,
    *LFM2_MOE,
]
