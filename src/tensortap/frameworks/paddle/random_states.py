"""The states of paddle's random generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle

from tensortap.core.interrupts import suppress_errors

__all__ = ["random_states"]


def random_states() -> Iterator[tuple[str, bytes]]:
    """Yield the state of the host's generator, and of each CUDA device's."""
    core = paddle.framework.core
    yield "paddle.cpu", _state(core.default_cpu_generator())
    if paddle.device.is_compiled_with_cuda():
        for number in range(paddle.device.cuda.device_count()):
            with suppress_errors():
                yield f"paddle.cuda:{number}", _state(core.default_cuda_generator(number))


def _state(generator: Any) -> bytes:
    # The text of a state has all of its numbers, and the address of its engine, which is another in each process.
    return " ".join(word for word in str(generator.get_state()).split() if not word.startswith("0x")).encode()
