"""The CUDA source on a CPU: compiled by g++ with the replacements in `cuda/`, and run one warp at a time.

`device_reader` returns the real device_reader, lanes and plans; only launches are simulated.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import fake_gpu
from tensortap.kernels.cuda import gpu
from tensortap.kernels.cuda.driver import Parameter
from tensortap.kernels.cuda.gpu import Gpu
from tensortap.kernels.cuda.variants import FILES, Device, Variant, options

COMPILER = shutil.which("g++")
FOLDER = Path(__file__).parent / "cuda"
PROCESSORS = 3
"""Few, so that blocks take several pieces each."""


class CpuKernel:
    """Stands in for `kernels.cuda.driver.Kernel`."""

    seed = 0
    """Seed of the order in which warps take turns."""

    def __init__(self, library: Path) -> None:
        self._launch = ctypes.CDLL(str(library)).launch_on_cpu
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._launch.restype = ctypes.c_char_p

    def launch(self, blocks: int, parameter: Parameter, stream: int) -> None:
        CpuKernel.seed += 1
        if wrong := self._launch(ctypes.addressof(parameter.memory), blocks, self.seed):
            raise AssertionError(wrong.decode())

    def prepared(self, blocks: int, parameter: Parameter, stream: int) -> Callable[[], None]:
        return lambda: self.launch(blocks, parameter, stream)


@cache
def built(name: str, *options: tuple[str, int]) -> CpuKernel:
    lines = ['#include "machine.h"', *(f"#define {option} {value}" for option, value in options)]
    for file in FILES[name]:
        ours = FOLDER / file
        lines.append((ours if ours.exists() else Path(gpu.__file__).parent / file).read_text())
    struct = {"summarize": "Works", "finish": "Batch"}[name]
    lines.append(f'extern "C" const char *launch_on_cpu(const {struct} *given, unsigned blocks, unsigned seed) {{')
    lines.append(f"    return launch(blocks, THREADS, seed, [=] {{ {name}(*given); }});\n}}\n")
    return CpuKernel(_compiled("\n".join(lines)))


def _compiled(source: str) -> Path:
    stem = _scratch() / hashlib.sha256(source.encode()).hexdigest()[:16]
    code, library = stem.with_suffix(".cpp"), stem.with_suffix(".so")
    code.write_text(source)
    _compile("-shared", f"-I{_header().parent}", f"-I{FOLDER}", "-o", str(library), str(code))
    return library


@cache
def _header() -> Path:
    """Return what the machine itself compiles to. It includes much of C++, which takes half the time of a kernel."""
    compiled = _scratch() / "machine.h.gch"
    _compile("-x", "c++-header", "-o", str(compiled), str(FOLDER / "machine.h"))
    return compiled


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    # A product and a sum are rounded once only where the source says fmaf.
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fPIC"]
    subprocess.run([COMPILER, *options, *arguments], check=True, capture_output=True, text=True)


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cuda_on_cpu_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _compiled_here(device: Device, variant: Variant) -> CpuKernel:
    return built(variant.name, *options(variant).items())


def device_reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes tensors of the CPU as if they were on a GPU."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(gpu, "compiled", _compiled_here)
    monkeypatch.setattr(gpu, "clear", lambda address, count, stream: ctypes.memset(address, 0, 4 * count))
    return fake_gpu.FakeReader(Gpu(Device(0, (9, 0), PROCESSORS, "")))
