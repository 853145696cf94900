"""Mistakes planted in the code of modules, each on one line, for `tensortap.zoom`."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["MISTAKES", "RIGHT", "SOURCES", "Mistake", "Source", "build", "changed_lines"]

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Source:
    """A file with modules, and how one of them is built and called."""

    text: Callable[[], str]
    make: Callable[[ModuleType, torch.dtype], torch.nn.Module]
    inputs: Callable[[ModuleType, torch.dtype], tuple[tuple[Any, ...], Mapping[str, Any]]]


@dataclass(frozen=True)
class Mistake:
    """A replacement in the text of a source."""

    name: str
    source: str
    old: str
    new: str
    dtype: torch.dtype = torch.float32
    lines: int = 1
    """How many of the changed lines may be named."""
    or_reference: bool = False
    """Whether a line was deleted, so that only the reference has it."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Legitimate changes beside it: an operator added, or fused."""


ATTENTION = """import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)
        self.v = nn.Linear(16, 16)
        self.o = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def heads(self, x):
        return x.view(2, 6, 2, 8).transpose(1, 2)

    def forward(self, x):
        h = self.norm(x)
        q = self.heads(self.q(h))
        k = self.heads(self.k(h))
        v = self.heads(self.v(h))
        scores = q @ k.transpose(-2, -1) * 8**-0.5
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, -1e9)
        weights = scores.softmax(-1)
        context = (weights @ v).transpose(1, 2).reshape(2, 6, 16)
        x = x + self.o(context)
        h = F.gelu(self.up(x))
        gate = torch.sigmoid(x.mean(-1, keepdim=True))
        return x + gate * self.down(h)
"""


def _block(module: ModuleType, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return module.Block().to(dtype)


def _block_inputs(module: ModuleType, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return (torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)).to(dtype),), {}


def _llama_text() -> str:
    from transformers.models.llama import modeling_llama

    text = (
        inspect.getsource(modeling_llama)
        .replace("from ... import", "from transformers import")
        .replace("from ...", "from transformers.")
    )
    return text.replace("from .configuration_llama", "from transformers.models.llama.configuration_llama")


def _llama_config(attention: str = "eager") -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        attn_implementation=attention,
    )


def _llama(module: ModuleType, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return module.LlamaDecoderLayer(_llama_config(), 0).to(dtype)


def _llama_inputs(module: ModuleType, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    places = torch.arange(7)[None]
    mask = torch.full((7, 7), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None].expand(2, 1, 7, 7)
    rotary = module.LlamaRotaryEmbedding(_llama_config())(hidden, places)
    return (hidden,), {"attention_mask": mask, "position_ids": places, "position_embeddings": rotary}


def _bert_text() -> str:
    from transformers.models.bert import modeling_bert

    text = (
        inspect.getsource(modeling_bert)
        .replace("from ... import", "from transformers import")
        .replace("from ...", "from transformers.")
    )
    return text.replace("from .configuration_bert", "from transformers.models.bert.configuration_bert")


def _bert(module: ModuleType, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import BertConfig

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=64, attn_implementation="eager"
    )
    return module.BertLayer(config).to(dtype).eval()


def _bert_inputs(module: ModuleType, dtype: torch.dtype) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    return (torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)).to(dtype),), {}


SOURCES: dict[str, Source] = {
    "block": Source(lambda: ATTENTION, _block, _block_inputs),
    "llama": Source(_llama_text, _llama, _llama_inputs),
    "bert": Source(_bert_text, _bert, _bert_inputs),
}

_UNFUSED_NORM = {
    "h = self.norm(x)": "m = x.mean(-1, keepdim=True); "
    "h = (x - m) * (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt() * self.norm.weight + self.norm.bias"
}
_FUSED_ATTENTION = {
    "        scores = scores.masked_fill(mask, -1e9)\n        weights = scores.softmax(-1)\n": "",
    "(weights @ v)": "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
}

RIGHT: dict[str, Mapping[str, str]] = {
    "unfused norm": _UNFUSED_NORM,
    "fused attention": _FUSED_ATTENTION,
    "scaled query": {"q @ k.transpose(-2, -1) * 8**-0.5": "(q * 8**-0.5) @ k.transpose(-2, -1)"},
    "einsum": {"q @ k.transpose(-2, -1)": 'torch.einsum("bhqd,bhkd->bhqk", q, k)'},
    "mask added": {"scores.masked_fill(mask, -1e9)": "scores + mask * -1e9"},
    "added operator": {"weights = scores.softmax(-1)": "weights = (scores + 0.0).softmax(-1).clone()"},
}
"""Other ways to write the block that compute the same."""

MISTAKES: tuple[Mistake, ...] = (
    Mistake("scale", "block", " * 8**-0.5", ""),
    Mistake("scale beside an unfused norm", "block", " * 8**-0.5", "", more=_UNFUSED_NORM),
    Mistake("scale value", "block", "8**-0.5", "16**-0.5"),
    Mistake("softmax dim", "block", "softmax(-1)", "softmax(-2)"),
    Mistake(
        "softmax dim beside an added operator",
        "block",
        "softmax(-1)",
        "softmax(-2)",
        more={"h = F.gelu(self.up(x))": "h = F.gelu(self.up(x) + 0.0)"},
    ),
    Mistake("mask offset", "block", ".triu(1)", ".triu(2)"),
    Mistake("mask offset beside an unfused norm", "block", ".triu(1)", ".triu(0)", more=_UNFUSED_NORM),
    Mistake("mask side", "block", ".triu(1)", ".tril(-1)"),
    Mistake("mask value", "block", "-1e9", "-1.0"),
    Mistake(
        "mask after softmax",
        "block",
        "scores = scores.masked_fill(mask, -1e9)\n        weights = scores.softmax(-1)",
        "weights = scores.softmax(-1)\n        weights = weights.masked_fill(mask, 0.0)",
        lines=2,
    ),
    Mistake("transposed weights", "block", "(weights @ v)", "(weights.transpose(-2, -1) @ v)"),
    Mistake("heads not merged", "block", "(weights @ v).transpose(1, 2)", "(weights @ v)"),
    Mistake("keys for values", "block", "weights @ v", "weights @ k"),
    Mistake("residual of the norm", "block", "x = x + self.o(context)", "x = h + self.o(context)"),
    Mistake("residual dropped", "block", "return x + gate * self.down(h)", "return gate * self.down(h)"),
    Mistake("residual twice", "block", "x = x + self.o(context)", "x = x + x + self.o(context)"),
    Mistake("tanh gelu", "block", "F.gelu(self.up(x))", 'F.gelu(self.up(x), approximate="tanh")'),
    Mistake("relu", "block", "F.gelu(self.up(x))", "F.relu(self.up(x))"),
    Mistake("reduction dim", "block", "x.mean(-1, keepdim=True)", "x.mean(1, keepdim=True)"),
    Mistake("sum for mean", "block", "x.mean(-1, keepdim=True)", "x.sum(-1, keepdim=True)"),
    Mistake("max for mean", "block", "x.mean(-1, keepdim=True)", "x.amax(-1, keepdim=True)"),
    Mistake("in-place scale", "block", "h = self.norm(x)", "h = self.norm(x.mul_(2.0))"),
    Mistake("in-place overwrite", "block", "h = F.gelu(self.up(x))", "h = F.gelu(self.up(x)); x *= 0.5"),
    Mistake(
        "overwritten values", "block", "weights = scores.softmax(-1)", "weights = scores.softmax(-1); v[:, :, 0] = 0"
    ),
    Mistake("detached weights", "block", "(weights @ v)", "(weights.detach() @ v)"),
    Mistake(
        "no gradient",
        "block",
        "gate = torch.sigmoid(x.mean(-1, keepdim=True))",
        "gate = torch.sigmoid(x.mean(-1, keepdim=True)).detach()",
    ),
    Mistake("data", "block", "gate * self.down(h)", "gate * self.down(h.data)"),
    Mistake(
        "norm epsilon",
        "block",
        "h = self.norm(x)",
        "h = F.layer_norm(x, (16,), self.norm.weight, self.norm.bias, 1e-3)",
    ),
    Mistake(
        "fused attention without mask",
        "block",
        "context = (weights @ v)",
        "context = F.scaled_dot_product_attention(q, k, v)",
    ),
    Mistake("heads split wrongly", "block", "x.view(2, 6, 2, 8).transpose(1, 2)", "x.view(2, 2, 6, 8)"),
    Mistake("rotary halves", "llama", "return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"),
    Mistake("rotary of keys", "llama", "(rotate_half(k) * sin)", "(rotate_half(k) * cos)"),
    Mistake("llama scale", "llama", "key_states.transpose(2, 3)) * scaling", "key_states.transpose(2, 3))"),
    Mistake("llama softmax dim", "llama", "softmax(attn_weights, dim=-1,", "softmax(attn_weights, dim=-2,"),
    Mistake("llama norm dim", "llama", "pow(2).mean(-1, keepdim=True)", "pow(2).mean(1, keepdim=True)"),
    Mistake(
        "llama gate",
        "llama",
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.gate_proj(x) * self.act_fn(self.up_proj(x))",
    ),
    Mistake(
        "llama heads repeated",
        "llama",
        "hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)",
        "hidden_states[:, None, :, :, :].expand(batch, n_rep, num_key_value_heads, slen, head_dim)",
    ),
    Mistake(
        "llama values detached", "llama", "value_states = repeat_kv(value", "value_states = repeat_kv(value.detach()"
    ),
    Mistake(
        "llama softmax not upcast",
        "llama",
        "softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
        "softmax(attn_weights, dim=-1)",
        torch.bfloat16,
    ),
    Mistake(
        "llama norm not upcast",
        "llama",
        "        hidden_states = hidden_states.to(torch.float32)\n",
        "        pass\n",
        torch.bfloat16,
        or_reference=True,
    ),
    Mistake("bert scale", "bert", "key.transpose(2, 3)) * scaling", "key.transpose(2, 3))"),
    Mistake("bert residual", "bert", "self.LayerNorm(hidden_states + input_tensor)", "self.LayerNorm(hidden_states)"),
    Mistake("bert softmax dim", "bert", "softmax(attn_weights, dim=-1)", "softmax(attn_weights, dim=-2)"),
)


def build(folder: Path, name: str, text: str) -> ModuleType:
    """Import a source text as a module of its own."""
    unique = f"planted_{name}_{next(_NUMBERS)}"
    path = folder / f"{unique}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module  # transformers looks its classes' modules up
    spec.loader.exec_module(module)
    return module


def changed_lines(text: str, old: str, new: str) -> tuple[str, list[int]]:
    """Replace the first occurrence; return the new text and the numbers of its changed lines."""
    assert old in text, old
    at = text.index(old)
    first = text.count("\n", 0, at) + 1
    return text.replace(old, new, 1), list(range(first, first + max(new.count("\n"), old.count("\n")) + 1))
