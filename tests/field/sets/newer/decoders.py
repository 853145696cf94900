"""Mistakes in newer decoders that the comparison's rules may be tuned on, as bug reports describe them."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, does, edits, holds, optimizes, reads, told, trains, untied, uses

_LAYER, _ATTENTION = "model.layers.1", "model.layers.0.self_attn"
_MLP = "hidden_states = self.mlp"

STABLELM = table(
    "stablelm",
    (
        "rotary-part-last",
        _ATTENTION,
        ("torch.cat((query_rot, query_pass), dim=-1)", "torch.cat((query_pass, query_rot), dim=-1)"),
    ),
    ("epsilon", f"{_LAYER}.input_layernorm", {"eps": 1e-4}),
    ("mlp-without-norm", _LAYER, ("self.mlp(self.post_attention_layernorm(residual))", "self.mlp(residual)")),
    ("dropout-left-on", "model.layers.0.dropout", {"p": 0.1}),
    ("norms-decay", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
    (
        "attention-detached",
        _LAYER,
        ("residual = residual + self_attn_output", "residual = residual + self_attn_output.detach()"),
        "backward",
    ),
)

PHI3 = table(
    "phi3",
    (
        "gate-and-up-swapped",
        "model.layers.0.mlp",
        ("gate, up_states = up_states.chunk", "up_states, gate = up_states.chunk"),
    ),
    (
        "values-before-keys",
        f"{_LAYER}.self_attn",
        ("    cos, sin = position", "    key_states, value_states = value_states, key_states\n    cos, sin = position"),
    ),
    ("rope-base", "model.rotary_emb", holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(5e4)), "state"),
    (
        "residual-cut",
        _LAYER,
        (
            "hidden_states = self.post_attention_layernorm(hidden_states)",
            "residual = residual.detach()\n    hidden_states = self.post_attention_layernorm(hidden_states)",
        ),
        "backward",
    ),
    ("labels-not-shifted", "", ("labels=labels, vocab_size", "labels=labels, shift_labels=labels, vocab_size")),
    ("optimizer-epsilon", every, trains(adam={"eps": 1e-6}), "update"),
    ("cleared-between-micro-batches", every, wrong.cleared_between, "update"),
    ("softmax-of-rounded-queries", _ATTENTION, attends(_ATTENTION, wrong.rounded("query")), "precision"),
)

GRANITE = table(
    "granite",
    ("residual-not-scaled", _LAYER, {"residual_multiplier": 1.0}),
    ("embeddings-not-scaled", "model", {"embedding_multiplier": 1.0}),
    ("scale-of-heads", _ATTENTION, {"scaling": 8**-0.5}),
    ("logits-not-scaled", "", ("logits = logits / self.config.logits_scaling", "logits = logits")),
    ("schedule-too-early", every, trains(schedule=lambda step: 1.0 - 0.01 * step), "update"),
    ("tokens-shifted", "", reads(lambda batch: batch | {"input_ids": batch["input_ids"].roll(1, 1)})),
)

OLMO2 = table(
    "olmo2",
    (
        "norm-before-mlp",
        "model.layers.0",
        (
            f"{_MLP}(hidden_states)\n    hidden_states = self.post_feedforward_layernorm(hidden_states)",
            f"{_MLP}(self.post_feedforward_layernorm(hidden_states))",
        ),
    ),
    (
        "query-norm-skipped",
        f"{_LAYER}.self_attn",
        ("self.q_norm(self.q_proj(hidden_states))", "self.q_proj(hidden_states)"),
    ),
    ("epsilon", f"{_LAYER}.self_attn.k_norm", {"variance_epsilon": 1e-3}),
    ("clipped-at-half", every, trains(clip=0.5), "update"),
    ("beta2", every, trains(adam={"betas": (0.9, 0.99)}), "update"),
    (
        "norm-not-trained",
        "model.layers.0.post_attention_layernorm",
        told("model.layers.0.post_attention_layernorm", "requires_grad_", False),
        "backward",
    ),
)

COHERE = table(
    "cohere",
    ("logit-scale", "", ("logits * self.logit_scale", "logits * self.logit_scale * 4")),
    ("not-parallel", _LAYER, ("self.mlp(hidden_states)", "self.mlp(hidden_states + hidden_states_attention)")),
    (
        "rotary-by-halves",
        "model.rotary_emb",
        ("torch.repeat_interleave(freqs, 2, dim=-1)", "torch.cat((freqs, freqs), dim=-1)"),
    ),
    (
        "mean-kept",
        "model.layers.0.input_layernorm",
        ("(hidden_states - mean) * torch.rsqrt", "hidden_states * torch.rsqrt"),
    ),
    ("head-not-tied", ("lm_head", "model.embed_tokens"), untied("lm_head"), "backward"),
)

QWEN2_MOE = table(
    "qwen2_moe",
    (
        "shared-gate-missing",
        f"{_LAYER}.mlp",
        ("F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * shared_expert_output", "shared_expert_output"),
    ),
    ("weights-normalised", "model.layers.0.mlp.gate", {"norm_topk_prob": True}),
    (
        "auxiliary-loss-of-padding",
        "",
        ("self.num_experts_per_tok,\n            attention_mask,", "self.num_experts_per_tok,\n            None,"),
    ),
    ("auxiliary-loss-left-out", "", ("loss += self.router_aux_loss_coef * aux_loss", "loss += 0 * aux_loss")),
    (
        "routing-detached",
        "model.layers.0.mlp",
        ("selected_experts, routing_weights)", "selected_experts, routing_weights.detach())"),
        "backward",
    ),
    (
        "softmax-of-the-chosen",
        f"{_LAYER}.mlp.gate",
        ("    router_scores = router_top_value", "    router_scores = router_top_value.softmax(-1)"),
    ),
    (
        "experts-swapped",
        f"{_LAYER}.mlp.experts",
        holds(f"{_LAYER}.mlp.experts", "down_proj", lambda weight: weight[[1, 0, 2, 3]]),
        "state",
    ),
)

DEEPSEEK = table(
    "deepseek_v3",
    ("routed-not-scaled", f"{_LAYER}.mlp.gate", {"routed_scaling_factor": 1.0}),
    (
        "shared-expert-after",
        "model.layers.2.mlp",
        ("self.shared_experts(residuals)", "self.shared_experts(hidden_states)"),
    ),
    ("rotary-by-halves", _ATTENTION, ("if self.config.rope_interleave:", "if False:")),
    ("latent-not-normed", f"{_LAYER}.self_attn", ("self.kv_a_layernorm(kv_nope)", "kv_nope")),
    (
        "router-bias",
        f"{_LAYER}.mlp.gate",
        holds(f"{_LAYER}.mlp.gate", "e_score_correction_bias", lambda bias: bias + 0.02 * wrong.alternating(bias)),
        "state",
    ),
    ("scale-without-rotary", "model.layers.2.self_attn", {"scaling": 8**-0.5}),
    (
        "weights-with-bias",
        "model.layers.2.mlp.gate",
        ("topk_weights = scores.gather", "topk_weights = scores_for_choice.gather"),
        "forward",
        holds("model.layers.2.mlp.gate", "e_score_correction_bias", lambda bias: bias + 0.1 * wrong.alternating(bias)),
    ),
)

GPT_OSS = table(
    "gpt_oss",
    (
        "sinks-not-loaded",
        f"{_LAYER}.self_attn",
        holds(f"{_LAYER}.self_attn", "sinks", lambda sinks: sinks * 0 - 3),
        "state",
    ),
    (
        "window-plus-one",
        "model",
        edits(
            "model",
            "create_sliding_window_causal_mask(**mask_kwargs)",
            "create_sliding_window_causal_mask(**(mask_kwargs | {'config': wider(self.config)}))",
            wider=lambda config: wrong.other_config(config, sliding_window=8),
        ),
    ),
    ("sigmoid-not-scaled", "model.layers.0.mlp.experts", {"alpha": 1.0}),
    (
        "up-without-one",
        f"{_LAYER}.mlp.experts",
        edits(f"{_LAYER}.mlp.experts", "(up + 1) * glu", "up * glu", "_apply_gate"),
    ),
    ("yarn-not-scaled", "model.rotary_emb", {"attention_scaling": 1.0}),
    (
        "softmax-of-all",
        f"{_LAYER}.mlp.router",
        (
            "torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)",
            "router_logits.softmax(1).gather(1, router_indices)",
        ),
    ),
)

GPTJ = table(
    "gptj",
    (
        "rotary-by-halves",
        "transformer.h.0.attn",
        uses("transformer.h.0.attn", apply_rotary_pos_emb=wrong.rotary_of_halves),
    ),
    (
        "mlp-left-out",
        "transformer.h.1",
        ("attn_outputs + feed_forward_hidden_states + residual", "attn_outputs + residual"),
    ),
    (
        "not-scaled",
        "transformer.h.1.attn",
        edits("transformer.h.1.attn", "attn_weights / self.scale_attn", "attn_weights / 1", "_attn"),
    ),
    ("rope-offset", "transformer", ("+ past_key_values_length", "+ past_key_values_length + 1")),
    ("not-cleared", every, trains(clear=False), "update"),
    ("gelu-by-erf", "transformer.h.1.mlp.act", does("transformer.h.1.mlp.act", wrong.gelu)),
)

MISTAKES = [*STABLELM, *PHI3, *GRANITE, *OLMO2, *COHERE, *QWEN2_MOE, *DEEPSEEK, *GPT_OSS, *GPTJ]
