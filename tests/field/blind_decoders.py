"""Mistakes in the decoders of the blind trial."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every, vectors
from .patches import attends, both, does, edits, has, holds, optimizes, told, trains, uses

_LAYER, _FIRST, _ATTENTION = "model.layers.1", "model.layers.0", "model.layers.1.self_attn"

OLMO3 = [
    Mistake(
        "norm-before-residual-skipped",
        "olmo3",
        _FIRST,
        "forward",
        edits(_FIRST, "hidden_states = self.post_feedforward_layernorm(hidden_states)", "pass"),
    ),
    Mistake(
        "normed-by-head",
        "olmo3",
        _ATTENTION,
        "forward",
        edits(_ATTENTION, "self.k_norm(self.k_proj(hidden_states))", "self.k_proj(hidden_states)"),
    ),
    Mistake(
        "epsilon",
        "olmo3",
        f"{_FIRST}.self_attn.q_norm",
        "forward",
        has(f"{_FIRST}.self_attn.q_norm", variance_epsilon=1e-3),
    ),
    Mistake(
        "window-everywhere",
        "olmo3",
        "model",
        "forward",
        edits("model", '"full_attention": create_causal_mask(', '"full_attention": create_sliding_window_causal_mask('),
    ),
    Mistake("micro-batches-summed", "olmo3", "", "backward", trains(share=1.0)),
    Mistake("vectors-decay", "olmo3", vectors, "update", optimizes(vectors, {"weight_decay": 0.1})),
]

SMOLLM3 = [
    Mistake("rotated-where-it-is-not", "smollm3", _ATTENTION, "forward", has(_ATTENTION, use_rope=True)),
    Mistake("gelu-for-silu", "smollm3", f"{_FIRST}.mlp.act_fn", "forward", does(f"{_FIRST}.mlp.act_fn", wrong.gelu)),
    Mistake(
        "residual-detached",
        "smollm3",
        _LAYER,
        "backward",
        edits(
            _LAYER,
            "hidden_states = residual + hidden_states\n    return",
            "hidden_states = residual.detach() + hidden_states\n    return",
        ),
    ),
    Mistake("beta", "smollm3", every, "update", trains(adam={"betas": (0.9, 0.99)})),
]

COHERE2 = [
    Mistake("logits-not-scaled", "cohere2", "", "forward", edits("", "logits = logits * self.logit_scale", "pass")),
    Mistake(
        "mlp-after-attention",
        "cohere2",
        _FIRST,
        "forward",
        edits(_FIRST, "self.mlp(hidden_states)", "self.mlp(hidden_states + hidden_states_attention)"),
    ),
    Mistake(
        "mean-not-subtracted",
        "cohere2",
        f"{_LAYER}.input_layernorm",
        "forward",
        edits(
            f"{_LAYER}.input_layernorm", "hidden_states = (hidden_states - mean) *", "hidden_states = hidden_states *"
        ),
    ),
    Mistake(
        "padding-dropped",
        "cohere2",
        "model",
        "forward",
        edits("model", '"attention_mask": attention_mask,', '"attention_mask": None,'),
    ),
]

DIFFLLAMA = [
    Mistake(
        "values-not-split",
        "diffllama",
        _ATTENTION,
        "forward",
        edits(
            _ATTENTION,
            "torch.cat([attn_output1, attn_output2], dim=-1)",
            "torch.cat([attn_output2, attn_output1], dim=-1)",
        ),
    ),
    Mistake("lambda", "diffllama", f"{_FIRST}.self_attn", "forward", has(f"{_FIRST}.self_attn", lambda_init=0.3)),
    Mistake(
        "mlp-cut",
        "diffllama",
        _FIRST,
        "backward",
        edits(_FIRST, "self.mlp(hidden_states)", "self.mlp(hidden_states.detach())"),
    ),
    Mistake(
        "weight-scaled",
        "diffllama",
        f"{_LAYER}.mlp.up_proj",
        "state",
        holds(f"{_LAYER}.mlp.up_proj", "weight", lambda weight: weight * 1.02),
    ),
]

LFM2 = [
    Mistake(
        "gates-swapped", "lfm2", f"{_FIRST}.conv", "forward", edits(f"{_FIRST}.conv", "B, C, x = BCx", "C, B, x = BCx")
    ),
    Mistake(
        "normed-twice",
        "lfm2",
        _LAYER,
        "forward",
        edits(
            _LAYER,
            "self.feed_forward(self.ffn_norm(hidden_states))",
            "self.feed_forward(self.ffn_norm(self.ffn_norm(hidden_states)))",
        ),
    ),
    Mistake(
        "decay-left-out",
        "lfm2",
        lambda name, parameter: ".conv." in name and parameter.ndim > 1,
        "update",
        optimizes(lambda name, parameter: ".conv." in name and parameter.ndim > 1, {"weight_decay": 0.0}),
    ),
]

XGLM = [
    Mistake(
        "embedding-not-scaled", "xglm", "model.embed_tokens", "forward", has("model.embed_tokens", embed_scale=1.0)
    ),
    Mistake("positions-shifted", "xglm", "model.embed_positions", "forward", has("model.embed_positions", offset=1)),
    Mistake("bias-dropped", "xglm", f"{_LAYER}.fc1", "forward", does(f"{_LAYER}.fc1", wrong.linear_without_bias)),
    Mistake(
        "norm-after-residual",
        "xglm",
        _FIRST,
        "forward",
        edits(
            _FIRST,
            "hidden_states = self.final_layer_norm(hidden_states)",
            "residual = hidden_states = self.final_layer_norm(hidden_states)",
        ),
    ),
]

PERSIMMON = [
    Mistake("relu-not-squared", "persimmon", f"{_LAYER}.mlp.act", "forward", does(f"{_LAYER}.mlp.act", wrong.relu)),
    Mistake(
        "all-rotated-in-halves-swapped",
        "persimmon",
        f"{_FIRST}.self_attn",
        "forward",
        uses(f"{_FIRST}.self_attn", apply_rotary_pos_emb=wrong.rotary_interleaved),
    ),
    Mistake(
        "query-norm-skipped",
        "persimmon",
        _ATTENTION,
        "forward",
        edits(_ATTENTION, "query_states = self.q_layernorm(query_states)", "pass"),
    ),
    Mistake(
        "norm-frozen",
        "persimmon",
        "model.final_layernorm",
        "backward",
        told("model.final_layernorm", "requires_grad_", False),
    ),
]

ERNIE_MOE = [
    Mistake(
        "shared-expert-dropped",
        "ernie_moe",
        f"{_LAYER}.mlp",
        "forward",
        edits(f"{_LAYER}.mlp", "final_hidden_states + shared_output", "final_hidden_states"),
    ),
    Mistake(
        "weights-not-normalized",
        "ernie_moe",
        f"{_FIRST}.mlp.gate",
        "forward",
        edits(
            f"{_FIRST}.mlp.gate",
            "routing_weights / torch.clamp(",
            "routing_weights / torch.ones_like(routing_weights[:, :1]) + 0 * torch.clamp(",
        ),
    ),
    Mistake(
        "router-detached",
        "ernie_moe",
        f"{_LAYER}.mlp",
        "backward",
        edits(f"{_LAYER}.mlp", "self.gate(hidden_states)", "self.gate(hidden_states.detach())"),
    ),
    Mistake(
        "key-heads-tiled",
        "ernie_moe",
        _ATTENTION,
        "forward",
        both(has(_ATTENTION, num_key_value_groups=1), attends(_ATTENTION, wrong.heads_tiled)),
    ),
    Mistake("lr-too-large", "ernie_moe", every, "update", optimizes(every, {"lr": 1.05e-3})),
]

BLIND_DECODERS = [*OLMO3, *SMOLLM3, *COHERE2, *DIFFLLAMA, *LFM2, *XGLM, *PERSIMMON, *ERNIE_MOE]
