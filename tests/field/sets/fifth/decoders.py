"""Mistakes in the decoders, and in the models of two halves, of the fifth blind trial."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, edits, holds, optimizes, told, trains, untied, uses

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"


def _wider_window(**options: Any) -> Any:
    """A window that shows one more token."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = options["config"]
    wider = wrong.other_config(config, sliding_window=config.sliding_window + 1)
    return create_sliding_window_causal_mask(**(options | {"config": wider}))


MINISTRAL = table(
    "ministral3",
    (
        "queries-not-scaled",
        _ATTENTION,
        ("query_states = query_states * get_llama_4_attn_scale(", "get_llama_4_attn_scale("),
    ),
    ("rotary-of-neighbours", _FIRST_ATTENTION, uses(_FIRST_ATTENTION, apply_rotary_pos_emb=wrong.rotary_interleaved)),
    (
        "key-heads-reversed",
        _ATTENTION,
        (
            "key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
            "key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2).flip(1)",
        ),
    ),
    ("window-wider", "model", uses("model", create_sliding_window_causal_mask=_wider_window)),
    ("epsilon", f"{_FIRST}.post_attention_layernorm", {"variance_epsilon": 1e-2}),
    ("residual-of-input", _LAYER, ("# Fully Connected\n    residual = hidden_states\n", "# Fully Connected\n")),
    (
        "labels-shifted-twice",
        "",
        ("labels=labels,", "labels=nn.functional.pad(labels[:, 1:], (0, 1), value=-100),"),
    ),
    ("norm-skipped", "model", ("hidden_states = self.norm(hidden_states)", "pass")),
)


def _rotary_of_queries(*arguments: Any, **options: Any) -> Any:
    """The keys are not turned."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(*arguments, **options)[0], arguments[1]


ARCEE = table(
    "arcee",
    ("relu-not-squared", f"{_LAYER}.mlp.act_fn", does(f"{_LAYER}.mlp.act_fn", wrong.relu)),
    ("scaled-by-width", _FIRST_ATTENTION, {"scaling": 128**-0.5}),
    (
        "values-from-keys",
        _ATTENTION,
        (
            "value_states = self.v_proj(hidden_states)",
            "value_states = self.k_proj(hidden_states)",
        ),
    ),
    ("rotary-base", "model.rotary_emb", holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(5e5)), "state"),
    ("padding-dropped", "model", ("attention_mask=attention_mask,", "attention_mask=None,")),
    ("keys-not-rotated", _ATTENTION, uses(_ATTENTION, apply_rotary_pos_emb=_rotary_of_queries)),
    ("bias-missing", f"{_FIRST}.mlp.down_proj", does(f"{_FIRST}.mlp.down_proj", wrong.linear_without_bias)),
    ("dropout-left-on", _FIRST_ATTENTION, {"attention_dropout": 0.1}),
    ("learning-rate", every, optimizes(every, {"lr": 1.1e-3}), "update"),
)


def _router_by_softmax(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of all experts add up to one before the best are chosen."""
    logits = F.linear(hidden_states, self.weight)
    values, chosen = torch.topk(logits.float().softmax(-1), self.top_k, dim=1)
    return torch.zeros_like(logits).scatter_(1, chosen, values.to(logits.dtype)), logits


_MOE = f"{_LAYER}.feed_forward"
_SCALED = "routed_in = routed_in * router_scores.transpose(0, 1).reshape(-1, 1)\n"
LLAMA4 = table(
    "llama4",
    (
        "chunks-ignored",
        "model",
        ("causal_mask_mapping[self.config.layer_types[i]]", "causal_mask_mapping['full_attention']"),
    ),
    ("keys-not-normed", _FIRST_ATTENTION, ("key_states = self.qk_norm(key_states)", "pass")),
    ("temperature-not-tuned", _ATTENTION, {"attn_temperature_tuning": False}),
    (
        "softmax-for-sigmoid",
        f"{_MOE}.router",
        does(f"{_MOE}.router", _router_by_softmax),
    ),
    (
        "scaled-after-experts",
        _MOE,
        (
            f"{_SCALED}    routed_out = self.experts(routed_in)",
            "routed_out = self.experts(routed_in) * router_scores.transpose(0, 1).reshape(-1, 1)",
        ),
    ),
    ("gate-and-up-swapped", f"{_MOE}.experts", ("gate, up = gate_up.chunk", "up, gate = gate_up.chunk")),
    (
        "shared-expert-missing",
        _MOE,
        ("out = self.shared_expert(hidden_states)", "out = torch.zeros_like(hidden_states)"),
    ),
    (
        "experts-in-other-order",
        f"{_MOE}.experts",
        holds(f"{_MOE}.experts", "down_proj", lambda weight: weight.flip(0)),
        "state",
    ),
    ("rotary-in-each-layer", _ATTENTION, {"use_rope": True}),
)

MINIMAX = table(
    "minimax",
    (
        "state-not-decayed",
        _FIRST_ATTENTION,
        ("attn_weights_inter * block_decay + next_attn_weights_inter", "attn_weights_inter + next_attn_weights_inter"),
    ),
    ("gate-by-silu", _FIRST_ATTENTION, ("F.sigmoid(self.output_gate(", "F.silu(self.output_gate(")),
    (
        "blocks-not-joined",
        _FIRST_ATTENTION,
        ("current_attn_output = attn_output_inter + attn_output_intra", "current_attn_output = attn_output_intra"),
    ),
    ("residual-factor", _LAYER, {"attn_alpha_factor": 1.0}),
    (
        "weights-not-normalised",
        f"{_LAYER}.mlp.gate",
        ("router_top_value /= router_top_value.sum(dim=-1, keepdim=True)", "pass"),
    ),
    (
        "balance-not-counted",
        "",
        ("loss += self.router_aux_loss_coef * aux_loss.to(loss.device)", "pass"),
    ),
    (
        "decay-reversed",
        _FIRST_ATTENTION,
        holds(_FIRST_ATTENTION, "query_decay", lambda decay: decay.flip(1)),
        "state",
    ),
    ("activation-skipped", f"{_FIRST}.mlp.experts", ("self.act_fn(gate) * up", "gate * up")),
)


def _unscaled(self: Any, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, self.weight, self.padding_idx)


GEMMA3N = table(
    "gemma3n",
    ("sparsity-ignored", f"{_FIRST}.mlp", {"activation_sparsity": 0.0}),
    (
        "residual-lost",
        f"{_LAYER}.laurel",
        ("return hidden_states + normed_laurel_hidden_states", "return normed_laurel_hidden_states"),
    ),
    ("halved", _LAYER, ("(attn_gated + laurel_output) / math.sqrt(2)", "(attn_gated + laurel_output) / 2")),
    ("input-of-other-layer", "model", ("per_layer_inputs[:, :, i, :]", "per_layer_inputs[:, :, i - 1, :]")),
    ("values-not-normed", _FIRST_ATTENTION, ("value_states = self.v_norm(value_states)", "pass")),
    ("logits-not-capped", "", ("if self.config.final_logit_softcapping is not None:", "if False:")),
    (
        "shared-keys-and-values-swapped",
        "model.layers.3.self_attn",
        ("key_states, value_states = shared_kv_states", "value_states, key_states = shared_kv_states"),
    ),
    ("embedding-not-scaled", "model.embed_tokens", does("model.embed_tokens", _unscaled)),
    (
        "coefficients-without-one",
        ("model.layers.1", "model.layers.1.altup"),
        edits("model.layers.1.altup", "weight, bias=None) + 1.0", "weight, bias=None)", "correct"),
    ),
)


def _sees_next(bias: Tensor) -> Tensor:
    return torch.ones_like(bias).tril(1)


_BLOCK = "transformer.h.1"
OPENAI = table(
    "openai_gpt",
    ("gelu-by-erf", "transformer.h.0.mlp", ("h = self.act(self.c_fc(x))", "h = nn.functional.gelu(self.c_fc(x))")),
    ("sees-next", "transformer.h.0.attn", holds("transformer.h.0.attn", "bias", _sees_next), "state"),
    ("scale-missing", f"{_BLOCK}.attn", {"scale": False}),
    ("norm-of-branch", _BLOCK, ("self.ln_1(x + a)", "x + self.ln_1(a)")),
    ("residual-of-input", "transformer.h.0", ("self.ln_2(n + m)", "self.ln_2(x + m)")),
    (
        "positions-from-one",
        "transformer",
        ("self.position_ids[None, : input_shape[-1]]", "self.position_ids[None, 1 : input_shape[-1] + 1]"),
    ),
    ("tie-lost", ("transformer.tokens_embed", "lm_head"), untied("lm_head"), "backward"),
    ("queries-as-keys", f"{_BLOCK}.attn", ("query, key, value = x.split(", "key, query, value = x.split(")),
)

_ENCODER, _DECODER = "model.encoder", "model.decoder"
BLENDERBOT = table(
    "blenderbot",
    ("norm-skipped", _ENCODER, ("hidden_states = self.layer_norm(hidden_states)", "pass")),
    (
        "attends-to-itself",
        f"{_DECODER}.layers.1",
        ("key_value_states=encoder_hidden_states,", "key_value_states=hidden_states,"),
    ),
    ("embedding-not-scaled", f"{_ENCODER}.embed_tokens", {"embed_scale": 1.0}),
    (
        "activation-skipped",
        f"{_DECODER}.layers.0",
        ("self.activation_fn(self.fc1(hidden_states))", "self.fc1(hidden_states)"),
    ),
    ("scale-halved", f"{_ENCODER}.layers.1.self_attn", {"scaling": 0.5 * 8**-0.5}),
    ("frozen", f"{_ENCODER}.layers.0.fc1", told(f"{_ENCODER}.layers.0.fc1", "requires_grad_", False), "backward"),
    ("not-cleared", every, trains(clear=False), "update"),
    (
        "residual-after-norm",
        f"{_DECODER}.layers.0",
        (
            "residual = hidden_states\n        hidden_states = self.encoder_attn_layer_norm(hidden_states)",
            "residual = hidden_states = self.encoder_attn_layer_norm(hidden_states)",
        ),
    ),
    (
        "queries-averaged",
        f"{_DECODER}.layers.1.self_attn",
        attends(f"{_DECODER}.layers.1.self_attn", lambda call: {"query": call["query"] - call["query"].mean(1, True)}),
    ),
)

_WITH_BIAS = "predict_attn_weights = predict_attn_weights + predict_relative_pos_embeddings"
PROPHETNET = table(
    "prophetnet",
    (
        "streams-in-other-order",
        "prophetnet.decoder",
        (
            "(ngram_embeddings[ngram - 1] + predicting_stream_pos_embed) for ngram",
            "(ngram_embeddings[ngram] + predicting_stream_pos_embed) for ngram",
        ),
    ),
    (
        "position-of-last",
        "prophetnet.decoder",
        ("self.position_embeddings._forward(position_ids + 1)", "self.position_embeddings._forward(position_ids)"),
    ),
    ("bias-of-positions-missing", "prophetnet.decoder.layers.0.self_attn", (_WITH_BIAS, "pass")),
    (
        "scaled-twice",
        "prophetnet.decoder.layers.1.cross_attn",
        ("self.query_proj(hidden_states) / (self.head_dim**0.5)", "self.query_proj(hidden_states) / self.head_dim"),
    ),
    (
        "norm-of-branch",
        "prophetnet.encoder.layers.1",
        (
            "self.feed_forward_layer_norm(feed_forward_output + hidden_states)",
            "self.feed_forward_layer_norm(feed_forward_output) + hidden_states",
        ),
    ),
    (
        "padding-smoothed",
        "",
        edits("", "smooth_loss = smooth_loss[non_masked_tokens]", "pass", "_compute_loss"),
    ),
    ("clipped-further", every, trains(clip=0.5), "update"),
)

MISTAKES = [*MINISTRAL, *ARCEE, *LLAMA4, *MINIMAX, *GEMMA3N, *OPENAI, *BLENDERBOT, *PROPHETNET]
