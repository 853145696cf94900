"""Mistakes in the encoders, and in the model of series, of the tenth blind trial."""

from __future__ import annotations

from torch import nn

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import does, edits, optimizes, told, trains

# --- attention by landmarks; held out ---------------------------------------------------------------------------------

_LAYERS = "nystromformer.encoder.layer"


def _of_embeddings(name: str, parameter: nn.Parameter) -> bool:
    return "embeddings." in name


NYSTROMFORMER = table(
    "nystromformer",
    (
        "scaled-once",
        f"{_LAYERS}.0.attention.self",
        ("key_layer = key_layer / math.sqrt(math.sqrt(self.attention_head_size))", "pass"),
    ),
    (
        "landmarks-largest",
        f"{_LAYERS}.1.attention.self",
        (
            "k_landmarks = key_layer.reshape(\n            -1,\n            self.num_attention_heads,\n"
            "            self.num_landmarks,\n            self.seq_len // self.num_landmarks,\n"
            "            self.attention_head_size,\n        ).mean(dim=-2)",
            "k_landmarks = key_layer.reshape(\n            -1,\n            self.num_attention_heads,\n"
            "            self.num_landmarks,\n            self.seq_len // self.num_landmarks,\n"
            "            self.attention_head_size,\n        ).amax(dim=-2)",
        ),
    ),
    (
        "fewer-iterations",
        f"{_LAYERS}.0.attention.self",
        edits(f"{_LAYERS}.0.attention.self", "n_iter=6", "n_iter=3", "iterative_inv"),
    ),
    (
        "coefficient-of-inverse",
        f"{_LAYERS}.1.attention.self",
        edits(f"{_LAYERS}.1.attention.self", "15 * identity", "14 * identity", "iterative_inv"),
    ),
    (
        "convolution-of-keys",
        f"{_LAYERS}.0.attention.self",
        ("context_layer += self.conv(value_layer)", "context_layer += self.conv(key_layer)"),
    ),
    (
        "inverse-detached",
        f"{_LAYERS}.1.attention.self",
        ("self.iterative_inv(kernel_2)", "self.iterative_inv(kernel_2).detach()"),
        "backward",
    ),
    (
        "positions-before-norm-lost",
        "nystromformer.embeddings",
        ("embeddings += position_embeddings\n", "pass\n"),
    ),
    (
        "last-token-for-first",
        "classifier",
        ("x = features[:, 0, :]", "x = features[:, -1, :]"),
    ),
    (
        "output-normed-before",
        f"{_LAYERS}.0.output",
        ("self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states) + input_tensor"),
    ),
    (
        "value-bias-missing",
        f"{_LAYERS}.1.attention.self.value",
        does(f"{_LAYERS}.1.attention.self.value", wrong.linear_without_bias),
    ),
    ("embeddings-frozen", _of_embeddings, optimizes(_of_embeddings, None), "update"),
)


# --- queries by the kind of token -------------------------------------------------------------------------------------

_TOKENS = "luke.encoder.layer"


def _of_entity_queries(name: str, parameter: nn.Parameter) -> bool:
    return "e2e_query" in name


LUKE = table(
    "luke",
    (
        "queries-of-words",
        f"{_TOKENS}.0.attention.self",
        ("self.w2e_query(word_hidden_states)", "self.query(word_hidden_states)"),
    ),
    (
        "entity-queries-swapped",
        f"{_TOKENS}.1.attention.self",
        (
            "e2w_query_layer = self.transpose_for_scores(self.e2w_query(",
            "e2w_query_layer = self.transpose_for_scores(self.e2e_query(",
        ),
    ),
    (
        "scaled-by-width",
        f"{_TOKENS}.0.attention.self",
        ("math.sqrt(self.attention_head_size)", "math.sqrt(self.all_head_size)"),
    ),
    (
        "missing-entities-seen",
        "luke",
        ("[attention_mask, entity_attention_mask]", "[attention_mask, torch.ones_like(entity_attention_mask)]"),
    ),
    (
        "padding-in-mean",
        "luke.entity_embeddings",
        ("position_embeddings = position_embeddings * position_embedding_mask", "pass"),
    ),
    (
        "places-summed",
        "luke.entity_embeddings",
        ("position_embeddings / position_embedding_mask.sum(dim=-2).clamp(min=1e-7)", "position_embeddings"),
    ),
    (
        "entities-not-normed",
        "luke.entity_embeddings",
        ("embeddings = self.LayerNorm(embeddings)", "pass"),
    ),
    (
        "positions-from-zero",
        "luke.embeddings",
        (
            "create_position_ids_from_input_ids(input_ids, self.padding_idx)",
            "torch.arange(input_ids.shape[1]).expand_as(input_ids)",
        ),
    ),
    (
        "pair-reversed",
        "",
        (
            "[outputs.entity_last_hidden_state[:, 0, :], outputs.entity_last_hidden_state[:, 1, :]]",
            "[outputs.entity_last_hidden_state[:, 1, :], outputs.entity_last_hidden_state[:, 0, :]]",
        ),
    ),
    (
        "words-detached",
        f"{_TOKENS}.1.attention.self",
        (
            "torch.cat([word_hidden_states, entity_hidden_states]",
            "torch.cat([word_hidden_states.detach(), entity_hidden_states]",
        ),
        "backward",
    ),
    (
        "labels-smoothed",
        "",
        (
            "nn.functional.cross_entropy(logits, labels)",
            "nn.functional.cross_entropy(logits, labels, label_smoothing=0.05)",
        ),
    ),
    ("entity-queries-decay-not", _of_entity_queries, optimizes(_of_entity_queries, {"weight_decay": 0.0}), "update"),
)


# --- an array of latents that reads a text ----------------------------------------------------------------------------

_READS, _THINKS, _ANSWERS = "perceiver.encoder.cross_attention", "perceiver.encoder.self_attends", "perceiver.decoder"


def _of_latents(name: str, parameter: nn.Parameter) -> bool:
    return name == "perceiver.embeddings.latents"


PERCEIVER = table(
    "perceiver",
    ("padding-read", "perceiver", ("inputs_mask=attention_mask,", "inputs_mask=None,")),
    (
        "third-token-hidden",
        "perceiver",
        (
            "        attention_mask=attention_mask,\n    )\n\n    encoder_outputs",
            "        attention_mask=attention_mask * (torch.arange(seq_length) != 2),\n    )\n\n    encoder_outputs",
        ),
    ),
    ("block-once", "perceiver.encoder", ("for _ in range(self.config.num_blocks):", "for _ in range(1):")),
    (
        "latents-not-added",
        f"{_READS}.attention",
        {"use_query_residual": False},
    ),
    (
        "queries-halved",
        f"{_READS}.attention.self",
        ("queries = self.query(hidden_states)", "queries = self.query(hidden_states * 0.5)"),
    ),
    ("activation-missing", f"{_THINKS}.1.mlp", ("hidden_states = self.intermediate_act_fn(hidden_states)", "pass")),
    (
        "residual-of-normed",
        f"{_THINKS}.0",
        (
            "layer_output = layer_output + attention_output",
            "layer_output = layer_output + self.layernorm(attention_output)",
        ),
    ),
    (
        "scaled-by-values",
        f"{_THINKS}.1.attention.self",
        ("/ math.sqrt(q_head_dim)", "/ q_head_dim"),
    ),
    (
        "positions-shifted",
        "perceiver.input_preprocessor",
        ("torch.arange(0, seq_length, device=inputs.device)", "torch.arange(1, seq_length + 1, device=inputs.device)"),
    ),
    (
        "latents-detached",
        f"{_ANSWERS}.decoder",
        ("inputs=z,", "inputs=z.detach(),"),
        "backward",
    ),
    ("latents-too-slow", _of_latents, optimizes(_of_latents, {"lr": 1e-4}), "update"),
    ("not-clipped", every, trains(clip=None), "update"),
)


# --- channels and patches of series that are mixed --------------------------------------------------------------------

_MIXERS = "model.encoder.mlp_mixer_encoder.mixers"


PATCHTSMIXER = table(
    "patchtsmixer",
    (
        "not-observed-counted",
        "model",
        ("self.scaler(past_values, observed_mask)", "self.scaler(past_values, torch.ones_like(observed_mask))"),
    ),
    (
        "variance-of-sample",
        "model.scaler",
        (
            "** 2).sum(self.dim, keepdim=self.keepdim) / denominator",
            "** 2).sum(self.dim, keepdim=self.keepdim) / (denominator - 1)",
        ),
    ),
    ("scale-of-zero", "model.scaler", {"minimum_scale": 1e-1}),
    ("last-patches-kept", "model.patching", {"sequence_start": 0}),
    (
        "gate-over-patches",
        f"{_MIXERS}.0.feature_mixer.gating_block",
        ("self.attn_softmax(self.attn_layer(inputs))", "self.attn_layer(inputs).softmax(-2)"),
    ),
    (
        "attention-not-added",
        f"{_MIXERS}.1.patch_mixer",
        ("self.norm_attn(hidden_state + x_attn)", "self.norm_attn(hidden_state)"),
    ),
    (
        "channels-mixed-last",
        f"{_MIXERS}.0",
        (
            'if self.mode == "mix_channel":\n        hidden = self.channel_feature_mixer(hidden)\n\n'
            "    hidden = self.patch_mixer(hidden)",
            "hidden = self.channel_feature_mixer(self.patch_mixer(hidden))",
        ),
    ),
    (
        "gate-detached",
        f"{_MIXERS}.1.channel_feature_mixer.gating_block",
        ("inputs = inputs * attn_weight", "inputs = inputs * attn_weight.detach()"),
        "backward",
    ),
    ("positions-missing", "model.encoder", ("patches = self.positional_encoder(patches)", "pass")),
    (
        "mean-not-restored",
        "",
        ("y_hat, loc=model_output.loc, scale=model_output.scale", "y_hat, loc=None, scale=model_output.scale"),
    ),
    (
        "loss-of-sum",
        "",
        (
            "loss_val = loss(distribution, future_values)\n                loss_val = weighted_average(loss_val)",
            "loss_val = loss(distribution, future_values).sum(1).mean()",
        ),
    ),
    (
        "statistics-frozen",
        f"{_MIXERS}.0.patch_mixer.norm.norm.batchnorm",
        told(f"{_MIXERS}.0.patch_mixer.norm.norm.batchnorm", "eval"),
    ),
    ("momentum", f"{_MIXERS}.1.feature_mixer.norm.norm.batchnorm", {"momentum": 0.2}, "update"),
    ("vectors-decay", vectors, optimizes(vectors, {"weight_decay": 0.3}), "update"),
)

MISTAKES = [*NYSTROMFORMER, *LUKE, *PERCEIVER, *PATCHTSMIXER]
