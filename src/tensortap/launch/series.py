"""The runs of one launch: a program that trains another model later records it into a run of its own."""

from __future__ import annotations

from tensortap.core.urls import Place, address_of
from tensortap.errors import RunNotFound
from tensortap.store.run_folder import open_run

__all__ = ["later_runs", "numbered"]


def numbered(path: Place, number: int) -> Place:
    """Return the path of a launch's n-th run, if its first run is at `path`.

    >>> numbered(Path("runs/a"), 2).name
    'a-2'
    """
    return path if number == 1 else path.with_name(f"{path.name}-{number}")


def later_runs(path: Place) -> list[Place]:
    """Return the second and all later runs of the launch whose first run is at `path`.

    A run of another launch may have such a name, too: only those that know their number belong to it.
    """
    found: list[Place] = []
    while _number_of(later := numbered(path, len(found) + 2)) == len(found) + 2:
        found.append(later)
    return found


def _number_of(path: Place) -> int | None:
    """Return the number that a run has in its launch; None if it is the first, or none."""
    try:
        run = open_run(address_of(path))
    except RunNotFound:
        return None
    values = [run.loop(rank).value("launch", 0) for rank in run.ranks]
    return next((value["number"] for value in values if value is not None), None)
