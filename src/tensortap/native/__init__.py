"""Code in C for what runs at every call of a module: built on first use, as the kernels are, or shipped in a wheel.

Everything here has a counterpart in Python, with the same results, which is taken where there is no compiler.
"""

from __future__ import annotations

from tensortap.native.building import load

__all__ = ["load"]
