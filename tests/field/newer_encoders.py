"""Mistakes in newer encoders and vision models that rules may be tuned on, as bug reports describe them."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every
from .patches import attends, does, edits, has, holds, optimizes, returns, told, trains

BART = [
    Mistake(
        "start-token",
        "bart",
        "",
        "forward",
        edits("", "self.config.pad_token_id, self.config.decoder_start_token_id", "self.config.pad_token_id, 1"),
    ),
    Mistake(
        "position-offset",
        "bart",
        "model.encoder.embed_positions",
        "forward",
        has("model.encoder.embed_positions", offset=1),
    ),
    Mistake(
        "cross-mask-dropped",
        "bart",
        "model",
        "forward",
        edits("model", "encoder_attention_mask=attention_mask", "encoder_attention_mask=None"),
    ),
    Mistake(
        "cross-norm-skipped",
        "bart",
        "model.decoder.layers.1",
        "forward",
        edits("model.decoder.layers.1", "hidden_states = self.encoder_attn_layer_norm(hidden_states)", "pass"),
    ),
    Mistake("logits-bias", "bart", "", "state", holds("", "final_logits_bias", lambda bias: bias + 0.1)),
    Mistake(
        "labels-smoothed",
        "bart",
        "",
        "forward",
        edits("", "CrossEntropyLoss()", "CrossEntropyLoss(label_smoothing=0.1)"),
    ),
    Mistake(
        "encoder-cut",
        "bart",
        "model",
        "backward",
        edits("model", "encoder_hidden_states=encoder_outputs[0]", "encoder_hidden_states=encoder_outputs[0].detach()"),
    ),
    Mistake(
        "one-layer-decays",
        "bart",
        lambda name, parameter: name == "model.decoder.layers.0.fc1.weight",
        "update",
        optimizes(lambda name, parameter: name == "model.decoder.layers.0.fc1.weight", {"weight_decay": 0.0}),
    ),
]

ELECTRA = [
    Mistake(
        "tanh-for-gelu", "electra", "classifier", "forward", edits("classifier", "self.activation(x)", "torch.tanh(x)")
    ),
    Mistake(
        "token-types-left-out",
        "electra",
        "electra.embeddings",
        "forward",
        edits("electra.embeddings", "inputs_embeds + token_type_embeddings", "inputs_embeds"),
    ),
    Mistake(
        "padding-dropped",
        "electra",
        "electra",
        "forward",
        edits(
            "electra",
            "_create_attention_masks(\n        attention_mask=attention_mask,",
            "_create_attention_masks(\n        attention_mask=None,",
        ),
    ),
    Mistake(
        "epsilon",
        "electra",
        "electra.encoder.layer.1.output.LayerNorm",
        "forward",
        has("electra.encoder.layer.1.output.LayerNorm", eps=1e-5),
    ),
    Mistake(
        "dropout-left-on",
        "electra",
        "electra.encoder.layer.0.attention.output.dropout",
        "forward",
        has("electra.encoder.layer.0.attention.output.dropout", p=0.1),
    ),
    Mistake(
        "head-slower",
        "electra",
        lambda name, parameter: name.startswith("classifier"),
        "update",
        optimizes(lambda name, parameter: name.startswith("classifier"), {"lr": 9e-4}),
    ),
    Mistake(
        "query-and-key-swapped",
        "electra",
        "electra.encoder.layer.1.attention.self",
        "forward",
        attends("electra.encoder.layer.1.attention.self", lambda call: {"query": call["key"], "key": call["query"]}),
    ),
]

_SHARED = "albert.encoder.albert_layer_groups.0.albert_layers.0"
ALBERT = [
    Mistake("gelu-by-erf", "albert", f"{_SHARED}.activation", "forward", does(f"{_SHARED}.activation", wrong.gelu)),
    Mistake(
        "residual-dropped",
        "albert",
        _SHARED,
        "forward",
        edits(
            _SHARED,
            "self.full_layer_layer_norm(ffn_output + attention_output)",
            "self.full_layer_layer_norm(ffn_output)",
        ),
    ),
    Mistake(
        "second-pass-cut",
        "albert",
        "albert.encoder",
        "backward",
        edits(
            "albert.encoder",
            "            hidden_states,\n            attention_mask,",
            "            hidden_states.detach() if i else hidden_states,\n            attention_mask,",
        ),
    ),
    Mistake(
        "mask-dropped",
        "albert",
        "albert",
        "forward",
        edits("albert", "        attention_mask=attention_mask,\n    )", "        attention_mask=None,\n    )"),
    ),
    Mistake(
        "pooled-from-last",
        "albert",
        "albert",
        "forward",
        edits("albert", "self.pooler(sequence_output[:, 0])", "self.pooler(sequence_output[:, -1])"),
    ),
]

_DINO = "dinov2.encoder.layer"
DINOV2 = [
    Mistake(
        "layer-scale-missing",
        "dinov2",
        f"{_DINO}.1",
        "forward",
        edits(f"{_DINO}.1", "hidden_states = self.layer_scale1(hidden_states)", "pass"),
    ),
    Mistake(
        "positions-flipped",
        "dinov2",
        "dinov2.embeddings",
        "state",
        holds("dinov2.embeddings", "position_embeddings", lambda table: table.flip(1)),
    ),
    Mistake(
        "class-token-in-mean",
        "dinov2",
        "",
        "forward",
        edits("", "patch_tokens = sequence_output[:, 1:]", "patch_tokens = sequence_output"),
    ),
    Mistake("epsilon", "dinov2", f"{_DINO}.0.norm2", "forward", has(f"{_DINO}.0.norm2", eps=1e-4)),
    Mistake("beta1", "dinov2", every, "update", trains(adam={"betas": (0.85, 0.999)})),
    Mistake(
        "gradient-doubled", "dinov2", f"{_DINO}.1.norm1", "backward", returns(f"{_DINO}.1.norm1", wrong.Doubled.apply)
    ),
]

_STAGE = "regnet.encoder.stages"
REGNET = [
    Mistake(
        "momentum",
        "regnet",
        f"{_STAGE}.0.layers.0.layer.0.normalization",
        "update",
        has(f"{_STAGE}.0.layers.0.layer.0.normalization", momentum=0.01),
    ),
    Mistake(
        "norm-in-evaluation",
        "regnet",
        f"{_STAGE}.1.layers.1.layer.1.normalization",
        "forward",
        told(f"{_STAGE}.1.layers.1.layer.1.normalization", "eval"),
    ),
    Mistake(
        "excitation-added",
        "regnet",
        f"{_STAGE}.1.layers.0.layer.2",
        "forward",
        edits(f"{_STAGE}.1.layers.0.layer.2", "hidden_state * attention", "hidden_state + attention"),
    ),
    Mistake(
        "activation-before-sum",
        "regnet",
        f"{_STAGE}.1.layers.1",
        "forward",
        edits(
            f"{_STAGE}.1.layers.1",
            "hidden_state += residual\n    hidden_state = self.activation(hidden_state)",
            "hidden_state = self.activation(hidden_state)\n    hidden_state = hidden_state + residual",
        ),
    ),
    Mistake(
        "running-mean-kept",
        "regnet",
        f"{_STAGE}.2.layers.0.shortcut.normalization",
        "update",
        has(f"{_STAGE}.2.layers.0.shortcut.normalization", momentum=0.0),
    ),
]

NEWER_ENCODERS = [*BART, *ELECTRA, *ALBERT, *DINOV2, *REGNET]
