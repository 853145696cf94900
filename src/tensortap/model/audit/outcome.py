"""What a load came to, which loads still count when others have followed, and why one did not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["LoadOutcome", "in_effect", "renamed"]


@dataclass(frozen=True)
class LoadOutcome:
    """Plain data; names are those of the model, keys those of the checkpoint."""

    where: str
    target: str = ""
    """Name of the module that was loaded into."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Key → name of every tensor that the load was meant for."""
    told: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name → (loaded | missing | mismatch | changed, what to add)."""
    unexpected: Sequence[str] = ()
    """Keys that the model has no place for."""

    @property
    def gave(self) -> set[str]:
        """The names that got their value from this load."""
        return {name for name, (what, _) in self.told.items() if what == "loaded"}

    def unplaced(self) -> Iterator[str]:
        """The unexpected keys as they would be called in the whole model."""
        return (f"{self.target}.{key}" if self.target else key for key in self.unexpected)


def in_effect(loads: Sequence[LoadOutcome]) -> list[LoadOutcome]:
    """Without those of which nothing is left: later ones were meant for all that they were, and gave all that they did.

    So a load that failed no longer counts when a proper one has followed; a load of a part does not undo the whole's.
    """
    left: list[LoadOutcome] = []
    meant: set[str] = set()
    given: set[str] = set()
    for load in reversed(loads):
        if not given or not (meant >= set(load.names.values()) and given >= load.gave):
            left.append(load)
        if load.gave:  # one that gave nothing takes no other's place
            meant.update(load.names.values())
            given |= load.gave
    return left[::-1]


def renamed(load: LoadOutcome, place: str) -> list[str]:
    """The most common reason why a checkpoint does not fit: it was written by a wrapper, or is read by one."""
    missing = [key for key, name in load.names.items() if load.told.get(name, ("", ""))[0] == "missing"]
    (theirs, ours), matched = _commonest(load.unexpected, missing)
    if not matched:
        return []
    what = f"begin with {theirs!r}" if theirs else f"lack {ours!r} at their beginning"
    return [f"{matched} of {len(load.unexpected)} unexpected keys{place} {what}, and are missing names otherwise"]


def _commonest(unexpected: Collection[str], missing: Collection[str]) -> tuple[tuple[str, str], int]:
    """What most of them differ by, as (their prefix, our prefix), and how many do."""
    prefixes: dict[tuple[str, str], int] = {}
    for key in unexpected:
        for name in missing:
            if key.endswith(f".{name}"):
                prefixes[key[: -len(name)], ""] = prefixes.get((key[: -len(name)], ""), 0) + 1
            elif name.endswith(f".{key}"):
                prefixes["", name[: -len(key)]] = prefixes.get(("", name[: -len(key)]), 0) + 1
    return max(prefixes.items(), key=lambda item: item[1], default=(("", ""), 0))
