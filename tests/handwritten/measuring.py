"""Runs pairs of trainings of hand-written models, compares them in three ways, and says whether a verdict is right."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import tensortap as tt
from field.bench.measuring import WAYS, Outcome, outcome_of, right_outcome
from field.kit.mistake import nothing
from field.kit.patches import Apply

from .kinds import Planted
from .models import MODELS
from .right import Right
from .running import STEPS, captured, checked, perturbed, training_of

__all__ = ["SETTINGS", "WAYS", "Bench", "ways_of"]

SETTINGS = ("alone", "beside")
"""Mistakes alone, and beside a right difference: the first other code of the model."""


def ways_of(pair: Right) -> tuple[str, ...]:
    return WAYS if pair.isolated else WAYS[:2]


class Bench:
    """Runs below one folder. References are kept until `forget`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: dict[tuple[Any, ...], Path] = {}
        self._numbers = itertools.count()

    def forget(self) -> None:
        """Delete all runs."""
        for path in self._kept.values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._kept.clear()

    def right(self, pair: Right, way: str) -> Outcome:
        """Compare a pair of right runs."""
        result = self._compared(
            (pair.model, pair.steps, pair.seed),
            (pair.common, pair.reference),
            (pair.common, pair.candidate),
            way,
            pair.noise,
        )
        return right_outcome(pair.name, pair.model, pair.name.split(",")[0], way, pair.held_out, result)

    def mistake(self, mistake: Planted, setting: str, way: str) -> Outcome:
        """Compare a mistake with the right run."""
        beside = next(iter(MODELS[mistake.family].rewrites.values())) if setting == "beside" else nothing
        # The reference is rewritten, so that the mistake edits the same code as ever.
        result = self._compared((mistake.family, STEPS, 0), (beside,), (mistake.apply,), way)
        return outcome_of(mistake, setting, way, result)

    def _compared(
        self,
        of: tuple[str, int, int],
        ours: tuple[Apply, ...],
        theirs: tuple[Apply, ...],
        way: str,
        noise: bool = False,
    ) -> Any:
        keep = "summary" if way == "summary" else "tensors"
        reference = self._reference(of, ours, keep)
        floor = self._noise(of, ours) if noise else None
        candidate = training_of(*of, *theirs)
        if way == "isolated":
            return checked(candidate, reference, floor)
        path = captured(candidate, self._path(), keep)
        try:
            return tt.compare(reference, path, noise=floor)
        finally:
            shutil.rmtree(path)

    def _reference(self, of: tuple[str, int, int], changes: tuple[Apply, ...], keep: str) -> Path:
        spot = (of, changes, keep)
        if spot not in self._kept:
            self._kept[spot] = captured(training_of(*of, *changes), self._path(), keep)
        return self._kept[spot]

    def _noise(self, of: tuple[str, int, int], changes: tuple[Apply, ...]) -> Path:
        spot = (of, changes, "noise")
        if spot not in self._kept:
            self._kept[spot] = perturbed(training_of(*of, *changes), self._path(".noise"))
        return self._kept[spot]

    def _path(self, ending: str = "") -> Path:
        return self.folder / f"{next(self._numbers):05d}{ending}"
