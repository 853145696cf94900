"""Mistakes in encoders, and in models of both, that the comparison's rules may be tuned on."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every
from .patches import attends, does, edits, has, holds, optimizes, trains

_LAYER = "bert.encoder.layer"

BERT = [
    Mistake(
        "token-types-forgotten",
        "bert",
        "bert.embeddings",
        "forward",
        edits("bert.embeddings", "inputs_embeds + token_type_embeddings", "inputs_embeds"),
    ),
    Mistake(
        "padding-dropped",
        "bert",
        "bert",
        "forward",
        edits(
            "bert",
            "        attention_mask=attention_mask,\n        encoder_hidden",
            "        attention_mask=None,\n        encoder_hidden",
        ),
    ),
    Mistake(
        "mask-ignored",
        "bert",
        f"{_LAYER}.1.attention.self",
        "forward",
        attends(f"{_LAYER}.1.attention.self", lambda call: {"attention_mask": None}),
    ),
    Mistake(
        "layer-norm-epsilon",
        "bert",
        f"{_LAYER}.0.output.LayerNorm",
        "forward",
        has(f"{_LAYER}.0.output.LayerNorm", eps=1e-5),
    ),
    Mistake(
        "pooled-last",
        "bert",
        "bert.pooler",
        "forward",
        edits("bert.pooler", "hidden_states[:, 0]", "hidden_states[:, -1]"),
    ),
    Mistake(
        "residual-outside-norm",
        "bert",
        f"{_LAYER}.1.attention.output",
        "forward",
        edits(
            f"{_LAYER}.1.attention.output",
            "self.LayerNorm(hidden_states + input_tensor)",
            "self.LayerNorm(hidden_states) + input_tensor",
        ),
    ),
    Mistake(
        "classifier-not-optimized",
        "bert",
        "classifier",
        "update",
        optimizes(lambda name, parameter: name.startswith("classifier"), None),
    ),
    Mistake(
        "labels-smoothed",
        "bert",
        "",
        "forward",
        edits("", "CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.1)"),
    ),
    Mistake(
        "gelu-by-tanh",
        "bert",
        f"{_LAYER}.1.intermediate.intermediate_act_fn",
        "forward",
        does(f"{_LAYER}.1.intermediate.intermediate_act_fn", wrong.gelu_by_tanh),
    ),
    Mistake("random-state", "bert", "bert.embeddings.dropout", "forward", trains(seed=3)),
]

_DECODER, _ENCODER = "decoder.block", "encoder.block"

T5 = [
    Mistake(
        "scale-added",
        "t5",
        f"{_DECODER}.1.layer.0.SelfAttention",
        "forward",
        has(f"{_DECODER}.1.layer.0.SelfAttention", scaling=8**-0.5),
    ),
    Mistake(
        "norm-centred",
        "t5",
        f"{_ENCODER}.0.layer.1.layer_norm",
        "forward",
        edits(
            f"{_ENCODER}.0.layer.1.layer_norm",
            "variance = ",
            "hidden_states = hidden_states - hidden_states.mean(-1, keepdim=True)\n    variance = ",
        ),
    ),
    Mistake(
        "bias-for-both-directions",
        "t5",
        f"{_DECODER}.0.layer.0.SelfAttention",
        "forward",
        edits(
            f"{_DECODER}.0.layer.0.SelfAttention",
            "bidirectional=(not self.is_decoder)",
            "bidirectional=True",
            "compute_bias",
        ),
    ),
    Mistake(
        "encoder-cut-off",
        "t5",
        "",
        "backward",
        edits("", "encoder_hidden_states=hidden_states,", "encoder_hidden_states=hidden_states.detach(),"),
    ),
    Mistake("logits-not-scaled", "t5", "", "forward", edits("", "if self.config.scale_decoder_outputs:", "if False:")),
    Mistake("cleared-between-micro-batches", "t5", every, "update", wrong.cleared_between),
    Mistake(
        "gelu-for-relu",
        "t5",
        f"{_ENCODER}.1.layer.1.DenseReluDense.act",
        "forward",
        does(f"{_ENCODER}.1.layer.1.DenseReluDense.act", wrong.gelu),
    ),
    Mistake(
        "feed-forward-residual-cut",
        "t5",
        f"{_DECODER}.1.layer.2",
        "backward",
        edits(
            f"{_DECODER}.1.layer.2",
            "self.DenseReluDense(forwarded_states)",
            "self.DenseReluDense(forwarded_states.detach())",
        ),
    ),
]

WHISPER = [
    Mistake(
        "activation-skipped",
        "whisper",
        "model.encoder",
        "forward",
        edits("model.encoder", "nn.functional.gelu(self.conv1(input_features))", "self.conv1(input_features)"),
    ),
    Mistake(
        "positions-not-added",
        "whisper",
        "model.encoder",
        "forward",
        edits("model.encoder", "inputs_embeds + self.embed_positions(all_positions)", "inputs_embeds"),
    ),
    Mistake(
        "encoder-cut-off",
        "whisper",
        "model",
        "backward",
        edits("model", "encoder_hidden_states=encoder_outputs[0]", "encoder_hidden_states=encoder_outputs[0].detach()"),
    ),
    Mistake(
        "cross-attention-to-itself",
        "whisper",
        "model.decoder.layers.0",
        "forward",
        edits("model.decoder.layers.0", "key_value_states=encoder_hidden_states", "key_value_states=hidden_states"),
    ),
    Mistake(
        "one-row-of-weight",
        "whisper",
        "model.encoder.layers.1.fc1",
        "state",
        holds("model.encoder.layers.1.fc1", "weight", wrong.element((11,), 0.0)),
    ),
]

DEBERTA = [
    Mistake(
        "scale-without-positions",
        "deberta",
        "deberta.encoder.layer.1.attention.self",
        "forward",
        edits(
            "deberta.encoder.layer.1.attention.self",
            "scaled_size_sqrt(query_layer, scale_factor)",
            "scaled_size_sqrt(query_layer, 1)",
        ),
    ),
    Mistake(
        "relative-positions-detached",
        "deberta",
        "deberta.encoder.layer.0.attention.self",
        "backward",
        edits(
            "deberta.encoder.layer.0.attention.self",
            "attention_scores = attention_scores + rel_att",
            "attention_scores = attention_scores + rel_att.detach()",
        ),
    ),
    Mistake("slow-rate", "deberta", every, "update", optimizes(lambda name, parameter: True, {"lr": 9e-4})),
]

ENCODERS = [*BERT, *T5, *WHISPER, *DEBERTA]
