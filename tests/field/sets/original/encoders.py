"""Mistakes in encoders, and in models of both, that the comparison's rules may be tuned on."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, edits, holds, optimizes, trains

_LAYER = "bert.encoder.layer"

BERT = table(
    "bert",
    ("token-types-forgotten", "bert.embeddings", ("inputs_embeds + token_type_embeddings", "inputs_embeds")),
    (
        "padding-dropped",
        "bert",
        (
            "        attention_mask=attention_mask,\n        encoder_hidden",
            "        attention_mask=None,\n        encoder_hidden",
        ),
    ),
    (
        "mask-ignored",
        f"{_LAYER}.1.attention.self",
        attends(f"{_LAYER}.1.attention.self", lambda call: {"attention_mask": None}),
    ),
    ("layer-norm-epsilon", f"{_LAYER}.0.output.LayerNorm", {"eps": 1e-5}),
    ("pooled-last", "bert.pooler", ("hidden_states[:, 0]", "hidden_states[:, -1]")),
    (
        "residual-outside-norm",
        f"{_LAYER}.1.attention.output",
        ("self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states) + input_tensor"),
    ),
    (
        "classifier-not-optimized",
        "classifier",
        optimizes(lambda name, parameter: name.startswith("classifier"), None),
        "update",
    ),
    ("labels-smoothed", "", ("CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.1)")),
    (
        "gelu-by-tanh",
        f"{_LAYER}.1.intermediate.intermediate_act_fn",
        does(f"{_LAYER}.1.intermediate.intermediate_act_fn", wrong.gelu_by_tanh),
    ),
    ("random-state", "bert.embeddings.dropout", trains(seed=3)),
)

_DECODER, _ENCODER = "decoder.block", "encoder.block"

T5 = table(
    "t5",
    ("scale-added", f"{_DECODER}.1.layer.0.SelfAttention", {"scaling": 8**-0.5}),
    (
        "norm-centred",
        f"{_ENCODER}.0.layer.1.layer_norm",
        ("variance = ", "hidden_states = hidden_states - hidden_states.mean(-1, keepdim=True)\n    variance = "),
    ),
    (
        "bias-for-both-directions",
        f"{_DECODER}.0.layer.0.SelfAttention",
        edits(
            f"{_DECODER}.0.layer.0.SelfAttention",
            "bidirectional=(not self.is_decoder)",
            "bidirectional=True",
            "compute_bias",
        ),
    ),
    (
        "encoder-cut-off",
        "",
        ("encoder_hidden_states=hidden_states,", "encoder_hidden_states=hidden_states.detach(),"),
        "backward",
    ),
    ("logits-not-scaled", "", ("if self.config.scale_decoder_outputs:", "if False:")),
    ("cleared-between-micro-batches", every, wrong.cleared_between, "update"),
    (
        "gelu-for-relu",
        f"{_ENCODER}.1.layer.1.DenseReluDense.act",
        does(f"{_ENCODER}.1.layer.1.DenseReluDense.act", wrong.gelu),
    ),
    (
        "feed-forward-residual-cut",
        f"{_DECODER}.1.layer.2",
        ("self.DenseReluDense(forwarded_states)", "self.DenseReluDense(forwarded_states.detach())"),
        "backward",
    ),
)

WHISPER = table(
    "whisper",
    (
        "activation-skipped",
        "model.encoder",
        ("nn.functional.gelu(self.conv1(input_features))", "self.conv1(input_features)"),
    ),
    ("positions-not-added", "model.encoder", ("inputs_embeds + self.embed_positions(all_positions)", "inputs_embeds")),
    (
        "encoder-cut-off",
        "model",
        ("encoder_hidden_states=encoder_outputs[0]", "encoder_hidden_states=encoder_outputs[0].detach()"),
        "backward",
    ),
    (
        "cross-attention-to-itself",
        "model.decoder.layers.0",
        ("key_value_states=encoder_hidden_states", "key_value_states=hidden_states"),
    ),
    (
        "one-row-of-weight",
        "model.encoder.layers.1.fc1",
        holds("model.encoder.layers.1.fc1", "weight", wrong.element((11,), 0.0)),
        "state",
    ),
)

DEBERTA = table(
    "deberta",
    (
        "scale-without-positions",
        "deberta.encoder.layer.1.attention.self",
        ("scaled_size_sqrt(query_layer, scale_factor)", "scaled_size_sqrt(query_layer, 1)"),
    ),
    (
        "relative-positions-detached",
        "deberta.encoder.layer.0.attention.self",
        ("attention_scores = attention_scores + rel_att", "attention_scores = attention_scores + rel_att.detach()"),
        "backward",
    ),
    ("slow-rate", every, optimizes(lambda name, parameter: True, {"lr": 9e-4}), "update"),
)

MISTAKES = [*BERT, *T5, *WHISPER, *DEBERTA]
