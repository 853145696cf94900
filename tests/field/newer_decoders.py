"""Mistakes in newer decoders that the comparison's rules may be tuned on, as bug reports describe them."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every, vectors
from .patches import attends, does, edits, has, holds, optimizes, reads, told, trains, untied, uses

_LAYER, _ATTENTION = "model.layers.1", "model.layers.0.self_attn"
_MLP = "hidden_states = self.mlp"

STABLELM = [
    Mistake(
        "rotary-part-last",
        "stablelm",
        _ATTENTION,
        "forward",
        edits(_ATTENTION, "torch.cat((query_rot, query_pass), dim=-1)", "torch.cat((query_pass, query_rot), dim=-1)"),
    ),
    Mistake("epsilon", "stablelm", f"{_LAYER}.input_layernorm", "forward", has(f"{_LAYER}.input_layernorm", eps=1e-4)),
    Mistake(
        "mlp-without-norm",
        "stablelm",
        _LAYER,
        "forward",
        edits(_LAYER, "self.mlp(self.post_attention_layernorm(residual))", "self.mlp(residual)"),
    ),
    Mistake("dropout-left-on", "stablelm", "model.layers.0.dropout", "forward", has("model.layers.0.dropout", p=0.1)),
    Mistake("norms-decay", "stablelm", vectors, "update", optimizes(vectors, {"weight_decay": 0.1})),
    Mistake(
        "attention-detached",
        "stablelm",
        _LAYER,
        "backward",
        edits(_LAYER, "residual = residual + self_attn_output", "residual = residual + self_attn_output.detach()"),
    ),
]

PHI3 = [
    Mistake(
        "gate-and-up-swapped",
        "phi3",
        "model.layers.0.mlp",
        "forward",
        edits("model.layers.0.mlp", "gate, up_states = up_states.chunk", "up_states, gate = up_states.chunk"),
    ),
    Mistake(
        "values-before-keys",
        "phi3",
        f"{_LAYER}.self_attn",
        "forward",
        edits(
            f"{_LAYER}.self_attn",
            "    cos, sin = position",
            "    key_states, value_states = value_states, key_states\n    cos, sin = position",
        ),
    ),
    Mistake(
        "rope-base",
        "phi3",
        "model.rotary_emb",
        "state",
        holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(5e4)),
    ),
    Mistake(
        "residual-cut",
        "phi3",
        _LAYER,
        "backward",
        edits(
            _LAYER,
            "hidden_states = self.post_attention_layernorm(hidden_states)",
            "residual = residual.detach()\n    hidden_states = self.post_attention_layernorm(hidden_states)",
        ),
    ),
    Mistake(
        "labels-not-shifted",
        "phi3",
        "",
        "forward",
        edits("", "labels=labels, vocab_size", "labels=labels, shift_labels=labels, vocab_size"),
    ),
    Mistake("optimizer-epsilon", "phi3", every, "update", trains(adam={"eps": 1e-6})),
    Mistake("cleared-between-micro-batches", "phi3", every, "update", wrong.cleared_between),
    Mistake("softmax-of-rounded-queries", "phi3", _ATTENTION, "precision", attends(_ATTENTION, wrong.rounded("query"))),
]

GRANITE = [
    Mistake("residual-not-scaled", "granite", _LAYER, "forward", has(_LAYER, residual_multiplier=1.0)),
    Mistake("embeddings-not-scaled", "granite", "model", "forward", has("model", embedding_multiplier=1.0)),
    Mistake("scale-of-heads", "granite", _ATTENTION, "forward", has(_ATTENTION, scaling=8**-0.5)),
    Mistake(
        "logits-not-scaled",
        "granite",
        "",
        "forward",
        edits("", "logits = logits / self.config.logits_scaling", "logits = logits"),
    ),
    Mistake("schedule-too-early", "granite", every, "update", trains(schedule=lambda step: 1.0 - 0.01 * step)),
    Mistake(
        "tokens-shifted",
        "granite",
        "",
        "forward",
        reads(lambda batch: batch | {"input_ids": batch["input_ids"].roll(1, 1)}),
    ),
]

OLMO2 = [
    Mistake(
        "norm-before-mlp",
        "olmo2",
        "model.layers.0",
        "forward",
        edits(
            "model.layers.0",
            f"{_MLP}(hidden_states)\n    hidden_states = self.post_feedforward_layernorm(hidden_states)",
            f"{_MLP}(self.post_feedforward_layernorm(hidden_states))",
        ),
    ),
    Mistake(
        "query-norm-skipped",
        "olmo2",
        f"{_LAYER}.self_attn",
        "forward",
        edits(f"{_LAYER}.self_attn", "self.q_norm(self.q_proj(hidden_states))", "self.q_proj(hidden_states)"),
    ),
    Mistake(
        "epsilon",
        "olmo2",
        f"{_LAYER}.self_attn.k_norm",
        "forward",
        has(f"{_LAYER}.self_attn.k_norm", variance_epsilon=1e-3),
    ),
    Mistake("clipped-at-half", "olmo2", every, "update", trains(clip=0.5)),
    Mistake("beta2", "olmo2", every, "update", trains(adam={"betas": (0.9, 0.99)})),
    Mistake(
        "norm-not-trained",
        "olmo2",
        "model.layers.0.post_attention_layernorm",
        "backward",
        told("model.layers.0.post_attention_layernorm", "requires_grad_", False),
    ),
]

COHERE = [
    Mistake(
        "logit-scale", "cohere", "", "forward", edits("", "logits * self.logit_scale", "logits * self.logit_scale * 4")
    ),
    Mistake(
        "not-parallel",
        "cohere",
        _LAYER,
        "forward",
        edits(_LAYER, "self.mlp(hidden_states)", "self.mlp(hidden_states + hidden_states_attention)"),
    ),
    Mistake(
        "rotary-by-halves",
        "cohere",
        "model.rotary_emb",
        "forward",
        edits("model.rotary_emb", "torch.repeat_interleave(freqs, 2, dim=-1)", "torch.cat((freqs, freqs), dim=-1)"),
    ),
    Mistake(
        "mean-kept",
        "cohere",
        "model.layers.0.input_layernorm",
        "forward",
        edits(
            "model.layers.0.input_layernorm",
            "(hidden_states - mean) * torch.rsqrt",
            "hidden_states * torch.rsqrt",
        ),
    ),
    Mistake("head-not-tied", "cohere", ("lm_head", "model.embed_tokens"), "backward", untied("lm_head")),
]

QWEN2_MOE = [
    Mistake(
        "shared-gate-missing",
        "qwen2_moe",
        f"{_LAYER}.mlp",
        "forward",
        edits(
            f"{_LAYER}.mlp",
            "F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * shared_expert_output",
            "shared_expert_output",
        ),
    ),
    Mistake(
        "weights-normalised",
        "qwen2_moe",
        "model.layers.0.mlp.gate",
        "forward",
        has("model.layers.0.mlp.gate", norm_topk_prob=True),
    ),
    Mistake(
        "auxiliary-loss-of-padding",
        "qwen2_moe",
        "",
        "forward",
        edits(
            "", "self.num_experts_per_tok,\n            attention_mask,", "self.num_experts_per_tok,\n            None,"
        ),
    ),
    Mistake(
        "auxiliary-loss-left-out",
        "qwen2_moe",
        "",
        "forward",
        edits("", "loss += self.router_aux_loss_coef * aux_loss", "loss += 0 * aux_loss"),
    ),
    Mistake(
        "routing-detached",
        "qwen2_moe",
        "model.layers.0.mlp",
        "backward",
        edits(
            "model.layers.0.mlp", "selected_experts, routing_weights)", "selected_experts, routing_weights.detach())"
        ),
    ),
    Mistake(
        "softmax-of-the-chosen",
        "qwen2_moe",
        f"{_LAYER}.mlp.gate",
        "forward",
        edits(
            f"{_LAYER}.mlp.gate",
            "    router_scores = router_top_value",
            "    router_scores = router_top_value.softmax(-1)",
        ),
    ),
    Mistake(
        "experts-swapped",
        "qwen2_moe",
        f"{_LAYER}.mlp.experts",
        "state",
        holds(f"{_LAYER}.mlp.experts", "down_proj", lambda weight: weight[[1, 0, 2, 3]]),
    ),
]

DEEPSEEK = [
    Mistake(
        "routed-not-scaled",
        "deepseek_v3",
        f"{_LAYER}.mlp.gate",
        "forward",
        has(f"{_LAYER}.mlp.gate", routed_scaling_factor=1.0),
    ),
    Mistake(
        "shared-expert-after",
        "deepseek_v3",
        "model.layers.2.mlp",
        "forward",
        edits("model.layers.2.mlp", "self.shared_experts(residuals)", "self.shared_experts(hidden_states)"),
    ),
    Mistake(
        "rotary-by-halves",
        "deepseek_v3",
        _ATTENTION,
        "forward",
        edits(_ATTENTION, "if self.config.rope_interleave:", "if False:"),
    ),
    Mistake(
        "latent-not-normed",
        "deepseek_v3",
        f"{_LAYER}.self_attn",
        "forward",
        edits(f"{_LAYER}.self_attn", "self.kv_a_layernorm(kv_nope)", "kv_nope"),
    ),
    Mistake(
        "router-bias",
        "deepseek_v3",
        f"{_LAYER}.mlp.gate",
        "state",
        holds(f"{_LAYER}.mlp.gate", "e_score_correction_bias", lambda bias: bias + 0.02 * wrong.alternating(bias)),
    ),
    Mistake(
        "scale-without-rotary",
        "deepseek_v3",
        "model.layers.2.self_attn",
        "forward",
        has("model.layers.2.self_attn", scaling=8**-0.5),
    ),
    Mistake(
        "weights-with-bias",
        "deepseek_v3",
        "model.layers.2.mlp.gate",
        "forward",
        edits("model.layers.2.mlp.gate", "topk_weights = scores.gather", "topk_weights = scores_for_choice.gather"),
        common=holds(
            "model.layers.2.mlp.gate", "e_score_correction_bias", lambda bias: bias + 0.1 * wrong.alternating(bias)
        ),
    ),
]

GPT_OSS = [
    Mistake(
        "sinks-not-loaded",
        "gpt_oss",
        f"{_LAYER}.self_attn",
        "state",
        holds(f"{_LAYER}.self_attn", "sinks", lambda sinks: sinks * 0 - 3),
    ),
    Mistake(
        "window-plus-one",
        "gpt_oss",
        "model",
        "forward",
        edits(
            "model",
            "create_sliding_window_causal_mask(**mask_kwargs)",
            "create_sliding_window_causal_mask(**(mask_kwargs | {'config': wider(self.config)}))",
            wider=lambda config: wrong.other_config(config, sliding_window=8),
        ),
    ),
    Mistake(
        "sigmoid-not-scaled",
        "gpt_oss",
        "model.layers.0.mlp.experts",
        "forward",
        has("model.layers.0.mlp.experts", alpha=1.0),
    ),
    Mistake(
        "up-without-one",
        "gpt_oss",
        f"{_LAYER}.mlp.experts",
        "forward",
        edits(f"{_LAYER}.mlp.experts", "(up + 1) * glu", "up * glu", "_apply_gate"),
    ),
    Mistake(
        "yarn-not-scaled", "gpt_oss", "model.rotary_emb", "forward", has("model.rotary_emb", attention_scaling=1.0)
    ),
    Mistake(
        "softmax-of-all",
        "gpt_oss",
        f"{_LAYER}.mlp.router",
        "forward",
        edits(
            f"{_LAYER}.mlp.router",
            "torch.nn.functional.softmax(router_top_value, dim=1, dtype=router_top_value.dtype)",
            "router_logits.softmax(1).gather(1, router_indices)",
        ),
    ),
]

GPTJ = [
    Mistake(
        "rotary-by-halves",
        "gptj",
        "transformer.h.0.attn",
        "forward",
        uses("transformer.h.0.attn", apply_rotary_pos_emb=wrong.rotary_of_halves),
    ),
    Mistake(
        "mlp-left-out",
        "gptj",
        "transformer.h.1",
        "forward",
        edits("transformer.h.1", "attn_outputs + feed_forward_hidden_states + residual", "attn_outputs + residual"),
    ),
    Mistake(
        "not-scaled",
        "gptj",
        "transformer.h.1.attn",
        "forward",
        edits("transformer.h.1.attn", "attn_weights / self.scale_attn", "attn_weights / 1", "_attn"),
    ),
    Mistake(
        "rope-offset",
        "gptj",
        "transformer",
        "forward",
        edits("transformer", "+ past_key_values_length", "+ past_key_values_length + 1"),
    ),
    Mistake("not-cleared", "gptj", every, "update", trains(clear=False)),
    Mistake("gelu-by-erf", "gptj", "transformer.h.1.mlp.act", "forward", does("transformer.h.1.mlp.act", wrong.gelu)),
]

NEWER_DECODERS = [*STABLELM, *PHI3, *GRANITE, *OLMO2, *COHERE, *QWEN2_MOE, *DEEPSEEK, *GPT_OSS, *GPTJ]
