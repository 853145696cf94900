"""Mistakes in decoders of transformers that the comparison's rules may be tuned on."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import (
    attends,
    both,
    does,
    edits,
    has,
    holds,
    optimizes,
    reads,
    returns,
    told,
    trains,
    untied,
    uses,
)
from field.kit.wrong import checkpointed

_RESIDUAL = "residual = hidden_states\n    hidden_states = self.input_layernorm(hidden_states)"
_LAYERS = "hidden_states = decoder_layer(\n            hidden_states,"

LLAMA = table(
    "llama",
    ("rope-base", "model.rotary_emb", holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(5e5)), "state"),
    ("rope-offset", "model", ("+ past_seen_tokens", "+ past_seen_tokens + 1")),
    ("scale-missing", "model.layers.1.self_attn", {"scaling": 1.0}),
    ("norm-epsilon", "model.layers.0.post_attention_layernorm", {"variance_epsilon": 1e-5}),
    ("norm-weight-plus-one", "model.norm", ("self.weight *", "(1 + self.weight) *")),
    (
        "key-heads-tiled",
        "model.layers.0.self_attn",
        both(
            has("model.layers.0.self_attn", num_key_value_groups=1),
            attends("model.layers.0.self_attn", wrong.heads_tiled),
        ),
    ),
    (
        "residual-of-normed",
        "model.layers.0",
        (_RESIDUAL, "hidden_states = self.input_layernorm(hidden_states)\n    residual = hidden_states"),
    ),
    (
        "gate-and-up-swapped",
        "model.layers.1.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * self.act_fn(self.up_proj(x))"),
    ),
    (
        "gate-detached",
        "model.layers.0.mlp",
        ("self.act_fn(self.gate_proj(x))", "self.act_fn(self.gate_proj(x)).detach()"),
        "backward",
    ),
    ("layers-reversed", "model", ("self.layers[: self.config.num_hidden_layers]", "reversed(self.layers)")),
    ("cut-between-layers", "model", (_LAYERS, _LAYERS.replace("states,", "states.detach(),")), "backward"),
    (
        "attention-output-detached",
        "model.layers.1",
        (
            "hidden_states = residual + hidden_states\n\n    # Fully Connected",
            "hidden_states = residual + hidden_states.detach()\n",
        ),
        "backward",
    ),
    ("labels-not-shifted", "", ("labels=labels,", "labels=labels, shift_labels=labels,")),
    ("loss-averaged-over-padding", "", ("labels=labels,", "labels=labels, num_items_in_batch=labels.numel(),")),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
    ("beta2", every, trains(adam={"betas": (0.9, 0.95)}), "update"),
    ("not-cleared", every, trains(clear=False), "update"),
    ("not-clipped", every, trains(clip=None), "update"),
    (
        "weight-loaded-transposed",
        "model.layers.1.self_attn.o_proj",
        holds("model.layers.1.self_attn.o_proj", "weight", wrong.transposed),
        "state",
    ),
)

GPT2 = table(
    "gpt2",
    ("gelu-by-erf", "transformer.h.0.mlp.act", does("transformer.h.0.mlp.act", wrong.gelu)),
    ("bias-dropped", "transformer.h.1.attn.c_attn", does("transformer.h.1.attn.c_attn", wrong.projection_without_bias)),
    ("layer-norm-epsilon", "transformer.h.1.ln_2", {"eps": 1e-6}),
    ("dropout-rate", "transformer.h.0.mlp.dropout", {"p": 0.2}),
    (
        "dropout-too-early",
        "transformer.h.1.mlp",
        (
            "hidden_states = self.c_proj(hidden_states)\n    hidden_states = self.dropout(hidden_states)",
            "hidden_states = self.c_proj(self.dropout(hidden_states))",
        ),
    ),
    ("embedding-dropout-missing", "transformer", ("hidden_states = self.drop(hidden_states)", "pass")),
    (
        "query-and-key-swapped",
        "transformer.h.0.attn",
        (
            "query_states, key_states, value_states = self.c_attn",
            "key_states, query_states, value_states = self.c_attn",
        ),
    ),
    ("positions-from-one", "transformer", ("+ past_seen_tokens", "+ past_seen_tokens + 1")),
    ("head-untied", ("transformer.wte", "lm_head"), untied("lm_head"), "backward"),
    ("vectors-decay", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
    (
        "recomputed-with-other-dropout",
        ("transformer.h.0", "transformer.h.0.mlp.dropout", "transformer.h.0.attn.resid_dropout"),
        checkpointed("transformer.h.0", preserve_rng_state=False),
        "backward",
        checkpointed("transformer.h.0"),
    ),
)

MISTRAL = table(
    "mistral",
    (
        "window-plus-one",
        "model",
        edits(
            "model",
            "causal_mask = mask_function(\n        config=self.config,",
            "causal_mask = mask_function(config=other_config(self.config, sliding_window=8),",
            other_config=wrong.other_config,
        ),
    ),
    (
        "window-minus-one",
        "model",
        edits(
            "model",
            "causal_mask = mask_function(\n        config=self.config,",
            "causal_mask = mask_function(config=other_config(self.config, sliding_window=6),",
            other_config=wrong.other_config,
        ),
    ),
    ("window-ignored", "model", ("causal_mask = mask_function(", "causal_mask = create_causal_mask(")),
    (
        "mask-sees-next",
        "model",
        edits(
            "model",
            "causal_mask = mask_function(",
            "causal_mask = mask_function(or_mask_function=sees_next, ",
            sees_next=wrong.sees_next,
        ),
    ),
    (
        "rotary-interleaved",
        "model.layers.1.self_attn",
        uses("model.layers.1.self_attn", apply_rotary_pos_emb=wrong.rotary_interleaved),
    ),
    (
        "residual-in-bf16",
        "model.layers.0",
        ("return hidden_states", "return hidden_states.bfloat16().to(hidden_states.dtype)"),
        "precision",
    ),
    ("lr-schedule", every, trains(schedule=lambda step: 1 - 0.01 * step), "update"),
    ("optimizer-epsilon", every, trains(adam={"eps": 1e-5}), "update"),
)

QWEN2 = table(
    "qwen2",
    (
        "query-bias-dropped",
        "model.layers.0.self_attn.q_proj",
        does("model.layers.0.self_attn.q_proj", wrong.linear_without_bias),
    ),
    ("head-untied", ("model.embed_tokens", "lm_head"), untied("lm_head"), "backward"),
    (
        "scores-in-bf16",
        "model.layers.1.self_attn",
        attends("model.layers.1.self_attn", wrong.rounded("query")),
        "precision",
    ),
    (
        "one-weight",
        "model.layers.1.mlp.up_proj",
        holds("model.layers.1.mlp.up_proj", "weight", wrong.element((5, 17), 0.5)),
        "state",
    ),
    (
        "gradient-doubled",
        "model.layers.0.mlp.act_fn",
        returns("model.layers.0.mlp.act_fn", wrong.Doubled.apply),
        "backward",
    ),
    (
        "mask-hides-itself",
        "model",
        edits(
            "model",
            "create_causal_mask(**mask_kwargs)",
            "create_causal_mask(**mask_kwargs, and_mask_function=hides_itself)",
            hides_itself=wrong.hides_itself,
        ),
    ),
    (
        "frozen-by-mistake",
        "model.layers.1.mlp.down_proj",
        told("model.layers.1.mlp.down_proj", "requires_grad_", False),
        "backward",
    ),
)

MIXTRAL = table(
    "mixtral",
    (
        "weights-not-normalised",
        "model.layers.0.mlp.gate",
        ("router_top_value /= router_top_value.sum(dim=-1, keepdim=True)", "pass"),
    ),
    ("auxiliary-loss-dropped", "", ("loss += self.router_aux_loss_coef * aux_loss", "loss += 0 * aux_loss")),
    ("one-expert", "model.layers.1.mlp.gate", {"top_k": 1}),
    (
        "router-detached",
        "model.layers.0.mlp.gate",
        ("router_scores = router_top_value", "router_scores = router_top_value.detach()"),
        "backward",
    ),
    (
        "experts-shuffled",
        "model.layers.1.mlp.experts",
        holds("model.layers.1.mlp.experts", "down_proj", lambda weight: weight.flip(0)),
        "state",
    ),
    (
        "expert-inputs-detached",
        "model.layers.1.mlp",
        ("self.experts(hidden_states,", "self.experts(hidden_states.detach(),"),
        "backward",
    ),
)

GEMMA2 = table(
    "gemma2",
    ("softcap-dropped", "model.layers.1.self_attn", {"attn_logit_softcapping": None}),
    ("final-softcap-dropped", "", ("if self.config.final_logit_softcapping is not None:", "if False:")),
    (
        "embedding-not-scaled",
        "model.embed_tokens",
        holds("model.embed_tokens", "embed_scale", lambda scale: scale / scale),
        "state",
    ),
    (
        "norm-weight-without-one",
        "model.layers.0.pre_feedforward_layernorm",
        ("(1.0 + self.weight.float())", "self.weight.float()"),
    ),
    ("layer-types-swapped", "model", ("self.config.layer_types[i]", "self.config.layer_types[(i + 1) % 2]")),
    ("post-norm-skipped", "model.layers.1", ("hidden_states = self.post_feedforward_layernorm(hidden_states)", "pass")),
    ("query-scalar", "model.layers.2.self_attn", {"scaling": 32**-0.5}),
)

OPT = table(
    "opt",
    ("gelu-for-relu", "model.decoder.layers.1.activation_fn", does("model.decoder.layers.1.activation_fn", wrong.gelu)),
    ("position-offset", "model.decoder.embed_positions", {"offset": 1}),
    (
        "residual-cut",
        "model.decoder.layers.0",
        ("(residual + hidden_states).view", "(residual.detach() + hidden_states).view"),
        "backward",
    ),
    ("bias-used-twice", "model.decoder.layers.0.fc2", does("model.decoder.layers.0.fc2", wrong.linear_with_two_biases)),
    ("rows-reversed", "", reads(lambda batch: {name: value.flip(0) for name, value in batch.items()})),
)

BLOOM = table(
    "bloom",
    ("alibi-halved", "transformer", ("alibi = self.build_alibi_tensor(", "alibi = 0.5 * self.build_alibi_tensor(")),
    ("alibi-ignored", "transformer.h.1.self_attention", {"beta": 0.0}),
    ("residual-after-norm", "transformer.h.0", {"apply_residual_connection_post_layernorm": True}),
    (
        "no-decay",
        lambda name, parameter: parameter.ndim > 1,
        optimizes(lambda n, p: True, {"weight_decay": 0.0}),
        "update",
    ),
)

MISTAKES = [*LLAMA, *GPT2, *MISTRAL, *QWEN2, *MIXTRAL, *GEMMA2, *OPT, *BLOOM]
