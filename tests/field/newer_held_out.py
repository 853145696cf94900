"""Mistakes in newer families on which no rule of the comparison is tuned: they are run to measure, not to look at."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every, vectors
from .patches import attends, both, does, edits, has, holds, optimizes, told, trains, uses

_LAYER, _ATTENTION = "model.layers.1", "model.layers.0.self_attn"

GLM4 = [
    Mistake(
        "sandwich-norm-skipped",
        "glm4",
        _LAYER,
        "forward",
        edits(_LAYER, "hidden_states = self.post_self_attn_layernorm(hidden_states)", "pass"),
    ),
    Mistake(
        "rotary-by-halves",
        "glm4",
        _ATTENTION,
        "forward",
        uses(_ATTENTION, apply_rotary_pos_emb=wrong.rotary_of_first_half),
    ),
    Mistake(
        "mlp-cut",
        "glm4",
        "model.layers.0",
        "backward",
        edits(
            "model.layers.0",
            "hidden_states = self.post_mlp_layernorm(hidden_states)",
            "hidden_states = self.post_mlp_layernorm(hidden_states.detach())",
        ),
    ),
    Mistake("epsilon", "glm4", "model.norm", "forward", has("model.norm", variance_epsilon=1e-6 * 100)),
    Mistake(
        "matrices-do-not-decay",
        "glm4",
        lambda name, parameter: parameter.ndim > 1,
        "update",
        optimizes(lambda name, parameter: parameter.ndim > 1, {"weight_decay": 0.0}),
    ),
]

STARCODER2 = [
    Mistake(
        "bias-dropped",
        "starcoder2",
        f"{_LAYER}.mlp.c_fc",
        "forward",
        does(f"{_LAYER}.mlp.c_fc", wrong.linear_without_bias),
    ),
    Mistake(
        "gelu-by-erf", "starcoder2", "model.layers.0.mlp.act", "forward", does("model.layers.0.mlp.act", wrong.gelu)
    ),
    Mistake(
        "key-heads-tiled",
        "starcoder2",
        f"{_LAYER}.self_attn",
        "forward",
        both(has(f"{_LAYER}.self_attn", num_key_value_groups=1), attends(f"{_LAYER}.self_attn", wrong.heads_tiled)),
    ),
    Mistake("micro-batches-summed", "starcoder2", "", "backward", trains(share=1.0)),
    Mistake(
        "embeddings-slower",
        "starcoder2",
        lambda name, parameter: "embed_tokens" in name,
        "update",
        optimizes(lambda name, parameter: "embed_tokens" in name, {"lr": 5e-4}),
    ),
]

GRANITEMOE = [
    Mistake("residual-scaled", "granitemoe", _LAYER, "forward", has(_LAYER, residual_multiplier=0.9)),
    Mistake(
        "softmax-of-all",
        "granitemoe",
        f"{_LAYER}.block_sparse_moe.router",
        "forward",
        edits(
            f"{_LAYER}.block_sparse_moe.router",
            "torch.softmax(top_k_logits, dim=-1)",
            "torch.softmax(router_logits, dim=-1).gather(1, top_k_index)",
        ),
    ),
    Mistake("scale-of-heads", "granitemoe", _ATTENTION, "forward", has(_ATTENTION, scaling=8**-0.5)),
    Mistake(
        "experts-detached",
        "granitemoe",
        "model.layers.0.block_sparse_moe",
        "backward",
        edits("model.layers.0.block_sparse_moe", "self.experts(hidden_states,", "self.experts(hidden_states.detach(),"),
    ),
]

GPT_NEO = [
    Mistake(
        "scaled",
        "gpt_neo",
        "transformer.h.0.attn.attention",
        "forward",
        edits(
            "transformer.h.0.attn.attention",
            "torch.matmul(query, key.transpose(-1, -2))",
            "torch.matmul(query, key.transpose(-1, -2)) / 8**0.5",
            "_attn",
        ),
    ),
    Mistake(
        "window-minus-one",
        "gpt_neo",
        "transformer.h.1.attn.attention",
        "state",
        holds("transformer.h.1.attn.attention", "bias", wrong.narrower_window),
    ),
    Mistake(
        "positions-left-out",
        "gpt_neo",
        "transformer",
        "forward",
        edits("transformer", "inputs_embeds + position_embeds", "inputs_embeds + 0 * position_embeds"),
    ),
    Mistake(
        "decay-too-large",
        "gpt_neo",
        lambda name, parameter: parameter.ndim > 1,
        "update",
        optimizes(lambda name, parameter: parameter.ndim > 1, {"weight_decay": 0.11}),
    ),
]

DISTILBERT = [
    Mistake("relu-missing", "distilbert", "", "forward", edits("", "nn.ReLU()(pooled_output)", "pooled_output")),
    Mistake(
        "scale-missing",
        "distilbert",
        "distilbert.transformer.layer.1.attention",
        "forward",
        has("distilbert.transformer.layer.1.attention", scaling=1.0),
    ),
    Mistake(
        "attention-residual-dropped",
        "distilbert",
        "distilbert.transformer.layer.0",
        "forward",
        edits(
            "distilbert.transformer.layer.0",
            "self.sa_layer_norm(attention_output + hidden_states)",
            "self.sa_layer_norm(attention_output)",
        ),
    ),
    Mistake(
        "padding-dropped",
        "distilbert",
        "distilbert",
        "forward",
        edits(
            "distilbert",
            "        attention_mask=attention_mask,\n    )\n\n    return",
            "        attention_mask=None,\n    )\n\n    return",
        ),
    ),
    Mistake(
        "norm-frozen",
        "distilbert",
        "distilbert.transformer.layer.1.output_layer_norm",
        "backward",
        told("distilbert.transformer.layer.1.output_layer_norm", "requires_grad_", False),
    ),
]

MPNET = [
    Mistake(
        "position-bias-dropped",
        "mpnet",
        "mpnet.encoder",
        "forward",
        edits("mpnet.encoder", "position_bias,\n", "0 * position_bias,\n"),
    ),
    Mistake(
        "positions-from-zero",
        "mpnet",
        "mpnet.embeddings",
        "forward",
        edits(
            "mpnet.embeddings",
            "create_position_ids_from_input_ids(input_ids, self.padding_idx)",
            "create_position_ids_from_input_ids(input_ids, self.padding_idx) - 1",
        ),
    ),
    Mistake("vectors-decay", "mpnet", vectors, "update", optimizes(vectors, {"weight_decay": 0.05})),
]

BEIT = [
    Mistake(
        "layer-scale-dropped",
        "beit",
        "beit.layers.1",
        "forward",
        edits("beit.layers.1", "self.lambda_1 * hidden_states", "hidden_states"),
    ),
    Mistake(
        "bias-table-flipped",
        "beit",
        "beit.layers.0.relative_position_bias",
        "state",
        holds("beit.layers.0.relative_position_bias", "relative_position_bias_table", lambda table: table.flip(0)),
    ),
    Mistake(
        "pooled-with-class",
        "beit",
        "beit.pooler",
        "forward",
        edits("beit.pooler", "hidden_states[:, 1:, :].mean(1)", "hidden_states.mean(1)"),
    ),
    Mistake("not-clipped", "beit", every, "update", trains(clip=None)),
]

WAV2VEC2 = [
    Mistake(
        "group-norm-skipped",
        "wav2vec2",
        "wav2vec2.feature_extractor.conv_layers.0",
        "forward",
        edits("wav2vec2.feature_extractor.conv_layers.0", "hidden_states = self.layer_norm(hidden_states)", "pass"),
    ),
    Mistake(
        "activation-of-positions",
        "wav2vec2",
        "wav2vec2.encoder.pos_conv_embed",
        "forward",
        edits("wav2vec2.encoder.pos_conv_embed", "hidden_states = self.activation(hidden_states)", "pass"),
    ),
    Mistake(
        "residual-dropped",
        "wav2vec2",
        "wav2vec2.encoder.layers.1",
        "forward",
        edits("wav2vec2.encoder.layers.1", "attn_residual + hidden_states", "hidden_states"),
    ),
    Mistake(
        "features-cut",
        "wav2vec2",
        "wav2vec2",
        "backward",
        edits(
            "wav2vec2",
            "extract_features = extract_features.transpose(1, 2)",
            "extract_features = extract_features.transpose(1, 2).detach()",
        ),
    ),
]

NEWER_HELD_OUT = [*GLM4, *STARCODER2, *GRANITEMOE, *GPT_NEO, *DISTILBERT, *MPNET, *BEIT, *WAV2VEC2]
