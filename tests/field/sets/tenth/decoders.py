"""Mistakes in the decoders of the tenth blind trial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from field.kit import wrong
from field.kit.mistake import every, table, vectors
from field.kit.patches import attends, does, edits, holds, optimizes, trains, untied, uses

_FIRST, _SECOND = "model.layers.0", "model.layers.1"


# --- streams of residuals, compressed keys; experts by the number of a token ------------------------------------------


def _of_streams(name: str, parameter: nn.Parameter) -> bool:
    return "_hc." in name


_SPARSE, _HEAVY = f"{_FIRST}.self_attn", f"{_SECOND}.self_attn"
DEEPSEEK_V4 = table(
    "deepseek_v4",
    (
        "streams-not-transposed",
        _SECOND,
        (
            "mlp_output.unsqueeze(-2) + torch.matmul(\n        comb.to(dtype).transpose(-1, -2), hidden_states",
            "mlp_output.unsqueeze(-2) + torch.matmul(\n        comb.to(dtype), hidden_states",
        ),
    ),
    (
        "streams-by-sigmoid",
        f"{_SECOND}.attn_hc",
        (
            "comb = torch.softmax(comb_w * comb_scale + comb_b, dim=-1)",
            "comb = torch.sigmoid(comb_w * comb_scale + comb_b)",
        ),
    ),
    ("post-not-doubled", f"{_SECOND}.ffn_hc", ("post = 2 * torch.sigmoid", "post = torch.sigmoid")),
    ("bias-of-streams-missing", "model.hc_head", (" + self.hc_base.float()", "")),
    (
        "window-of-future",
        f"{_HEAVY}.compressor",
        ("causal_threshold = (position_ids + 1) //", "causal_threshold = (position_ids + 4) //"),
    ),
    ("biases-of-places-missing", f"{_HEAVY}.compressor", (" + self.position_bias", "")),
    (
        "series-swapped",
        f"{_SPARSE}.compressor",
        (
            "new_kv[:, :, ratio:] = chunk_kv[..., self.head_dim :]",
            "new_kv[:, :, ratio:] = chunk_kv[..., : self.head_dim]",
        ),
    ),
    ("scores-without-relu", f"{_SPARSE}.compressor.indexer.scorer", ("F.relu(scores)", "scores")),
    (
        "rotation-not-undone",
        _SPARSE,
        ("attn_output.transpose(1, 2), cos, -sin)", "attn_output.transpose(1, 2), cos, sin)"),
    ),
    ("rotary-of-main", _HEAVY, {"rope_layer_type": "main"}),
    (
        "compressed-detached",
        _HEAVY,
        ("torch.cat([kv, compressed_kv]", "torch.cat([kv, compressed_kv.detach()]"),
        "backward",
    ),
    (
        "table-shifted",
        f"{_FIRST}.mlp.gate",
        holds(f"{_FIRST}.mlp.gate", "tid2eid", lambda table: table.roll(1, 0)),
        "state",
    ),
    ("not-clamped", f"{_SECOND}.mlp.shared_experts", {"limit": 7.0}),
    ("streams-too-fast", _of_streams, optimizes(_of_streams, {"lr": 2e-3}), "update"),
)


# --- embeddings for each layer, keys of an earlier layer, keys that are values ----------------------------------------


def _of_layer_embeddings(name: str, parameter: nn.Parameter) -> bool:
    return "embed_tokens_per_layer" in name


def _narrower(**options: Any) -> Any:
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = wrong.other_config(options.pop("config"), sliding_window=5)
    return create_sliding_window_causal_mask(config=config, **options)


GEMMA4 = table(
    "gemma4",
    (
        "values-from-normed-keys",
        f"{_SECOND}.self_attn",
        ("value_states = self.v_norm(value_states)", "value_states = self.v_norm(self.k_norm(value_states))"),
    ),
    ("scaled-by-heads", f"{_FIRST}.self_attn", {"scaling": 8**-0.5}),
    (
        "shared-keys-detached",
        "model.layers.3.self_attn",
        (
            "key_states, value_states = shared_kv_states[self.layer_type]",
            "key_states, value_states = [each.detach() for each in shared_kv_states[self.layer_type]]",
        ),
        "backward",
    ),
    (
        "experts-by-sigmoid",
        f"{_FIRST}.router",
        ("nn.functional.softmax(expert_scores, dim=-1, dtype=torch.float32)", "torch.sigmoid(expert_scores.float())"),
    ),
    (
        "expert-scale-missing",
        f"{_SECOND}.router",
        ("top_k_weights * self.per_expert_scale[top_k_index]", "top_k_weights"),
    ),
    (
        "router-of-normed",
        f"{_FIRST}",
        ("self.router(hidden_states_flat)", "self.router(self.pre_feedforward_layernorm_2(hidden_states_flat))"),
    ),
    ("layer-scalar-not-loaded", f"{_SECOND}", holds(_SECOND, "layer_scalar", lambda scalar: scalar * 0.5), "state"),
    ("gate-of-layers-without-activation", "model.layers.2", ("hidden_states = self.act_fn(hidden_states)\n", "pass\n")),
    (
        "layer-embeddings-of-next",
        "model",
        ("per_layer_inputs[:, :, i, :]", "per_layer_inputs[:, :, (i + 1) % 4, :]"),
    ),
    (
        "layer-embeddings-not-scaled",
        "model",
        edits(
            "model",
            "(per_layer_projection + per_layer_inputs)",
            "(per_layer_projection + per_layer_inputs / 8**0.5)",
            "project_per_layer_inputs",
        ),
    ),
    ("window-narrower", "model", uses("model", create_sliding_window_causal_mask=_narrower)),
    (
        "frequencies-not-partial",
        "model.rotary_emb",
        holds("model.rotary_emb", "full_attention_inv_freq", lambda inverse: inverse.flip(0)),
        "state",
    ),
    ("cap-before-scale", "", ("logits = torch.tanh(logits)", "logits = torch.tanh(logits * 2)")),
    ("norm-epsilon", f"{_SECOND}.post_attention_layernorm", {"eps": 1e-2}),
    ("layer-embeddings-frozen", _of_layer_embeddings, optimizes(_of_layer_embeddings, None), "update"),
)


# --- a state space, experts in a smaller space, attention without positions -------------------------------------------


_SCAN, _EXPERTS = f"{_FIRST}.mixer", f"{_SECOND}.mixer"
NEMOTRON_H = table(
    "nemotron_h",
    ("decay-positive", _SCAN, ("A = -torch.exp(self.A_log.float())", "A = -self.A_log.float().abs()")),
    (
        "padding-in-convolution",
        _SCAN,
        ("    hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)\n", ""),
    ),
    (
        "gate-by-sigmoid",
        f"{_SCAN}.norm",
        ("nn.functional.silu(gate.to(torch.float32))", "torch.sigmoid(gate.to(torch.float32))"),
    ),
    (
        "skip-missing",
        _SCAN,
        (
            "D=self.D,\n            z=None,\n            return_final_states=output",
            "D=None,\n            z=None,\n            return_final_states=output",
        ),
    ),
    ("relu-not-squared", f"{_EXPERTS}.experts.act_fn", does(f"{_EXPERTS}.experts.act_fn", wrong.relu)),
    (
        "shared-from-latent",
        _EXPERTS,
        (
            "self.shared_experts(residuals)",
            "self.shared_experts(residuals * topk_weights.view(*orig_shape[:-1], -1).sum(-1, keepdim=True))",
        ),
    ),
    ("groups-by-sum-of-all", f"{_EXPERTS}.gate", {"topk_group": 2}),
    (
        "latent-detached",
        _EXPERTS,
        ("self.experts(hidden_states, topk_indices", "self.experts(hidden_states.detach(), topk_indices"),
        "backward",
    ),
    (
        "not-causal",
        "model",
        uses("model", create_causal_mask=wrong.mask_that_sees_next),
    ),
    (
        "residual-in-norm",
        "model.layers.3",
        ("hidden_states = residual + hidden_states\n", "hidden_states = self.norm(residual) + hidden_states\n"),
    ),
    ("scaled-by-width", "model.layers.2.mixer", attends("model.layers.2.mixer", lambda call: {"scaling": 32**-0.5})),
    ("loss-not-shifted", "", ("self.loss_function(logits, labels,", "self.loss_function(logits, labels.roll(1, 1),")),
    ("step-bias-decays", vectors, optimizes(vectors, {"weight_decay": 0.1}), "update"),
    ("cleared-between", every, wrong.cleared_between, "update"),
)


# --- a decoder with windows; held out ---------------------------------------------------------------------------------


def _wider(**options: Any) -> Any:
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = wrong.other_config(options.pop("config"), sliding_window=6)
    return create_sliding_window_causal_mask(config=config, **options)


def _next_in_window(**options: Any) -> Any:
    from transformers.masking_utils import create_sliding_window_causal_mask

    return create_sliding_window_causal_mask(or_mask_function=wrong.sees_next, **options)


def _turned_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Keys are turned in the other direction."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    return q * cos + half(q) * sin, k * cos - half(k) * sin


MODERNBERT_DECODER = table(
    "modernbert_decoder",
    ("window-wider", "model", uses("model", create_sliding_window_causal_mask=_wider)),
    (
        "next-seen-in-window",
        "model",
        uses("model", create_sliding_window_causal_mask=_next_in_window),
    ),
    (
        "positions-doubled",
        "model",
        ("position_ids.unsqueeze(0).expand(batch_size, -1)", "(2 * position_ids).unsqueeze(0).expand(batch_size, -1)"),
    ),
    ("keys-turned-back", f"{_SECOND}.attn", uses(f"{_SECOND}.attn", apply_rotary_pos_emb=_turned_back)),
    ("gate-and-input-swapped", f"{_FIRST}.mlp", ("input, gate = self.Wi", "gate, input = self.Wi")),
    (
        "attention-residual-of-normed",
        f"{_SECOND}",
        ("hidden_states = self.attn_norm(hidden_states)", "hidden_states = residual = self.attn_norm(hidden_states)"),
    ),
    (
        "norm-in-first-layer",
        f"{_FIRST}",
        ("hidden_states = self.attn_norm(hidden_states)", "hidden_states = self.mlp_norm(hidden_states)"),
    ),
    ("head-tanh", "lm_head.act", does("lm_head.act", wrong.gelu_by_tanh), "precision"),
    ("decoder-bias-ignored", "decoder", does("decoder", wrong.linear_without_bias)),
    ("tie-lost", ("model.embeddings.tok_embeddings", "decoder"), untied("decoder"), "backward"),
    (
        "values-detached",
        "model.layers.2.attn",
        attends("model.layers.2.attn", lambda call: {"value": call["value"].detach()}),
        "backward",
    ),
    ("norm-bias-not-loaded", "model.final_norm", holds("model.final_norm", "bias", torch.zeros_like), "state"),
    ("labels-of-padding", "", ("labels=labels, vocab_size", "labels=labels.clamp(min=0), vocab_size")),
    ("first-moment-missing", every, trains(adam={"betas": (0.0, 0.999)}), "update"),
)

MISTAKES = [*DEEPSEEK_V4, *GEMMA4, *NEMOTRON_H, *MODERNBERT_DECODER]
