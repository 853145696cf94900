"""Mistakes in the encoders, and in the models of texts with sources, images or series, of the eighth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import does, edits, holds, optimizes, told, trains, uses


def _wider_window(config: Any, **options: Any) -> Any:
    """A window in both directions that is two tokens wider."""
    from transformers.masking_utils import create_bidirectional_sliding_window_mask

    return create_bidirectional_sliding_window_mask(config=wrong.other_config(config, sliding_window=8), **options)


_LAYER, _FIRST = "model.layers.1", "model.layers.0"
ULTRABERT = table(
    "ultrabert",
    ("window-wider", "model", uses("model", create_bidirectional_sliding_window_mask=_wider_window)),
    (
        "rotary-of-other-layers",
        "model",
        ("position_embeddings[layer_type],\n", 'position_embeddings["full_attention"],\n'),
    ),
    (
        "padding-visible-in-full",
        "model",
        (
            '"full_attention": create_bidirectional_mask(**mask_kwargs)',
            '"full_attention": create_bidirectional_mask(**(mask_kwargs | {"attention_mask": None}))',
        ),
    ),
    ("second-activation-missing", "head", ("hidden_states = self.act_fn(hidden_states)\n    return", "return")),
    ("padding-in-loss", "", ("self.loss_function(logits, labels,", "self.loss_function(logits, labels.clamp(min=0),")),
    (
        "activation-on-up",
        f"{_LAYER}.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * self.act_fn(self.up_proj(x))"),
    ),
    ("epsilon", f"{_FIRST}.post_attention_layernorm", {"variance_epsilon": 1e-1}),
    ("decay-of-vectors", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
)


# --- texts on a page --------------------------------------------------------------------------------------------------

_PAGE, _TEXT = "lilt.layout_embeddings", "lilt.embeddings"
_BOTH, _LAST_BOTH = (f"lilt.encoder.layer.{number}.attention.self" for number in (0, 1))
_LAYOUT_ACTIVATION = "lilt.encoder.layer.0.layout_intermediate.intermediate_act_fn"
LILT = table(
    "lilt",
    (
        "layout-scaled-as-text",
        _BOTH,
        ("self.attention_head_size // self.channel_shrink_ratio\n", "self.attention_head_size\n"),
    ),
    (
        "layout-ignored",
        _LAST_BOTH,
        (
            "attention_scores = tmp_attention_scores + tmp_layout_attention_scores",
            "attention_scores = tmp_attention_scores",
        ),
    ),
    ("width-for-height", _PAGE, ("bbox[:, :, 3] - bbox[:, :, 1]", "bbox[:, :, 2] - bbox[:, :, 0]")),
    (
        "corner-repeated",
        _PAGE,
        ("self.y_position_embeddings(bbox[:, :, 3])", "self.y_position_embeddings(bbox[:, :, 1])"),
    ),
    (
        "positions-one-later",
        _TEXT,
        edits(
            _TEXT,
            "incremental_indices.long() + padding_idx",
            "incremental_indices.long() + padding_idx + 1",
            "create_position_ids_from_input_ids",
        ),
    ),
    ("layout-not-carried", "lilt.encoder", ("layout_inputs = layer_outputs[1]", "pass")),
    (
        "padding-on-page-seen",
        _BOTH,
        ("layout_attention_scores = layout_attention_scores + attention_mask", "pass"),
    ),
    (
        "layout-detached",
        "lilt.encoder",
        ("layout_inputs = layer_outputs[1]", "layout_inputs = layer_outputs[1].detach()"),
        "backward",
    ),
    ("gelu-by-tanh", _LAYOUT_ACTIVATION, does(_LAYOUT_ACTIVATION, wrong.gelu_by_tanh)),
)


# --- a text and its source in one attention; held out -----------------------------------------------------------------

_ENCODER, _DECODER = "model.encoder.text_model", "model.decoder"
_NORMED = "hidden_states = self.post_self_attn_layernorm(hidden_states)\n"
T5GEMMA2 = table(
    "t5gemma2",
    (
        "source-keys-first",
        f"{_DECODER}.layers.0.self_attn",
        ("torch.cat([key_states, cross_key_states], dim=2)", "torch.cat([cross_key_states, key_states], dim=2)"),
    ),
    (
        "source-heads-reversed",
        f"{_DECODER}.layers.1.self_attn",
        (
            "cross_key_states = self.k_norm(cross_key_states)",
            "cross_key_states = self.k_norm(cross_key_states.flip(1))",
        ),
    ),
    ("padding-of-source-seen", _DECODER, ("attention_mask=encoder_attention_mask,", "attention_mask=None,")),
    ("window-one-sided", _ENCODER, ("is_causal=False", "is_causal=True")),
    ("cap-missing", "", ("if decoder_config.final_logit_softcapping is not None:", "if False:")),
    (
        "embedding-not-scaled",
        f"{_ENCODER}.embed_tokens",
        holds(f"{_ENCODER}.embed_tokens", "embed_scale", torch.ones_like),
        "state",
    ),
    (
        "sum-normed",
        f"{_ENCODER}.layers.1",
        (
            f"{_NORMED}    hidden_states = residual + self.dropout(hidden_states)",
            "hidden_states = self.post_self_attn_layernorm(residual + self.dropout(hidden_states))",
        ),
    ),
    ("weight-without-one", f"{_DECODER}.norm", ("(1.0 + self.weight.float())", "self.weight.float()")),
    (
        "source-detached",
        "model",
        ("encoder_hidden_states=encoder_hidden_states,", "encoder_hidden_states=encoder_hidden_states.detach(),"),
        "backward",
    ),
    ("first-moment", every, trains(adam={"betas": (0.95, 0.999)}), "update"),
)


# --- images before a question -----------------------------------------------------------------------------------------


def _of_tower(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("model.vision_tower.")


def _answer_sees_next(**options: Any) -> Any:
    """Every token sees the next one."""
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(or_mask_function=wrong.sees_next, **options)


_READER = "model.language_model.layers"
PALIGEMMA = table(
    "paligemma",
    ("answer-for-question", "model", ("token_type_ids == 0, 0, -1", "token_type_ids == 1, 0, -1")),
    (
        "images-of-other-rows",
        "model",
        (
            "masked_scatter(special_image_mask, image_features)",
            "masked_scatter(special_image_mask, image_features.flip(0))",
        ),
    ),
    (
        "patches-reversed",
        "model",
        edits(
            "model", "image_outputs.last_hidden_state", "image_outputs.last_hidden_state.flip(1)", "get_image_features"
        ),
    ),
    ("heads-not-scaled", f"{_READER}.1.self_attn", {"scaling": 1.0}),
    ("next-token-seen", "model", uses("model", create_causal_mask=_answer_sees_next)),
    (
        "embedding-not-scaled",
        "model.language_model.embed_tokens",
        holds("model.language_model.embed_tokens", "embed_scale", torch.ones_like),
        "state",
    ),
    ("labels-not-shifted", "", ("labels=labels,", "labels=nn.functional.pad(labels, (1, 0), value=-100)[:, :-1],")),
    (
        "projector-frozen",
        "model.multi_modal_projector.linear",
        told("model.multi_modal_projector.linear", "requires_grad_", False),
        "backward",
    ),
    ("erf-for-tanh", f"{_READER}.0.mlp.act_fn", does(f"{_READER}.0.mlp.act_fn", wrong.gelu)),
    ("tower-too-slow", _of_tower, optimizes(_of_tower, {"lr": 3e-4}), "update"),
)


# --- series; held out -------------------------------------------------------------------------------------------------

TIMESFM = table(
    "timesfm",
    (
        "padding-visible",
        "decoder",
        ("attention_mask=patched_padding,", "attention_mask=torch.zeros_like(patched_padding),"),
    ),
    ("deviation-ignored", "decoder", edits("decoder", " / sigma[:, None, None]", "", "_forward_transform")),
    (
        "mean-not-restored",
        "",
        edits(
            "",
            "* sigma[:, None, None, None] + mu[:, None, None, None]",
            "* sigma[:, None, None, None]",
            "_postprocess_output",
        ),
    ),
    ("frequencies-shifted", "decoder", ("self.freq_emb(freq)", "self.freq_emb((freq + 1) % 3)")),
    (
        "positions-not-shifted",
        "decoder",
        ("pos_emb = self._timesfm_shift_padded_seq(patched_padding, pos_emb)", "pass"),
    ),
    (
        "scale-without-logarithm",
        "decoder.layers.0.self_attn",
        edits("decoder.layers.0.self_attn", "1.442695041 /", "1.0 /", "_scale_query"),
    ),
    (
        "quantiles-reversed",
        "",
        edits("", "enumerate(self.config.quantiles)", "enumerate(self.config.quantiles[::-1])", "_quantile_loss"),
    ),
    ("residual-normed", "decoder.layers.1.mlp", ("return outputs + x", "return outputs + gate_inp")),
    ("squares-alone", "", ("loss = mse_loss + quantile_loss", "loss = mse_loss + quantile_loss.detach()"), "backward"),
    ("rate-decays", every, trains(schedule=lambda step: 0.9**step), "update"),
)

MISTAKES = [*ULTRABERT, *LILT, *T5GEMMA2, *PALIGEMMA, *TIMESFM]
