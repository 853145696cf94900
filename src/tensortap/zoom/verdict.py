"""Zooms into the module that a comparison names, with the inputs that its reference recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tensortap.core.records import Comparison, Finding
from tensortap.core.zooming import ZoomSides
from tensortap.errors import TensortapError, UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.replay.recorded_call import CallSelector
from tensortap.replay.sources import FunctionSource
from tensortap.store import Run
from tensortap.zoom.runs import ZoomOptions, zoom_runs

__all__ = ["check_models", "zoom_comparison"]

_COMPUTED = ("forward", "backward")


def check_models(models: Any) -> None:
    """Raise UsageError if these are not two models, or functions that build them: before anything is compared."""
    if not isinstance(models, (tuple, list)) or len(models) != 2:
        raise UsageError(
            'zoom takes two models, the reference\'s and the candidate\'s: ("ref.py:build", "cand.py:build")'
        )
    for each in models:
        if isinstance(each, str):
            FunctionSource.of(each, "zoom")
        else:
            framework_of(network_of(each))


def zoom_comparison(
    comparison: Comparison, reference: Run, candidate: Run | None, models: ZoomSides, module: str | None = None
) -> Comparison:
    """Return the comparison with the line where the module of its first finding differs, or a note why not."""
    first = comparison.first
    if first is None or comparison.verdict != "diverged":
        return _noted(comparison, "nothing diverged")
    if first.key.phase not in _COMPUTED:
        return _noted(comparison, "the first difference is not in what a module computes")
    options = ZoomOptions(
        reference=reference,
        candidate=candidate,
        selector=_selector(first),
        reference_model=models[0],
        candidate_model=models[1],
        candidate_module=first.counterpart if module is None else module,
    )
    try:
        result = zoom_runs(options)
    except TensortapError as error:  # the comparison itself must not be lost
        return _noted(comparison, str(error))
    return replace(comparison, zoom=result, sentence=f"{comparison.sentence} Zoomed in: {result.sentence}")


def _selector(first: Finding) -> CallSelector:
    own = first.key.call if first.key.module == first.module and first.key.kind in ("input", "output") else None
    return CallSelector(first.module, first.key.step, first.key.micro, own, first.rank)


def _noted(comparison: Comparison, why: str) -> Comparison:
    return replace(comparison, notes=[*comparison.notes, f"not zoomed in: {why}"])
