"""Mistakes in the decoders of the second blind trial."""

from __future__ import annotations

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, both, does, has, holds, optimizes, trains, untied, uses
from field.kit.running import Training

_LAYER, _FIRST, _ATTENTION = "model.layers.1", "model.layers.0", "model.layers.1.self_attn"


def _rotary_of_halves(training: Training) -> None:
    """One attention pairs halves of a head, where the model pairs neighbours."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    uses(_ATTENTION, apply_rotary_pos_emb=apply_rotary_pos_emb)(training)


HELIUM = table(
    "helium",
    ("neighbours-not-paired", _ATTENTION, _rotary_of_halves),
    (
        "heads-tiled",
        f"{_FIRST}.self_attn",
        both(has(f"{_FIRST}.self_attn", num_key_value_groups=1), attends(f"{_FIRST}.self_attn", wrong.heads_tiled)),
    ),
    ("epsilon", f"{_LAYER}.input_layernorm", {"variance_epsilon": 1e-2}),
    ("theta", "model.rotary_emb", holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(100.0)), "state"),
    (
        "mlp-residual-before-norm",
        _FIRST,
        (
            "residual = hidden_states\n    hidden_states = self.post_attention_layernorm(hidden_states)",
            "hidden_states = self.post_attention_layernorm(hidden_states)\n    residual = hidden_states",
        ),
    ),
)

_BLOCK = "transformer.blocks.1"
MPT = table(
    "mpt",
    (
        "alibi-slopes",
        "transformer",
        (
            "self.build_mpt_alibi_tensor(self.num_heads,",
            "self.build_mpt_alibi_tensor(alibi_bias_max=4, num_heads=self.num_heads, sequence_length=",
        ),
    ),
    ("scale-missing", f"{_BLOCK}.attn", {"softmax_scale": 1.0}),
    ("gelu-by-tanh", "transformer.blocks.0.ffn.act", does("transformer.blocks.0.ffn.act", wrong.gelu_by_tanh)),
    (
        "residual-of-norm",
        _BLOCK,
        ("residual = hidden_states\n\n    # Self", "residual = layernorm_output\n\n    # Self"),
    ),
    ("tie-lost", ("transformer.wte", "lm_head"), untied("lm_head"), "backward"),
)

GLM = table(
    "glm",
    ("all-rotated", "model.rotary_emb", holds("model.rotary_emb", "inv_freq", lambda table: table * 0.5), "state"),
    (
        "gate-and-up-swapped",
        f"{_LAYER}.mlp",
        ("gate, up_states = up_states.chunk", "up_states, gate = up_states.chunk"),
    ),
    ("bias-twice", f"{_FIRST}.self_attn.q_proj", does(f"{_FIRST}.self_attn.q_proj", wrong.linear_with_two_biases)),
    ("padding-dropped", "model", ("attention_mask=attention_mask,", "attention_mask=None,")),
)

OLMO = table(
    "olmo",
    ("not-clipped", _ATTENTION, ("value_states.clamp_(min=-self.config.clip_qkv, max=self.config.clip_qkv)", "pass")),
    (
        "rms-for-layer-norm",
        f"{_LAYER}.post_attention_layernorm",
        does(
            f"{_LAYER}.post_attention_layernorm", lambda self, x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        ),
    ),
    ("micro-batches-summed", "", trains(share=1.0), "backward"),
    (
        "attention-detached",
        _FIRST,
        ("hidden_states = residual + hidden_states\n\n", "hidden_states = residual + hidden_states.detach()\n\n"),
        "backward",
    ),
    (
        "decay-doubled",
        lambda name, parameter: parameter.ndim > 1,
        optimizes(lambda name, parameter: parameter.ndim > 1, {"weight_decay": 0.2}),
        "update",
    ),
)

EXAONE4 = table(
    "exaone4",
    ("rotated-in-global-layer", _ATTENTION, {"sliding_window": None}),
    (
        "normed-before",
        _LAYER,
        (
            "self.mlp(hidden_states)\n    hidden_states = self.post_feedforward_layernorm(hidden_states)",
            "self.mlp(self.post_feedforward_layernorm(hidden_states))",
        ),
    ),
    ("key-norm-skipped", f"{_FIRST}.self_attn", ("key_states = self.k_norm(key_states)", "pass")),
    ("full-mask-everywhere", "model", ("causal_mask_mapping[layer_type]", "causal_mask_mapping['full_attention']")),
)

_GATE = f"{_LAYER}.mlp.gate"
DOTS1 = table(
    "dots1",
    ("not-normalised", _GATE, {"norm_topk_prob": False}),
    ("softmax-for-sigmoid", _GATE, ("router_logits.sigmoid()", "router_logits.softmax(-1)")),
    ("factor-missing", _GATE, {"routed_scaling_factor": 1.0}),
    (
        "shared-on-nothing",
        f"{_LAYER}.mlp",
        (
            "hidden_states = hidden_states + self.shared_experts(residuals)",
            "hidden_states = hidden_states + 0.5 * self.shared_experts(residuals)",
        ),
    ),
    (
        "correction-stale",
        _GATE,
        holds(_GATE, "e_score_correction_bias", lambda bias: bias + wrong.alternating(bias)),
        "state",
    ),
    (
        "weights-detached",
        f"{_LAYER}.mlp",
        ("topk_indices, topk_weights)", "topk_indices, topk_weights.detach())"),
        "backward",
    ),
)

NANOCHAT = table(
    "nanochat",
    ("softcap-missing", "", ("logits = torch.tanh(logits)", "pass")),
    ("normed-before-rotary", _ATTENTION, ("query_states = self.q_norm(query_states)", "pass")),
    (
        "first-norm-skipped",
        "model",
        ("hidden_states = self.norm(hidden_states)  # Additional norm before the layers", "pass"),
    ),
    ("relu-not-squared", f"{_FIRST}.mlp.activation_fn", does(f"{_FIRST}.mlp.activation_fn", wrong.relu)),
)

CTRL = table(
    "ctrl",
    ("embedding-not-scaled", "transformer", ("inputs_embeds *= np.sqrt(self.d_model_size)", "pass")),
    (
        "key-and-query-swapped",
        "transformer.h.1.multi_head_attention",
        (
            "attention_interface(\n        self,\n        query_states,\n        key_states,",
            "attention_interface(\n        self,\n        key_states,\n        query_states,",
        ),
    ),
    (
        "positions-off-by-one",
        "transformer",
        ("self.pos_encoding[position_ids, :]", "self.pos_encoding[position_ids + 1, :]"),
    ),
    ("residual-of-norm", "transformer.h.0", ("out1 = x + attn_output", "out1 = normed + attn_output")),
    (
        "weight-transposed",
        "transformer.h.0.multi_head_attention.Wq",
        holds("transformer.h.0.multi_head_attention.Wq", "weight", wrong.transposed),
        "state",
    ),
)


GPT_BIGCODE = table(
    "gpt_bigcode",
    (
        "keys-and-values-swapped",
        "transformer.h.1.attn",
        (
            "query, key, value = (\n                self.c_attn(hidden_states).unsqueeze(1)",
            "query, value, key = (\n                self.c_attn(hidden_states).unsqueeze(1)",
        ),
    ),
    (
        "scale-squared",
        "transformer.h.0.attn",
        attends("transformer.h.0.attn", lambda call: {"scaling": call["scaling"] ** 2}),
    ),
    (
        "mlp-residual-lost",
        "transformer.h.1",
        ("hidden_states = residual + feed_forward_hidden_states", "hidden_states = feed_forward_hidden_states"),
    ),
    ("lr", every, optimizes(every, {"lr": 2e-3}), "update"),
)

_RECURRENT = "model.layers.0.temporal_block"
RECURRENT_GEMMA = table(
    "recurrent_gemma",
    ("softcap-missing", "", ("nn.functional.tanh(logits / cap) * cap", "logits")),
    ("normalizer", "model", ("hidden_states = hidden_states * self.normalizer.type(hidden_states.dtype)", "pass")),
    (
        "gates-swapped",
        f"{_RECURRENT}.rg_lru",
        ("gated_inputs = activations * input_gate", "gated_inputs = activations * recurrent_gate"),
    ),
    (
        "conv-not-causal",
        _RECURRENT,
        (
            "self.rg_lru.recurrent_states = None\n        x_branch = self.conv_1d(x_branch)[..., :seq_len]",
            "self.rg_lru.recurrent_states = None\n        x_branch = self.conv_1d(x_branch)[..., 1 : seq_len + 1]",
        ),
    ),
    ("norm-without-one", "model.layers.1.channel_pre_norm", ("(1.0 + self.weight.float())", "self.weight.float()")),
    ("vectors-decay", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
)

MISTAKES = [*HELIUM, *MPT, *GLM, *OLMO, *EXAONE4, *DOTS1, *NANOCHAT, *CTRL, *GPT_BIGCODE, *RECURRENT_GEMMA]
