"""Digests of the states of random generators: those of the framework, of Python and of NumPy's global generator.

A digest takes some ten microseconds for each generator. Reading a state changes nothing.
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework

__all__ = ["RandomStates"]

_MT19937_BYTES = 4 * 624 + 4
_QUIET_BYTES = 2047
"""Most bytes that hashlib takes without releasing the interpreter. The index's thread would take it, and keep it for
milliseconds, while the step waits to begin."""


class RandomStates:
    """Reads the digest of each generator's state."""

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._python: tuple[int, str] = (0, "")
        """The hash of Python's last state, and its digest."""
        self._numpy: tuple[Any, int] = (None, 0)
        """NumPy's global bit generator, and the address of its state; 0 if that is not as expected."""

    def digests(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each generator and the digest of its state. One that cannot be read now is left out."""
        for name, state in self._framework.random_states():
            yield name, _digest(state)
        with suppress_errors():
            yield "python", self._of_python()
        with suppress_errors():
            yield "numpy", self._of_numpy()

    def _of_python(self) -> str:
        _, words, gauss = random.getstate()
        seen = hash((words, gauss is None, gauss or 0.0))  # four times as fast as the digest
        if seen != self._python[0]:
            self._python = seen, _digest(array("Q", words).tobytes() + repr(gauss).encode())
        return self._python[1]

    def _of_numpy(self) -> str:
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._numpy[0]:
            self._numpy = generator, _state_address(generator)
        if address := self._numpy[1]:
            return _digest(ctypes.string_at(address, _MT19937_BYTES))
        return _digest(_numpy_state())


def _state_address(generator: Any) -> int:
    """Return the address of the generator's state, if the generator is the expected one; else 0.

    Reading it there takes a microsecond, through `get_state` sixty.
    """
    with suppress_errors():
        address = int(generator.ctypes.state_address)
        if ctypes.string_at(address, _MT19937_BYTES) == _numpy_state():
            return address
    return 0


def _numpy_state() -> bytes:
    name, key, position, *_ = np.random.get_state()
    if name != "MT19937" or sys.byteorder != "little":
        return repr(np.random.get_state(legacy=False)).encode()
    return np.asarray(key, np.uint32).tobytes() + int(position).to_bytes(4, sys.byteorder)


def _digest(state: bytes) -> str:
    digest = blake2b(digest_size=8)
    for start in range(0, len(state), _QUIET_BYTES):
        digest.update(state[start : start + _QUIET_BYTES])
    return digest.hexdigest()
