"""Runs one module alone on its recorded inputs, and compares the results with the recorded ones."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

from tensortap.capture import capture
from tensortap.capture.watching.flatten import open_value
from tensortap.compare import compare
from tensortap.core.records import GRADIENT_KINDS, Comparison, Record, display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.player import FLOATS, Player, player_of
from tensortap.kernels import summarize
from tensortap.replay import repro
from tensortap.replay.arguments import build_arguments, change_device
from tensortap.replay.model_lookup import attribute_of, find_module, has_dropout, model_of, without_tied
from tensortap.replay.recorded_call import CallSelector, RecordedCall, copy_records, find_call
from tensortap.replay.sources import FunctionSource, load_function
from tensortap.replay.state import find_state_names, restore, state_of
from tensortap.store import Run, open_run
from tensortap.store.formats import open_any

__all__ = ["ReplayOptions", "run_replay"]


@dataclass(frozen=True)
class ReplayOptions:
    """The arguments of `tensortap.replay`."""

    run: str | os.PathLike[str] | Run
    selector: CallSelector
    model: Any
    implementation: str | Callable[..., Any] | None = None
    dtype: str | None = None
    device: str | None = None
    evaluate: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rtol: float | None = None
    atol: float | None = None
    repro: str | os.PathLike[str] | None = None
    details: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOATS:
            raise UsageError(f"dtype: {self.dtype!r} is not one of {', '.join(FLOATS)}")
        if self.repro is not None and Path(self.repro).exists() and not Path(self.repro).is_dir():
            raise UsageError(f"repro: {self.repro} is a file; name a folder")


def run_replay(options: ReplayOptions) -> Comparison:
    """Replay one call and compare it; see `tensortap.replay`."""
    with ExitStack() as opened:
        run = options.run if isinstance(options.run, Run) else opened.enter_context(open_any(options.run, summarize))
        replay = _Replay(options, find_call(run, options.selector))
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tensortap-replay-")))
        return replay.run(folder)


class _Replay:
    """A module, prepared to run on the records of one call."""

    def __init__(self, options: ReplayOptions, recorded: RecordedCall) -> None:
        self._options = options
        root, self._built_by = model_of(options.model)
        self._framework: Framework = framework_of(root)
        recorded_with = recorded.run.info.get("framework", self._framework.name)
        if recorded_with != self._framework.name:  # another layout of parameters could go unnoticed
            raise UsageError(f"the run was recorded with {recorded_with}, and this is a {self._framework.name} model")
        self._player: Player = player_of(self._framework)
        module = find_module(self._framework, root, recorded.module, self._built_by)
        self._recorded = without_tied(self._framework, root, module, recorded)
        self._attribute = attribute_of(root, module)
        names = find_state_names(self._framework, root, module)
        # A model object of the user must not change.
        self._module = module if isinstance(options.model, str) else copy.deepcopy(module)
        self._notes = restore(self._framework, self._module, names, self._recorded, self._built_by)
        self._source = self._player.plain_source(self._module)
        self._state = {
            f"{owner}.{name}" if owner else name: self._framework.host(tensor).copy()
            for owner, _, name, tensor in state_of(self._framework, self._module)
        }
        if options.implementation is not None:
            self._module.forward = MethodType(_load_implementation(options.implementation), self._module)
        if options.evaluate:
            self._module.eval()
        self._module = self._player.moved(self._module, options.dtype, options.device)
        kept = self._recorded.arguments
        self._arguments = build_arguments(
            self._recorded.of("input"),
            kept if kept is None or options.device is None else change_device(kept, options.device),
            self._module.forward,
            options.arguments,
            display_name(self._recorded.module),
        )

    def run(self, folder: Path) -> Comparison:
        """Run the module and compare; `folder` receives intermediate runs."""
        recorded = self._recorded
        if not self._gradients() and any(kind in recorded.kinds for kind in GRADIENT_KINDS):
            what = "only summaries" if recorded.of("grad_output") else "nothing"
            note = f"no backward: the run has {what} of the gradients of the module's outputs"
            recorded = self._recorded = recorded.without(GRADIENT_KINDS, note)
        gradients = self._own_gradients()
        output = self._run(folder / "alone", gradients)
        copy_records(recorded.run, recorded.records, folder / "reference")
        with open_run(folder / "alone") as alone:
            copy_records(alone, _comparable(recorded, alone), folder / "candidate", recorded.to_run_key)
        result = compare(
            folder / "reference",
            folder / "candidate",
            rtol=self._options.rtol,
            atol=self._options.atol,
            workers=1,
            details=self._options.details,
        )
        notes = [*self._origin_notes(), *result.notes]
        if self._options.repro is not None:
            notes += self._write_repro(Path(self._options.repro), output, gradients)
        return replace(
            result,
            reference=str(recorded.run.path),
            candidate=self._describe(),
            notes=notes,
            info={**result.info, "reference": recorded.run.info},
            options=None,
        )

    def _gradients(self) -> dict[str, Record]:
        """Return the kept gradients of outputs, by path."""
        return {
            path: record for path, record in self._recorded.of("grad_output").items() if record.location is not None
        }

    def _own_gradients(self) -> dict[str, Any]:
        """Return, by the output's path, the part of each recorded gradient that comes from outside the module."""
        recorded = {path: self._load(record) for path, record in self._gradients().items()}
        if len(recorded) < 2:
            return recorded
        # Some outputs may be computed from others. A copy runs to find out, because a call may change buffers.
        outputs = self._outputs(self._call(copy.deepcopy(self._module)))
        distinct = {id(outputs[path]): path for path in reversed(recorded) if path in outputs}
        paths = [path for path in recorded if path in distinct.values()]
        own = self._player.own_gradients([outputs[path] for path in paths], [recorded[path] for path in paths])
        return dict(zip(paths, own, strict=True))

    def _run(self, folder: Path, gradients: Mapping[str, Any]) -> Any:
        """Run one call under a tap, and its backward; return the module's output."""
        recorded = self._recorded
        seen = {record.key.module for record in recorded.records}
        with capture(
            self._module,
            folder,
            keep="tensors",
            kinds=sorted(recorded.kinds),
            modules=lambda name, _: recorded.inside(name) in seen,
        ):
            output = self._call(self._module)
            outputs = self._outputs(output)
            paths = [path for path in gradients if path in outputs]
            if paths:
                with self._report_failure():
                    self._player.backward([outputs[path] for path in paths], [gradients[path] for path in paths])
        return output

    def _call(self, module: Any) -> Any:
        inputs, made = self._recorded.of("input"), dict[int, Any]()

        def tensor(path: str) -> Any:
            record = inputs[path]
            if record.tensor not in made:  # an aliased input stays one tensor
                made[record.tensor] = self._player.differentiable(self._load(record))
            return made[record.tensor]

        args, kwargs = self._arguments.fill(tensor, self._player.named)
        with self._report_failure():
            return module(*args, **kwargs)

    @contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Raise an error of the module as UsageError, with the arguments that had to be assumed."""
        try:
            yield
        except Exception as error:
            assumed = f" (not kept: {', '.join(self._arguments.assumed)})" if self._arguments.assumed else ""
            what = f"{display_name(self._recorded.module)} failed on the recorded inputs"
            raise UsageError(f"{what}: {type(error).__name__}: {error}{assumed}") from error

    def _outputs(self, output: Any) -> dict[str, Any]:
        """Return the tensors of an output that require gradients, by path."""
        tensors = open_value(output, self._framework.is_tensor).tensors
        return {path: tensor for path, tensor in tensors if self._framework.requires_gradient(tensor)}

    def _load(self, record: Record) -> Any:
        return self._player.tensor(self._recorded.run.load(record), self._module, self._options.dtype)

    def _describe(self) -> str:
        """Return the candidate's name for reports."""
        options = self._options
        words = [f"{display_name(self._recorded.module)} of {self._built_by}, replayed"]
        if options.implementation is not None:
            words.append(f"with {_name_of(options.implementation)}")
        if options.dtype is not None:
            words.append(f"in {options.dtype}")
        if options.device is not None:
            words.append(f"on {options.device}")
        return " ".join(words)

    def _origin_notes(self) -> list[str]:
        """Return notes on the call, its arguments and the origin of parameters."""
        recorded = self._recorded
        plain = f", called with {', '.join(self._arguments.plain)}" if self._arguments.plain else ""
        notes = [
            f"replayed: step {recorded.step}, micro {recorded.micro}, call {recorded.call}{plain}",
            *recorded.notes,
            *self._notes,
        ]
        if self._arguments.assumed:
            notes.append(
                f"arguments that the run did not keep; used instead: {', '.join(self._arguments.assumed)} "
                "(--arg NAME=VALUE sets another)"
            )
        if self._arguments.dropped:
            notes.append(f"dropped, because forward does not take them: {', '.join(self._arguments.dropped)}")
        if has_dropout(self._framework, self._module):  # first, where it is always shown: it may explain everything
            notes.insert(0, "dropout is on and draws other numbers than in the run: try --eval, or evaluate=True")
        return notes

    def _write_repro(self, folder: Path, output: Any, gradients: Mapping[str, Any]) -> list[str]:
        """Write the script, and return notes on files that it lacks."""
        model, implementation = self._options.model, self._options.implementation
        if self._source is None and not isinstance(model, str):
            raise UsageError('repro: give the model as "file.py:function", so that the script can build it')
        if callable(implementation):
            raise UsageError('repro: give the implementation as "file.py:function", so that the script can use it')
        case = repro.ReproCase(
            dialect=self._player.dialect,
            recorded=self._recorded,
            arguments=self._arguments,
            state=self._state,
            output=output,
            gradients={path: self._framework.host(tensor) for path, tensor in gradients.items()},
            source=self._source,
            model=FunctionSource.of(model, "model") if self._source is None else None,
            attribute=self._attribute,
            implementation=None if implementation is None else FunctionSource.of(implementation, "implementation"),
            dtype=self._options.dtype,
            device=self._options.device,
            training=bool(self._module.training),
        )
        repro.write_repro(folder, case)
        return [
            f"repro: {source.file.name} imports {name} from the same folder: copy that to {folder}, too"
            for source in (case.model, case.implementation)
            if source is not None
            for name in source.neighbours()
        ]


def _comparable(recorded: RecordedCall, alone: Run) -> Iterator[Record]:
    """Yield the records of the replay that have a counterpart in the run, or should have one."""
    known = {record.key for record in recorded.records}
    for record in alone:
        # Parameters after the step do not matter. Every input has a gradient here, also if it had none in the run.
        if record.key.phase == "forward" or recorded.to_run_key(record.key) in known:
            yield record


def _load_implementation(given: str | Callable[..., Any]) -> Callable[..., Any]:
    return given if callable(given) else load_function(FunctionSource.of(given, "implementation"), "implementation")


def _name_of(given: str | Callable[..., Any]) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", "a function")
