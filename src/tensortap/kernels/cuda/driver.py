"""NVRTC and the CUDA driver through ctypes: compile kernels from source and launch them.

Both libraries come with the framework; installing tensortap compiles nothing. Pointers and streams are plain integers,
so that this module needs no framework.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from tensortap.errors import TensortapError

__all__ = [
    "CudaError",
    "Kernel",
    "Parameter",
    "PreparedLaunch",
    "allow_captures",
    "clear",
    "compile_kernel",
    "has_happened",
    "pin",
    "unpin",
]

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_thread = threading.local()


class CudaError(TensortapError):
    """An error of the CUDA driver or of the run-time compiler."""


class Parameter:
    """Memory for the struct that a kernel takes. A launch copies it, so it may change right after."""

    def __init__(self, nbytes: int) -> None:
        self.memory = ctypes.create_string_buffer(nbytes)
        self.pointers = (c_void_p * 1)(ctypes.addressof(self.memory))


class Kernel:
    """A kernel with one parameter, a struct passed by value. It belongs to the context in which it was made."""

    def __init__(self, image: bytes, name: str, threads: int, shared: int = 0) -> None:
        self._module, self._function = c_void_p(), c_void_p()
        _check(_driver().cuModuleLoadData(byref(self._module), image))
        _check(_driver().cuModuleGetFunction(byref(self._function), self._module, name.encode()))
        _check(_driver().cuFuncSetAttribute(self._function, _MOST_SHARED, shared))
        self._threads = threads
        self._shared = shared
        self._call = _driver()["cuLaunchKernel"]  # a function object without argtypes: its arguments need no conversion

    def launch(self, blocks: int, parameter: Parameter, stream: int) -> None:
        self.prepared(blocks, parameter, stream)()

    def prepared(self, blocks: int, parameter: Parameter, stream: int) -> PreparedLaunch:
        """Return a function that launches the kernel with the current content of the parameter."""
        return PreparedLaunch(self._call, self._function, (blocks, self._threads, self._shared), parameter, stream)


class PreparedLaunch:
    """Launches a kernel with the current content of its parameter. `native/launches.h` does the same.

    Converting eleven arguments takes longer than the launch itself, so it is done once.
    """

    __slots__ = ("_arguments", "_call", "packed")

    def __init__(
        self, call: Any, function: c_void_p, sizes: tuple[int, int, int], parameter: Parameter, stream: int
    ) -> None:
        """`sizes` are the blocks, the threads of each, and their bytes of shared memory."""
        blocks, threads, shared = sizes
        counts = [c_uint(size) for size in (blocks, 1, 1, threads, 1, 1, shared)]
        self._arguments = function, *counts, c_void_p(stream), parameter.pointers, None
        self._call = call
        address = ctypes.cast(call, c_void_p).value
        pointers = ctypes.addressof(parameter.pointers)
        self.packed = struct.pack("<4Q3I", address, function.value or 0, stream, pointers, *sizes)
        """The driver's function, the kernel, the stream, the pointer to its parameters, and the sizes."""

    def __call__(self) -> None:
        self.check(self._call(*self._arguments))

    def check(self, code: int) -> None:
        """Raise CudaError if the driver returned an error."""
        _check(code)


def compile_kernel(source: str, name: str, capability: tuple[int, int], options: Sequence[str], toolkit: str) -> bytes:
    """Return the kernel's machine code. `toolkit` is the CUDA version that the framework was built for, as "13.0"."""
    nvrtc = _nvrtc(toolkit.partition(".")[0])
    program = c_void_p()
    _check_nvrtc(nvrtc, nvrtc.nvrtcCreateProgram(byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
    try:
        flags = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", *options]
        code = nvrtc.nvrtcCompileProgram(program, len(flags), (c_char_p * len(flags))(*(f.encode() for f in flags)))
        if code:
            raise CudaError(
                f"the kernel {name} does not compile for sm_{capability[0]}{capability[1]}: {_log(nvrtc, program)}"
            )
        size = c_size_t()
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetCUBINSize(program, byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return image.raw


def clear(address: int, count: int, stream: int) -> None:
    """Set `count` 32-bit numbers on the device to zero, in stream order."""
    _check(_driver().cuMemsetD32Async(address, 0, count, stream))


def pin(address: int, nbytes: int) -> bool:
    """Page-lock memory; return False if the driver refuses.

    Unlike the runtime's function, the driver's leaves no sticky error that a later launch would report.
    """
    return not _driver().cuMemHostRegister_v2(address, nbytes, _PORTABLE)


def unpin(address: int) -> None:
    _driver().cuMemHostUnregister(address)


def allow_captures() -> None:
    """Let this thread synchronise without breaking a graph capture in another thread."""
    if not getattr(_thread, "relaxed", False):
        _driver().cuThreadExchangeStreamCaptureMode(byref(c_int(_RELAXED)))
        _thread.relaxed = True


def has_happened(event: int) -> bool:
    """Return whether an event is known to have happened, without breaking a graph capture in another thread."""
    mode = c_int(_RELAXED)
    _driver().cuThreadExchangeStreamCaptureMode(byref(mode))
    try:
        return not _driver().cuEventQuery(event)
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(byref(mode))


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"there is no CUDA driver: {error}") from error
    library.cuModuleLoadData.argtypes = [c_void_p, c_char_p]
    library.cuModuleGetFunction.argtypes = [c_void_p, c_void_p, c_char_p]
    library.cuFuncSetAttribute.argtypes = [c_void_p, c_int, c_int]
    library.cuMemsetD32Async.argtypes = [c_void_p, c_uint, c_size_t, c_void_p]
    library.cuMemHostRegister_v2.argtypes = [c_void_p, c_size_t, c_uint]
    library.cuMemHostUnregister.argtypes = [c_void_p]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [c_void_p]
    library.cuEventQuery.argtypes = [c_void_p]
    library.cuGetErrorString.argtypes = [c_int, c_void_p]
    return library


@cache
def _nvrtc(major: str) -> ctypes.CDLL:
    name = f"libnvrtc.so.{major}"
    for candidate in (name, *_installed(name)):
        try:
            library = ctypes.CDLL(candidate)
        except OSError:
            continue
        library.nvrtcCreateProgram.argtypes = [c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p]
        library.nvrtcCompileProgram.argtypes = [c_void_p, c_int, c_void_p]
        for function in (library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN):
            function.argtypes = [c_void_p, c_void_p]
        for function in (library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog):
            function.argtypes = [c_void_p, c_void_p]
        library.nvrtcGetErrorString.restype = c_char_p
        return library
    raise CudaError(f"{name}, the run-time compiler of CUDA, was not found")


def _installed(name: str) -> list[str]:
    """Return the paths at which pip and the CUDA toolkit install a library."""
    packages = Path(ctypes.__file__).parents[1] / "site-packages"
    import numpy  # usually in the same site-packages as the framework

    roots = {packages, Path(numpy.__file__).parents[1]}
    found = [str(path) for root in roots for path in sorted(root.glob(f"nvidia/*/lib/{name}"))]
    return [*found, f"/usr/local/cuda/lib64/{name}"]


def _log(nvrtc: ctypes.CDLL, program: c_void_p) -> str:
    size = c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace").strip()


def _check_nvrtc(nvrtc: ctypes.CDLL, code: int) -> None:
    if code:
        raise CudaError(f"NVRTC: {nvrtc.nvrtcGetErrorString(code).decode()}")


def _check(code: int) -> None:
    if code:
        text = c_char_p()
        _driver().cuGetErrorString(code, byref(text))
        raise CudaError(f"CUDA: {(text.value or b'unknown error').decode()} ({code})")
