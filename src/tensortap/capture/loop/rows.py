"""Notes a digest of the rows that each micro step reads. It is independent of their order, so that reordered data is
recognised.

The notes become the loop fact `rows`, at the end of each step. Tensors on a device are left out: reading them would
make the host wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.base import Framework
from tensortap.kernels.summary.row_order import digest_of_rows

__all__ = ["InputRows"]


class InputRows:
    """Collects the rows of the model's inputs over a step."""

    def __init__(self, framework: Framework, write: Callable[[int, str, str, Mapping[str, Any]], None]) -> None:
        self._framework = framework
        self._write = write
        self._found: dict[str, str] = {}

    def entered(self, micro: int, tensors: Iterable[tuple[str, Any]]) -> None:
        """Note the inputs of a call that opens a micro step."""
        with suppress_errors():
            for path, tensor in tensors:
                if self._framework.device_reader(tensor) is None:
                    digest = digest_of_rows(self._framework.host(tensor))
                    if digest is not None:
                        self._found[f"{micro}.{path}"] = f"{digest:016x}"

    def end_step(self, step: int) -> None:
        if self._found:
            self._write(step, "rows", "", dict(self._found))
        self._found.clear()
