"""Mistakes in the decoders of the third blind trial."""

from __future__ import annotations

from torch import nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, edits, holds, optimizes, trains, untied

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"

APERTUS = table(
    "apertus",
    ("keys-normed-as-queries", _ATTENTION, ("key_states = self.k_norm(key", "key_states = self.q_norm(key")),
    ("slope", f"{_FIRST}.mlp.act_fn", holds(f"{_FIRST}.mlp.act_fn", "alpha_p", lambda slope: slope + 0.2), "state"),
    (
        "residual-halved",
        _FIRST,
        (
            "hidden_states = residual + hidden_states\n\n    # Fully",
            "hidden_states = 0.5 * residual + hidden_states\n\n    # Fully",
        ),
    ),
    ("labels-not-shifted", "", ("labels=labels,", "labels=labels, shift_labels=labels,")),
    ("epsilon", "model.norm", {"variance_epsilon": 1e-2}),
    ("clipped-twice", every, trains(clip=0.25), "update"),
)

SEED_OSS = table(
    "seed_oss",
    ("bias-missing", f"{_ATTENTION}.v_proj", does(f"{_ATTENTION}.v_proj", wrong.linear_without_bias)),
    ("scale-doubled", _FIRST_ATTENTION, attends(_FIRST_ATTENTION, lambda call: {"scaling": 2 * call["scaling"]})),
    (
        "sees-next",
        "model",
        edits(
            "model",
            "create_causal_mask(",
            "create_causal_mask(or_mask_function=sees_next, ",
            sees_next=wrong.sees_next,
        ),
    ),
    (
        "norm-not-upcast",
        f"{_FIRST}.post_attention_layernorm",
        ("hidden_states.to(torch.float32)", "hidden_states.to(torch.bfloat16)"),
        "precision",
    ),
    ("gelu-for-silu", f"{_LAYER}.mlp.act_fn", does(f"{_LAYER}.mlp.act_fn", wrong.gelu)),
    ("sine-for-cosine", _ATTENTION, ("cos, sin = position_embeddings", "sin, cos = position_embeddings")),
    (
        "mlp-residual-lost",
        _FIRST,
        (
            "hidden_states = self.mlp(hidden_states)\n    hidden_states = residual + hidden_states",
            "hidden_states = self.mlp(hidden_states)",
        ),
    ),
)

_GATE = f"{_LAYER}.mlp.gate"
DEEPSEEK_V2 = table(
    "deepseek_v2",
    ("groups-not-masked", _GATE, ("scores = scores.masked_fill(~score_mask.bool(), 0.0)", "pass")),
    ("factor-missing", _GATE, {"routed_scaling_factor": 1.0}),
    ("scale-without-rope", _FIRST_ATTENTION, attends(_FIRST_ATTENTION, lambda call: {"scaling": 8**-0.5})),
    ("latent-not-normed", _ATTENTION, ("self.kv_a_layernorm(kv_nope).view(", "kv_nope.view(")),
    ("keys-not-rotated", _ATTENTION, ("q_pe, k_pe = apply_rotary_emb(", "q_pe, _ = apply_rotary_emb(")),
    ("shared-after-experts", f"{_LAYER}.mlp", ("self.shared_experts(residuals)", "self.shared_experts(hidden_states)")),
    ("gate-and-up-swapped", f"{_LAYER}.mlp.experts", ("self.act_fn(gate) * up", "self.act_fn(up) * gate")),
)

PHIMOE = table(
    "phimoe",
    ("jitter", f"{_LAYER}.mlp.router", {"router_jitter_noise": 0.3}),
    (
        "weights-detached",
        f"{_LAYER}.mlp",
        ("selected_experts, routing_weights)\n", "selected_experts, routing_weights.detach())\n"),
        "backward",
    ),
    ("norm-bias-missing", f"{_FIRST}.input_layernorm", does(f"{_FIRST}.input_layernorm", wrong.norm_without_bias)),
    ("frequencies-halved", "model.rotary_emb", ("freqs = position_ids[", "freqs = 0.5 * position_ids[")),
    ("keys-from-values", _ATTENTION, ("key_states = self.k_proj(", "key_states = self.v_proj(")),
)

_MIXED = f"{_LAYER}.self_attention"
JETMOE = table(
    "jetmoe",
    (
        "keys-interleaved",
        _MIXED,
        ("key_states = key_states.repeat(1, self.top_k, 1, 1)", "key_states = key_states.repeat_interleave(2, 1)"),
    ),
    (
        "softmax-over-all",
        f"{_FIRST}.mlp.router",
        ("torch.softmax(top_k_logits, dim=1)", "torch.softmax(logits, dim=1).gather(1, top_k_indices)"),
    ),
    ("bias-missing", f"{_FIRST}.mlp", ("layer_output = layer_output + self.bias", "pass")),
    (
        "gated-twice",
        (_MIXED, f"{_MIXED}.experts"),
        edits(f"{_MIXED}.experts", "* batch_gates[:, None]", "* batch_gates[:, None] ** 2", method="reduce"),
    ),
    ("tie-lost", ("model.embed_tokens", "lm_head"), untied("lm_head"), "backward"),
    ("betas", every, trains(adam={"betas": (0.9, 0.95)}), "update"),
)

_MIXER = f"{_FIRST}.mamba"
BAMBA = table(
    "bamba",
    ("skip-missing", _MIXER, ("D=self.D,\n            z=None,", "D=0 * self.D,\n            z=None,")),
    (
        "step-bias-doubled",
        _MIXER,
        ("dt_bias=self.dt_bias,\n            dt_softplus", "dt_bias=2 * self.dt_bias,\n            dt_softplus"),
    ),
    ("sigmoid-for-silu", f"{_MIXER}.norm", ("nn.functional.silu(gate", "torch.sigmoid(gate")),
    (
        "step-limited",
        _MIXER,
        ("dt_limit=self.time_step_limit,\n            **kwargs", "dt_limit=(0.0, 0.5),\n            **kwargs"),
    ),
    ("decay-rates", _MIXER, holds(_MIXER, "A_log", lambda rates: rates + 0.3), "state"),
    ("epsilon", "model.final_layernorm", {"variance_epsilon": 5e-2}),
)

_DELTA = f"{_FIRST}.linear_attn"


def _of_experts(name: str, parameter: nn.Parameter) -> bool:
    return ".experts." in name


QWEN3_NEXT = table(
    "qwen3_next",
    ("sigmoid-for-silu", f"{_DELTA}.norm", ("ACT2FN[self.activation](gate", "torch.sigmoid(gate")),
    ("gate-missing", _ATTENTION, ("attn_output = attn_output * torch.sigmoid(gate)", "pass")),
    (
        "shared-not-gated",
        f"{_FIRST}.mlp",
        ("F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * shared_expert_output", "shared_expert_output"),
    ),
    ("one-expert", _GATE, ("torch.topk(router_probs, self.top_k,", "torch.topk(router_probs, 1,")),
    ("step-bias-missing", _DELTA, ("F.softplus(a.float() + self.dt_bias)", "F.softplus(a.float())")),
    (
        "beta-and-decay-swapped",
        _DELTA,
        edits(_DELTA, "value, z, b, a\n", "value, z, a, b\n", method="fix_query_key_value_ordering"),
    ),
    ("experts-learn-slowly", _of_experts, optimizes(_of_experts, {"lr": 1e-4}), "update"),
)

BIOGPT = table(
    "biogpt",
    ("positions-off-by-one", "biogpt.embed_positions", {"offset": 1}),
    ("embedding-not-scaled", "biogpt.embed_tokens", {"embed_scale": 1.0}),
    ("gelu-by-tanh", "biogpt.layers.1.activation_fn", does("biogpt.layers.1.activation_fn", wrong.gelu_by_tanh)),
    ("norm-skipped", "biogpt.layers.0", ("hidden_states = self.final_layer_norm(hidden_states)", "pass")),
    (
        "padding-dropped",
        "biogpt",
        ("attention_mask=attention_mask,\n        past_key", "attention_mask=None,\n        past_key"),
    ),
    ("not-cleared", every, trains(clear=False), "update"),
)

MISTAKES = [*APERTUS, *SEED_OSS, *DEEPSEEK_V2, *PHIMOE, *JETMOE, *BAMBA, *QWEN3_NEXT, *BIOGPT]
