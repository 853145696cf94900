"""Code in C for the work at every call of a module: built on first use, as the kernels are, or shipped in a wheel.

All of it has a counterpart in Python with the same results, which runs where there is no compiler. Through
`torch_access.cpp`, the C code reads torch's tensors; without it, it reads their Python attributes.
"""

from __future__ import annotations

from tensortap.native.building import BackgroundBuild, load
from tensortap.native.compiler import Extension

__all__ = ["BackgroundBuild", "Extension", "load"]
