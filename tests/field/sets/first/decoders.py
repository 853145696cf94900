"""Mistakes in the decoders of the blind trial."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, both, does, has, holds, optimizes, told, trains, uses

_LAYER, _FIRST, _ATTENTION = "model.layers.1", "model.layers.0", "model.layers.1.self_attn"

OLMO3 = table(
    "olmo3",
    (
        "norm-before-residual-skipped",
        _FIRST,
        ("hidden_states = self.post_feedforward_layernorm(hidden_states)", "pass"),
    ),
    ("normed-by-head", _ATTENTION, ("self.k_norm(self.k_proj(hidden_states))", "self.k_proj(hidden_states)")),
    ("epsilon", f"{_FIRST}.self_attn.q_norm", {"variance_epsilon": 1e-3}),
    (
        "window-everywhere",
        "model",
        ('"full_attention": create_causal_mask(', '"full_attention": create_sliding_window_causal_mask('),
    ),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
    ("vectors-decay", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
)

SMOLLM3 = table(
    "smollm3",
    ("rotated-where-it-is-not", _ATTENTION, {"use_rope": True}),
    ("gelu-for-silu", f"{_FIRST}.mlp.act_fn", does(f"{_FIRST}.mlp.act_fn", wrong.gelu)),
    (
        "residual-detached",
        _LAYER,
        (
            "hidden_states = residual + hidden_states\n    return",
            "hidden_states = residual.detach() + hidden_states\n    return",
        ),
        "backward",
    ),
    ("beta", every, trains(adam={"betas": (0.9, 0.99)}), "update"),
)

COHERE2 = table(
    "cohere2",
    ("logits-not-scaled", "", ("logits = logits * self.logit_scale", "pass")),
    ("mlp-after-attention", _FIRST, ("self.mlp(hidden_states)", "self.mlp(hidden_states + hidden_states_attention)")),
    (
        "mean-not-subtracted",
        f"{_LAYER}.input_layernorm",
        ("hidden_states = (hidden_states - mean) *", "hidden_states = hidden_states *"),
    ),
    ("padding-dropped", "model", ('"attention_mask": attention_mask,', '"attention_mask": None,')),
)

DIFFLLAMA = table(
    "diffllama",
    (
        "values-not-split",
        _ATTENTION,
        ("torch.cat([attn_output1, attn_output2], dim=-1)", "torch.cat([attn_output2, attn_output1], dim=-1)"),
    ),
    ("lambda", f"{_FIRST}.self_attn", {"lambda_init": 0.3}),
    ("mlp-cut", _FIRST, ("self.mlp(hidden_states)", "self.mlp(hidden_states.detach())"), "backward"),
    (
        "weight-scaled",
        f"{_LAYER}.mlp.up_proj",
        holds(f"{_LAYER}.mlp.up_proj", "weight", lambda weight: weight * 1.02),
        "state",
    ),
)

LFM2 = table(
    "lfm2",
    ("gates-swapped", f"{_FIRST}.conv", ("B, C, x = BCx", "C, B, x = BCx")),
    (
        "normed-twice",
        _LAYER,
        (
            "self.feed_forward(self.ffn_norm(hidden_states))",
            "self.feed_forward(self.ffn_norm(self.ffn_norm(hidden_states)))",
        ),
    ),
    (
        "decay-left-out",
        lambda name, parameter: ".conv." in name and parameter.ndim > 1,
        optimizes(lambda name, parameter: ".conv." in name and parameter.ndim > 1, {"weight_decay": 0.0}),
        "update",
    ),
)

XGLM = table(
    "xglm",
    ("embedding-not-scaled", "model.embed_tokens", {"embed_scale": 1.0}),
    ("positions-shifted", "model.embed_positions", {"offset": 1}),
    ("bias-dropped", f"{_LAYER}.fc1", does(f"{_LAYER}.fc1", wrong.linear_without_bias)),
    (
        "norm-after-residual",
        _FIRST,
        (
            "hidden_states = self.final_layer_norm(hidden_states)",
            "residual = hidden_states = self.final_layer_norm(hidden_states)",
        ),
    ),
)

PERSIMMON = table(
    "persimmon",
    ("relu-not-squared", f"{_LAYER}.mlp.act", does(f"{_LAYER}.mlp.act", wrong.relu)),
    (
        "all-rotated-in-halves-swapped",
        f"{_FIRST}.self_attn",
        uses(f"{_FIRST}.self_attn", apply_rotary_pos_emb=wrong.rotary_interleaved),
    ),
    ("query-norm-skipped", _ATTENTION, ("query_states = self.q_layernorm(query_states)", "pass")),
    ("norm-frozen", "model.final_layernorm", told("model.final_layernorm", "requires_grad_", False), "backward"),
)

ERNIE_MOE = table(
    "ernie_moe",
    ("shared-expert-dropped", f"{_LAYER}.mlp", ("final_hidden_states + shared_output", "final_hidden_states")),
    (
        "weights-not-normalized",
        f"{_FIRST}.mlp.gate",
        (
            "routing_weights / torch.clamp(",
            "routing_weights / torch.ones_like(routing_weights[:, :1]) + 0 * torch.clamp(",
        ),
    ),
    ("router-detached", f"{_LAYER}.mlp", ("self.gate(hidden_states)", "self.gate(hidden_states.detach())"), "backward"),
    (
        "key-heads-tiled",
        _ATTENTION,
        both(has(_ATTENTION, num_key_value_groups=1), attends(_ATTENTION, wrong.heads_tiled)),
    ),
    ("lr-too-large", every, optimizes(every, {"lr": 1.05e-3}), "update"),
)

MISTAKES = [*OLMO3, *SMOLLM3, *COHERE2, *DIFFLLAMA, *LFM2, *XGLM, *PERSIMMON, *ERNIE_MOE]
