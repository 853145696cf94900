"""The states of torch's random generators."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tensortap.core.interrupts import suppress_errors

__all__ = ["random_states"]


def random_states() -> Iterator[tuple[str, bytes]]:
    """Yield the state of the host's generator, and of each CUDA device's if CUDA is in use. No device is waited for."""
    yield "torch.cpu", torch.default_generator.get_state().numpy().tobytes()
    if torch.cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            with suppress_errors():  # not while a CUDA graph is being captured
                yield f"torch.cuda:{number}", generator.get_state().numpy().tobytes()
