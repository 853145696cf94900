"""Changes of a training. A module keeps its name and class, and no random number is drawn."""

from __future__ import annotations

from collections.abc import Callable

from support.training_changes import Apply, both, does, has, holds, reads, regroups, trains

from .running import usual_groups

__all__ = ["Apply", "both", "does", "has", "holds", "optimizes", "reads", "trains"]


def optimizes(matters: Callable[[str], bool], options: dict[str, float] | None) -> Apply:
    """Some parameters get other options; with None, the optimizer does not get them."""
    return regroups(usual_groups, lambda name, parameter: matters(name), options)
