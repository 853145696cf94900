"""Mistakes in the decoders of the second blind trial."""

from __future__ import annotations

from . import wrong
from .mistake import Mistake, every, vectors
from .patches import attends, both, does, edits, has, holds, optimizes, trains, untied, uses
from .running import Training

_LAYER, _FIRST, _ATTENTION = "model.layers.1", "model.layers.0", "model.layers.1.self_attn"


def _rotary_of_halves(training: Training) -> None:
    """One attention pairs halves of a head, where the model pairs neighbours."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    uses(_ATTENTION, apply_rotary_pos_emb=apply_rotary_pos_emb)(training)


HELIUM = [
    Mistake("neighbours-not-paired", "helium", _ATTENTION, "forward", _rotary_of_halves),
    Mistake(
        "heads-tiled",
        "helium",
        f"{_FIRST}.self_attn",
        "forward",
        both(has(f"{_FIRST}.self_attn", num_key_value_groups=1), attends(f"{_FIRST}.self_attn", wrong.heads_tiled)),
    ),
    Mistake(
        "epsilon",
        "helium",
        f"{_LAYER}.input_layernorm",
        "forward",
        has(f"{_LAYER}.input_layernorm", variance_epsilon=1e-2),
    ),
    Mistake(
        "theta",
        "helium",
        "model.rotary_emb",
        "state",
        holds("model.rotary_emb", "inv_freq", wrong.base_of_rotary(100.0)),
    ),
    Mistake(
        "mlp-residual-before-norm",
        "helium",
        _FIRST,
        "forward",
        edits(
            _FIRST,
            "residual = hidden_states\n    hidden_states = self.post_attention_layernorm(hidden_states)",
            "hidden_states = self.post_attention_layernorm(hidden_states)\n    residual = hidden_states",
        ),
    ),
]

_BLOCK = "transformer.blocks.1"
MPT = [
    Mistake(
        "alibi-slopes",
        "mpt",
        "transformer",
        "forward",
        edits(
            "transformer",
            "self.build_mpt_alibi_tensor(self.num_heads,",
            "self.build_mpt_alibi_tensor(alibi_bias_max=4, num_heads=self.num_heads, sequence_length=",
        ),
    ),
    Mistake("scale-missing", "mpt", f"{_BLOCK}.attn", "forward", has(f"{_BLOCK}.attn", softmax_scale=1.0)),
    Mistake(
        "gelu-by-tanh",
        "mpt",
        "transformer.blocks.0.ffn.act",
        "forward",
        does("transformer.blocks.0.ffn.act", wrong.gelu_by_tanh),
    ),
    Mistake(
        "residual-of-norm",
        "mpt",
        _BLOCK,
        "forward",
        edits(_BLOCK, "residual = hidden_states\n\n    # Self", "residual = layernorm_output\n\n    # Self"),
    ),
    Mistake("tie-lost", "mpt", ("transformer.wte", "lm_head"), "backward", untied("lm_head")),
]

GLM = [
    Mistake(
        "all-rotated",
        "glm",
        "model.rotary_emb",
        "state",
        holds("model.rotary_emb", "inv_freq", lambda table: table * 0.5),
    ),
    Mistake(
        "gate-and-up-swapped",
        "glm",
        f"{_LAYER}.mlp",
        "forward",
        edits(f"{_LAYER}.mlp", "gate, up_states = up_states.chunk", "up_states, gate = up_states.chunk"),
    ),
    Mistake(
        "bias-twice",
        "glm",
        f"{_FIRST}.self_attn.q_proj",
        "forward",
        does(f"{_FIRST}.self_attn.q_proj", wrong.linear_with_two_biases),
    ),
    Mistake(
        "padding-dropped",
        "glm",
        "model",
        "forward",
        edits("model", "attention_mask=attention_mask,", "attention_mask=None,"),
    ),
]

OLMO = [
    Mistake(
        "not-clipped",
        "olmo",
        _ATTENTION,
        "forward",
        edits(_ATTENTION, "value_states.clamp_(min=-self.config.clip_qkv, max=self.config.clip_qkv)", "pass"),
    ),
    Mistake(
        "rms-for-layer-norm",
        "olmo",
        f"{_LAYER}.post_attention_layernorm",
        "forward",
        does(
            f"{_LAYER}.post_attention_layernorm", lambda self, x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        ),
    ),
    Mistake("micro-batches-summed", "olmo", "", "backward", trains(share=1.0)),
    Mistake(
        "attention-detached",
        "olmo",
        _FIRST,
        "backward",
        edits(
            _FIRST,
            "hidden_states = residual + hidden_states\n\n",
            "hidden_states = residual + hidden_states.detach()\n\n",
        ),
    ),
    Mistake(
        "decay-doubled",
        "olmo",
        lambda name, parameter: parameter.ndim > 1,
        "update",
        optimizes(lambda name, parameter: parameter.ndim > 1, {"weight_decay": 0.2}),
    ),
]

EXAONE4 = [
    Mistake("rotated-in-global-layer", "exaone4", _ATTENTION, "forward", has(_ATTENTION, sliding_window=None)),
    Mistake(
        "normed-before",
        "exaone4",
        _LAYER,
        "forward",
        edits(
            _LAYER,
            "self.mlp(hidden_states)\n    hidden_states = self.post_feedforward_layernorm(hidden_states)",
            "self.mlp(self.post_feedforward_layernorm(hidden_states))",
        ),
    ),
    Mistake(
        "key-norm-skipped",
        "exaone4",
        f"{_FIRST}.self_attn",
        "forward",
        edits(f"{_FIRST}.self_attn", "key_states = self.k_norm(key_states)", "pass"),
    ),
    Mistake(
        "full-mask-everywhere",
        "exaone4",
        "model",
        "forward",
        edits("model", "causal_mask_mapping[layer_type]", "causal_mask_mapping['full_attention']"),
    ),
]

_GATE = f"{_LAYER}.mlp.gate"
DOTS1 = [
    Mistake("not-normalised", "dots1", _GATE, "forward", has(_GATE, norm_topk_prob=False)),
    Mistake(
        "softmax-for-sigmoid",
        "dots1",
        _GATE,
        "forward",
        edits(_GATE, "router_logits.sigmoid()", "router_logits.softmax(-1)"),
    ),
    Mistake("factor-missing", "dots1", _GATE, "forward", has(_GATE, routed_scaling_factor=1.0)),
    Mistake(
        "shared-on-nothing",
        "dots1",
        f"{_LAYER}.mlp",
        "forward",
        edits(
            f"{_LAYER}.mlp",
            "hidden_states = hidden_states + self.shared_experts(residuals)",
            "hidden_states = hidden_states + 0.5 * self.shared_experts(residuals)",
        ),
    ),
    Mistake(
        "correction-stale",
        "dots1",
        _GATE,
        "state",
        holds(_GATE, "e_score_correction_bias", lambda bias: bias + wrong.alternating(bias)),
    ),
    Mistake(
        "weights-detached",
        "dots1",
        f"{_LAYER}.mlp",
        "backward",
        edits(f"{_LAYER}.mlp", "topk_indices, topk_weights)", "topk_indices, topk_weights.detach())"),
    ),
]

NANOCHAT = [
    Mistake("softcap-missing", "nanochat", "", "forward", edits("", "logits = torch.tanh(logits)", "pass")),
    Mistake(
        "normed-before-rotary",
        "nanochat",
        _ATTENTION,
        "forward",
        edits(_ATTENTION, "query_states = self.q_norm(query_states)", "pass"),
    ),
    Mistake(
        "first-norm-skipped",
        "nanochat",
        "model",
        "forward",
        edits("model", "hidden_states = self.norm(hidden_states)  # Additional norm before the layers", "pass"),
    ),
    Mistake(
        "relu-not-squared",
        "nanochat",
        f"{_FIRST}.mlp.activation_fn",
        "forward",
        does(f"{_FIRST}.mlp.activation_fn", wrong.relu),
    ),
]

CTRL = [
    Mistake(
        "embedding-not-scaled",
        "ctrl",
        "transformer",
        "forward",
        edits("transformer", "inputs_embeds *= np.sqrt(self.d_model_size)", "pass"),
    ),
    Mistake(
        "key-and-query-swapped",
        "ctrl",
        "transformer.h.1.multi_head_attention",
        "forward",
        edits(
            "transformer.h.1.multi_head_attention",
            "attention_interface(\n        self,\n        query_states,\n        key_states,",
            "attention_interface(\n        self,\n        key_states,\n        query_states,",
        ),
    ),
    Mistake(
        "positions-off-by-one",
        "ctrl",
        "transformer",
        "forward",
        edits("transformer", "self.pos_encoding[position_ids, :]", "self.pos_encoding[position_ids + 1, :]"),
    ),
    Mistake(
        "residual-of-norm",
        "ctrl",
        "transformer.h.0",
        "forward",
        edits("transformer.h.0", "out1 = x + attn_output", "out1 = normed + attn_output"),
    ),
    Mistake(
        "weight-transposed",
        "ctrl",
        "transformer.h.0.multi_head_attention.Wq",
        "state",
        holds("transformer.h.0.multi_head_attention.Wq", "weight", wrong.transposed),
    ),
]


GPT_BIGCODE = [
    Mistake(
        "keys-and-values-swapped",
        "gpt_bigcode",
        "transformer.h.1.attn",
        "forward",
        edits(
            "transformer.h.1.attn",
            "query, key, value = (\n                self.c_attn(hidden_states).unsqueeze(1)",
            "query, value, key = (\n                self.c_attn(hidden_states).unsqueeze(1)",
        ),
    ),
    Mistake(
        "scale-squared",
        "gpt_bigcode",
        "transformer.h.0.attn",
        "forward",
        attends("transformer.h.0.attn", lambda call: {"scaling": call["scaling"] ** 2}),
    ),
    Mistake(
        "mlp-residual-lost",
        "gpt_bigcode",
        "transformer.h.1",
        "forward",
        edits(
            "transformer.h.1",
            "hidden_states = residual + feed_forward_hidden_states",
            "hidden_states = feed_forward_hidden_states",
        ),
    ),
    Mistake("lr", "gpt_bigcode", every, "update", optimizes(every, {"lr": 2e-3})),
]

_RECURRENT = "model.layers.0.temporal_block"
RECURRENT_GEMMA = [
    Mistake(
        "softcap-missing",
        "recurrent_gemma",
        "",
        "forward",
        edits("", "nn.functional.tanh(logits / cap) * cap", "logits"),
    ),
    Mistake(
        "normalizer",
        "recurrent_gemma",
        "model",
        "forward",
        edits("model", "hidden_states = hidden_states * self.normalizer.type(hidden_states.dtype)", "pass"),
    ),
    Mistake(
        "gates-swapped",
        "recurrent_gemma",
        f"{_RECURRENT}.rg_lru",
        "forward",
        edits(
            f"{_RECURRENT}.rg_lru",
            "gated_inputs = activations * input_gate",
            "gated_inputs = activations * recurrent_gate",
        ),
    ),
    Mistake(
        "conv-not-causal",
        "recurrent_gemma",
        _RECURRENT,
        "forward",
        edits(
            _RECURRENT,
            "self.rg_lru.recurrent_states = None\n        x_branch = self.conv_1d(x_branch)[..., :seq_len]",
            "self.rg_lru.recurrent_states = None\n        x_branch = self.conv_1d(x_branch)[..., 1 : seq_len + 1]",
        ),
    ),
    Mistake(
        "norm-without-one",
        "recurrent_gemma",
        "model.layers.1.channel_pre_norm",
        "forward",
        edits("model.layers.1.channel_pre_norm", "(1.0 + self.weight.float())", "self.weight.float()"),
    ),
    Mistake("vectors-decay", "recurrent_gemma", vectors, "update", optimizes(vectors, {"weight_decay": 0.1})),
]

SECOND_DECODERS = [*HELIUM, *MPT, *GLM, *OLMO, *EXAONE4, *DOTS1, *NANOCHAT, *CTRL, *GPT_BIGCODE, *RECURRENT_GEMMA]
