"""Mistakes in the encoders, and in the models of translations and series, of the ninth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, does, edits, holds, optimizes, told, trains, untied, uses


def _wider_window(config: Any, **options: Any) -> Any:
    """A window in both directions that is a token wider."""
    from transformers.masking_utils import create_bidirectional_sliding_window_mask

    return create_bidirectional_sliding_window_mask(config=wrong.other_config(config, sliding_window=4), **options)


# --- experts for each token of an encoder -----------------------------------------------------------------------------


def _rotary_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    return turned(q), turned(k)


def _of_routers(name: str, parameter: nn.Parameter) -> bool:
    return ".router." in name


_LAYER, _FIRST = "model.layers.1", "model.layers.0"
PRIVACY_FILTER = table(
    "privacy_filter",
    ("window-wider", "model", uses("model", create_bidirectional_sliding_window_mask=_wider_window)),
    ("rotary-of-halves", f"{_FIRST}.self_attn", uses(f"{_FIRST}.self_attn", apply_rotary_pos_emb=_rotary_of_halves)),
    ("keys-not-scaled", f"{_LAYER}.self_attn", ("key_states = key_states * self.scaling", "pass")),
    (
        "softmax-over-all",
        f"{_FIRST}.mlp.router",
        (
            "softmax(router_top_value, dim=1, dtype=router_top_value.dtype)",
            "softmax(router_logits, dim=1).gather(1, router_indices)",
        ),
    ),
    ("scaled-once", f"{_LAYER}.mlp", ("hidden_states = hidden_states * self.num_experts", "pass")),
    (
        "gate-limited-below",
        f"{_FIRST}.mlp.experts",
        edits(
            f"{_FIRST}.mlp.experts",
            "gate.clamp(min=None, max=self.limit)",
            "gate.clamp(min=-self.limit, max=self.limit)",
            "_apply_gate",
        ),
    ),
    (
        "up-without-one",
        f"{_LAYER}.mlp.experts",
        edits(f"{_LAYER}.mlp.experts", "(up + 1) * glu", "up * glu", "_apply_gate"),
    ),
    (
        "bias-of-other-expert",
        f"{_LAYER}.mlp.experts",
        ("self.down_proj_bias[expert_idx].float()", "self.down_proj_bias[expert_idx - 1].float()"),
    ),
    (
        "router-detached",
        f"{_FIRST}.mlp.router",
        ("softmax(router_top_value, dim=1", "softmax(router_top_value.detach(), dim=1"),
        "backward",
    ),
    ("routers-too-fast", _of_routers, optimizes(_of_routers, {"lr": 1e-2}), "update"),
)


# --- words with further signs -----------------------------------------------------------------------------------------

_SIGNS, _ENCODER = "roc_bert.embeddings", "roc_bert.encoder.layer"
_SELF, _LAST_SELF = f"{_ENCODER}.0.attention.self", f"{_ENCODER}.1.attention.self"
ROC_BERT = table(
    "roc_bert",
    (
        "signs-swapped",
        "",
        (
            "input_shape_ids=input_shape_ids,\n        input_pronunciation_ids=input_pronunciation_ids",
            "input_shape_ids=input_pronunciation_ids,\n        input_pronunciation_ids=input_shape_ids",
        ),
    ),
    (
        "pronunciation-first",
        _SIGNS,
        (
            "torch.cat((embedding_in, embedding_pronunciation), -1)",
            "torch.cat((embedding_pronunciation, embedding_in), -1)",
        ),
    ),
    (
        "positions-one-later",
        _SIGNS,
        (
            "self.position_ids[:, past_key_values_length : seq_length + past_key_values_length]",
            "self.position_ids[:, 1 : seq_length + 1]",
        ),
    ),
    (
        "padding-seen",
        "roc_bert",
        edits(
            "roc_bert",
            "attention_mask=attention_mask,\n        )\n\n    if encoder",
            "attention_mask=None,\n        )\n\n    if encoder",
            "_create_attention_masks",
        ),
    ),
    ("causal", "roc_bert", uses("roc_bert", "_create_attention_masks", create_bidirectional_mask=wrong.causal_mask)),
    ("values-from-keys", _SELF, ("value_layer = self.value(hidden_states)", "value_layer = self.key(hidden_states)")),
    ("softmax-of-squares", _LAST_SELF, attends(_LAST_SELF, lambda call: {"scaling": call["scaling"] ** 2})),
    (
        "residual-doubled",
        f"{_ENCODER}.1",
        edits(
            f"{_ENCODER}.1",
            "self.output(intermediate_output, attention_output)",
            "self.output(intermediate_output, 2 * attention_output)",
            "feed_forward_chunk",
        ),
    ),
    (
        "gelu-by-tanh",
        f"{_ENCODER}.0.intermediate.intermediate_act_fn",
        does(f"{_ENCODER}.0.intermediate.intermediate_act_fn", wrong.gelu_by_tanh),
    ),
    (
        "tie-lost",
        ("roc_bert.embeddings.word_embeddings", "cls.predictions.decoder"),
        untied("cls.predictions.decoder"),
        "backward",
    ),
    ("signs-frozen", f"{_SIGNS}.shape_embed", told(f"{_SIGNS}.shape_embed", "requires_grad_", False), "backward"),
    ("decay-of-all", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
)


# --- characters and molecules; held out -------------------------------------------------------------------------------

_CHARS, _DOWN, _UP = "canine.char_embeddings", "canine.chars_to_molecules", "canine.projection"
CANINE = table(
    "canine",
    (
        "hash-without-one",
        _CHARS,
        edits(_CHARS, "((input_ids + 1) * prime)", "(input_ids * prime)", "_hash_bucket_tensors"),
    ),
    ("class-last", _DOWN, ("[cls_encoding, downsampled_truncated]", "[downsampled_truncated, cls_encoding]")),
    ("first-truncated", _DOWN, ("downsampled[:, 0:-1, :]", "downsampled[:, 1:, :]")),
    ("upsampled-late", "canine", edits("canine", "molecules[:, 1:, :]", "molecules[:, :-1, :]", "_repeat_molecules")),
    ("padded-before", _UP, ("(pad_beg, pad_end)", "(pad_total, 0)")),
    (
        "padding-in-molecules",
        "canine",
        edits(
            "canine",
            "poolable_char_mask.float()",
            "torch.ones_like(poolable_char_mask).float()",
            "_downsample_attention_mask",
        ),
    ),
    (
        "local-mask-missing",
        "canine",
        ("attention_mask=char_attention_mask,", "attention_mask=torch.ones_like(char_attention_mask),"),
    ),
    (
        "characters-detached",
        "canine",
        (
            "torch.cat([input_char_encoding, repeated_molecules]",
            "torch.cat([input_char_encoding.detach(), repeated_molecules]",
        ),
        "backward",
    ),
    ("norm-epsilon", f"{_UP}.LayerNorm", {"eps": 1e-1}),
    (
        "scaled-twice",
        "canine.encoder.layer.1.attention.self",
        ("attention_scores / math.sqrt(self.attention_head_size)", "attention_scores / self.attention_head_size"),
    ),
    ("warm-up-forgotten", every, trains(schedule=lambda step: 0.5 + 0.5 * step), "update"),
)


# --- a text and the image of its page ---------------------------------------------------------------------------------

_PAGE, _PLACES = "layoutlmv3", "layoutlmv3.encoder"
_LOOKS = f"{_PLACES}.layer"
LAYOUTLMV3 = table(
    "layoutlmv3",
    (
        "lower-for-upper",
        _PLACES,
        edits(_PLACES, "position_coord_y = bbox[:, :, 3]", "position_coord_y = bbox[:, :, 1]", "_cal_2d_pos_emb"),
    ),
    (
        "direction-reversed",
        _PLACES,
        edits(
            _PLACES,
            "position_ids.unsqueeze(-2) - position_ids.unsqueeze(-1)",
            "position_ids.unsqueeze(-1) - position_ids.unsqueeze(-2)",
            "_cal_1d_pos_emb",
        ),
    ),
    (
        "bias-not-scaled",
        f"{_LOOKS}.0.attention.self",
        ("(rel_pos + rel_2d_pos) / math.sqrt(self.attention_head_size)", "rel_pos + rel_2d_pos"),
    ),
    ("image-hidden", _PAGE, ("visual_attention_mask = torch.ones(", "visual_attention_mask = torch.zeros(")),
    (
        "image-before-text",
        _PAGE,
        (
            "torch.cat([embedding_output, visual_embeddings], dim=1)",
            "torch.cat([visual_embeddings, embedding_output], dim=1)",
        ),
    ),
    (
        "positions-of-image-after-text",
        _PAGE,
        (
            "torch.cat([position_ids, visual_position_ids], dim=1)",
            "torch.cat([position_ids, visual_position_ids + input_shape[1]], dim=1)",
        ),
    ),
    ("patches-without-positions", _PAGE, edits(_PAGE, "if self.pos_embed is not None:", "if False:", "forward_image")),
    ("norm-skipped", _PAGE, ("embedding_output = self.LayerNorm(embedding_output)", "pass")),
    (
        "sizes-swapped",
        f"{_PAGE}.embeddings",
        edits(
            f"{_PAGE}.embeddings",
            "h_position_embeddings,\n            w_position_embeddings,",
            "w_position_embeddings,\n            h_position_embeddings,",
            "calculate_spatial_position_embeddings",
        ),
    ),
    (
        "table-not-loaded",
        f"{_PLACES}.rel_pos_x_bias",
        holds(f"{_PLACES}.rel_pos_x_bias", "weight", torch.zeros_like),
        "state",
    ),
    ("dropout-left-on", f"{_LOOKS}.1.output.dropout", {"p": 0.1}),
)


# --- blocks of keys ---------------------------------------------------------------------------------------------------


def _next_block_left_out(x: Tensor, block_dim: int, sequence_dim: int, pad_value: int = 0) -> Tensor:
    """The third block is the second one again."""
    from transformers.models.longt5.modeling_longt5 import _concatenate_3_blocks

    first, second, _ = _concatenate_3_blocks(x, block_dim, sequence_dim, pad_value).chunk(3, sequence_dim)
    return torch.cat((first, second, second), sequence_dim)


def _not_local(mask: Tensor, block_len: int, device: Any) -> Tensor:
    from transformers.models.longt5 import modeling_longt5 as longt5

    blocks = longt5._split_into_blocks(mask, block_len, 1)
    keys = longt5._concatenate_3_blocks(blocks, 1, 2)
    return torch.logical_and(blocks[..., None], keys[:, :, None])[:, None]


_LOCAL = "encoder.block.0.layer.0.LocalSelfAttention"
_WRITES = "decoder.block.1.layer"
LONGT5 = table(
    "longt5",
    (
        "block-repeated",
        "encoder.block.1.layer.0.LocalSelfAttention",
        uses("encoder.block.1.layer.0.LocalSelfAttention", _concatenate_3_blocks=_next_block_left_out),
    ),
    ("whole-blocks-seen", "encoder", uses("encoder", _get_local_attention_mask=_not_local)),
    (
        "one-direction",
        _LOCAL,
        edits(_LOCAL, "bidirectional=(not self.is_decoder)", "bidirectional=False", "compute_bias"),
    ),
    ("scaled", _LOCAL, ("scores += position_bias", "scores = scores * 8**-0.5 + position_bias")),
    ("padding-of-source-seen", "", ("encoder_attention_mask=attention_mask,", "encoder_attention_mask=None,")),
    (
        "distances-shifted",
        "decoder.block.0.layer.0.SelfAttention",
        edits(
            "decoder.block.0.layer.0.SelfAttention",
            "memory_position - context_position",
            "memory_position - context_position + 1",
            "compute_bias",
        ),
    ),
    (
        "not-normed",
        f"{_WRITES}.1",
        ("self.EncDecAttention(\n        normed_hidden_states,", "self.EncDecAttention(\n        hidden_states,"),
    ),
    (
        "gate-and-up-swapped",
        f"{_WRITES}.2.DenseReluDense",
        (
            "self.act(self.wi_0(hidden_states))\n    hidden_linear = self.wi_1(hidden_states)",
            "self.act(self.wi_1(hidden_states))\n    hidden_linear = self.wi_0(hidden_states)",
        ),
    ),
    (
        "mean-subtracted",
        "encoder.final_layer_norm",
        (
            "hidden_states.to(torch.float32).pow(2)",
            "(hidden_states - hidden_states.mean(-1, keepdim=True)).to(torch.float32).pow(2)",
        ),
    ),
    (
        "source-detached",
        "",
        ("encoder_hidden_states=hidden_states,", "encoder_hidden_states=hidden_states.detach(),"),
        "backward",
    ),
    (
        "labels-as-inputs",
        "",
        ("decoder_input_ids = self._shift_right(labels)", "decoder_input_ids = labels.clamp(min=0)"),
    ),
    ("rate-doubled-later", every, trains(schedule=lambda step: 1.0 + step), "update"),
)


# --- periods of a series ----------------------------------------------------------------------------------------------


def _of_projections(name: str, parameter: nn.Parameter) -> bool:
    return "trend_projection" in name


_HEARS, _TELLS = "model.encoder.layers", "model.decoder.layers"
AUTOFORMER = table(
    "autoformer",
    (
        "rolled-forward",
        f"{_HEARS}.0.self_attn",
        ("shifts=-int(top_k_delays_index[i])", "shifts=int(top_k_delays_index[i])"),
    ),
    (
        "correlation-of-keys",
        f"{_TELLS}.0.encoder_attn",
        ("query_states_fft * torch.conj(key_states_fft)", "torch.conj(query_states_fft) * key_states_fft"),
    ),
    ("fewer-periods", f"{_HEARS}.1.self_attn", {"autocorrelation_factor": 1}),
    ("trend-of-ends-zero", f"{_TELLS}.1.decomp2", ("front = x[:, 0:1, :].repeat", "front = 0 * x[:, 0:1, :].repeat")),
    (
        "trend-left-out",
        f"{_TELLS}.0",
        ("residual_trend = trend1 + trend2 + trend3", "residual_trend = trend1 + trend3"),
    ),
    ("trend-not-summed", "model.decoder", ("trend = trend + residual_trend", "trend = residual_trend")),
    ("trend-not-added", "", ("outputs.last_hidden_state + outputs.trend", "outputs.last_hidden_state")),
    ("mean-over-time-kept", "model.encoder.layers.0.final_layer_norm", ("return x_hat - bias", "return x_hat")),
    ("unobserved-counted", "model.scaler", ("(data * observed_indicator).abs()", "data.abs()")),
    (
        "lags-one-off",
        "model",
        edits("model", "[lag - shift for lag", "[lag - 1 - shift for lag", "get_lagged_subsequences"),
    ),
    (
        "encoder-detached",
        "model",
        (
            "encoder_hidden_states=encoder_outputs.last_hidden_state,",
            "encoder_hidden_states=encoder_outputs.last_hidden_state.detach(),",
        ),
        "backward",
    ),
    ("trend-decays", _of_projections, optimizes(_of_projections, {"weight_decay": 0.0}), "update"),
)

MISTAKES = [*PRIVACY_FILTER, *ROC_BERT, *CANINE, *LAYOUTLMV3, *LONGT5, *AUTOFORMER]
