"""The environment of a run beyond its framework: Python, the platform, and variables that libraries read."""

from __future__ import annotations

import os
import platform
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["describe_environment"]

# They change which kernels run, in which precision, or in which order sums are taken. None of them names a person,
# a machine or a folder.
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "FLAGS_allow_tf32",
    "FLAGS_cudnn_deterministic",
    "FLAGS_cudnn_exhaustive_search",
    "FLAGS_embedding_deterministic",
    "KMP_DETERMINISTIC_REDUCTION",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTHONHASHSEED",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)


def describe_environment(framework: Mapping[str, Any]) -> dict[str, Any]:
    """Return the framework's own description and that of the process.

    Random states are checksums: two runs with the same one draw the same numbers.
    """
    own = {"numpy": _checksum(np.random.get_state()), "python": _checksum(random.getstate())}
    return {
        **framework,
        "random_states": {**framework.get("random_states", {}), **own},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _checksum(state: Any) -> str:
    return f"{zlib.crc32(repr(_plain(state)).encode()):08x}"


def _plain(state: Any) -> Any:
    """Return the whole state, since `repr` omits the middle of an array."""
    if isinstance(state, (tuple, list)):
        return [_plain(each) for each in state]
    return state.tolist() if isinstance(state, np.ndarray) else state
