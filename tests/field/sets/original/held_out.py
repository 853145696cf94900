"""Mistakes in models on which no rule of the comparison is tuned: they are run to measure, not to look at."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, does, edits, holds, optimizes, returns, told, trains, uses

_QWEN = "model.layers.1.self_attn"

QWEN3 = table(
    "qwen3",
    (
        "query-norm-skipped",
        _QWEN,
        ("self.q_norm(self.q_proj(hidden_states).view(hidden_shape))", "self.q_proj(hidden_states).view(hidden_shape)"),
    ),
    ("key-norm-epsilon", f"{_QWEN}.k_norm", {"variance_epsilon": 1e-2}),
    ("rope-base", "model.rotary_emb", holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(1e6)), "state"),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
    ("loss-averaged-over-padding", "", ("labels=labels,", "labels=labels, num_items_in_batch=labels.numel(),")),
    ("mlp-cut", "model.layers.0", ("self.mlp(hidden_states)", "self.mlp(hidden_states.detach())"), "backward"),
    ("lr-too-large", every, optimizes(lambda name, parameter: True, {"lr": 1.1e-3}), "update"),
    ("cleared-between-micro-batches", every, wrong.cleared_between, "update"),
    (
        "normed-in-bf16",
        "model.layers.1.input_layernorm",
        returns("model.layers.1.input_layernorm", wrong.rounded_to_bf16),
        "precision",
    ),
)

PHI = table(
    "phi",
    (
        "rotary-interleaved",
        "model.layers.0.self_attn",
        uses("model.layers.0.self_attn", apply_rotary_pos_emb=wrong.rotary_interleaved),
    ),
    (
        "bias-used-twice",
        "model.layers.1.self_attn.dense",
        does("model.layers.1.self_attn.dense", wrong.linear_with_two_biases),
    ),
    ("gelu-by-erf", "model.layers.0.mlp.activation_fn", does("model.layers.0.mlp.activation_fn", wrong.gelu)),
    ("not-parallel", "model.layers.1", ("self.mlp(hidden_states)", "self.mlp(hidden_states + attn_outputs)")),
    ("optimizer-momentum", every, trains(adam={"betas": (0.8, 0.999)}), "update"),
    ("rope-offset", "model", ("+ past_seen_tokens", "+ past_seen_tokens + 1")),
)

NEOX = table(
    "gpt_neox",
    ("residual-not-parallel", "gpt_neox.layers.1", {"use_parallel_residual": False}),
    (
        "query-and-key-swapped",
        "gpt_neox.layers.0.attention",
        ("query_states, key_states, value_states = qkv", "key_states, query_states, value_states = qkv"),
    ),
    ("layer-norm-epsilon", "gpt_neox.layers.0.input_layernorm", {"eps": 1e-6}),
    (
        "rotated-backwards",
        "gpt_neox.layers.1.attention",
        uses("gpt_neox.layers.1.attention", apply_rotary_pos_emb=wrong.rotary_reversed),
    ),
    ("not-cleared", every, trains(clear=False), "update"),
    (
        "mask-hides-itself",
        "gpt_neox",
        edits(
            "gpt_neox",
            "create_causal_mask(",
            "create_causal_mask(and_mask_function=hides_itself, ",
            hides_itself=wrong.hides_itself,
        ),
    ),
)

FALCON = table(
    "falcon",
    ("attention-output-dropped", "transformer.h.1", ("mlp_output += attention_output", "pass")),
    (
        "mask-sees-next",
        "transformer",
        edits(
            "transformer",
            "create_causal_mask(",
            "create_causal_mask(or_mask_function=sees_next, ",
            sees_next=wrong.sees_next,
        ),
    ),
    ("norm-decays", vectors, optimizes(vectors, {"weight_decay": 0.2}), "update"),
    (
        "gradient-doubled",
        "transformer.h.0.mlp.act",
        returns("transformer.h.0.mlp.act", wrong.Doubled.apply),
        "backward",
    ),
    (
        "weight-scaled",
        "transformer.h.1.mlp.dense_4h_to_h",
        holds("transformer.h.1.mlp.dense_4h_to_h", "weight", lambda weight: weight * 1.01),
        "state",
    ),
)

GEMMA3 = table(
    "gemma3",
    (
        "norm-weight-without-one",
        "model.layers.1.self_attn.q_norm",
        ("(1.0 + self.weight.float())", "self.weight.float()"),
    ),
    (
        "embedding-not-scaled",
        "model.embed_tokens",
        holds("model.embed_tokens", "embed_scale", lambda scale: scale / scale),
        "state",
    ),
    ("scale-of-width", "model.layers.0.self_attn", {"scaling": 32**-0.5}),
    (
        "window-plus-one",
        "model",
        edits(
            "model",
            "create_sliding_window_causal_mask(**sliding_mask_kwargs)",
            "create_sliding_window_causal_mask(**(sliding_mask_kwargs | {'config': wider(self.config)}))",
            wider=lambda config: wrong.other_config(config, sliding_window=8),
        ),
    ),
    (
        "residual-doubled",
        "model.layers.1",
        (
            "hidden_states = residual + hidden_states\n\n    return",
            "hidden_states = 2 * residual + hidden_states\n    return",
        ),
    ),
)

ROBERTA = table(
    "roberta",
    (
        "positions-from-zero",
        "roberta.embeddings",
        (
            "input_ids, self.padding_idx, past_key_values_length",
            "input_ids, self.padding_idx, past_key_values_length + 1",
        ),
    ),
    ("tanh-missing", "classifier", ("x = torch.tanh(x)", "pass")),
    (
        "padding-dropped",
        "roberta",
        (
            "        attention_mask=attention_mask,\n        encoder_hidden",
            "        attention_mask=None,\n        encoder_hidden",
        ),
    ),
    (
        "layer-frozen",
        ("roberta.encoder.layer.1.output.dense", "roberta.encoder.layer.1.output.LayerNorm"),
        told("roberta.encoder.layer.1.output", "requires_grad_", False),
        "backward",
    ),
    ("dropout-left-on", "roberta.encoder.layer.0.output.dropout", {"p": 0.1}),
)

OLMOE = table(
    "olmoe",
    ("weights-not-normalised", "model.layers.1.mlp.gate", {"norm_topk_prob": False}),
    ("auxiliary-loss-doubled", "", ("loss += self.router_aux_loss_coef", "loss += 2 * self.router_aux_loss_coef")),
    (
        "routing-detached",
        "model.layers.0.mlp",
        ("top_k_index, top_k_weights)", "top_k_index, top_k_weights.detach())"),
        "backward",
    ),
    (
        "value-rounded",
        "model.layers.0.self_attn",
        attends("model.layers.0.self_attn", wrong.rounded("value")),
        "precision",
    ),
)

CLIP = table(
    "clip",
    ("temperature-not-exponential", "", ("self.logit_scale.exp()", "self.logit_scale")),
    (
        "text-not-causal",
        "text_model",
        (
            "attention_mask = create_causal_mask(",
            "attention_mask = create_causal_mask(or_mask_function=lambda b, h, q, k: k >= 0,",
        ),
    ),
    (
        "gelu-for-quick-gelu",
        "vision_model.encoder.layers.0.mlp.activation_fn",
        does("vision_model.encoder.layers.0.mlp.activation_fn", wrong.gelu),
    ),
    ("one-sided-loss", "", ("image_text_contrastive_loss(logits_per_text)", "contrastive_loss(logits_per_text)")),
    (
        "image-side-detached",
        "",
        ("image_embeds = vision_outputs.pooler_output", "image_embeds = vision_outputs.pooler_output.detach()"),
        "backward",
    ),
)

MAMBA = table(
    "mamba",
    (
        "skip-weight-missing",
        "backbone.layers.1.mixer",
        holds("backbone.layers.1.mixer", "D", lambda skip: 0 * skip),
        "state",
    ),
    (
        "residual-cut",
        "backbone.layers.0",
        ("hidden_states = residual + hidden_states", "hidden_states = residual.detach() + hidden_states"),
        "backward",
    ),
    ("norm-epsilon", "backbone.norm_f", {"variance_epsilon": 1e-3}),
)

EFFICIENTNET = table(
    "efficientnet",
    (
        "squeezed-by-maximum",
        "features.2.0.block.2.avgpool",
        does("features.2.0.block.2.avgpool", lambda self, x: x.amax((2, 3), keepdim=True)),
    ),
    ("batch-norm-momentum", "features.3.0.block.0.1", {"momentum": 0.01}, "update"),
    ("relu-for-silu", "features.2.1.block.1.2", does("features.2.1.block.1.2", wrong.relu)),
    ("excitation-detached", "features.3.1.block.2", ("scale * input", "scale.detach() * input"), "backward"),
)

TV_SWIN = table(
    "tv_swin",
    ("no-shift", "features.1.1.attn", {"shift_size": [0, 0]}),
    (
        "position-table-flipped",
        "features.3.0.attn",
        holds("features.3.0.attn", "relative_position_bias_table", lambda table: table.flip(0)),
        "state",
    ),
    ("merged-without-norm", "features.2", ("x = self.norm(x)", "pass")),
)

TIMM = table(
    "timm_vit",
    ("layer-norm-epsilon", "blocks.1.norm2", {"eps": 1e-4}),
    ("patches-column-first", "patch_embed", ("x.flatten(2)", "x.transpose(2, 3).flatten(2)")),
    ("labels-smoothed", "", trains(loss=wrong.smoothed_loss), "backward"),
    ("not-clipped", every, trains(clip=None), "update"),
)

MISTAKES = [*QWEN3, *PHI, *NEOX, *FALCON, *GEMMA3, *ROBERTA, *OLMOE, *CLIP, *MAMBA, *EFFICIENTNET, *TV_SWIN, *TIMM]
