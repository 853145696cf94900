"""Mistakes in the encoders of text, and in the model of two halves, of the seventh blind trial."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, edits, has, holds, optimizes, trains, untied, uses

_BERT = "ernie.encoder.layer"
ERNIE = table(
    "ernie",
    ("task-left-out", "ernie.embeddings", {"use_task_id": False}),
    ("types-as-tasks", "ernie", ("task_type_ids=task_type_ids,", "task_type_ids=token_type_ids,")),
    ("dropout-left-on", f"{_BERT}.0.attention.output.dropout", has(f"{_BERT}.0.attention.output.dropout", p=0.1)),
    (
        "branch-normed",
        f"{_BERT}.1.attention.output",
        ("self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states) + input_tensor"),
    ),
    (
        "bias-of-values-missing",
        f"{_BERT}.1.attention.self.value",
        does(f"{_BERT}.1.attention.self.value", wrong.linear_without_bias),
    ),
    (
        "mask-of-other-row",
        "ernie",
        (
            "self._create_attention_masks(\n        attention_mask=attention_mask,",
            "self._create_attention_masks(\n        attention_mask=attention_mask.roll(1, 0),",
        ),
    ),
    ("loss-summed", "", ("CrossEntropyLoss()", "CrossEntropyLoss(reduction='sum')")),
    (
        "residual-lost",
        f"{_BERT}.0",
        edits(
            f"{_BERT}.0",
            "self.output(intermediate_output, attention_output)",
            "self.output(intermediate_output, torch.zeros_like(attention_output))",
            "feed_forward_chunk",
        ),
    ),
    (
        "gradient-of-scores-doubled",
        "",
        edits(
            "",
            "logits = self.classifier(sequence_output)",
            "logits = Doubled.apply(self.classifier(sequence_output))",
            Doubled=wrong.Doubled,
        ),
        "backward",
    ),
)


def _turned_twice(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb(*apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim), cos, sin, unsqueeze_dim)


_JINA = "roberta.layers"
JINA_V3 = table(
    "jina_v3",
    ("types-not-added", "roberta.embeddings", ("embeddings = embeddings + token_type_embeddings", "pass")),
    ("turned-twice", f"{_JINA}.0.self_attn", uses(f"{_JINA}.0.self_attn", apply_rotary_pos_emb=_turned_twice)),
    ("second-token", "classifier", ("features[:, 0, :]", "features[:, 1, :]")),
    ("norm-skipped", f"{_JINA}.1", ("hidden_states = self.post_mlp_layernorm(hidden_states)", "pass")),
    (
        "padding-shifted",
        "roberta",
        ("attention_mask=attention_mask,\n    )\n", "attention_mask=attention_mask.roll(1, 1),\n    )\n"),
    ),
    (
        "activated-last",
        f"{_JINA}.1.mlp",
        (
            "hidden_states = self.activation_fn(hidden_states)\n    hidden_states = self.fc2(hidden_states)",
            "hidden_states = self.activation_fn(self.fc2(hidden_states))",
        ),
    ),
    (
        "projection-transposed",
        f"{_JINA}.0.self_attn.o_proj",
        holds(f"{_JINA}.0.self_attn.o_proj", "weight", wrong.transposed),
        "state",
    ),
    ("other-optimizer", every, trains(optimizer=torch.optim.NAdam), "update"),
)


def _of_decoder(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("lm_head.decoder.")


ESMC = table(
    "esmc",
    ("chains-not-separated", "esmc", ("if sequence_id is not None:", "if False:")),
    ("branches-not-scaled", "esmc.layers.1", {"scaling_factor": 1.0}),
    (
        "norm-of-other-order",
        "esmc.layers.0.self_attn.q_norm",
        holds("esmc.layers.0.self_attn.q_norm", "weight", lambda weight: weight.flip(0)),
        "state",
    ),
    ("gelu-by-tanh", "lm_head", ("F.gelu(hidden_states)", "F.gelu(hidden_states, approximate='tanh')")),
    (
        "seen-tokens-predicted",
        "",
        (
            "self.loss_function(logits, labels,",
            "self.loss_function(logits, torch.where(labels < 0, input_ids, labels),",
        ),
    ),
    (
        "predicted-from-last",
        "",
        ("self.loss_function(logits, labels,", "self.loss_function(logits.roll(1, 1), labels,"),
    ),
    ("sigmoid-for-silu", "esmc.layers.0.mlp", ("self.act_fn(self.gate_proj(x))", "self.gate_proj(x).sigmoid()")),
    (
        "keys-detached",
        "esmc.layers.1.self_attn",
        ("key_states = key_states.view(hidden_shape)", "key_states = key_states.detach().view(hidden_shape)"),
        "backward",
    ),
    ("decoder-slower", _of_decoder, optimizes(_of_decoder, {"weight_decay": 0.1, "lr": 5e-4}), "update"),
)


def _unshifted(labels: Tensor, pad_token_id: int, decoder_start_token_id: int) -> Tensor:
    """The decoder is fed what it has to predict."""
    return labels.masked_fill(labels == -100, pad_token_id)


_HEARD, _SAID = "model.encoder.layers", "model.decoder.layers"
CANARY = table(
    "canary",
    (
        "padding-attended",
        "model",
        ("encoder_attention_mask=encoder_outputs.attention_mask,", "encoder_attention_mask=None,"),
    ),
    (
        "positions-not-normed",
        "model.decoder",
        ("self.embedding_layernorm(inputs_embeds + pos_emb)", "self.embedding_layernorm(inputs_embeds) + pos_emb"),
    ),
    (
        "wrong-norm",
        f"{_SAID}.1",
        ("self.post_attention_layernorm(hidden_states)", "self.input_layernorm(hidden_states)"),
    ),
    ("half-missing", f"{_HEARD}.0", ("residual + 0.5 * hidden_states", "residual + hidden_states")),
    ("not-shifted", f"{_HEARD}.1.self_attn", ("matrix_bd = self._rel_shift(matrix_bd)", "pass")),
    (
        "bias-of-content-for-positions",
        f"{_HEARD}.0.self_attn",
        ("query_states + self.bias_v.view(", "query_states + self.bias_u.view("),
    ),
    ("targets-as-inputs", "", uses("", shift_tokens_right=_unshifted)),
    ("tie-lost", ("model.decoder.embed_tokens", "proj_out"), untied("proj_out"), "backward"),
    ("momentum", f"{_HEARD}.0.conv.norm", has(f"{_HEARD}.0.conv.norm", momentum=0.5), "update"),
)

MISTAKES = [*ERNIE, *JINA_V3, *ESMC, *CANARY]
