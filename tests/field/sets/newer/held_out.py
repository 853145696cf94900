"""Mistakes in newer families on which no rule of the comparison is tuned: they are run to measure, not to look at."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, both, does, edits, has, holds, optimizes, told, trains, uses

_LAYER, _ATTENTION = "model.layers.1", "model.layers.0.self_attn"

GLM4 = table(
    "glm4",
    ("sandwich-norm-skipped", _LAYER, ("hidden_states = self.post_self_attn_layernorm(hidden_states)", "pass")),
    ("rotary-by-halves", _ATTENTION, uses(_ATTENTION, apply_rotary_pos_emb=wrong.rotary_of_first_half)),
    (
        "mlp-cut",
        "model.layers.0",
        (
            "hidden_states = self.post_mlp_layernorm(hidden_states)",
            "hidden_states = self.post_mlp_layernorm(hidden_states.detach())",
        ),
        "backward",
    ),
    ("epsilon", "model.norm", {"variance_epsilon": 1e-6 * 100}),
    (
        "matrices-do-not-decay",
        lambda name, parameter: parameter.ndim > 1,
        optimizes(lambda name, parameter: parameter.ndim > 1, {"weight_decay": 0.0}),
        "update",
    ),
)

STARCODER2 = table(
    "starcoder2",
    ("bias-dropped", f"{_LAYER}.mlp.c_fc", does(f"{_LAYER}.mlp.c_fc", wrong.linear_without_bias)),
    ("gelu-by-erf", "model.layers.0.mlp.act", does("model.layers.0.mlp.act", wrong.gelu)),
    (
        "key-heads-tiled",
        f"{_LAYER}.self_attn",
        both(has(f"{_LAYER}.self_attn", num_key_value_groups=1), attends(f"{_LAYER}.self_attn", wrong.heads_tiled)),
    ),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
    (
        "embeddings-slower",
        lambda name, parameter: "embed_tokens" in name,
        optimizes(lambda name, parameter: "embed_tokens" in name, {"lr": 5e-4}),
        "update",
    ),
)

GRANITEMOE = table(
    "granitemoe",
    ("residual-scaled", _LAYER, {"residual_multiplier": 0.9}),
    (
        "softmax-of-all",
        f"{_LAYER}.block_sparse_moe.router",
        ("torch.softmax(top_k_logits, dim=-1)", "torch.softmax(router_logits, dim=-1).gather(1, top_k_index)"),
    ),
    ("scale-of-heads", _ATTENTION, {"scaling": 8**-0.5}),
    (
        "experts-detached",
        "model.layers.0.block_sparse_moe",
        ("self.experts(hidden_states,", "self.experts(hidden_states.detach(),"),
        "backward",
    ),
)

GPT_NEO = table(
    "gpt_neo",
    (
        "scaled",
        "transformer.h.0.attn.attention",
        edits(
            "transformer.h.0.attn.attention",
            "torch.matmul(query, key.transpose(-1, -2))",
            "torch.matmul(query, key.transpose(-1, -2)) / 8**0.5",
            "_attn",
        ),
    ),
    (
        "window-minus-one",
        "transformer.h.1.attn.attention",
        holds("transformer.h.1.attn.attention", "bias", wrong.narrower_window),
        "state",
    ),
    ("positions-left-out", "transformer", ("inputs_embeds + position_embeds", "inputs_embeds + 0 * position_embeds")),
    (
        "decay-too-large",
        lambda name, parameter: parameter.ndim > 1,
        optimizes(lambda name, parameter: parameter.ndim > 1, {"weight_decay": 0.11}),
        "update",
    ),
)

DISTILBERT = table(
    "distilbert",
    ("relu-missing", "", ("nn.ReLU()(pooled_output)", "pooled_output")),
    ("scale-missing", "distilbert.transformer.layer.1.attention", {"scaling": 1.0}),
    (
        "attention-residual-dropped",
        "distilbert.transformer.layer.0",
        ("self.sa_layer_norm(attention_output + hidden_states)", "self.sa_layer_norm(attention_output)"),
    ),
    (
        "padding-dropped",
        "distilbert",
        (
            "        attention_mask=attention_mask,\n    )\n\n    return",
            "        attention_mask=None,\n    )\n\n    return",
        ),
    ),
    (
        "norm-frozen",
        "distilbert.transformer.layer.1.output_layer_norm",
        told("distilbert.transformer.layer.1.output_layer_norm", "requires_grad_", False),
        "backward",
    ),
)

MPNET = table(
    "mpnet",
    ("position-bias-dropped", "mpnet.encoder", ("position_bias,\n", "0 * position_bias,\n")),
    (
        "positions-from-zero",
        "mpnet.embeddings",
        (
            "create_position_ids_from_input_ids(input_ids, self.padding_idx)",
            "create_position_ids_from_input_ids(input_ids, self.padding_idx) - 1",
        ),
    ),
    ("vectors-decay", vectors, optimizes(vectors, {"weight_decay": 0.05}), "update"),
)

BEIT = table(
    "beit",
    ("layer-scale-dropped", "beit.layers.1", ("self.lambda_1 * hidden_states", "hidden_states")),
    (
        "bias-table-flipped",
        "beit.layers.0.relative_position_bias",
        holds("beit.layers.0.relative_position_bias", "relative_position_bias_table", lambda table: table.flip(0)),
        "state",
    ),
    ("pooled-with-class", "beit.pooler", ("hidden_states[:, 1:, :].mean(1)", "hidden_states.mean(1)")),
    ("not-clipped", every, trains(clip=None), "update"),
)

WAV2VEC2 = table(
    "wav2vec2",
    (
        "group-norm-skipped",
        "wav2vec2.feature_extractor.conv_layers.0",
        ("hidden_states = self.layer_norm(hidden_states)", "pass"),
    ),
    (
        "activation-of-positions",
        "wav2vec2.encoder.pos_conv_embed",
        ("hidden_states = self.activation(hidden_states)", "pass"),
    ),
    ("residual-dropped", "wav2vec2.encoder.layers.1", ("attn_residual + hidden_states", "hidden_states")),
    (
        "features-cut",
        "wav2vec2",
        (
            "extract_features = extract_features.transpose(1, 2)",
            "extract_features = extract_features.transpose(1, 2).detach()",
        ),
        "backward",
    ),
)

MISTAKES = [*GLM4, *STARCODER2, *GRANITEMOE, *GPT_NEO, *DISTILBERT, *MPNET, *BEIT, *WAV2VEC2]
