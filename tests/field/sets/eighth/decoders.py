"""Mistakes in the decoders of the eighth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import Apply, attends, does, edits, holds, optimizes, trains, untied, uses
from field.kit.running import Training

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"


def _windowed(size: int) -> Any:
    """A mask of a window of another size into the past."""

    def mask(config: Any, **options: Any) -> Any:
        from transformers.masking_utils import create_sliding_window_causal_mask

        return create_sliding_window_causal_mask(config=wrong.other_config(config, sliding_window=size), **options)

    return mask


# --- attention and a state space side by side -------------------------------------------------------------------------


def _of_state_space(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith((".A_log", ".D", ".dt_bias"))


FALCON_H1 = table(
    "falcon_h1",
    ("keys-not-scaled", _FIRST_ATTENTION, {"key_multiplier": 1.0}),
    (
        "padding-scanned",
        f"{_FIRST}.mamba",
        (
            "apply_mask_to_padding_states(hidden_states_B_C.transpose(1, 2), attention_mask)",
            "hidden_states_B_C.transpose(1, 2)",
        ),
    ),
    (
        "decays-of-other-heads",
        f"{_LAYER}.mamba",
        ("-torch.exp(self.A_log.float())", "-torch.exp(self.A_log.float()).roll(1)"),
    ),
    ("skip-left-out", f"{_LAYER}.mamba", ("D=self.D,\n            z=None", "D=None,\n            z=None")),
    ("gated-after-norm", f"{_LAYER}.mamba.norm", {"norm_before_gate": True}),
    ("groups-normed-together", f"{_FIRST}.mamba.norm", {"n_groups": 1}),
    ("scan-not-scaled", _FIRST, {"ssm_out_multiplier": 1.0}),
    (
        "attention-after-scan",
        _LAYER,
        ("hidden_states=hidden_states * self.attention_in", "hidden_states=mamba_hidden_states * self.attention_in"),
    ),
    (
        "gate-scaled-late",
        f"{_LAYER}.feed_forward",
        (
            "self.act_fn(self.gate_proj(x) * self.gate_multiplier)",
            "self.act_fn(self.gate_proj(x)) * self.gate_multiplier",
        ),
    ),
    ("logits-not-scaled", "", (" * self.model.lm_head_multiplier", "")),
    ("state-space-decays", _of_state_space, optimizes(_of_state_space, {"weight_decay": 0.5}), "update"),
)


# --- values of the token before, a router with a memory ---------------------------------------------------------------

ZAYA = table(
    "zaya",
    (
        "values-not-delayed",
        f"{_FIRST_ATTENTION}.qkv_proj",
        ("torch.cat([recurrent_v_state, delayed_v_state[:, :-1]], dim=1)", "delayed_v_state"),
    ),
    ("temperatures-swapped", f"{_ATTENTION}.qk_norm", ("self.temp[None", "self.temp.flip(0)[None")),
    (
        "convolution-looks-ahead",
        f"{_ATTENTION}.qkv_proj",
        ("F.pad(qk_states, (self.conv_kernel_size, 0))", "F.pad(qk_states, (self.conv_kernel_size - 1, 1))"),
    ),
    (
        "router-forgets",
        "model",
        ("prev_router_hidden_states,\n            attention_mask", "None,\n            attention_mask"),
    ),
    (
        "weights-detached",
        f"{_FIRST}.mlp.gate",
        ("torch.gather(router_probs, dim=2", "torch.gather(router_probs.detach(), dim=2"),
        "backward",
    ),
    (
        "bias-after-scale",
        f"{_FIRST}.post_attention_residual_scale",
        (
            "(residual + self.residual_bias) * self.residual_scale",
            "residual * self.residual_scale + self.residual_bias",
        ),
    ),
    ("window-one-wider", "model", uses("model", create_sliding_window_causal_mask=_windowed(7))),
    (
        "gelu-by-tanh",
        f"{_LAYER}.mlp.gate.router_mlp.act_fn",
        does(f"{_LAYER}.mlp.gate.router_mlp.act_fn", wrong.gelu_by_tanh),
    ),
    (
        "balance-not-loaded",
        f"{_LAYER}.mlp.gate",
        holds(f"{_LAYER}.mlp.gate", "balancing_biases", lambda bias: bias + 0.1 * wrong.alternating(bias)),
        "state",
    ),
    ("last-micro-batch-alone", every, wrong.cleared_between, "update"),
)


# --- sinks ------------------------------------------------------------------------------------------------------------


def _sink_reversed(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """The share of the sink is left, instead of that of the tokens."""
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    share = (module.sinks.view(1, -1, 1) - scores.logsumexp(-1)).sigmoid()
    weights = scores.softmax(-1)
    return (weights @ value * share[..., None]).transpose(1, 2).contiguous(), weights


def _recomputed_with(module: str, **attributes: Any) -> Apply:
    """Activations are computed again in backward, with other attributes than in the forward."""

    def apply(training: Training) -> None:
        target = training.model.get_submodule(module)
        inner, usual = target.forward, {name: getattr(target, name) for name in attributes}

        def forward(*arguments: Any, **options: Any) -> Any:
            runs: list[None] = []

            def run(*again: Any, **options: Any) -> Any:
                vars(target).update(attributes if runs else usual)
                runs.append(None)
                try:
                    return inner(*again, **options)
                finally:
                    vars(target).update(usual)

            return checkpoint(run, *arguments, use_reentrant=False, **options)

        target.forward = forward

    return apply


GRANITE_SWA = table(
    "granite_swa",
    ("sink-reversed", _FIRST_ATTENTION, uses(_FIRST_ATTENTION, eager_attention_forward=_sink_reversed)),
    ("sinks-of-other-heads", _ATTENTION, holds(_ATTENTION, "sinks", lambda sinks: sinks.flip(0)), "state"),
    (
        "rotary-in-both",
        "model",
        ("position_embeddings_by_theta[theta] if theta", "position_embeddings_by_theta[theta or 10000.0] if True"),
    ),
    ("window-narrower", "model", uses("model", create_sliding_window_causal_mask=_windowed(5))),
    ("residual-not-scaled", _LAYER, {"residual_multiplier": 1.0}),
    ("embedding-not-scaled", "model", {"embedding_multiplier": 1.0}),
    ("logits-not-scaled", "", ("logits / self.config.logits_scaling", "1 * logits")),
    (
        "residual-normed",
        _FIRST,
        (
            "hidden_states = self.input_layernorm(hidden_states)",
            "hidden_states = residual = self.input_layernorm(hidden_states)",
        ),
    ),
    ("recomputed-otherwise", _LAYER, _recomputed_with(_LAYER, residual_multiplier=1.0), "backward"),
    ("tie-lost", ("model.embed_tokens", "lm_head"), untied("lm_head"), "backward"),
)


# --- a delta rule beside attention; held out --------------------------------------------------------------------------

_RULE = f"{_FIRST}.linear_attn"
_POST = "hidden_states = self.post_attention_layernorm(hidden_states)\n"
OLMO_HYBRID = table(
    "olmo_hybrid",
    ("rates-below-one", _RULE, {"allow_neg_eigval": False}),
    ("keys-tiled", _RULE, ("k = k.repeat_interleave(expand_ratio, dim=2)", "k = k.repeat(1, 1, expand_ratio, 1)")),
    ("convolution-looks-ahead", _RULE, ("mixed_qkv[:, :, -seq_len:]", "mixed_qkv.roll(-1, -1)")),
    ("sigmoid-for-silu", f"{_RULE}.o_norm", {"activation": "sigmoid"}),
    (
        "sum-normed",
        _LAYER,
        (
            f"{_POST}    hidden_states = residual + hidden_states",
            "hidden_states = self.post_attention_layernorm(residual + hidden_states)",
        ),
    ),
    ("keys-not-normed", _ATTENTION, ("self.k_norm(self.k_proj(hidden_states))", "self.k_proj(hidden_states)")),
    ("rotary-lost", "model", ('self.config.layer_types[i] == "full_attention"', "False")),
    ("rate-without-bias", _RULE, (".float() + self.dt_bias)", ".float() + 0 * self.dt_bias)")),
    ("not-cleared", every, trains(clear=False), "update"),
)


# --- two attentions a layer, experts that return their input ----------------------------------------------------------


def _rotary_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return turned(q), turned(k)


_EXPERTS, _ROUTER = f"{_FIRST}.mlp.experts", f"{_FIRST}.mlp.router"
_SECOND = "hidden_states = self.mlps[0](hidden_states)"
_CHOSEN = "topk_weights = scores.gather(1, topk_indices)"
LONGCAT_FLASH = table(
    "longcat_flash",
    ("weights-normalised", _ROUTER, (_CHOSEN, f"{_CHOSEN}; topk_weights = topk_weights / topk_weights.sum(1, True)")),
    ("weights-not-scaled", _ROUTER, {"routed_scaling_factor": 1.0}),
    (
        "nothing-from-free-experts",
        _EXPERTS,
        ("self.identity_expert(current_state)", "0 * self.identity_expert(current_state)"),
    ),
    ("shortcut-of-residual", _FIRST, ("self.mlp(hidden_states)", "self.mlp(residual)")),
    (
        "shortcut-detached",
        _FIRST,
        ("residual + hidden_states + shortcut_mlp_output", "residual + hidden_states + shortcut_mlp_output.detach()"),
        "backward",
    ),
    ("latent-not-scaled", f"{_FIRST_ATTENTION}.1", {"mla_scale_kv_lora": 1.0}),
    (
        "rotary-of-halves",
        f"{_FIRST_ATTENTION}.0",
        uses(f"{_FIRST_ATTENTION}.0", apply_rotary_pos_emb_interleave=_rotary_of_halves),
    ),
    (
        "values-before-keys",
        f"{_FIRST_ATTENTION}.1",
        edits(
            f"{_FIRST_ATTENTION}.1",
            "k_nope, value_states = torch.split(kv_nope, [self.qk_nope_head_dim, self.v_head_dim]",
            "value_states, k_nope = torch.split(kv_nope, [self.v_head_dim, self.qk_nope_head_dim]",
            "expand_kv",
        ),
    ),
    (
        "correction-not-loaded",
        _ROUTER,
        holds(_ROUTER, "e_score_correction_bias", lambda bias: bias + 0.2 * wrong.alternating(bias)),
        "state",
    ),
    (
        "residual-rounded",
        _FIRST,
        (f"{_SECOND}\n", f"{_SECOND}; residual = residual.bfloat16().to(residual.dtype)\n"),
        "precision",
    ),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
)


# --- stacks that run several times, partly without gradients ----------------------------------------------------------


def _causal_in_questions(call: dict[str, Any]) -> dict[str, Any]:
    """The mask of one layer hides the future in the question, too."""
    mask = call["attention_mask"]
    future = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
    hidden = mask.logical_not() if mask.dtype == torch.bool else mask
    if mask.dtype == torch.bool:
        return {"attention_mask": ~(hidden | future)}
    return {"attention_mask": mask.masked_fill(future, torch.finfo(mask.dtype).min)}


_HIGH, _LOW = "model.H_module", "model.L_module"
HRM_TEXT = table(
    "hrm_text",
    ("fewer-cycles-trained", "model", {"L_bp_cycles_padded": [1, 1]}, "backward"),
    (
        "embeddings-injected",
        "model",
        (
            "hidden_states_low_cycle.to(hidden_states_high_cycle.device) + hidden_states_high_cycle",
            "hidden_states_low_cycle + inputs_embeds",
        ),
    ),
    (
        "silu-for-sigmoid",
        f"{_HIGH}.layers.0.self_attn",
        ("torch.sigmoid(gate_states)", "nn.functional.silu(gate_states)"),
    ),
    ("question-causal", "model", ("torch.where(token_type_ids == 1, 0, -1)", "torch.full_like(token_type_ids, -1)")),
    (
        "question-one-longer",
        "model",
        ("token_type_ids == 1, 0", "(token_type_ids == 1) | (token_type_ids.roll(1, 1) == 1), 0"),
    ),
    ("causal-in-one-layer", f"{_LOW}.layers.0.self_attn", attends(f"{_LOW}.layers.0.self_attn", _causal_in_questions)),
    ("embedding-not-scaled", "model", {"embedding_scale": 1.0}),
    ("norm-skipped", _LOW, ("return self.final_norm(hidden_states)", "return 1 * hidden_states")),
    ("start-not-loaded", "model", holds("model", "z_L_init", torch.zeros_like), "state"),
    (
        "mlp-detached",
        f"{_HIGH}.layers.0",
        ("hidden_states = self.mlp(hidden_states)", "hidden_states = self.mlp(hidden_states.detach())"),
        "backward",
    ),
)

MISTAKES = [*FALCON_H1, *ZAYA, *GRANITE_SWA, *OLMO_HYBRID, *LONGCAT_FLASH, *HRM_TEXT]
