"""Mistakes in newer encoders and vision models that rules may be tuned on, as bug reports describe them."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import attends, does, holds, optimizes, returns, told, trains

BART = table(
    "bart",
    (
        "start-token",
        "",
        ("self.config.pad_token_id, self.config.decoder_start_token_id", "self.config.pad_token_id, 1"),
    ),
    ("position-offset", "model.encoder.embed_positions", {"offset": 1}),
    ("cross-mask-dropped", "model", ("encoder_attention_mask=attention_mask", "encoder_attention_mask=None")),
    (
        "cross-norm-skipped",
        "model.decoder.layers.1",
        ("hidden_states = self.encoder_attn_layer_norm(hidden_states)", "pass"),
    ),
    ("logits-bias", "", holds("", "final_logits_bias", lambda bias: bias + 0.1), "state"),
    ("labels-smoothed", "", ("CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.1)")),
    (
        "encoder-cut",
        "model",
        ("encoder_hidden_states=encoder_outputs[0]", "encoder_hidden_states=encoder_outputs[0].detach()"),
        "backward",
    ),
    (
        "one-layer-decays",
        lambda name, parameter: name == "model.decoder.layers.0.fc1.weight",
        optimizes(lambda name, parameter: name == "model.decoder.layers.0.fc1.weight", {"weight_decay": 0.0}),
        "update",
    ),
)

ELECTRA = table(
    "electra",
    ("tanh-for-gelu", "classifier", ("self.activation(x)", "torch.tanh(x)")),
    ("token-types-left-out", "electra.embeddings", ("inputs_embeds + token_type_embeddings", "inputs_embeds")),
    (
        "padding-dropped",
        "electra",
        (
            "_create_attention_masks(\n        attention_mask=attention_mask,",
            "_create_attention_masks(\n        attention_mask=None,",
        ),
    ),
    ("epsilon", "electra.encoder.layer.1.output.LayerNorm", {"eps": 1e-5}),
    ("dropout-left-on", "electra.encoder.layer.0.attention.output.dropout", {"p": 0.1}),
    (
        "head-slower",
        lambda name, parameter: name.startswith("classifier"),
        optimizes(lambda name, parameter: name.startswith("classifier"), {"lr": 9e-4}),
        "update",
    ),
    (
        "query-and-key-swapped",
        "electra.encoder.layer.1.attention.self",
        attends("electra.encoder.layer.1.attention.self", lambda call: {"query": call["key"], "key": call["query"]}),
    ),
)

_SHARED = "albert.encoder.albert_layer_groups.0.albert_layers.0"
ALBERT = table(
    "albert",
    ("gelu-by-erf", f"{_SHARED}.activation", does(f"{_SHARED}.activation", wrong.gelu)),
    (
        "residual-dropped",
        _SHARED,
        ("self.full_layer_layer_norm(ffn_output + attention_output)", "self.full_layer_layer_norm(ffn_output)"),
    ),
    (
        "second-pass-cut",
        "albert.encoder",
        (
            "            hidden_states,\n            attention_mask,",
            "            hidden_states.detach() if i else hidden_states,\n            attention_mask,",
        ),
        "backward",
    ),
    (
        "mask-dropped",
        "albert",
        ("        attention_mask=attention_mask,\n    )", "        attention_mask=None,\n    )"),
    ),
    ("pooled-from-last", "albert", ("self.pooler(sequence_output[:, 0])", "self.pooler(sequence_output[:, -1])")),
)

_DINO = "dinov2.encoder.layer"
DINOV2 = table(
    "dinov2",
    ("layer-scale-missing", f"{_DINO}.1", ("hidden_states = self.layer_scale1(hidden_states)", "pass")),
    (
        "positions-flipped",
        "dinov2.embeddings",
        holds("dinov2.embeddings", "position_embeddings", lambda table: table.flip(1)),
        "state",
    ),
    ("class-token-in-mean", "", ("patch_tokens = sequence_output[:, 1:]", "patch_tokens = sequence_output")),
    ("epsilon", f"{_DINO}.0.norm2", {"eps": 1e-4}),
    ("beta1", every, trains(adam={"betas": (0.85, 0.999)}), "update"),
    ("gradient-doubled", f"{_DINO}.1.norm1", returns(f"{_DINO}.1.norm1", wrong.Doubled.apply), "backward"),
)

_STAGE = "regnet.encoder.stages"
REGNET = table(
    "regnet",
    ("momentum", f"{_STAGE}.0.layers.0.layer.0.normalization", {"momentum": 0.01}, "update"),
    (
        "norm-in-evaluation",
        f"{_STAGE}.1.layers.1.layer.1.normalization",
        told(f"{_STAGE}.1.layers.1.layer.1.normalization", "eval"),
    ),
    ("excitation-added", f"{_STAGE}.1.layers.0.layer.2", ("hidden_state * attention", "hidden_state + attention")),
    (
        "activation-before-sum",
        f"{_STAGE}.1.layers.1",
        (
            "hidden_state += residual\n    hidden_state = self.activation(hidden_state)",
            "hidden_state = self.activation(hidden_state)\n    hidden_state = hidden_state + residual",
        ),
    ),
    ("running-mean-kept", f"{_STAGE}.2.layers.0.shortcut.normalization", {"momentum": 0.0}, "update"),
)

MISTAKES = [*BART, *ELECTRA, *ALBERT, *DINOV2, *REGNET]
