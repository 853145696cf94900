"""Noise that was measured in one step is that of the terms of a gradient, also where another step cancels them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_runs import Array, Seen, values, write

import tensortap as tt
from tensortap.store.noise_file import write_noise

NOISE = 0.01


def run(path: Path, sizes: tuple[float, float], given: tuple[float, float], off: float = 0.0) -> Path:
    """Two steps of one layer whose bias has a gradient of some size, below a gradient of some size."""
    seen = []
    for step, (size, terms) in enumerate(zip(sizes, given, strict=True)):
        bias: Array = np.float32(size) * values(9, (16,))
        moved = np.float32(off * np.linalg.norm(bias) / 4) * np.resize([1, -1], 16).astype(np.float32)
        seen += [
            Seen("fc", values(1), "input", step),
            Seen("fc", values(2, (4, 16)), "output", step),
            Seen("fc", np.float32(terms) * values(3, (4, 16)), "grad_output", step),
            Seen("fc", bias + moved * step, "param_grad", step, "bias"),
        ]
    return write(path, seen)


@pytest.mark.parametrize(
    ("sizes", "given", "verdict"),
    [
        ((1.0, 0.1), (1.0, 1.0), "match"),  # little is left of the same terms
        ((1.0, 0.1), (1.0, 0.1), "diverged"),  # the terms are smaller, and so is their noise
        ((1.0, 1.0), (1.0, 1.0), "diverged"),
    ],
)
def test_noise_counts_against_what_is_left(
    tmp_path: Path, sizes: tuple[float, float], given: tuple[float, float], verdict: str
) -> None:
    write_noise(tmp_path / "noise", [(("fc", 0, "param_grad", "bias"), (NOISE, NOISE))], {}, overwrite=False)
    ours = run(tmp_path / "a", sizes, given)
    theirs = run(tmp_path / "b", sizes, given, off=5 * NOISE)
    assert tt.compare(ours, theirs, noise=[tmp_path / "noise"]).verdict == verdict
