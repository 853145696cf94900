"""Mistakes in the decoders of the fourth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, edits, holds, optimizes, told, trains, untied, uses

_LAYER, _FIRST = "model.layers.1", "model.layers.0"
_ATTENTION, _FIRST_ATTENTION = f"{_LAYER}.self_attn", f"{_FIRST}.self_attn"
_ROTATED = "query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)"

GEMMA = table(
    "gemma",
    (
        "weight-without-one",
        f"{_LAYER}.post_attention_layernorm",
        ("(1.0 + self.weight.float())", "self.weight.float()"),
    ),
    (
        "positions-doubled",
        "model",
        ("= position_ids.unsqueeze(0)", "= 2 * position_ids.unsqueeze(0)"),
    ),
    ("scaled-by-width", _FIRST_ATTENTION, {"scaling": 32**-0.5}),
    ("gelu-by-erf", f"{_FIRST}.mlp.act_fn", does(f"{_FIRST}.mlp.act_fn", wrong.gelu)),
    (
        "heads-interleaved",
        _ATTENTION,
        ("attn_output.reshape(*input_shape, -1)", "attn_output.transpose(2, 3).reshape(*input_shape, -1)"),
    ),
    ("items-of-padding-counted", "", ("labels=labels,", "labels=labels, num_items_in_batch=torch.tensor(48),")),
)


def _rotary_of_llama(*arguments: Any, **options: Any) -> Any:
    """Pairs halves, where the model pairs neighbours."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(*arguments, **options)


ERNIE = table(
    "ernie4_5",
    ("rotary-of-halves", _ATTENTION, uses(_ATTENTION, apply_rotary_pos_emb=_rotary_of_llama)),
    ("bias-missing", f"{_FIRST_ATTENTION}.o_proj", does(f"{_FIRST_ATTENTION}.o_proj", wrong.linear_without_bias)),
    (
        "value-heads-reversed",
        _FIRST_ATTENTION,
        (
            "self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)",
            "self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2).flip(1)",
        ),
    ),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
    (
        "residual-after-norm",
        _LAYER,
        (
            "residual = hidden_states\n    hidden_states = self.post_attention_layernorm(hidden_states)",
            "residual = hidden_states = self.post_attention_layernorm(hidden_states)",
        ),
    ),
    ("padding-dropped", "model", ("attention_mask=attention_mask,", "attention_mask=None,")),
    ("bias-added-twice", f"{_LAYER}.mlp.up_proj", does(f"{_LAYER}.mlp.up_proj", wrong.linear_with_two_biases)),
)


def _recent(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Lets a token see the last five."""
    return key > query - 5


def _of_head(name: str, parameter: nn.Parameter) -> bool:
    return "embed_tokens" in name or "lm_head" in name


HUNYUAN = table(
    "hunyuan",
    (
        "normed-before-rotary",
        _ATTENTION,
        (
            f"{_ROTATED}\n    query_states = self.query_layernorm(query_states)\n"
            "    key_states = self.key_layernorm(key_states)",
            "query_states = self.query_layernorm(query_states)\n    key_states = self.key_layernorm(key_states)\n"
            f"    {_ROTATED}",
        ),
    ),
    ("keys-not-normed", _FIRST_ATTENTION, ("key_states = self.key_layernorm(key_states)", "pass")),
    (
        "window",
        "model",
        edits("model", "create_causal_mask(", "create_causal_mask(and_mask_function=recent, ", recent=_recent),
    ),
    (
        "rotary-base",
        "model.rotary_emb",
        holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(1e6)),
        "state",
    ),
    (
        "mlp-doubled",
        _FIRST,
        (
            "hidden_states = self.mlp(hidden_states)\n    hidden_states = residual + hidden_states",
            "hidden_states = residual + 2 * self.mlp(hidden_states)",
        ),
    ),
    ("epsilon", f"{_FIRST_ATTENTION}.query_layernorm", {"variance_epsilon": 3e-2}),
    ("embedding-not-decayed", _of_head, optimizes(_of_head, {"weight_decay": 0.0}), "update"),
)

_OWN = "causal_mask_mapping[self.config.layer_types[i]],"
BERT_DECODER = table(
    "bert_decoder",
    ("window-ignored", "model", (_OWN, "causal_mask_mapping['full_attention'],")),
    (
        "one-rotary-for-all",
        "model",
        ("=position_embeddings[self.config.layer_types[i]],", "=position_embeddings['full_attention'],"),
    ),
    ("gate-and-input-swapped", f"{_LAYER}.mlp", ("self.act(input) * gate", "input * self.act(gate)")),
    ("bias-missing", "model.final_norm", does("model.final_norm", wrong.norm_without_bias)),
    (
        "embedding-not-normed",
        "model.embeddings",
        ("self.norm(self.tok_embeddings(input_ids))", "self.tok_embeddings(input_ids)"),
    ),
    ("activation-skipped", "lm_head", ("self.act(self.dense(hidden_states))", "self.dense(hidden_states)")),
    ("frozen", f"{_FIRST}.attn.Wo", told(f"{_FIRST}.attn.Wo", "requires_grad_", False), "backward"),
    ("tie-lost", ("model.embeddings.tok_embeddings", "decoder"), untied("decoder"), "backward"),
)


def _rotary_of_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Turns the last part of each head, where the first one is to be turned."""
    width = cos.shape[-1]
    turned = _rotary_of_llama(q[..., -width:], k[..., -width:], cos, sin, unsqueeze_dim=unsqueeze_dim)
    return tuple(torch.cat((x[..., :-width], part), -1) for x, part in zip((q, k), turned, strict=True))


_GATE = f"{_LAYER}.mlp.gate"
GLM4_MOE = table(
    "glm4_moe",
    ("groups-by-best", _GATE, (".topk(2, dim=-1)[0]", ".topk(1, dim=-1)[0]")),
    ("softmax-for-sigmoid", _GATE, ("router_logits.sigmoid()", "router_logits.softmax(-1)")),
    ("weights-not-normalised", _GATE, {"norm_topk_prob": False}),
    ("queries-not-normed", _FIRST_ATTENTION, ("query_states = self.q_norm(query_states)", "pass")),
    ("last-part-rotated", _ATTENTION, uses(_ATTENTION, apply_rotary_pos_emb=_rotary_of_last)),
    (
        "shared-expert-missing",
        f"{_LAYER}.mlp",
        ("hidden_states = hidden_states + self.shared_experts(residuals)", "pass"),
    ),
    (
        "weight-of-first-choice",
        f"{_LAYER}.mlp.experts",
        ("top_k_weights[token_idx, top_k_pos, None]", "top_k_weights[token_idx, 0, None]"),
    ),
)


def _sees_all(**options: Any) -> Any:
    from transformers.masking_utils import create_bidirectional_mask

    known = ("config", "inputs_embeds", "attention_mask")
    return create_bidirectional_mask(**{name: options[name] for name in known})


def _norm_without_weight(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


_MIXER = f"{_FIRST}.mamba"
JAMBA = table(
    "jamba",
    ("norm-without-weight", f"{_MIXER}.b_layernorm", does(f"{_MIXER}.b_layernorm", _norm_without_weight)),
    ("decay-rates-reversed", _MIXER, holds(_MIXER, "A_log", lambda rates: rates.flip(1)), "state"),
    ("bias-not-loaded", f"{_MIXER}.conv1d", holds(f"{_MIXER}.conv1d", "bias", torch.zeros_like), "state"),
    (
        "weights-normalised",
        f"{_LAYER}.feed_forward.router",
        ("top_k_weights.to(", "(top_k_weights / top_k_weights.sum(-1, keepdim=True)).to("),
    ),
    ("not-causal", "model", uses("model", create_causal_mask=_sees_all)),
    ("wrong-norm", _LAYER, ("self.pre_ff_layernorm(hidden_states)", "self.input_layernorm(hidden_states)")),
    ("scaled-twice", _ATTENTION, attends(_ATTENTION, lambda call: {"query": call["query"] * call["scaling"]})),
    ("warmup", every, trains(schedule=lambda step: (step + 1) / 2), "update"),
)

_ENCODER, _DECODER = "model.encoder", "model.decoder"
T5GEMMA = table(
    "t5gemma",
    ("scores-not-capped", f"{_ENCODER}.layers.1.self_attn", {"attn_logit_softcapping": None}),
    (
        "cross-padding-dropped",
        f"{_DECODER}.layers.0",
        ("attention_mask=encoder_attention_mask,", "attention_mask=None,"),
    ),
    (
        "norm-skipped",
        f"{_DECODER}.layers.1",
        ("hidden_states = self.post_cross_attn_layernorm(hidden_states)", "pass"),
    ),
    (
        "window-one-sided",
        _ENCODER,
        uses(_ENCODER, create_bidirectional_sliding_window_mask=wrong.causal_window),
    ),
    ("embedding-not-scaled", _DECODER, ("hidden_states = hidden_states * normalizer", "pass")),
    (
        "values-shifted",
        f"{_DECODER}.layers.1.cross_attn",
        ("self.v_proj(encoder_hidden_states)", "self.v_proj(encoder_hidden_states.roll(1, 1))"),
    ),
    ("labels-not-shifted", "", ("self._shift_right(labels)", "labels.clamp(min=0)")),
)

PLBART = table(
    "plbart",
    (
        "norm-of-branch",
        f"{_ENCODER}.layers.0",
        (
            "hidden_states = residual + hidden_states\n    hidden_states = self.self_attn_layer_norm(hidden_states)",
            "hidden_states = residual + self.self_attn_layer_norm(hidden_states)",
        ),
    ),
    ("positions-without-offset", f"{_ENCODER}.embed_positions", {"offset": 0}),
    ("labels-not-shifted", "", ("shift_tokens_right(labels, self.config.pad_token_id)", "labels.clamp(min=0)")),
    ("scale-missing", f"{_DECODER}.layers.1.encoder_attn", {"scaling": 1.0}),
    ("not-causal", _DECODER, uses(_DECODER, create_causal_mask=_sees_all)),
    ("dropout-left-on", f"{_DECODER}.layers.0", {"dropout": 0.1}),
    ("cross-padding-dropped", "model", ("encoder_attention_mask=attention_mask,", "encoder_attention_mask=None,")),
    ("betas", every, trains(adam={"betas": (0.8, 0.99)}), "update"),
)

_VISION, _TEXT = "model.vision_tower", "model.language_model"
_IMAGE = "masked_scatter(special_image_mask, image_features)"
LLAVA = table(
    "llava",
    ("last-features", "model", ("vision_feature_layer=vision_feature_layer,", "vision_feature_layer=-1,")),
    ("image-reversed", "model", (_IMAGE, _IMAGE.replace("features", "features.flip(-2)"))),
    ("image-detached", "model", (_IMAGE, _IMAGE.replace("features", "features.detach()")), "backward"),
    (
        "bias-missing",
        "model.multi_modal_projector.linear_2",
        does("model.multi_modal_projector.linear_2", wrong.linear_without_bias),
    ),
    ("gelu-by-tanh", "model.multi_modal_projector.act", does("model.multi_modal_projector.act", wrong.gelu_by_tanh)),
    ("norm-skipped", _VISION, ("hidden_states = self.pre_layrnorm(hidden_states)", "pass")),
    ("scale", f"{_TEXT}.layers.0.self_attn", {"scaling": 0.5}),
    ("sees-next", _TEXT, uses(_TEXT, create_causal_mask=wrong.mask_that_sees_next)),
)

MISTAKES = [*GEMMA, *ERNIE, *HUNYUAN, *BERT_DECODER, *GLM4_MOE, *JAMBA, *T5GEMMA, *PLBART, *LLAVA]
