"""torch's own C++ interface to tensors, for the hooks in C: `native/torch_access.cpp`, built for this torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from tensortap import native

__all__ = ["access_build", "tensor_access"]

_LIBRARIES = "c10", "torch_cpu", "torch_python"


def tensor_access() -> tuple[Any | None, bool]:
    """See `frameworks.base.TensorValues.tensor_access`."""
    build = access_build()
    module = build.module()
    return None if module is None else module.access, build.pending


@cache
def access_build() -> native.BackgroundBuild:
    """Return the build of the module, which is made once in a process."""
    folder = Path(torch.__file__).parent
    options = (
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{folder / 'include'}",
        f"-L{folder / 'lib'}",
        *(f"-l{name}" for name in _LIBRARIES),
    )
    source = Path(native.__file__).with_name("torch_access.cpp")
    return native.BackgroundBuild(native.Extension(str(source), options, torch.__version__))
