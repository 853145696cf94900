"""The environment of a torch process: versions, devices, and the flags that change the last bits of a result."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from tensortap.frameworks.torch.tracing import tracing

__all__ = ["environment"]

_FLAGS: dict[str, Callable[[], Any]] = {
    "threads": torch.get_num_threads,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "matmul_precision": torch.get_float32_matmul_precision,
    "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
    "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn_tf32": lambda: torch.backends.cudnn.allow_tf32,
    "fp32_precision": lambda: torch.backends.fp32_precision,
    "reduced_precision_fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "reduced_precision_bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "flash_attention": torch.backends.cuda.flash_sdp_enabled,
    "memory_efficient_attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "cpu_capability": torch.backends.cpu.get_cpu_capability,
}


def environment() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
        },
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
        "flags": {name: _read(flag) for name, flag in _FLAGS.items()},
        "seed": torch.initial_seed(),
        # Under fake tensors the generator's state has no bytes.
        "random_states": {} if tracing() else {"torch": f"{zlib.crc32(torch.get_rng_state().numpy()):08x}"},
    }


def _read(flag: Callable[[], Any]) -> Any:
    """Return a flag; None if this torch lacks it, or refuses because two settings of it disagree."""
    try:
        value = flag()
    except (AttributeError, RuntimeError):
        return None
    return value if isinstance(value, (bool, int, str, type(None))) else str(value)
