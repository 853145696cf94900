"""Mistakes in models on which no rule of the comparison is tuned: they are run to measure, not to look at."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every, vectors
from .patches import attends, does, edits, has, holds, optimizes, returns, told, trains, uses

_QWEN = "model.layers.1.self_attn"

QWEN3 = [
    Mistake(
        "query-norm-skipped",
        "qwen3",
        _QWEN,
        "forward",
        edits(
            _QWEN,
            "self.q_norm(self.q_proj(hidden_states).view(hidden_shape))",
            "self.q_proj(hidden_states).view(hidden_shape)",
        ),
    ),
    Mistake("key-norm-epsilon", "qwen3", f"{_QWEN}.k_norm", "forward", has(f"{_QWEN}.k_norm", variance_epsilon=1e-2)),
    Mistake(
        "rope-base",
        "qwen3",
        "model.rotary_emb",
        "state",
        holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(1e6)),
    ),
    Mistake("micro-batches-summed", "qwen3", "", "backward", trains(share=1.0)),
    Mistake(
        "loss-averaged-over-padding",
        "qwen3",
        "",
        "forward",
        edits("", "labels=labels,", "labels=labels, num_items_in_batch=labels.numel(),"),
    ),
    Mistake(
        "mlp-cut",
        "qwen3",
        "model.layers.0",
        "backward",
        edits("model.layers.0", "self.mlp(hidden_states)", "self.mlp(hidden_states.detach())"),
    ),
    Mistake("lr-too-large", "qwen3", every, "update", optimizes(lambda name, parameter: True, {"lr": 1.1e-3})),
    Mistake("cleared-between-micro-batches", "qwen3", every, "update", wrong.cleared_between),
    Mistake(
        "normed-in-bf16",
        "qwen3",
        "model.layers.1.input_layernorm",
        "precision",
        returns("model.layers.1.input_layernorm", wrong.rounded_to_bf16),
    ),
]

PHI = [
    Mistake(
        "rotary-interleaved",
        "phi",
        "model.layers.0.self_attn",
        "forward",
        uses("model.layers.0.self_attn", apply_rotary_pos_emb=wrong.rotary_interleaved),
    ),
    Mistake(
        "bias-used-twice",
        "phi",
        "model.layers.1.self_attn.dense",
        "forward",
        does("model.layers.1.self_attn.dense", wrong.linear_with_two_biases),
    ),
    Mistake(
        "gelu-by-erf",
        "phi",
        "model.layers.0.mlp.activation_fn",
        "forward",
        does("model.layers.0.mlp.activation_fn", wrong.gelu),
    ),
    Mistake(
        "not-parallel",
        "phi",
        "model.layers.1",
        "forward",
        edits("model.layers.1", "self.mlp(hidden_states)", "self.mlp(hidden_states + attn_outputs)"),
    ),
    Mistake("optimizer-momentum", "phi", every, "update", trains(adam={"betas": (0.8, 0.999)})),
    Mistake("rope-offset", "phi", "model", "forward", edits("model", "+ past_seen_tokens", "+ past_seen_tokens + 1")),
]

NEOX = [
    Mistake(
        "residual-not-parallel",
        "gpt_neox",
        "gpt_neox.layers.1",
        "forward",
        has("gpt_neox.layers.1", use_parallel_residual=False),
    ),
    Mistake(
        "query-and-key-swapped",
        "gpt_neox",
        "gpt_neox.layers.0.attention",
        "forward",
        edits(
            "gpt_neox.layers.0.attention",
            "query_states, key_states, value_states = qkv",
            "key_states, query_states, value_states = qkv",
        ),
    ),
    Mistake(
        "layer-norm-epsilon",
        "gpt_neox",
        "gpt_neox.layers.0.input_layernorm",
        "forward",
        has("gpt_neox.layers.0.input_layernorm", eps=1e-6),
    ),
    Mistake(
        "rotated-backwards",
        "gpt_neox",
        "gpt_neox.layers.1.attention",
        "forward",
        uses("gpt_neox.layers.1.attention", apply_rotary_pos_emb=wrong.rotary_reversed),
    ),
    Mistake("not-cleared", "gpt_neox", every, "update", trains(clear=False)),
    Mistake(
        "mask-hides-itself",
        "gpt_neox",
        "gpt_neox",
        "forward",
        edits(
            "gpt_neox",
            "create_causal_mask(",
            "create_causal_mask(and_mask_function=hides_itself, ",
            hides_itself=wrong.hides_itself,
        ),
    ),
]

FALCON = [
    Mistake(
        "attention-output-dropped",
        "falcon",
        "transformer.h.1",
        "forward",
        edits("transformer.h.1", "mlp_output += attention_output", "pass"),
    ),
    Mistake(
        "mask-sees-next",
        "falcon",
        "transformer",
        "forward",
        edits(
            "transformer",
            "create_causal_mask(",
            "create_causal_mask(or_mask_function=sees_next, ",
            sees_next=wrong.sees_next,
        ),
    ),
    Mistake("norm-decays", "falcon", vectors, "update", optimizes(vectors, {"weight_decay": 0.2})),
    Mistake(
        "gradient-doubled",
        "falcon",
        "transformer.h.0.mlp.act",
        "backward",
        returns("transformer.h.0.mlp.act", wrong.Doubled.apply),
    ),
    Mistake(
        "weight-scaled",
        "falcon",
        "transformer.h.1.mlp.dense_4h_to_h",
        "state",
        holds("transformer.h.1.mlp.dense_4h_to_h", "weight", lambda weight: weight * 1.01),
    ),
]

GEMMA3 = [
    Mistake(
        "norm-weight-without-one",
        "gemma3",
        "model.layers.1.self_attn.q_norm",
        "forward",
        edits("model.layers.1.self_attn.q_norm", "(1.0 + self.weight.float())", "self.weight.float()"),
    ),
    Mistake(
        "embedding-not-scaled",
        "gemma3",
        "model.embed_tokens",
        "state",
        holds("model.embed_tokens", "embed_scale", lambda scale: scale / scale),
    ),
    Mistake(
        "scale-of-width",
        "gemma3",
        "model.layers.0.self_attn",
        "forward",
        has("model.layers.0.self_attn", scaling=32**-0.5),
    ),
    Mistake(
        "window-plus-one",
        "gemma3",
        "model",
        "forward",
        edits(
            "model",
            "create_sliding_window_causal_mask(**sliding_mask_kwargs)",
            "create_sliding_window_causal_mask(**(sliding_mask_kwargs | {'config': wider(self.config)}))",
            wider=lambda config: wrong.other_config(config, sliding_window=8),
        ),
    ),
    Mistake(
        "residual-doubled",
        "gemma3",
        "model.layers.1",
        "forward",
        edits(
            "model.layers.1",
            "hidden_states = residual + hidden_states\n\n    return",
            "hidden_states = 2 * residual + hidden_states\n    return",
        ),
    ),
]

ROBERTA = [
    Mistake(
        "positions-from-zero",
        "roberta",
        "roberta.embeddings",
        "forward",
        edits(
            "roberta.embeddings",
            "input_ids, self.padding_idx, past_key_values_length",
            "input_ids, self.padding_idx, past_key_values_length + 1",
        ),
    ),
    Mistake("tanh-missing", "roberta", "classifier", "forward", edits("classifier", "x = torch.tanh(x)", "pass")),
    Mistake(
        "padding-dropped",
        "roberta",
        "roberta",
        "forward",
        edits(
            "roberta",
            "        attention_mask=attention_mask,\n        encoder_hidden",
            "        attention_mask=None,\n        encoder_hidden",
        ),
    ),
    Mistake(
        "layer-frozen",
        "roberta",
        ("roberta.encoder.layer.1.output.dense", "roberta.encoder.layer.1.output.LayerNorm"),
        "backward",
        told("roberta.encoder.layer.1.output", "requires_grad_", False),
    ),
    Mistake(
        "dropout-left-on",
        "roberta",
        "roberta.encoder.layer.0.output.dropout",
        "forward",
        has("roberta.encoder.layer.0.output.dropout", p=0.1),
    ),
]

OLMOE = [
    Mistake(
        "weights-not-normalised",
        "olmoe",
        "model.layers.1.mlp.gate",
        "forward",
        has("model.layers.1.mlp.gate", norm_topk_prob=False),
    ),
    Mistake(
        "auxiliary-loss-doubled",
        "olmoe",
        "",
        "forward",
        edits("", "loss += self.router_aux_loss_coef", "loss += 2 * self.router_aux_loss_coef"),
    ),
    Mistake(
        "routing-detached",
        "olmoe",
        "model.layers.0.mlp",
        "backward",
        edits("model.layers.0.mlp", "top_k_index, top_k_weights)", "top_k_index, top_k_weights.detach())"),
    ),
    Mistake(
        "value-rounded",
        "olmoe",
        "model.layers.0.self_attn",
        "precision",
        attends("model.layers.0.self_attn", wrong.rounded("value")),
    ),
]

CLIP = [
    Mistake(
        "temperature-not-exponential", "clip", "", "forward", edits("", "self.logit_scale.exp()", "self.logit_scale")
    ),
    Mistake(
        "text-not-causal",
        "clip",
        "text_model",
        "forward",
        edits(
            "text_model",
            "attention_mask = create_causal_mask(",
            "attention_mask = create_causal_mask(or_mask_function=lambda b, h, q, k: k >= 0,",
        ),
    ),
    Mistake(
        "gelu-for-quick-gelu",
        "clip",
        "vision_model.encoder.layers.0.mlp.activation_fn",
        "forward",
        does("vision_model.encoder.layers.0.mlp.activation_fn", wrong.gelu),
    ),
    Mistake(
        "one-sided-loss",
        "clip",
        "",
        "forward",
        edits("", "image_text_contrastive_loss(logits_per_text)", "contrastive_loss(logits_per_text)"),
    ),
    Mistake(
        "image-side-detached",
        "clip",
        "",
        "backward",
        edits(
            "", "image_embeds = vision_outputs.pooler_output", "image_embeds = vision_outputs.pooler_output.detach()"
        ),
    ),
]

MAMBA = [
    Mistake(
        "skip-weight-missing",
        "mamba",
        "backbone.layers.1.mixer",
        "state",
        holds("backbone.layers.1.mixer", "D", lambda skip: 0 * skip),
    ),
    Mistake(
        "residual-cut",
        "mamba",
        "backbone.layers.0",
        "backward",
        edits(
            "backbone.layers.0",
            "hidden_states = residual + hidden_states",
            "hidden_states = residual.detach() + hidden_states",
        ),
    ),
    Mistake("norm-epsilon", "mamba", "backbone.norm_f", "forward", has("backbone.norm_f", variance_epsilon=1e-3)),
]

EFFICIENTNET = [
    Mistake(
        "squeezed-by-maximum",
        "efficientnet",
        "features.2.0.block.2.avgpool",
        "forward",
        does("features.2.0.block.2.avgpool", lambda self, x: x.amax((2, 3), keepdim=True)),
    ),
    Mistake(
        "batch-norm-momentum",
        "efficientnet",
        "features.3.0.block.0.1",
        "update",
        has("features.3.0.block.0.1", momentum=0.01),
    ),
    Mistake(
        "relu-for-silu", "efficientnet", "features.2.1.block.1.2", "forward", does("features.2.1.block.1.2", wrong.relu)
    ),
    Mistake(
        "excitation-detached",
        "efficientnet",
        "features.3.1.block.2",
        "backward",
        edits("features.3.1.block.2", "scale * input", "scale.detach() * input"),
    ),
]

TV_SWIN = [
    Mistake("no-shift", "tv_swin", "features.1.1.attn", "forward", has("features.1.1.attn", shift_size=[0, 0])),
    Mistake(
        "position-table-flipped",
        "tv_swin",
        "features.3.0.attn",
        "state",
        holds("features.3.0.attn", "relative_position_bias_table", lambda table: table.flip(0)),
    ),
    Mistake("merged-without-norm", "tv_swin", "features.2", "forward", edits("features.2", "x = self.norm(x)", "pass")),
]

TIMM = [
    Mistake("layer-norm-epsilon", "timm_vit", "blocks.1.norm2", "forward", has("blocks.1.norm2", eps=1e-4)),
    Mistake(
        "patches-column-first",
        "timm_vit",
        "patch_embed",
        "forward",
        edits("patch_embed", "x.flatten(2)", "x.transpose(2, 3).flatten(2)"),
    ),
    Mistake("labels-smoothed", "timm_vit", "", "backward", trains(loss=wrong.smoothed_loss)),
    Mistake("not-clipped", "timm_vit", every, "update", trains(clip=None)),
]

HELD_OUT = [*QWEN3, *PHI, *NEOX, *FALCON, *GEMMA3, *ROBERTA, *OLMOE, *CLIP, *MAMBA, *EFFICIENTNET, *TV_SWIN, *TIMM]
