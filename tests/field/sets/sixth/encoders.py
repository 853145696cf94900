"""Mistakes in the encoders, and in the models of two halves, of images and of sound, of the sixth blind trial."""

from __future__ import annotations

from torch import nn

from field.kit import wrong
from field.kit.mistake import table
from field.kit.patches import attends, does, edits, optimizes, told, trains, uses

_ENCODER, _DECODER = "model.encoder", "model.decoder"
BLENDERBOT_SMALL = table(
    "blenderbot_small",
    ("padding-attended", "model", ("encoder_attention_mask=attention_mask,", "encoder_attention_mask=None,")),
    (
        "positions-normed",
        _DECODER,
        (
            "inputs_embeds = self.layernorm_embedding(inputs_embeds)\n    hidden_states = inputs_embeds + position_ids",
            "hidden_states = self.layernorm_embedding(inputs_embeds + position_ids)",
        ),
    ),
    ("positions-from-one", _ENCODER, ("self.embed_positions(input_shape)", "self.embed_positions(input_shape, 1)")),
    (
        "values-from-keys",
        f"{_DECODER}.layers.1.encoder_attn",
        ("value_states = self.v_proj(current_states)", "value_states = self.k_proj(current_states)"),
    ),
    (
        "activation-skipped",
        f"{_ENCODER}.layers.0",
        ("self.activation_fn(self.fc1(hidden_states))", "self.fc1(hidden_states)"),
    ),
    (
        "residual-lost",
        f"{_DECODER}.layers.0",
        (
            "hidden_states = residual + hidden_states\n        hidden_states = self.encoder_attn_layer_norm",
            "hidden_states = self.encoder_attn_layer_norm",
        ),
    ),
    ("sees-next", _DECODER, uses(_DECODER, create_causal_mask=wrong.mask_that_sees_next)),
    (
        "encoder-detached",
        "model",
        ("encoder_hidden_states=encoder_outputs[0],", "encoder_hidden_states=encoder_outputs[0].detach(),"),
        "backward",
    ),
)

MOONSHINE = table(
    "moonshine",
    (
        "padding-attended",
        "model",
        ("encoder_attention_mask=encoder_outputs.attention_mask,", "encoder_attention_mask=None,"),
    ),
    (
        "mask-not-shortened",
        _ENCODER,
        ("attention_mask[..., ::downsample_stride][..., :mask_len]", "attention_mask[..., :mask_len]"),
    ),
    ("scale-missing", f"{_DECODER}.layers.0.encoder_attn", {"scaling": 1.0}),
    ("gate-and-up-swapped", f"{_DECODER}.layers.1.mlp", ("hidden_states, gate =", "gate, hidden_states =")),
    (
        "rotary-of-halves",
        f"{_ENCODER}.layers.1.self_attn",
        uses(f"{_ENCODER}.layers.1.self_attn", apply_rotary_pos_emb=wrong.rotary_of_first_half),
    ),
    ("epsilon", f"{_ENCODER}.groupnorm", {"eps": 1e-1}),
    ("tanh-skipped", _ENCODER, ("nn.functional.tanh(self.conv1(input_values))", "self.conv1(input_values)")),
    (
        "labels-shifted-again",
        "",
        (
            "shift_labels if shift_labels is not None else labels",
            "nn.functional.pad(labels[:, 1:], (0, 1), value=-100)",
        ),
    ),
)

_XL = "roberta.encoder.layer"
XLM_ROBERTA_XL = table(
    "xlm_roberta_xl",
    ("padding-dropped", "roberta", ("(\n        attention_mask=attention_mask,", "(\n        attention_mask=None,")),
    ("keys-from-values", f"{_XL}.1.attention.self", ("key_layer = self.key(", "key_layer = self.value(")),
    ("norm-skipped", "roberta.encoder", ("hidden_states = self.LayerNorm(hidden_states)", "pass")),
    (
        "residual-normed",
        f"{_XL}.0.attention",
        ("self.output(attention_output, hidden_states)", "self.output(attention_output, intermediate)"),
    ),
    ("tanh-skipped", "classifier", ("x = torch.tanh(x)", "pass")),
    (
        "positions-capped",
        "roberta.embeddings",
        ("self.position_embeddings(position_ids)", "self.position_embeddings(position_ids.clamp(max=6))"),
    ),
    (
        "bias-missing",
        f"{_XL}.1.intermediate.dense",
        does(f"{_XL}.1.intermediate.dense", wrong.linear_without_bias),
    ),
)

_XMOD = "roberta.encoder.layer"
_ADAPTER = f"{_XMOD}.1.output.adapter_modules.de_DE"
XMOD = table(
    "xmod",
    (
        "other-language",
        f"{_XMOD}.0.output",
        edits(
            f"{_XMOD}.0.output",
            "lang_mask = lang_ids == adapter_idx",
            "lang_mask = lang_ids != adapter_idx",
            "lang_adapter",
        ),
    ),
    (
        "adapter-without-residual",
        f"{_XMOD}.1.output",
        edits(f"{_XMOD}.1.output", "hidden_states += residual", "pass", "lang_adapter"),
    ),
    (
        "heads-not-transposed",
        f"{_XMOD}.0.attention.self",
        ("attn_output.reshape(*input_shape, -1)", "attn_output.transpose(1, 2).reshape(*input_shape, -1)"),
    ),
    (
        "queries-centred",
        f"{_XMOD}.1.attention.self",
        attends(f"{_XMOD}.1.attention.self", lambda call: {"query": call["query"] - call["query"].mean(-1, True)}),
    ),
    ("padding-dropped", "roberta", ("(\n        attention_mask=attention_mask,", "(\n        attention_mask=None,")),
    ("adapter-frozen", f"{_ADAPTER}.dense1", told(f"{_ADAPTER}.dense1", "requires_grad_", False), "backward"),
    ("gelu-by-tanh", f"{_ADAPTER}.adapter_act_fn", does(f"{_ADAPTER}.adapter_act_fn", wrong.gelu_by_tanh)),
)


def _of_head(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("head.")


EVA = table(
    "eva",
    ("queries-as-keys", "blocks.0.attn", ("q, k, v = qkv.unbind(0)", "k, q, v = qkv.unbind(0)")),
    (
        "class-turned",
        "blocks.1.attn",
        ("k = torch.cat([k[:, :, :npt, :], apply", "k = torch.cat([q[:, :, :npt, :], apply"),
    ),
    ("gate-skipped", "blocks.0.mlp", ("else self.act(x1) * x2", "else x1 * x2")),
    ("wrong-norm", "blocks.1", ("self.mlp(self.norm2(x))", "self.mlp(self.norm1(x))")),
    (
        "positions-missing",
        "",
        edits("", "x = x + pos_embed\n\n    x = self.pos_drop(x)", "pass\n\n    x = self.pos_drop(x)", "_pos_embed"),
    ),
    ("labels-smoothed", "", trains(loss=wrong.smoothed_loss), "backward"),
    ("head-not-trained", _of_head, optimizes(_of_head, None), "update"),
)

MISTAKES = [*BLENDERBOT_SMALL, *MOONSHINE, *XLM_ROBERTA_XL, *XMOD, *EVA]
