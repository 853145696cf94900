"""Mistakes in the decoders of the seventh blind trial."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from field.kit.building import own_loss
from field.kit.mistake import every, table
from field.kit.patches import attends, holds, optimizes, told, trains, uses
from field.kit.running import Training

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"
_NORMED = "hidden_states = self.post_attention_layernorm(hidden_states)"


def _mask_rolled(call: dict[str, Any]) -> dict[str, Any]:
    """Each key has the mask of the key before it."""
    return {"attention_mask": call["attention_mask"].roll(1, -1)}


def _neighbour_hidden(**options: Any) -> Any:
    """A token does not see the token before it."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(and_mask_function=lambda batch, head, query, key: key != query - 1, **options)


def _texts_shifted(**options: Any) -> Any:
    """The last token of a text counts as the first one of the text after it."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(**(options | {"position_ids": options["position_ids"].roll(-1, 1)}))


def _keys_not_normalised(*parts: Tensor, use_qk_l2norm_in_kernel: bool = False, **options: Any) -> Any:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(*parts, use_qk_l2norm_in_kernel=False, **options)


def _each_clipped(training: Training) -> None:
    """Gradients are clipped after each micro batch, not only before the step."""
    parameters = list(training.model.parameters())
    training.after_backward = lambda optimizer: torch.nn.utils.clip_grad_norm_(parameters, 0.1)


MINISTRAL = table(
    "ministral",
    ("mask-rolled", _ATTENTION, attends(_ATTENTION, _mask_rolled)),
    (
        "positions-quartered",
        "model.rotary_emb",
        ("position_ids[..., None].float()", "0.25 * position_ids[..., None].float()"),
    ),
    (
        "heads-reversed",
        _FIRST_ATTENTION,
        ("attn_output.reshape(*input_shape, -1)", "attn_output.flip(-2).reshape(*input_shape, -1)"),
    ),
    ("residual-normed", _FIRST, (_NORMED, f"residual = {_NORMED}")),
    ("up-by-gate", f"{_LAYER}.mlp", ("* self.up_proj(x)", "* self.gate_proj(x)")),
    ("fewer-items", "", trains(loss=functools.partial(own_loss, num_items_in_batch=torch.tensor(37)))),
    (
        "window-for-both",
        "model",
        ("causal_mask_mapping[self.config.layer_types[i]]", "causal_mask_mapping['sliding_attention']"),
    ),
    ("decay-coupled", every, trains(optimizer=torch.optim.Adam), "update"),
)


def _is_decay_of_keys(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith(".A")


DOGE = table(
    "doge",
    ("fewer-keys-kept", _ATTENTION, {"keep_window_size": 6}),
    ("rates-negated", _FIRST_ATTENTION, ("self.A * F.softplus(dt_states)", "-self.A * F.softplus(dt_states)")),
    (
        "residual-not-weighted",
        _LAYER,
        ("hidden_states = self.input_residual * residual + hidden_states", "hidden_states = residual + hidden_states"),
    ),
    (
        "scores-normalised-first",
        f"{_LAYER}.mlp",
        ("all_scores.topk(self.top_k, dim=-1)", "all_scores.softmax(-1).topk(self.top_k, dim=-1)"),
    ),
    (
        "keys-of-experts-swapped",
        f"{_FIRST}.mlp",
        (
            "indices_x.unsqueeze(-1) * self.num_keys + indices_y.unsqueeze(-2)",
            "indices_x.unsqueeze(-1) + indices_y.unsqueeze(-2) * self.num_keys",
        ),
    ),
    (
        "experts-not-activated",
        f"{_LAYER}.mlp",
        ("self.act_fn(experts_weights) * routing_weights", "experts_weights * routing_weights"),
    ),
    (
        "padding-not-ignored",
        "",
        ("self.loss_function(logits, labels,", "self.loss_function(logits, labels.clamp(min=0),"),
    ),
    (
        "mask-tiled",
        _FIRST_ATTENTION,
        (
            "repeat_kv(attn_mask, self.num_key_value_groups)",
            "attn_mask.repeat(1, self.num_key_value_groups, 1, 1)",
        ),
    ),
    ("decay-not-trained", _is_decay_of_keys, optimizes(_is_decay_of_keys, None), "update"),
)

_BLOCK, _FIRST_BLOCK = "transformer.blocks.1", "transformer.blocks.0"
_FIRST_EXPERTS = f"{_FIRST_BLOCK}.ffn.experts"
DBRX = table(
    "dbrx",
    (
        "not-clamped",
        f"{_BLOCK}.norm_attn_norm.attn",
        ("qkv_states = qkv_states.clamp(min=min_val, max=self.clip_qkv)", "pass"),
    ),
    (
        "keys-and-values-swapped",
        f"{_FIRST_BLOCK}.norm_attn_norm.attn",
        (
            "query_states, key_states, value_states = qkv_states.split",
            "query_states, value_states, key_states = qkv_states.split",
        ),
    ),
    ("weights-of-length-one", f"{_BLOCK}.ffn", {"moe_normalize_expert_weights": 2.0}),
    (
        "attention-not-in-residual",
        f"{_BLOCK}.norm_attn_norm",
        (
            "residual_states = hidden_states\n    hidden_states = self.norm_2(",
            "hidden_states = self.norm_2(",
        ),
    ),
    ("epsilon", f"{_FIRST_BLOCK}.norm_attn_norm.norm_2", {"eps": 1e-1}),
    (
        "weights-detached",
        _FIRST_EXPERTS,
        ("* top_k_weights[token_idx, idx, None]", "* top_k_weights[token_idx, idx, None].detach()"),
        "backward",
    ),
    (
        "other-half-activated",
        f"{_BLOCK}.ffn.experts.mlp",
        ("gate_proj = self.activation_fn(gate_proj)", "up_proj = self.activation_fn(up_proj)"),
    ),
    ("each-clipped", every, _each_clipped, "update"),
)


def _of_router(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith("mlp.gate.weight")


LAGUNA = table(
    "laguna",
    ("gates-reversed", _ATTENTION, ("* gate.unsqueeze(-1)", "* gate.flip(-1).unsqueeze(-1)")),
    ("gate-by-sigmoid", _FIRST_ATTENTION, ("F.softplus(self.g_proj(", "F.sigmoid(self.g_proj(")),
    ("scores-not-capped", f"{_LAYER}.mlp.gate", {"router_logit_softcapping": 0.0}),
    (
        "weights-with-correction",
        f"{_LAYER}.mlp.gate",
        ("routing_weights = routing_scores.gather", "routing_weights = scores_for_selection.gather"),
    ),
    (
        "all-experts-scaled",
        f"{_LAYER}.mlp",
        ("hidden_states = hidden_states + shared_output", "hidden_states = hidden_states + 2.0 * shared_output"),
    ),
    ("neighbour-hidden", "model", uses("model", create_causal_mask=_neighbour_hidden)),
    (
        "angles-of-other-layers",
        "model",
        ("position_embeddings[self.config.layer_types[i]]", "position_embeddings[self.config.layer_types[1 - i]]"),
    ),
    ("router-not-decayed", _of_router, optimizes(_of_router, {"weight_decay": 0.0, "lr": 1e-3}), "update"),
)

GLM4_LITE = table(
    "glm4_moe_lite",
    (
        "other-part-turned",
        _FIRST_ATTENTION,
        (
            "q_pass, q_rot = torch.split(q_states, [self.qk_nope_head_dim, self.qk_rope_head_dim]",
            "q_rot, q_pass = torch.split(q_states, [self.qk_rope_head_dim, self.qk_nope_head_dim]",
        ),
    ),
    (
        "keys-not-turned",
        _ATTENTION,
        (
            "q_rot, k_rot = apply_rotary_pos_emb_interleave(",
            "q_rot, _ = apply_rotary_pos_emb_interleave(",
        ),
    ),
    ("root-of-scale", _ATTENTION, {"scaling": 8**-0.25}),
    (
        "correction-loaded",
        f"{_LAYER}.mlp.gate",
        holds(f"{_LAYER}.mlp.gate", "e_score_correction_bias", lambda bias: torch.linspace(0, 0.5, len(bias))),
        "state",
    ),
    (
        "scaled-twice",
        f"{_LAYER}.mlp.gate",
        ("topk_weights * self.routed_scaling_factor", "topk_weights * self.routed_scaling_factor**2"),
    ),
    ("shared-after-routed", f"{_LAYER}.mlp", ("self.shared_experts(residuals)", "self.shared_experts(hidden_states)")),
    (
        "variance-for-mean-square",
        f"{_FIRST}.post_attention_layernorm",
        ("hidden_states.pow(2).mean(-1, keepdim=True)", "hidden_states.var(-1, keepdim=True)"),
    ),
    (
        "embedding-detached",
        "model",
        ("self.embed_tokens(input_ids)", "self.embed_tokens(input_ids).detach()"),
        "backward",
    ),
    ("third-step-slower", every, trains(schedule=lambda step: 0.5 if step == 2 else 1.0), "update"),
)

COHERE2_MOE = table(
    "cohere2_moe",
    ("mlp-of-attention", _LAYER, ("self.mlp(hidden_states)", "self.mlp(hidden_states_attention)")),
    ("summed-not-averaged", f"{_LAYER}.mlp", {"shared_expert_combination_strategy": "sum"}),
    (
        "tables-of-halves",
        "model.rotary_emb",
        ("torch.repeat_interleave(freqs, 2, dim=-1)", "torch.cat((freqs, freqs), dim=-1)"),
    ),
    ("turned-in-full-layer", _ATTENTION, {"force_rope": True}),
    ("logits-not-scaled", "", {"logit_scale": 1.0}),
    ("softmax-for-sigmoid", f"{_LAYER}.mlp.gate", {"expert_selection_fn": "softmax"}),
    (
        "variance-not-centred",
        f"{_LAYER}.input_layernorm",
        ("(hidden_states - mean).pow(2)", "hidden_states.pow(2)"),
    ),
    (
        "residual-detached",
        _LAYER,
        (
            "hidden_states = residual + hidden_states_attention",
            "hidden_states = residual.detach() + hidden_states_attention",
        ),
        "backward",
    ),
)


def _of_experts(name: str, parameter: nn.Parameter) -> bool:
    return ".mlp.experts." in name


HY_V3 = table(
    "hy_v3",
    ("texts-shifted", "model", uses("model", create_causal_mask=_texts_shifted)),
    ("large-epsilon-of-weights", f"{_LAYER}.mlp.gate", ("+ 1e-20", "+ 1e-1")),
    ("weights-not-scaled", f"{_LAYER}.mlp.gate", {"router_scaling_factor": 1.0}),
    (
        "shared-after-routed",
        f"{_LAYER}.mlp",
        ("self.shared_experts(hidden_states).float()", "self.shared_experts(routed_output).float()"),
    ),
    (
        "keys-normed-by-queries-weight",
        _ATTENTION,
        ("key_states = self.k_norm(key_states)", "key_states = self.k_norm(key_states) * self.q_norm.weight"),
    ),
    (
        "weights-of-other-choice",
        f"{_LAYER}.mlp.experts",
        ("top_k_weights[token_idx, top_k_pos, None]", "top_k_weights[token_idx, 1 - top_k_pos, None]"),
    ),
    ("first-tokens-predicted", "", ("labels=labels,", "labels=input_ids,")),
    (
        "projection-frozen",
        f"{_FIRST}.mlp.down_proj",
        told(f"{_FIRST}.mlp.down_proj", "requires_grad_", False),
        "backward",
    ),
    ("experts-faster", _of_experts, optimizes(_of_experts, {"weight_decay": 0.1, "lr": 2e-3}), "update"),
)

_LINEAR = f"{_FIRST}.linear_attn"
QWEN3_5 = table(
    "qwen3_5",
    ("gates-of-next-head", _ATTENTION, ("torch.sigmoid(gate)", "torch.sigmoid(gate.roll(self.head_dim, -1))")),
    ("queries-as-gates", _ATTENTION, ("query_states, gate = torch.chunk(", "gate, query_states = torch.chunk(")),
    ("gate-by-sigmoid", f"{_LINEAR}.norm", {"activation": "sigmoid"}),
    ("rates-not-exponential", _LINEAR, ("-self.A_log.float().exp() *", "-self.A_log.float() *")),
    ("keys-not-normalised", _LINEAR, uses(_LINEAR, torch_chunk_gated_delta_rule=_keys_not_normalised)),
    ("writes-doubled", _LINEAR, ("beta = b.sigmoid()", "beta = 2 * b.sigmoid()")),
    (
        "key-heads-tiled",
        _LINEAR,
        (
            "key = key.repeat_interleave(self.num_v_heads // self.num_k_heads, dim=2)",
            "key = key.repeat(1, 1, self.num_v_heads // self.num_k_heads, 1)",
        ),
    ),
    ("weight-without-one", f"{_ATTENTION}.q_norm", ("(1.0 + self.weight.float())", "self.weight.float()")),
    ("convolution-frozen", f"{_LINEAR}.conv1d", told(f"{_LINEAR}.conv1d", "requires_grad_", False), "backward"),
)

MISTAKES = [
    *MINISTRAL,
    *DOGE,
    *DBRX,
    *LAGUNA,
    *GLM4_LITE,
    *COHERE2_MOE,
    *HY_V3,
    *QWEN3_5,
]
