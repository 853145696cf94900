"""Zooms into a module with the inputs and parameters of recorded runs."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from tensortap.core.records import Record, display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.player import player_of
from tensortap.kernels import summarize
from tensortap.replay.arguments import build_arguments
from tensortap.replay.model_lookup import find_module, model_of
from tensortap.replay.recorded_call import CallSelector, RecordedCall, find_call
from tensortap.replay.state import find_state_names, restore
from tensortap.store import Run
from tensortap.store.formats import open_any
from tensortap.zoom.result import Zoom
from tensortap.zoom.tracing import Call
from tensortap.zoom.zooming import zoom_modules

__all__ = ["ZoomOptions", "zoom_runs"]


@dataclass(frozen=True)
class ZoomOptions:
    """The arguments of `tensortap zoom`."""

    reference: str | os.PathLike[str] | Run
    candidate: str | os.PathLike[str] | Run | None
    """A run that kept the candidate's parameters; None takes those of the reference."""
    selector: CallSelector
    reference_model: Any
    """A model, or "file.py:function" that builds one."""
    candidate_model: Any
    candidate_module: str | None = None
    """The module's name in the candidate, if it differs."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Plain arguments by name, which replace those of the run."""
    exact: bool = True


def zoom_runs(options: ZoomOptions) -> Zoom:
    """Run a module of both models on the inputs that the reference recorded, operator by operator."""
    with ExitStack() as opened:

        def open_side(run: Any) -> Run:
            return run if isinstance(run, Run) else opened.enter_context(open_any(run, summarize))

        recorded = find_call(open_side(options.reference), options.selector)
        theirs = _Module(options.reference_model, recorded.module, "reference")
        ours = _Module(options.candidate_model, options.candidate_module or recorded.module, "candidate")
        notes = [f"inputs: step {recorded.step}, micro {recorded.micro}, call {recorded.call} of {recorded.run.path}"]
        notes += theirs.restore(recorded)
        own = None if options.candidate is None else _state_of(open_side(options.candidate), ours.name, recorded)
        if own is None and any(_kept_parameter(record) for record in recorded.records):
            notes.append("the candidate has the parameters of the reference: its own run kept none")
        notes += ours.restore(replace(recorded, module=ours.name) if own is None else own)
        call = _call(theirs, recorded, options.arguments)
        result = zoom_modules(theirs.module, ours.module, call, display_name(recorded.module), options.exact)
        return replace(result, notes=[*notes, *result.notes])


class _Module:
    """A module of one side, with the parameters of a run."""

    def __init__(self, model: Any, name: str, side: str) -> None:
        root, self._built_by = model_of(model)
        self.name = name
        self.framework: Framework = framework_of(root)
        found = find_module(self.framework, root, name, self._built_by)
        self._names = find_state_names(self.framework, root, found)
        self._side = side
        self.module = found if isinstance(model, str) else copy.deepcopy(found)  # a user's object must not change

    def restore(self, recorded: RecordedCall) -> list[str]:
        notes = restore(self.framework, self.module, self._names, recorded, self._built_by)
        return [f"{self._side}: {note}" for note in notes]


def _state_of(run: Run, module: str, recorded: RecordedCall) -> RecordedCall | None:
    """Return the state that a run kept of a module before the same step; None if it kept no parameters."""
    kept = [
        record
        for record in run.records(rank=run.ranks[0] if run.ranks else 0, step=recorded.step)
        if _kept_parameter(record)
        and (record.key.module == module or record.key.module.startswith(f"{module}.") or not module)
    ]
    if not kept:
        return None
    return RecordedCall(
        run, kept[0].rank, module, recorded.cls, recorded.step, recorded.micro, recorded.call, kept, {}, ()
    )


def _kept_parameter(record: Record) -> bool:
    return record.key.kind == "param" and record.location is not None


def _call(side: _Module, recorded: RecordedCall, given: Mapping[str, Any]) -> Call:
    """Return the recorded call, with a tensor for each recorded input."""
    player = player_of(side.framework)
    inputs, made = recorded.of("input"), dict[int, Any]()

    def load(record: Any) -> Any:
        return player.tensor(recorded.run.load(record), side.module, None)

    def tensor(path: str) -> Any:
        record = inputs[path]
        if record.tensor not in made:  # an aliased input stays one tensor
            made[record.tensor] = load(record)
        return made[record.tensor]

    name = display_name(recorded.module)
    arguments = build_arguments(inputs, recorded.arguments, side.module.forward, given, name)
    args, kwargs = arguments.fill(tensor, player.named)
    gradients = {path: record for path, record in recorded.of("grad_output").items() if record.location is not None}
    # Of several outputs, one may be computed from another, and its recorded gradient contains the other's.
    sent = {path: load(record) for path, record in gradients.items()} if len(gradients) == 1 else {}
    if not inputs:
        raise UsageError(f"{recorded.run.path} has no inputs of {name}")
    return Call(tuple(args), kwargs, sent)
