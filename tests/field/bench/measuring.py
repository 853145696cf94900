"""Runs pairs of trainings, compares them in three ways, and says how a verdict compares with the truth."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tensortap as tt
from field.kit.mistake import Mistake
from field.kit.patches import Apply, both
from field.kit.running import SEED, STEPS, Training, loss_of, train_under, training_of
from field.sets import EVERY
from tensortap.core.causes import Cause
from tensortap.core.records import MODULE_KINDS

from .settings import SETTINGS

WAYS = ("tensors", "summary", "isolated")
WITH_TRUTH = "truth"
"""A further way: isolated, and each side is measured against the candidate's modules in float64."""
OUTCOMES = ("exact", "wrong", "missed", "cannot tell")
# Mistakes of the loop are made outside the modules: naming one of them for its computation is wrong.
_COMPUTED = {
    Cause.OUTPUT,
    Cause.OUTPUT_ON_UNKNOWN_INPUTS,
    Cause.CONTAINER_CODE,
    Cause.PARAMETER_GRADIENT,
    Cause.SENT_GRADIENT,
    Cause.CONTAINER_BACKWARD,
    Cause.MISSING_GRADIENT,
    Cause.MISSING_IN_CONTAINER,
    Cause.EXTRA_GRADIENT,
    Cause.EXTRA_IN_CONTAINER,
}


@dataclass(frozen=True)
class Outcome:
    """What was said about one pair of runs."""

    name: str
    family: str
    setting: str
    way: str
    kind: str
    held_out: bool
    expected: tuple[str, ...]
    outcome: str
    """Of a mistake: one of `OUTCOMES`. Of a right pair: "right", "false alarm" or "cannot tell"."""
    named: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    sentence: str = ""
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        expected = " or ".join(name or "(root)" for name in self.expected[:3])
        causes = zip(self.named[:4], self.causes[:4], strict=True)
        named = ", ".join(f"{name or '(root)'} [{cause}]" for name, cause in causes)
        title = f"{self.outcome}: {self.family} {self.name} ({self.setting}, {self.way})"
        return f"{title}: expected {expected or 'nothing'}, named {named or 'nothing'}\n    {self.sentence}"


class Bench:
    """Runs below one folder. What references share is made once for each family, and deleted with `forget`."""

    def __init__(self, folder: Path, kinds: tuple[str, ...] = MODULE_KINDS) -> None:
        self.folder = folder
        self.kinds = kinds
        self._made: dict[tuple[Any, ...], Path] = {}
        self._numbers = itertools.count()

    def forget(self) -> None:
        """Delete all runs."""
        for path in self._made.values():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._made.clear()

    def captured(self, training: Training, keep: str) -> Path:
        """Train under a tap."""
        path = self.folder / f"{next(self._numbers):05d}"
        train_under(
            training, lambda model, optimizer: tt.capture(model, path, keep=keep, kinds=self.kinds, optimizer=optimizer)
        )
        return path

    def once(self, family: str, apply: Apply, keep: str, steps: int = STEPS, seed: int = SEED) -> Path:
        """A run of a reference, made once."""
        spot = (family, apply, keep, steps, seed)
        if spot not in self._made:
            self._made[spot] = self.captured(_changed(training_of(family, steps=steps, seed=seed), apply), keep)
        return self._made[spot]

    def perturbed(self, family: str, apply: Apply) -> Path:
        """The noise of a reference, by perturbation."""
        spot = (family, apply, "noise")
        if spot not in self._made:
            training = _changed(training_of(family), apply)
            path = self.folder / f"{next(self._numbers):05d}.noise"
            batch = training.batches[0][0]
            tt.noise(training.model, lambda model: (loss_of(training, model, batch) * training.share).backward(), path)
            self._made[spot] = path
        return self._made[spot]

    def compared(
        self, family: str, common: Apply, candidate: Training, way: str, noise: Apply | None = None, steps: int = STEPS
    ) -> Any:
        """Compare a candidate with the reference of its family in one of the three ways."""
        keep = "summary" if way == "summary" else "tensors"
        reference = self.once(family, common, keep, steps)
        if way in ("isolated", WITH_TRUTH):
            truth = "float64" if way == WITH_TRUTH else None
            floor = None if noise is None else self.perturbed(family, common)
            return train_under(
                candidate,
                lambda model, optimizer: tt.check(model, reference, noise=floor, optimizer=optimizer, truth=truth),
            ).result
        floors = [] if noise is None else [self.once(family, _pair(common, noise), keep, steps)]
        path = self.captured(candidate, keep)
        result = tt.compare(reference, path, noise=floors) if floors else tt.compare(reference, path)
        shutil.rmtree(path)
        return result

    def judged(self, mistake: Mistake, setting: str, way: str) -> Outcome:
        """Make a mistake, compare, and say whether it was named."""
        of = SETTINGS[setting]
        common = _pair(mistake.common, of.common)
        steps = EVERY[mistake.family].steps
        candidate = _changed(training_of(mistake.family, of.attention, steps), common, of.candidate, mistake.apply)
        result = self.compared(mistake.family, common, candidate, way, of.noise, steps)
        return outcome_of(mistake, setting, way, result)

    def both_judged(self, one: Mistake, other: Mistake, setting: str) -> Outcome:
        """Make two mistakes at once, each module on the reference's own inputs."""
        of = SETTINGS[setting]
        candidate = _changed(training_of(one.family, of.attention), of.common, of.candidate, one.apply, other.apply)
        result = self.compared(one.family, of.common, candidate, "isolated", of.noise)
        named, causes, places = *_named(result), (*one.places, *other.places)
        found = all(set(mistake.places) & set(named) for mistake in (one, other))
        outcome = "exact" if found and set(named) <= set(places) else "named" if found else "missed"
        return Outcome(
            f"{one.name} and {other.name}", one.family, setting, "isolated", "two", one.held_out, places, outcome,
            named, causes, result.sentence, tuple(result.notes),
        )  # fmt: skip


def outcome_of(mistake: Mistake, setting: str, way: str, result: Any) -> Outcome:
    """How the verdict about a mistake compares with the truth."""
    named, causes = _named(result)
    if result.verdict == "match":
        outcome = "missed"
    elif result.verdict not in ("diverged", "imprecise") or result.first is None:
        outcome = "cannot tell"
    else:
        blamed = list(zip(named, causes, strict=True))
        if way not in ("isolated", WITH_TRUTH):  # the first is the answer; later ones may follow from it
            blamed = [(result.first.module, str(result.first.cause))]
        outcome = "exact" if all(_fits(mistake, *each) for each in blamed) else "wrong"
        named, causes = tuple(name for name, _ in blamed), tuple(cause for _, cause in blamed)
    return Outcome(
        mistake.name, mistake.family, setting, way, mistake.kind, mistake.held_out, mistake.places, outcome,
        named, causes, result.sentence, tuple(result.notes),
    )  # fmt: skip


def _fits(mistake: Mistake, module: str, cause: str) -> bool:
    of_loop = callable(mistake.where)
    if of_loop and module == "":
        return Cause(cause) not in _COMPUTED  # the loop itself
    return module in mistake.places and not (of_loop and Cause(cause) in _COMPUTED)


def _named(result: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Every named module with the cause of its first finding."""
    found: dict[str, str] = {}
    for birth in result.births:
        found.setdefault(birth.module, str(birth.cause))
    return tuple(found), tuple(found.values())


def _changed(training: Training, *applies: Apply) -> Training:
    for apply in applies:
        apply(training)
    return training


_PAIRS: dict[tuple[Apply, Apply], Apply] = {}


def _pair(one: Apply, other: Apply) -> Apply:
    """Both changes, always the same function for the same two, so that runs are found again."""
    return _PAIRS.setdefault((one, other), both(one, other))


def right_outcome(name: str, family: str, setting: str, way: str, held_out: bool, result: Any) -> Outcome:
    """Whether a pair of right runs raised an alarm."""
    named, causes = _named(result)
    alarm = result.verdict == "diverged" or result.first is not None
    outcome = "false alarm" if alarm else "right" if result.verdict == "match" else "cannot tell"
    return Outcome(
        name, family, setting, way, "right", held_out, (), outcome, named, causes, result.sentence, tuple(result.notes)
    )


def print_changes(before: list[dict[str, Any]], after: Sequence[Outcome]) -> None:
    """What another run of the benchmark said about the same pairs."""
    spots = ("name", "family", "setting", "way")
    earlier = {tuple(entry[spot] for spot in spots): entry["outcome"] for entry in before}
    for outcome in after:
        was = earlier.get(tuple(getattr(outcome, spot) for spot in spots))
        if was is not None and was != outcome.outcome:
            print(f"was {was}, now {outcome}")
