"""Mistakes in the models of images, videos and sound of the ninth blind trial."""

from __future__ import annotations

from torch import nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, edits, optimizes, told, trains


def _of_offsets(name: str, parameter: nn.Parameter) -> bool:
    return "sampling_offsets" in name


# --- objects at points that are sampled -------------------------------------------------------------------------------

_FINDS = "model.decoder"
DEFORMABLE_DETR = table(
    "deformable_detr",
    (
        "offsets-halved",
        "model.encoder.layers.0.self_attn",
        (" / offset_normalizer[None", " / (2 * offset_normalizer)[None"),
    ),
    ("corners-aligned", f"{_FINDS}.layers.0.encoder_attn.attn", ("align_corners=False", "align_corners=True")),
    (
        "margin-read",
        "model.encoder.layers.1.self_attn",
        ("value.masked_fill(~attention_mask[..., None], float(0))", "1 * value"),
    ),
    (
        "points-not-normalised",
        f"{_FINDS}.layers.1.encoder_attn",
        ("sampling_offsets / self.n_points * reference", "sampling_offsets * reference"),
    ),
    (
        "weights-by-level",
        "model.encoder.layers.0.self_attn",
        (
            "F.softmax(attention_weights, -1)",
            "(F.softmax(attention_weights.unflatten(-1, (self.n_levels, -1)), -1) / self.n_levels).flatten(-2)",
        ),
    ),
    ("levels-not-embedded", "model", ("pos_embed + self.level_embed[level].view(1, 1, -1)", "pos_embed")),
    (
        "margin-ignored-in-ratio",
        "model",
        (
            "[self.get_valid_ratio(m, dtype=source_flatten.dtype) for m in masks]",
            "[self.get_valid_ratio(torch.ones_like(m), dtype=source_flatten.dtype) for m in masks]",
        ),
    ),
    ("boxes-not-refined", _FINDS, ("if self.bbox_embed is not None:", "if False:")),
    ("points-not-detached", _FINDS, ("new_reference_points.detach()", "new_reference_points"), "backward"),
    ("box-without-reference", "", ("delta_bbox + reference", "delta_bbox")),
    (
        "positions-of-queries-missing",
        f"{_FINDS}.layers.1.self_attn",
        ("hidden_states + position_embeddings if position_embeddings is not None else", "hidden_states if True else"),
    ),
    ("offsets-too-slow", _of_offsets, optimizes(_of_offsets, {"lr": 1e-4}), "update"),
)


# --- time and space in turns ------------------------------------------------------------------------------------------

_SEES = "timesformer.encoder.layer"
TIMESFORMER = table(
    "timesformer",
    (
        "patch-for-class",
        "timesformer.embeddings",
        ("embeddings[:batch_size, 0, :].unsqueeze(1)", "embeddings[:batch_size, 1, :].unsqueeze(1)"),
    ),
    ("time-and-space-swapped", f"{_SEES}.0", ("        .permute(0, 3, 1, 2, 4)\n", "")),
    (
        "time-residual-lost",
        f"{_SEES}.1",
        ("temporal_embedding = hidden_states[:, 1:, :] + residual_temporal", "temporal_embedding = residual_temporal"),
    ),
    ("dense-skipped", f"{_SEES}.0", ("residual_temporal = self.temporal_dense(residual_temporal)", "pass")),
    ("class-of-first-frame", f"{_SEES}.1", ("torch.mean(cls_token, 1, True)", "cls_token[:, :1]")),
    ("class-not-averaged", f"{_SEES}.0", ("torch.mean(cls_token, 1, True)", "torch.sum(cls_token, 1, True)")),
    ("time-not-embedded", "timesformer.embeddings", ("embeddings = embeddings + self.time_embeddings\n", "pass\n")),
    ("scaled-by-width", f"{_SEES}.0.temporal_attention.attention", {"scale": 32**-0.5}),
    (
        "queries-and-keys-swapped",
        f"{_SEES}.1.attention.attention",
        ("qkv[0], qkv[1], qkv[2]", "qkv[1], qkv[0], qkv[2]"),
    ),
    (
        "time-detached",
        f"{_SEES}.1",
        ("self.temporal_layernorm(temporal_embedding)", "self.temporal_layernorm(temporal_embedding.detach())"),
        "backward",
    ),
    (
        "relu-for-gelu",
        f"{_SEES}.0.intermediate.intermediate_act_fn",
        does(f"{_SEES}.0.intermediate.intermediate_act_fn", wrong.relu),
    ),
    ("epsilon-of-optimizer", every, trains(adam={"eps": 1e-3}), "update"),
)


# --- images in twice the size; held out -------------------------------------------------------------------------------

_STAGE = "swin2sr.encoder.stages"
_NORMED = "hidden_states = self.layernorm_before"
SWIN2SR = table(
    "swin2sr",
    (
        "shift-not-undone",
        f"{_STAGE}.0.layers.1",
        ("shifts=(self.shift_size, self.shift_size)", "shifts=(-self.shift_size, -self.shift_size)"),
    ),
    (
        "mask-missing",
        f"{_STAGE}.1.layers.1",
        edits(f"{_STAGE}.1.layers.1", "if self.shift_size <= 0:", "if True:", "get_attn_mask"),
    ),
    (
        "norm-before",
        f"{_STAGE}.0.layers.0",
        (
            f"{_NORMED}(attention_windows)\n    hidden_states = shortcut + self.drop_path(hidden_states)",
            f"{_NORMED}(shortcut + self.drop_path(attention_windows))",
        ),
    ),
    (
        "keys-not-normalised",
        f"{_STAGE}.0.layers.0.attention.self",
        ("nn.functional.normalize(\n        key_layer, dim=-1\n    )", "key_layer"),
    ),
    ("scale-clamped-lower", f"{_STAGE}.1.layers.0.attention.self", ("max=math.log(1.0 / 0.01)", "max=math.log(2.0)")),
    (
        "bias-without-sigmoid",
        f"{_STAGE}.0.layers.1.attention.self",
        ("16 * torch.sigmoid(relative_position_bias)", "relative_position_bias"),
    ),
    ("stage-residual-lost", f"{_STAGE}.1", ("hidden_states = hidden_states + residual", "pass")),
    (
        "input-not-added",
        "swin2sr",
        ("self.conv_after_body(sequence_output) + embeddings", "self.conv_after_body(sequence_output)"),
    ),
    (
        "mean-not-restored",
        "",
        ("reconstruction / self.swin2sr.img_range + self.swin2sr.mean", "reconstruction / self.swin2sr.img_range"),
    ),
    (
        "channels-mixed",
        "upsample.upsample",
        (
            'hidden_state = self.__getattr__(f"convolution_{i}")(hidden_state)',
            'hidden_state = self.__getattr__(f"convolution_{i}")(hidden_state).roll(1, 1)',
        ),
    ),
    ("slope-of-activation", "upsample.activation", {"negative_slope": 0.2}),
    ("first-moment", every, trains(adam={"betas": (0.8, 0.999)}), "update"),
)


# --- a text that is read aloud ----------------------------------------------------------------------------------------

_TEXT, _VOICE = "speecht5.encoder.wrapped_encoder", "speecht5.decoder.wrapped_decoder"
_BEFORE, _AFTER = "speecht5.decoder.prenet", "speech_decoder_postnet"
_FED = "self.feed_forward(hidden_states)"
_FRAMES = "\n                labels, self.config.reduction_factor, decoder_attention_mask\n            "
SPEECHT5 = table(
    "speecht5",
    ("speaker-not-normalised", _BEFORE, ("speaker_embeddings = nn.functional.normalize(speaker_embeddings)", "pass")),
    (
        "dropout-left-out",
        _BEFORE,
        edits(
            _BEFORE,
            "torch.where(all_masks == 1, inputs_embeds, 0) * 1 / (1 - p)",
            "inputs_embeds",
            "_consistent_dropout",
        ),
    ),
    ("dropout-not-rescaled", _BEFORE, edits(_BEFORE, "* 1 / (1 - p)", "", "_consistent_dropout")),
    ("positions-not-scaled", "speecht5.encoder.prenet.encode_positions", ("self.alpha * self.pe[", "self.pe[")),
    (
        "distances-reversed",
        f"{_TEXT}.embed_positions",
        ("pos_seq[:, None] - pos_seq[None, :]", "pos_seq[None, :] - pos_seq[:, None]"),
    ),
    ("distances-not-added", f"{_TEXT}.layers.1.attention", ("attn_weights += rel_pos_bias", "pass")),
    (
        "padding-of-text-heard",
        "speecht5",
        ("encoder_attention_mask = attention_mask\n", "encoder_attention_mask = None\n"),
    ),
    (
        "norm-before-residual",
        f"{_VOICE}.layers.0",
        (
            f"hidden_states + {_FED}\n    hidden_states = self.final_layer_norm(hidden_states)",
            f"hidden_states + self.final_layer_norm({_FED})",
        ),
    ),
    (
        "refinement-lost",
        _AFTER,
        edits(
            _AFTER,
            "return hidden_states + layer_output.transpose(1, 2)",
            "return layer_output.transpose(1, 2)",
            "postnet",
        ),
    ),
    (
        "refinement-detached",
        _AFTER,
        ("self.postnet(outputs_before_postnet)", "self.postnet(outputs_before_postnet.detach())"),
        "backward",
    ),
    (
        "frames-not-shifted",
        "",
        (
            f"shift_spectrograms_right({_FRAMES})",
            "labels.masked_fill(labels == -100, 0), decoder_attention_mask",
        ),
    ),
    ("momentum", f"{_AFTER}.layers.0.batch_norm", {"momentum": 0.01}, "update"),
    ("statistics-of-population", f"{_AFTER}.layers.1.batch_norm", told(f"{_AFTER}.layers.1.batch_norm", "eval")),
)

MISTAKES = [*DEFORMABLE_DETR, *TIMESFORMER, *SWIN2SR, *SPEECHT5]
