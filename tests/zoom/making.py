"""How modules of held-out mistakes are built and called."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

import torch
from zoom.planted import Source

__all__ = ["causal", "library_text", "own_source", "randn", "randomised"]


def library_text(family: str) -> Callable[[], str]:
    """Return what reads the code of a family of transformers, so that it runs from a file elsewhere."""

    def text() -> str:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        source = inspect.getsource(module).replace("from ... import", "from transformers import")
        source = source.replace("from ...", "from transformers.")
        return source.replace("from .conf", f"from transformers.models.{family}.conf")

    return text


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomised(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Give every parameter random values: some libraries begin with zeros or ones, or leave memory as it is."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = max(1, parameter.shape[-1]) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * scale)
    return module.to(dtype).eval()


def causal(length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]


def own_source(text: str, *shape: int) -> Source:
    """Return a source with a hand-written `Block`, called with a random tensor."""
    return Source(
        lambda: text,
        lambda module, dtype: randomised(module.Block(), dtype),
        lambda module, dtype: ((randn(*shape).to(dtype),), {}),
    )
