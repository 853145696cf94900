"""Mistakes in the encoders and in the models of images, video, sound and series of the fourth blind trial."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import does, holds, optimizes, told, trains, untied, uses

_BERT = "roberta_prelayernorm"
_LAYERS = f"{_BERT}.encoder.layer"
PRELAYERNORM = table(
    "prelayernorm",
    (
        "positions-off-by-one",
        f"{_BERT}.embeddings",
        ("self.position_embeddings(position_ids)", "self.position_embeddings(position_ids.clamp(min=1) - 1)"),
    ),
    (
        "other-type",
        f"{_BERT}.embeddings",
        ("self.token_type_embeddings(token_type_ids)", "self.token_type_embeddings(1 - token_type_ids)"),
    ),
    (
        "residual-after-norm",
        f"{_LAYERS}.1.attention",
        (
            "self.output(attention_output, hidden_states)",
            "self.output(attention_output, hidden_states_pre_layer_norm)",
        ),
    ),
    ("norm-skipped", _BERT, ("sequence_output = self.LayerNorm(sequence_output)", "pass")),
    ("mean-for-first", "classifier", ("features[:, 0, :]", "features.mean(1)")),
    (
        "padding-dropped",
        f"{_LAYERS}.1",
        (
            "self.attention(\n        hidden_states,\n        attention_mask,",
            "self.attention(\n        hidden_states,\n        None,",
        ),
    ),
    (
        "relu-for-gelu",
        f"{_LAYERS}.0.intermediate.intermediate_act_fn",
        does(f"{_LAYERS}.0.intermediate.intermediate_act_fn", wrong.relu),
    ),
)

_NOMIC = "nomic_bert"
NOMIC = table(
    "nomic_bert",
    (
        "rotary-base",
        f"{_NOMIC}.rotary_emb",
        holds(f"{_NOMIC}.rotary_emb", "inv_freq", wrong.base_of_rotary(500.0)),
        "state",
    ),
    (
        "turned-backwards",
        f"{_NOMIC}.layers.1.self_attn",
        ("cos, sin = position_embeddings", "cos, sin = position_embeddings[0], -position_embeddings[1]"),
    ),
    (
        "gate-and-up-swapped",
        f"{_NOMIC}.layers.0.mlp",
        ("self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * self.act_fn(self.up_proj(x))"),
    ),
    ("causal", _NOMIC, uses(_NOMIC, create_bidirectional_mask=wrong.causal_mask)),
    ("tanh-skipped", f"{_NOMIC}.pooler", ("pooled_output = self.activation(pooled_output)", "pass")),
    (
        "norm-of-branch",
        f"{_NOMIC}.layers.1",
        (
            "hidden_states = residual + self.post_mlp_dropout(hidden_states)\n"
            "    hidden_states = self.post_mlp_layernorm(hidden_states)",
            "hidden_states = residual + self.post_mlp_layernorm(self.post_mlp_dropout(hidden_states))",
        ),
    ),
    ("not-clipped", every, trains(clip=None), "update"),
)

_FRAMES = "videomae.encoder.layer"
VIDEOMAE = table(
    "videomae",
    (
        "frames-as-channels",
        "videomae.embeddings.patch_embeddings",
        (
            "pixel_values.permute(0, 2, 1, 3, 4)",
            "pixel_values.reshape(batch_size, num_channels, num_frames, height, width)",
        ),
    ),
    ("scale-missing", f"{_FRAMES}.1.attention.attention", {"scaling": 1.0}),
    (
        "positions-missing",
        "videomae.embeddings",
        (
            "embeddings = embeddings + self.position_embeddings",
            "embeddings = embeddings + 0 * self.position_embeddings",
        ),
    ),
    (
        "residual-after-norm",
        f"{_FRAMES}.1",
        ("attention_output + hidden_states", "attention_output + hidden_states_norm"),
    ),
    ("first-for-mean", "", ("sequence_output.mean(1)", "sequence_output[:, 0]")),
    ("epsilon", f"{_FRAMES}.0.layernorm_after", {"eps": 3e-2}),
    ("norms-decayed", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
)

_AST = "audio_spectrogram_transformer"
AST = table(
    "ast",
    ("axes-swapped", f"{_AST}.embeddings.patch_embeddings", ("input_values = input_values.transpose(2, 3)", "pass")),
    ("second-token-ignored", _AST, ("(sequence_output[:, 0] + sequence_output[:, 1]) / 2", "sequence_output[:, 0]")),
    ("keys-from-queries", f"{_AST}.layers.1.attention", ("key_states = self.k_proj(", "key_states = self.q_proj(")),
    (
        "gelu-by-tanh",
        f"{_AST}.layers.0.mlp.activation_fn",
        does(f"{_AST}.layers.0.mlp.activation_fn", wrong.gelu_by_tanh),
    ),
    (
        "bias-added-twice",
        f"{_AST}.layers.0.attention.o_proj",
        does(f"{_AST}.layers.0.attention.o_proj", wrong.linear_with_two_biases),
    ),
    (
        "labels-smoothed",
        "",
        (
            "self.loss_function(labels, logits, self.config, **kwargs)",
            "nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)",
        ),
    ),
    ("optimizer-epsilon", every, trains(adam={"eps": 1e-3}), "update"),
)

_SERIES = "model.encoder.layers"
PATCHTST = table(
    "patchtst",
    (
        "unobserved-counted",
        "model.scaler.scaler",
        ("loc = (data * observed_indicator).sum(", "loc = data.sum("),
    ),
    ("mean-not-restored", "", ("y_hat * model_output.scale + model_output.loc", "y_hat * model_output.scale")),
    ("least-scale", "model.scaler.scaler", {"minimum_scale": 0.3}),
    (
        "positions-missing",
        "model.encoder.positional_encoder",
        ("self.positional_dropout(patch_input + self.position_enc)", "self.positional_dropout(patch_input)"),
    ),
    (
        "norm-in-eval",
        f"{_SERIES}.0.norm_sublayer1.batchnorm",
        told(f"{_SERIES}.0.norm_sublayer1.batchnorm", "eval"),
    ),
    ("normed-after", f"{_SERIES}.1", {"pre_norm": False}),
    ("absolute-loss", "", ('nn.MSELoss(reduction="mean")', "nn.L1Loss()")),
    ("momentum", f"{_SERIES}.1.norm_sublayer3.batchnorm", {"momentum": 0.01}, "update"),
)

SPEECH = table(
    "speech",
    (
        "halves-swapped",
        "model.encoder.conv",
        ("glu(hidden_states, dim=1)", "glu(hidden_states.roll(hidden_states.shape[1] // 2, 1), dim=1)"),
    ),
    ("features-not-scaled", "model.encoder", ("inputs_embeds = self.embed_scale * inputs_embeds", "pass")),
    ("padding-inverted", "model.encoder", ("attention_mask.ne(1).long()", "attention_mask.long()")),
    (
        "cross-padding-dropped",
        "model",
        ("encoder_attention_mask=encoder_attention_mask,", "encoder_attention_mask=None,"),
    ),
    (
        "residual-after-norm",
        "model.encoder.layers.1",
        (
            "residual = hidden_states\n    hidden_states = self.final_layer_norm(hidden_states)",
            "residual = hidden_states = self.final_layer_norm(hidden_states)",
        ),
    ),
    ("tie-lost", ("model.decoder.embed_tokens", "lm_head"), untied("lm_head"), "backward"),
    (
        "shifted-twice",
        "",
        (
            "lm_logits.view(-1, self.config.vocab_size), labels.view(-1)",
            "lm_logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()",
        ),
    ),
)

_STAGE = "levit.encoder.stages"
LEVIT = table(
    "levit",
    (
        "biases-reversed",
        f"{_STAGE}.0.layers.0.module",
        holds(f"{_STAGE}.0.layers.0.module", "attention_biases", lambda biases: biases.flip(1)),
        "state",
    ),
    ("scale-missing", f"{_STAGE}.1.layers.0.module", {"scale": 1.0}),
    (
        "sampled-from-one",
        f"{_STAGE}.0.layers.2.queries_subsample",
        (":: self.stride, :: self.stride", "1 :: self.stride, 1 :: self.stride"),
    ),
    (
        "residual-lost",
        f"{_STAGE}.0.layers.1",
        ("else:\n        hidden_state = hidden_state + self.module", "else:\n        hidden_state = self.module"),
    ),
    ("activation-skipped", f"{_STAGE}.0.layers.2", ("self.activation(hidden_state)", "hidden_state")),
    ("epsilon", "levit.patch_embeddings.embedding_layer_1.batch_norm", {"eps": 3e-2}),
    ("norm-in-eval", "classifier.batch_norm", told("classifier.batch_norm", "eval")),
)

_BLOCK = "mobilevitv2.encoder.layer"
_LINEAR = f"{_BLOCK}.2.transformer.layer.0"
MOBILEVIT = table(
    "mobilevitv2",
    ("softmax-axis", f"{_LINEAR}.attention", ("softmax(query, dim=-1)", "softmax(query, dim=-2)")),
    ("relu-missing", f"{_LINEAR}.attention", ("torch.nn.functional.relu(value)", "value")),
    ("norm-skipped", f"{_BLOCK}.3", ("patches = self.layernorm(patches)", "pass")),
    ("residual-lost", f"{_BLOCK}.1.layer.1", {"use_residual": False}),
    ("padded-by-reflection", f"{_BLOCK}.3.conv_kxk.convolution", {"padding_mode": "reflect"}),
    (
        "maximum-for-mean",
        "mobilevitv2",
        ("torch.mean(last_hidden_state, dim=[-2, -1], keepdim=False)", "last_hidden_state.amax((-2, -1))"),
    ),
    ("more-groups", f"{_LINEAR}.layernorm_before", {"num_groups": 4}),
    (
        "statistics-not-updated",
        f"{_BLOCK}.0.layer.0.conv_3x3.normalization",
        {"track_running_stats": False},
        "update",
    ),
)

MISTAKES = [*PRELAYERNORM, *NOMIC, *VIDEOMAE, *AST, *PATCHTST, *SPEECH, *LEVIT, *MOBILEVIT]
