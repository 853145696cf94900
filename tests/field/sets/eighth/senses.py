"""Mistakes in the models of images and of sound of the eighth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, edits, holds, optimizes, trains, uses

_LAYER, _FIRST = "encoder.layers.1", "encoder.layers.0"
GRANITE_SPEECH5 = table(
    "granite_speech5",
    ("distances-reversed", "encoder", holds("encoder", "attention_dists", wrong.transposed), "state"),
    (
        "distances-not-scaled",
        f"{_FIRST}.self_attn",
        ("self.rel_pos_emb(position_embeddings) * self.scaling", "self.rel_pos_emb(position_embeddings)"),
    ),
    (
        "block-padded-before",
        f"{_LAYER}.self_attn",
        (
            "nn.functional.pad(hidden_states, (0, 0, 0, num_padded))",
            "nn.functional.pad(hidden_states, (0, 0, num_padded, 0))",
        ),
    ),
    ("first-for-mean", _FIRST, ("hidden_states.unfold(1, 2, 2).mean(-1)", "hidden_states[:, ::2]")),
    ("sigmoid-for-softmax", "encoder", ("nn.functional.softmax(mid_logits, dim=-1)", "mid_logits.sigmoid()")),
    (
        "middle-detached",
        "encoder",
        ("nn.functional.softmax(mid_logits, dim=-1)", "nn.functional.softmax(mid_logits, dim=-1).detach()"),
        "backward",
    ),
    ("half-missing", _LAYER, ("residual + 0.5 * hidden_states", "residual + hidden_states")),
    ("momentum", f"{_LAYER}.conv.norm", {"momentum": 0.3}, "update"),
    (
        "mask-cut",
        "encoder",
        ("downsample_attention_mask(attention_mask)", "attention_mask[:, : attention_mask.shape[1] // 2]"),
    ),
    ("dropout-left-on", f"{_FIRST}.feed_forward2", {"activation_dropout": 0.1}),
)


# --- sound in frames --------------------------------------------------------------------------------------------------


def _wider_windows(window: Any) -> Any:
    """A frame sees one more frame of the past."""

    def seen(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query - key <= window[0]) & (key - query < window[1])

    return seen


_HEARS, _WRITES = "model.encoder", "model.decoder"
MOONSHINE_STREAMING = table(
    "moonshine_streaming",
    ("window-wider", _HEARS, uses(_HEARS, sliding_window_mask_function=_wider_windows)),
    ("frames-not-centred", f"{_HEARS}.embedder.cmvn", ("return centered / rms", "return x / rms")),
    ("tanh-for-asinh", f"{_HEARS}.embedder.comp", ("torch.asinh", "torch.tanh")),
    (
        "one-frame-more",
        f"{_HEARS}.embedder",
        ("padding_mask.sum(-1) // self.frame_len", "padding_mask.sum(-1) // self.frame_len + 1"),
    ),
    ("weight-without-one", f"{_HEARS}.layers.0.input_layernorm", {"unit_offset": 0.0}),
    (
        "positions-not-added",
        _WRITES,
        ("encoder_hidden_states += position_embeddings.to(encoder_hidden_states.device)", "pass"),
    ),
    (
        "halves-swapped",
        f"{_WRITES}.layers.1.mlp",
        ("hidden_states, gate = hidden_states.chunk", "gate, hidden_states = hidden_states.chunk"),
    ),
    (
        "padding-of-sound-heard",
        _WRITES,
        (
            "attention_mask=encoder_attention_mask,\n        encoder_hidden_states",
            "attention_mask=None,\n        encoder_hidden_states",
        ),
    ),
    (
        "rotary-of-halves",
        f"{_WRITES}.layers.0.self_attn",
        uses(f"{_WRITES}.layers.0.self_attn", apply_rotary_pos_emb=wrong.rotary_of_first_half),
    ),
    ("optimizer-epsilon", every, trains(adam={"eps": 1e-4}), "update"),
)


# --- objects in images; held out --------------------------------------------------------------------------------------


def _of_positions(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith("position_embeddings")


_EYE = "vit.encoder.layer"
YOLOS = table(
    "yolos",
    (
        "tokens-in-other-order",
        "vit.embeddings",
        ("(cls_tokens, embeddings, detection_tokens)", "(cls_tokens, detection_tokens, embeddings)"),
    ),
    (
        "middle-positions-lost",
        "vit.encoder",
        ("hidden_states = hidden_states + interpolated_mid_position_embeddings[i].to(hidden_states.device)", "pass"),
    ),
    ("bilinear-for-bicubic", "vit.embeddings.interpolation", ('mode="bicubic"', 'mode="bilinear"')),
    (
        "patches-for-objects",
        "",
        (
            "sequence_output[:, -self.config.num_detection_tokens :, :]",
            "sequence_output[:, 1 : 1 + self.config.num_detection_tokens, :]",
        ),
    ),
    (
        "boxes-clamped",
        "",
        ("self.bbox_predictor(sequence_output).sigmoid()", "self.bbox_predictor(sequence_output).clamp(0, 1)"),
    ),
    ("activated-at-the-end", "bbox_predictor", ("if i < self.num_layers - 1", "if i < self.num_layers")),
    (
        "residual-of-attention",
        f"{_EYE}.1",
        ("self.output(layer_output, hidden_states)", "self.output(layer_output, attention_output)"),
    ),
    (
        "keys-for-queries",
        f"{_EYE}.0.attention.attention",
        ("query_layer,\n        key_layer,", "key_layer,\n        query_layer,"),
    ),
    (
        "positions-rolled",
        "vit.embeddings",
        ("embeddings = embeddings + position_embeddings", "embeddings = embeddings + position_embeddings.roll(1, 1)"),
    ),
    ("positions-not-trained", _of_positions, optimizes(_of_positions, None), "update"),
)


# --- images of several sizes ------------------------------------------------------------------------------------------

_SIGHT = "vision_model.encoder.layers"
SIGLIP2 = table(
    "siglip2",
    (
        "height-for-width",
        "vision_model.embeddings",
        ("spatial_shapes, max_length", "spatial_shapes.flip(1), max_length"),
    ),
    ("padding-visible", "vision_model", ("attention_mask=pixel_attention_mask,", "attention_mask=None,")),
    (
        "padding-averaged",
        "",
        (
            "sequence_output * pool_mask, dim=1) / torch.sum(pool_mask, dim=1)",
            "sequence_output, dim=1) / pool_mask.shape[1]",
        ),
    ),
    ("norm-skipped", "vision_model", ("last_hidden_state = self.post_layernorm(last_hidden_state)", "pass")),
    (
        "positions-of-first",
        "vision_model.embeddings",
        ("patch_embeds + resized_positional_embeddings", "patch_embeds + resized_positional_embeddings[:1]"),
    ),
    ("erf-for-tanh", f"{_SIGHT}.0.mlp.activation_fn", does(f"{_SIGHT}.0.mlp.activation_fn", wrong.gelu)),
    ("scaled-by-width", f"{_SIGHT}.1.self_attn", {"scale": 32**-0.5}),
    (
        "residual-normed",
        f"{_SIGHT}.0",
        (
            "hidden_states = self.layer_norm1(hidden_states)",
            "hidden_states = residual = self.layer_norm1(hidden_states)",
        ),
    ),
    (
        "bias-not-loaded",
        f"{_SIGHT}.1.self_attn.v_proj",
        holds(f"{_SIGHT}.1.self_attn.v_proj", "bias", torch.zeros_like),
        "state",
    ),
    ("clipped-harder", every, trains(clip=0.1), "update"),
)


# --- patches that an encoder does not see -----------------------------------------------------------------------------


def _of_mask_token(name: str, parameter: nn.Parameter) -> bool:
    return name.endswith("mask_token")


VIT_MAE = table(
    "vit_mae",
    (
        "others-shown",
        "vit.embeddings",
        edits("vit.embeddings", "ids_shuffle[:, :len_keep]", "ids_shuffle[:, -len_keep:]", "random_masking"),
    ),
    ("loss-of-shown", "", ("(loss * mask).sum() / mask.sum()", "(loss * (1 - mask)).sum() / (1 - mask).sum()")),
    (
        "order-not-restored",
        "decoder",
        ("index=ids_restore.unsqueeze(-1)", "index=ids_restore.argsort(1).unsqueeze(-1)"),
    ),
    (
        "class-without-position",
        "vit.embeddings",
        ("self.cls_token + position_embeddings[:, :1, :]", "1 * self.cls_token"),
    ),
    ("channels-first", "", edits("", "permute(0, 2, 4, 3, 5, 1)", "permute(0, 2, 4, 1, 3, 5)", "patchify")),
    ("pixels-not-normed", "", ("if self.config.norm_pix_loss:", "if False:")),
    ("epsilon", "decoder.decoder_norm", {"eps": 1e-1}),
    (
        "heads-rolled",
        "vit.layers.1.attention",
        ("attn_output.reshape(*input_shape, -1)", "attn_output.roll(1, 2).reshape(*input_shape, -1)"),
    ),
    (
        "latent-detached",
        "",
        ("latent, ids_restore, interpolate", "latent.detach(), ids_restore, interpolate"),
        "backward",
    ),
    ("mask-token-not-trained", _of_mask_token, optimizes(_of_mask_token, None), "update"),
)

MISTAKES = [*GRANITE_SPEECH5, *MOONSHINE_STREAMING, *YOLOS, *SIGLIP2, *VIT_MAE]
