"""Loads of a checkpoint: one under way, its outcome, and which outcomes later loads leave in effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.core.records import Summary
from tensortap.frameworks.loading import LoadCall, outcome
from tensortap.model.audit.snapshots import Change, TensorSnapshots
from tensortap.report.wording import shape

__all__ = ["LoadOutcome", "RunningLoad", "describe_renamed_keys", "loads_in_effect"]

_MOST_PREFIXES = 8
"""Missing keys with one ending that a key is compared with: a short ending may be that of every layer."""

ShapeOf = Callable[[str], tuple[int, ...]]


@dataclass
class RunningLoad:
    """A load that is under way. When it ends, `results` and `unexpected_keys` judge it."""

    target: str
    """Name of the module that is loaded into."""
    method: str
    where: str
    call: LoadCall
    keys: Mapping[str, str]
    """Key in the checkpoint → name in the model."""
    ties: Sequence[Sequence[str]]
    """Groups of names that share one tensor."""
    before: Mapping[str, Summary | None]
    """Name → summary of its values before the load."""
    reported: set[str] = field(default_factory=set)
    """Names that nested loads have already reported."""
    delegated: set[tuple[str, tuple[int, ...] | None]] = field(default_factory=set)
    """Keys, with their shapes, that this load passed to nested loads. Paddle's DataParallel passes all of them."""

    @classmethod
    def begin(
        cls, snapshots: TensorSnapshots, target: str, method: str, where: str, call: LoadCall, state: Mapping[str, Any]
    ) -> RunningLoad:
        """Return a new load into the module `target`. `state` maps checkpoint keys to the module's tensors."""
        by_tensor: dict[int, list[str]] = {}
        for name, _, tensor in snapshots.tensors():
            by_tensor.setdefault(id(tensor), []).append(name)
        keys = {}
        for key, tensor in state.items():
            if names := by_tensor.get(id(tensor)):
                full = f"{target}.{key}" if target else key
                keys[key] = full if full in names else next((n for n in names if key.endswith(n)), names[0])
        ties = [names for names in by_tensor.values() if len(names) > 1]
        before = {name: snapshots.summary(name) for name in snapshots.names}
        return cls(target, method, where, call, keys, ties, before)

    @property
    def only_delegates(self) -> bool:
        """Whether nested loads have judged every key that this load was given."""
        return bool(self.delegated) and self.call.given.items() <= self.delegated

    def took_place(self, changed: Mapping[str, Change], error: BaseException | None) -> bool:
        """Return whether the load set any values, even if it raised afterwards."""
        return error is None or bool(changed) or _ran_to_the_end(error)

    def results(
        self, changed: Mapping[str, Change], shape_of: ShapeOf, result: Any, error: BaseException | None
    ) -> Iterator[tuple[str, str, str]]:
        """Yield (name, event, detail) of every tensor that the load targeted or changed."""
        if not self.took_place(changed, error):
            return
        mismatched = self._mismatched(shape_of)
        missing = {key for key in self._missing_and_unexpected(result)[0] if key not in mismatched}
        loaded = {name for key, name in self.keys.items() if key not in mismatched and key not in missing}
        ties = {name: group for group in self.ties for name in group}
        for key, name in self.keys.items():
            if name not in changed and (name in self.reported or (name in loaded and _may_be_skipped(key, error))):
                continue
            partner = next((other for other in ties.get(name, ()) if other in loaded and other != name), None)
            if name in loaded:
                yield name, "loaded", ""
            elif partner is not None:
                yield name, "loaded", f"through {partner}, which it is tied to"
            elif name in changed:
                yield name, "loaded", ""
            elif key in mismatched:
                yield name, "mismatch", f"{shape(mismatched[key])} in the checkpoint, {shape(shape_of(name))} here"
            elif key in missing:
                yield name, "missing", ""
        targeted = set(self.keys.values())
        for name in [name for name in changed if name not in targeted]:
            yield name, "changed", f"during {self.method} at {self.where}"

    def unexpected_keys(self, shape_of: ShapeOf, result: Any) -> list[str]:
        """Return the keys of the checkpoint that match no tensor of the model."""
        settled = {*self._mismatched(shape_of), *(key for key, _ in self.delegated & self.call.given.items())}
        return [key for key in self._missing_and_unexpected(result)[1] if key not in settled]

    def _mismatched(self, shape_of: ShapeOf) -> dict[str, tuple[int, ...]]:
        """Return key → shape in the checkpoint, where it differs from the model's.

        Paddle counts such a key as both missing and unexpected.
        """
        return {
            key: there
            for key, name in self.keys.items()
            if (there := self.call.given.get(key)) is not None
            and there != (here := shape_of(name))
            and not (here == () and there == (1,))  # very old checkpoints write scalars like this
        }

    def _missing_and_unexpected(self, result: Any) -> tuple[Sequence[str], Sequence[str]]:
        """Return both lists as the framework reports them, which knows of renaming hooks; else infer them."""
        given = self.call.given
        absent, unknown = [key for key in self.keys if key not in given], [key for key in given if key not in self.keys]
        if (reported := outcome(result)) is None:
            return absent, unknown
        missing, unexpected = reported
        if set(unknown) <= set(unexpected):
            # No hook renamed a key, so an absent key got no value from the checkpoint. Torch does not always report it
            # as missing: BatchNorm fills in its own count of batches.
            missing = absent
        return missing, unexpected


def _ran_to_the_end(error: BaseException | None) -> bool:
    """Return whether the load copied all tensors that fit.

    Torch then raises one error for the others. Any other error stops the load at once.
    """
    return error is None or "Error(s) in loading state_dict" in str(error)


def _may_be_skipped(key: str, error: BaseException | None) -> bool:
    """Return whether the error may have kept a given value that fits from being copied."""
    return not _ran_to_the_end(error) or f'While copying the parameter named "{key}"' in str(error)


@dataclass(frozen=True)
class LoadOutcome:
    """The outcome of a load, as plain data. Names are those of the model, keys those of the checkpoint."""

    where: str
    target: str = ""
    """Name of the module that was loaded into."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Key → name of every tensor that the load targeted."""
    results: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name → (loaded | missing | mismatch | changed, detail)."""
    unexpected: Sequence[str] = ()
    """Keys that match no tensor of the model."""

    @property
    def loaded(self) -> set[str]:
        """Names that got their value from this load."""
        return {name for name, (what, _) in self.results.items() if what == "loaded"}

    def unexpected_names(self) -> Iterator[str]:
        """Yield the unexpected keys with the target's name before them."""
        return (f"{self.target}.{key}" if self.target else key for key in self.unexpected)


def loads_in_effect(loads: Sequence[LoadOutcome]) -> list[LoadOutcome]:
    """Return the loads without those that later ones replace: later loads targeted and loaded all that they did.

    A failed load thus stops counting after a proper one. A load of a submodule does not replace a load of the model.
    """
    effective: list[LoadOutcome] = []
    targeted: set[str] = set()
    loaded: set[str] = set()
    for load in reversed(loads):
        if not loaded or not (targeted >= set(load.names.values()) and loaded >= load.loaded):
            effective.append(load)
        if load.loaded:  # a load that set nothing replaces no other
            targeted.update(load.names.values())
            loaded |= load.loaded
    return effective[::-1]


def describe_renamed_keys(load: LoadOutcome, place: str) -> list[str]:
    """Return a note if a prefix explains the unexpected keys: a wrapper wrote the checkpoint, or a wrapper reads it."""
    missing = [key for key, name in load.names.items() if load.results.get(name, ("", ""))[0] == "missing"]
    (extra, absent), matched = _most_common_prefix(load.unexpected, missing)
    if not matched:
        return []
    if extra and absent:
        what = f"begin with {extra!r} where missing ones begin with {absent!r}"
    elif extra:
        what = f"begin with {extra!r}, and without it are the missing ones"
    else:
        what = f"are missing ones without {absent!r} at the beginning"
    return [f"{matched} of {len(load.unexpected)} unexpected keys{place} {what}"]


def _most_common_prefix(unexpected: Collection[str], missing: Collection[str]) -> tuple[tuple[str, str], int]:
    """Return the prefixes that most pairs differ by, as (the checkpoint's, the model's), and how many pairs do.

    Two prefixes that both exist must explain several keys: any two keys may end in "weight".
    """
    by_ending: dict[str, list[str]] = {}
    for name in missing:
        for prefix, ending in _splits(name):
            by_ending.setdefault(ending, []).append(prefix)
    counts: Counter[tuple[str, str]] = Counter()
    for key in unexpected:
        ends = ((extra, by_ending[ending]) for extra, ending in _splits(key) if ending in by_ending)
        extra, absent = next(ends, ("", []))  # of the longest ending
        counts.update((extra, prefix) for prefix in absent[:_MOST_PREFIXES])
    sure = {pair: n for pair, n in counts.items() if any(pair) and (not all(pair) or 2 <= n >= len(unexpected) / 2)}
    return max(sure.items(), key=lambda item: item[1], default=(("", ""), 0))


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, ending) for each dot of the name, with the longest ending first: all of it."""
    start = 0
    while True:
        yield name[:start], name[start:]
        if not (start := name.find(".", start) + 1):
            return
