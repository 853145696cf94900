"""Mistakes in decoders of transformers that the comparison's rules may be tuned on."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every, vectors
from .patches import attends, both, does, edits, has, holds, optimizes, reads, returns, told, trains, untied, uses
from .wrong import checkpointed

_RESIDUAL = "residual = hidden_states\n    hidden_states = self.input_layernorm(hidden_states)"
_LAYERS = "hidden_states = decoder_layer(\n            hidden_states,"

LLAMA = [
    Mistake(
        "rope-base",
        "llama",
        "model.rotary_emb",
        "state",
        holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(5e5)),
    ),
    Mistake("rope-offset", "llama", "model", "forward", edits("model", "+ past_seen_tokens", "+ past_seen_tokens + 1")),
    Mistake(
        "scale-missing", "llama", "model.layers.1.self_attn", "forward", has("model.layers.1.self_attn", scaling=1.0)
    ),
    Mistake(
        "norm-epsilon",
        "llama",
        "model.layers.0.post_attention_layernorm",
        "forward",
        has("model.layers.0.post_attention_layernorm", variance_epsilon=1e-5),
    ),
    Mistake(
        "norm-weight-plus-one",
        "llama",
        "model.norm",
        "forward",
        edits("model.norm", "self.weight *", "(1 + self.weight) *"),
    ),
    Mistake(
        "key-heads-tiled",
        "llama",
        "model.layers.0.self_attn",
        "forward",
        both(
            has("model.layers.0.self_attn", num_key_value_groups=1),
            attends("model.layers.0.self_attn", wrong.heads_tiled),
        ),
    ),
    Mistake(
        "residual-of-normed",
        "llama",
        "model.layers.0",
        "forward",
        edits(
            "model.layers.0",
            _RESIDUAL,
            "hidden_states = self.input_layernorm(hidden_states)\n    residual = hidden_states",
        ),
    ),
    Mistake(
        "gate-and-up-swapped",
        "llama",
        "model.layers.1.mlp",
        "forward",
        edits(
            "model.layers.1.mlp",
            "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
            "self.gate_proj(x) * self.act_fn(self.up_proj(x))",
        ),
    ),
    Mistake(
        "gate-detached",
        "llama",
        "model.layers.0.mlp",
        "backward",
        edits("model.layers.0.mlp", "self.act_fn(self.gate_proj(x))", "self.act_fn(self.gate_proj(x)).detach()"),
    ),
    Mistake(
        "layers-reversed",
        "llama",
        "model",
        "forward",
        edits("model", "self.layers[: self.config.num_hidden_layers]", "reversed(self.layers)"),
    ),
    Mistake(
        "cut-between-layers",
        "llama",
        "model",
        "backward",
        edits("model", _LAYERS, _LAYERS.replace("states,", "states.detach(),")),
    ),
    Mistake(
        "attention-output-detached",
        "llama",
        "model.layers.1",
        "backward",
        edits(
            "model.layers.1",
            "hidden_states = residual + hidden_states\n\n    # Fully Connected",
            "hidden_states = residual + hidden_states.detach()\n",
        ),
    ),
    Mistake(
        "labels-not-shifted", "llama", "", "forward", edits("", "labels=labels,", "labels=labels, shift_labels=labels,")
    ),
    Mistake(
        "loss-averaged-over-padding",
        "llama",
        "",
        "forward",
        edits("", "labels=labels,", "labels=labels, num_items_in_batch=labels.numel(),"),
    ),
    Mistake("micro-batches-summed", "llama", "", "backward", trains(share=1.0)),
    Mistake("beta2", "llama", every, "update", trains(adam={"betas": (0.9, 0.95)})),
    Mistake("not-cleared", "llama", every, "update", trains(clear=False)),
    Mistake("not-clipped", "llama", every, "update", trains(clip=None)),
    Mistake(
        "weight-loaded-transposed",
        "llama",
        "model.layers.1.self_attn.o_proj",
        "state",
        holds("model.layers.1.self_attn.o_proj", "weight", wrong.transposed),
    ),
]

GPT2 = [
    Mistake("gelu-by-erf", "gpt2", "transformer.h.0.mlp.act", "forward", does("transformer.h.0.mlp.act", wrong.gelu)),
    Mistake(
        "bias-dropped",
        "gpt2",
        "transformer.h.1.attn.c_attn",
        "forward",
        does("transformer.h.1.attn.c_attn", wrong.projection_without_bias),
    ),
    Mistake("layer-norm-epsilon", "gpt2", "transformer.h.1.ln_2", "forward", has("transformer.h.1.ln_2", eps=1e-6)),
    Mistake(
        "dropout-rate", "gpt2", "transformer.h.0.mlp.dropout", "forward", has("transformer.h.0.mlp.dropout", p=0.2)
    ),
    Mistake(
        "dropout-too-early",
        "gpt2",
        "transformer.h.1.mlp",
        "forward",
        edits(
            "transformer.h.1.mlp",
            "hidden_states = self.c_proj(hidden_states)\n    hidden_states = self.dropout(hidden_states)",
            "hidden_states = self.c_proj(self.dropout(hidden_states))",
        ),
    ),
    Mistake(
        "embedding-dropout-missing",
        "gpt2",
        "transformer",
        "forward",
        edits("transformer", "hidden_states = self.drop(hidden_states)", "pass"),
    ),
    Mistake(
        "query-and-key-swapped",
        "gpt2",
        "transformer.h.0.attn",
        "forward",
        edits(
            "transformer.h.0.attn",
            "query_states, key_states, value_states = self.c_attn",
            "key_states, query_states, value_states = self.c_attn",
        ),
    ),
    Mistake(
        "positions-from-one",
        "gpt2",
        "transformer",
        "forward",
        edits("transformer", "+ past_seen_tokens", "+ past_seen_tokens + 1"),
    ),
    Mistake("head-untied", "gpt2", ("transformer.wte", "lm_head"), "backward", untied("lm_head")),
    Mistake("vectors-decay", "gpt2", vectors, "update", optimizes(vectors, {"weight_decay": 0.1})),
    Mistake(
        "recomputed-with-other-dropout",
        "gpt2",
        ("transformer.h.0", "transformer.h.0.mlp.dropout", "transformer.h.0.attn.resid_dropout"),
        "backward",
        checkpointed("transformer.h.0", preserve_rng_state=False),
        common=checkpointed("transformer.h.0"),
    ),
]

MISTRAL = [
    Mistake(
        "window-plus-one",
        "mistral",
        "model",
        "forward",
        edits(
            "model",
            "causal_mask = mask_function(\n        config=self.config,",
            "causal_mask = mask_function(config=other_config(self.config, sliding_window=8),",
            other_config=wrong.other_config,
        ),
    ),
    Mistake(
        "window-minus-one",
        "mistral",
        "model",
        "forward",
        edits(
            "model",
            "causal_mask = mask_function(\n        config=self.config,",
            "causal_mask = mask_function(config=other_config(self.config, sliding_window=6),",
            other_config=wrong.other_config,
        ),
    ),
    Mistake(
        "window-ignored",
        "mistral",
        "model",
        "forward",
        edits("model", "causal_mask = mask_function(", "causal_mask = create_causal_mask("),
    ),
    Mistake(
        "mask-sees-next",
        "mistral",
        "model",
        "forward",
        edits(
            "model",
            "causal_mask = mask_function(",
            "causal_mask = mask_function(or_mask_function=sees_next, ",
            sees_next=wrong.sees_next,
        ),
    ),
    Mistake(
        "rotary-interleaved",
        "mistral",
        "model.layers.1.self_attn",
        "forward",
        uses("model.layers.1.self_attn", apply_rotary_pos_emb=wrong.rotary_interleaved),
    ),
    Mistake(
        "residual-in-bf16",
        "mistral",
        "model.layers.0",
        "precision",
        edits("model.layers.0", "return hidden_states", "return hidden_states.bfloat16().to(hidden_states.dtype)"),
    ),
    Mistake("lr-schedule", "mistral", every, "update", trains(schedule=lambda step: 1 - 0.01 * step)),
    Mistake("optimizer-epsilon", "mistral", every, "update", trains(adam={"eps": 1e-5})),
]

QWEN2 = [
    Mistake(
        "query-bias-dropped",
        "qwen2",
        "model.layers.0.self_attn.q_proj",
        "forward",
        does("model.layers.0.self_attn.q_proj", wrong.linear_without_bias),
    ),
    Mistake("head-untied", "qwen2", ("model.embed_tokens", "lm_head"), "backward", untied("lm_head")),
    Mistake(
        "scores-in-bf16",
        "qwen2",
        "model.layers.1.self_attn",
        "precision",
        attends("model.layers.1.self_attn", wrong.rounded("query")),
    ),
    Mistake(
        "one-weight",
        "qwen2",
        "model.layers.1.mlp.up_proj",
        "state",
        holds("model.layers.1.mlp.up_proj", "weight", wrong.element((5, 17), 0.5)),
    ),
    Mistake(
        "gradient-doubled",
        "qwen2",
        "model.layers.0.mlp.act_fn",
        "backward",
        returns("model.layers.0.mlp.act_fn", wrong.Doubled.apply),
    ),
    Mistake(
        "mask-hides-itself",
        "qwen2",
        "model",
        "forward",
        edits(
            "model",
            "create_causal_mask(**mask_kwargs)",
            "create_causal_mask(**mask_kwargs, and_mask_function=hides_itself)",
            hides_itself=wrong.hides_itself,
        ),
    ),
    Mistake(
        "frozen-by-mistake",
        "qwen2",
        "model.layers.1.mlp.down_proj",
        "backward",
        told("model.layers.1.mlp.down_proj", "requires_grad_", False),
    ),
]

MIXTRAL = [
    Mistake(
        "weights-not-normalised",
        "mixtral",
        "model.layers.0.mlp.gate",
        "forward",
        edits("model.layers.0.mlp.gate", "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)", "pass"),
    ),
    Mistake(
        "auxiliary-loss-dropped",
        "mixtral",
        "",
        "forward",
        edits("", "loss += self.router_aux_loss_coef * aux_loss", "loss += 0 * aux_loss"),
    ),
    Mistake("one-expert", "mixtral", "model.layers.1.mlp.gate", "forward", has("model.layers.1.mlp.gate", top_k=1)),
    Mistake(
        "router-detached",
        "mixtral",
        "model.layers.0.mlp.gate",
        "backward",
        edits(
            "model.layers.0.mlp.gate", "router_scores = router_top_value", "router_scores = router_top_value.detach()"
        ),
    ),
    Mistake(
        "experts-shuffled",
        "mixtral",
        "model.layers.1.mlp.experts",
        "state",
        holds("model.layers.1.mlp.experts", "down_proj", lambda weight: weight.flip(0)),
    ),
    Mistake(
        "expert-inputs-detached",
        "mixtral",
        "model.layers.1.mlp",
        "backward",
        edits("model.layers.1.mlp", "self.experts(hidden_states,", "self.experts(hidden_states.detach(),"),
    ),
]

GEMMA2 = [
    Mistake(
        "softcap-dropped",
        "gemma2",
        "model.layers.1.self_attn",
        "forward",
        has("model.layers.1.self_attn", attn_logit_softcapping=None),
    ),
    Mistake(
        "final-softcap-dropped",
        "gemma2",
        "",
        "forward",
        edits("", "if self.config.final_logit_softcapping is not None:", "if False:"),
    ),
    Mistake(
        "embedding-not-scaled",
        "gemma2",
        "model.embed_tokens",
        "state",
        holds("model.embed_tokens", "embed_scale", lambda scale: scale / scale),
    ),
    Mistake(
        "norm-weight-without-one",
        "gemma2",
        "model.layers.0.pre_feedforward_layernorm",
        "forward",
        edits("model.layers.0.pre_feedforward_layernorm", "(1.0 + self.weight.float())", "self.weight.float()"),
    ),
    Mistake(
        "layer-types-swapped",
        "gemma2",
        "model",
        "forward",
        edits("model", "self.config.layer_types[i]", "self.config.layer_types[(i + 1) % 2]"),
    ),
    Mistake(
        "post-norm-skipped",
        "gemma2",
        "model.layers.1",
        "forward",
        edits("model.layers.1", "hidden_states = self.post_feedforward_layernorm(hidden_states)", "pass"),
    ),
    Mistake(
        "query-scalar",
        "gemma2",
        "model.layers.2.self_attn",
        "forward",
        has("model.layers.2.self_attn", scaling=32**-0.5),
    ),
]

OPT = [
    Mistake(
        "gelu-for-relu",
        "opt",
        "model.decoder.layers.1.activation_fn",
        "forward",
        does("model.decoder.layers.1.activation_fn", wrong.gelu),
    ),
    Mistake(
        "position-offset",
        "opt",
        "model.decoder.embed_positions",
        "forward",
        has("model.decoder.embed_positions", offset=1),
    ),
    Mistake(
        "residual-cut",
        "opt",
        "model.decoder.layers.0",
        "backward",
        edits("model.decoder.layers.0", "(residual + hidden_states).view", "(residual.detach() + hidden_states).view"),
    ),
    Mistake(
        "bias-used-twice",
        "opt",
        "model.decoder.layers.0.fc2",
        "forward",
        does("model.decoder.layers.0.fc2", wrong.linear_with_two_biases),
    ),
    Mistake(
        "rows-reversed",
        "opt",
        "",
        "forward",
        reads(lambda batch: {name: value.flip(0) for name, value in batch.items()}),
    ),
]

BLOOM = [
    Mistake(
        "alibi-halved",
        "bloom",
        "transformer",
        "forward",
        edits("transformer", "alibi = self.build_alibi_tensor(", "alibi = 0.5 * self.build_alibi_tensor("),
    ),
    Mistake(
        "alibi-ignored",
        "bloom",
        "transformer.h.1.self_attention",
        "forward",
        has("transformer.h.1.self_attention", beta=0.0),
    ),
    Mistake(
        "residual-after-norm",
        "bloom",
        "transformer.h.0",
        "forward",
        has("transformer.h.0", apply_residual_connection_post_layernorm=True),
    ),
    Mistake(
        "no-decay",
        "bloom",
        lambda name, parameter: parameter.ndim > 1,
        "update",
        optimizes(lambda n, p: True, {"weight_decay": 0.0}),
    ),
]

DECODERS = [*LLAMA, *GPT2, *MISTRAL, *QWEN2, *MIXTRAL, *GEMMA2, *OPT, *BLOOM]
