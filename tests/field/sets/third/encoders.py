"""Mistakes in the encoders, models of images and models of sound of the third blind trial."""

from __future__ import annotations

import torch

from field.kit import wrong
from field.kit.mistake import every, table
from field.kit.patches import does, edits, holds, told, trains, uses

_LAYERS = "transformer.encoder.layers"
SQUEEZEBERT = table(
    "squeezebert",
    ("scaled-by-heads", f"{_LAYERS}.1.attention", ("sqrt(self.attention_head_size)", "sqrt(self.num_attention_heads)")),
    ("residual-lost", f"{_LAYERS}.1.post_attention", ("x = x + input_tensor", "pass")),
    ("dropout-left-on", f"{_LAYERS}.0.output.dropout", {"p": 0.1}),
    (
        "residual-of-attention",
        f"{_LAYERS}.1",
        ("self.output(intermediate_output, post_attention_output)", "self.output(intermediate_output, hidden_states)"),
    ),
    ("last-token", "transformer.pooler", ("hidden_states[:, 0]", "hidden_states[:, -1]")),
)

EUROBERT = table(
    "eurobert",
    ("pooled-over-padding", "", ("(last_hidden_state * attention_mask.unsqueeze(-1)).sum(", "last_hidden_state.sum(")),
    ("causal", "model", uses("model", create_bidirectional_mask=wrong.causal_mask)),
    (
        "heads-not-transposed",
        "model.layers.0.self_attn",
        ("attn_output.reshape(", "attn_output.transpose(1, 2).reshape("),
    ),
    ("normed-twice", "model", ("self.norm(hidden_states)", "self.norm(self.norm(hidden_states))")),
    (
        "input-detached",
        "model.layers.0",
        ("hidden_states=hidden_states,", "hidden_states=hidden_states.detach(),"),
        "backward",
    ),
)

_ROUTER, _EXPERTS = "model.encoder.layers.1.ffn.router", "model.decoder.layers.1.ffn.experts"
NLLB_MOE = table(
    "nllb_moe",
    ("one-expert", _ROUTER, edits(_ROUTER, "= gates1 + gates2", "= gates1", method="route_tokens")),
    ("probabilities-ignored", _EXPERTS, (" * router_probs[top_x, idx, None]", "")),
    ("embedding-not-scaled", "model.encoder.embed_tokens", {"embed_scale": 1.0}),
    ("positions-off-by-one", "model.decoder.embed_positions", ("position_ids.view(-1))", "position_ids.view(-1) + 1)")),
    (
        "cross-padding-dropped",
        "model.decoder.layers.0",
        ("attention_mask=encoder_attention_mask,", "attention_mask=None,"),
    ),
    ("gelu-for-relu", f"{_EXPERTS}.expert_0.act", does(f"{_EXPERTS}.expert_0.act", wrong.gelu)),
)

MARIAN = table(
    "marian",
    (
        "attends-to-itself",
        "model.decoder.layers.1",
        ("key_value_states=encoder_hidden_states", "key_value_states=hidden_states"),
    ),
    ("loss-summed", "", ("CrossEntropyLoss()", "CrossEntropyLoss(reduction='sum')")),
    ("wrong-start", "", ("self.config.decoder_start_token_id", "self.config.eos_token_id")),
    (
        "embedding-not-scaled",
        "model.encoder",
        ("self.embed_tokens(input_ids) * self.embed_scale", "self.embed_tokens(input_ids)"),
    ),
    (
        "positions-reversed",
        "model.encoder.embed_positions",
        holds("model.encoder.embed_positions", "weight", lambda weight: weight.flip(1)),
        "state",
    ),
    ("optimizer-epsilon", every, trains(adam={"eps": 1e-4}), "update"),
)

XLM = table(
    "xlm",
    ("mask-ignored", "transformer.attentions.1", ("scores.masked_fill_(mask,", "scores.masked_fill_(mask & False,")),
    ("norm-of-attention", "transformer", ("self.layer_norm2[i](tensor)", "self.layer_norm1[i](tensor)")),
    (
        "relu-for-gelu",
        "transformer.ffns.1",
        edits("transformer.ffns.1", "x = self.act(x)", "x = torch.relu(x)", method="ff_chunk"),
    ),
    ("head-frozen", "sequence_summary.summary", told("sequence_summary.summary", "requires_grad_", False), "backward"),
)

IJEPA = table(
    "ijepa",
    (
        "positions-reversed",
        "ijepa.embeddings",
        ("embeddings + self.position_embeddings\n", "embeddings + self.position_embeddings.flip(1)\n"),
    ),
    ("maximum-for-mean", "", ("sequence_output.mean(dim=1)", "sequence_output.amax(dim=1)")),
    ("epsilon", "ijepa.layers.1.layernorm_after", {"eps": 1e-3}),
    ("patches-transposed", "ijepa.embeddings.patch_embeddings", (".flatten(2)", ".transpose(2, 3).flatten(2)")),
    (
        "bias-lost",
        "ijepa.layers.0.attention.v_proj",
        holds("ijepa.layers.0.attention.v_proj", "bias", torch.zeros_like),
        "state",
    ),
)

_REDUCED = "pvt.encoder.block.0.0.attention.self"
PVT = table(
    "pvt",
    ("scale-missing", "pvt.encoder.block.1.0.attention.self", ("/ math.sqrt(self.attention_head_size)", "")),
    (
        "norm-of-attention",
        "pvt.encoder.block.1.0",
        ("self.layer_norm_2(hidden_states)", "self.layer_norm_2(attention_output)"),
    ),
    ("reduction-not-normed", _REDUCED, ("hidden_states = self.layer_norm(hidden_states)", "pass")),
    (
        "class-token-appended",
        "pvt.encoder.patch_embeddings.1",
        ("torch.cat((cls_token, embeddings), dim=1)", "torch.cat((embeddings, cls_token), dim=1)"),
    ),
    ("axes-swapped", "pvt.encoder", (".permute(0, 3, 1, 2)", ".permute(0, 3, 2, 1)")),
)

_STAGE = "encoder.stages.1.blocks"
HGNET = table(
    "hgnet",
    ("affine-bias-missing", "embedder.stem3.lab", (" + self.bias", "")),
    (
        "norm-in-eval",
        f"{_STAGE}.0.aggregation.0.normalization",
        told(f"{_STAGE}.0.aggregation.0.normalization", "eval"),
    ),
    ("epsilon", "embedder.stem1.normalization", {"eps": 1e-2}),
    ("residual-lost", f"{_STAGE}.1", {"residual": False}),
    ("concatenated-in-reverse", f"{_STAGE}.0", ("torch.cat(output, dim=1)", "torch.cat(output[::-1], dim=1)")),
    ("padded-on-the-left", "embedder", ("F.pad(emb_stem_2a, (0, 1, 0, 1))", "F.pad(emb_stem_2a, (1, 0, 1, 0))")),
    ("statistics-momentum", "embedder.stem4.normalization", {"momentum": 0.01}, "update"),
)

_BLOCK = "swiftformer.encoder.network.2.blocks.0"
SWIFTFORMER = table(
    "swiftformer",
    ("scale-missing", _BLOCK, ("self.layer_scale_1 * res", "res")),
    ("keys-not-normalised", f"{_BLOCK}.attn", ("key = torch.nn.functional.normalize(key, dim=-1)", "pass")),
    ("softmax-axis", f"{_BLOCK}.attn", ("softmax(dim=-1)", "softmax(dim=1)")),
    ("second-head-ignored", "", ("(cls_out + distillation_out) / 2", "cls_out")),
    (
        "gelu-by-tanh",
        f"{_BLOCK}.local_representation.act",
        does(f"{_BLOCK}.local_representation.act", wrong.gelu_by_tanh),
    ),
)

SEW = table(
    "sew",
    (
        "upsampled-by-channel",
        "sew.encoder.upsample",
        (
            "src_len, self.squeeze_factor, tgt_embed_dim)",
            "src_len, tgt_embed_dim, self.squeeze_factor).transpose(2, 3)",
        ),
    ),
    (
        "pool-shifted",
        "sew.encoder",
        ("pooled_hidden_states[..., :min_length] +", "pooled_hidden_states[..., :min_length].roll(1, -1) +"),
    ),
    ("scale", "sew.encoder.layers.1.attention", {"scaling": 0.5}),
    (
        "residual-of-attention",
        "sew.encoder.layers.0",
        ("= hidden_states + self.feed_forward", "= attn_residual + self.feed_forward"),
    ),
    (
        "padding-dropped",
        "sew.encoder",
        (
            "inputs_embeds=hidden_states, attention_mask=attention_mask",
            "inputs_embeds=hidden_states, attention_mask=None",
        ),
    ),
)

MISTAKES = [
    *SQUEEZEBERT, *EUROBERT, *NLLB_MOE, *MARIAN, *XLM, *IJEPA, *PVT, *HGNET, *SWIFTFORMER, *SEW
]  # fmt: skip
