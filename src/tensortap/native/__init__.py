"""Code in C for what runs at every call of a module: built on first use, as the kernels are, or shipped in a wheel.

Everything here has a counterpart in Python, with the same results, which is taken where there is no compiler.
`torch_access.cpp` answers what the C code asks of torch's tensors; without it, Python's attributes do.
"""

from __future__ import annotations

from tensortap.native.building import BackgroundBuild, load
from tensortap.native.compiler import Extension

__all__ = ["BackgroundBuild", "Extension", "load"]
