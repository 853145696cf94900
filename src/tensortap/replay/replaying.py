"""One module, run alone on what a run recorded of it, and compared with what the run recorded."""

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
from tensortap.capture.flatten import open_value
from tensortap.compare import compare
from tensortap.core.records import GRADIENT_KINDS, Comparison, Record, display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.frameworks.base import Framework
from tensortap.frameworks.player import FLOATS, Player, player_of
from tensortap.kernels import summarize
from tensortap.replay import repro
from tensortap.replay.arguments import arranged, moved
from tensortap.replay.excerpt import Excerpt, Place, copied, excerpt
from tensortap.replay.sources import Source, function_of
from tensortap.replay.state import homes_of, restore, state_of
from tensortap.replay.subject import attribute_of, drops, found, model_of, without_tied
from tensortap.store import Run, open_run
from tensortap.store.formats import open_any

__all__ = ["Request", "run_replay"]


@dataclass(frozen=True)
class Request:
    """What was asked; see `tensortap.replay`."""

    run: str | os.PathLike[str] | Run
    place: Place
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
            raise UsageError(f"dtype: {self.dtype!r} is none of {', '.join(FLOATS)}")
        if self.repro is not None and Path(self.repro).exists() and not Path(self.repro).is_dir():
            raise UsageError(f"repro: {self.repro} is a file; name a folder")


def run_replay(request: Request) -> Comparison:
    """See `tensortap.replay`."""
    with ExitStack() as opened:
        run = request.run if isinstance(request.run, Run) else opened.enter_context(open_any(request.run, summarize))
        part = excerpt(run, request.place)
        player = _Replay(request, part)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="tensortap-replay-")))
        return player.compared(folder)


class _Replay:
    """A module ready to be run on the records of one call."""

    def __init__(self, request: Request, part: Excerpt) -> None:
        self._request = request
        root, self._built_by = model_of(request.model)
        self._framework: Framework = framework_of(root)
        recorded_with = part.run.info.get("framework", self._framework.name)
        if recorded_with != self._framework.name:  # its parameters may be laid out differently, and nobody would notice
            raise UsageError(f"the run was recorded with {recorded_with}, and this is a {self._framework.name} model")
        self._player: Player = player_of(self._framework)
        module = found(self._framework, root, part.module, self._built_by)
        self._part = without_tied(self._framework, root, module, part)
        self._attribute = attribute_of(root, module)
        homes = homes_of(self._framework, root, module)
        # A model that is the user's own stays as it is.
        self._module = module if isinstance(request.model, str) else copy.deepcopy(module)
        self._notes = restore(self._framework, self._module, homes, self._part, self._built_by)
        self._source = self._player.plain_source(self._module)
        self._state = {
            f"{owner}.{name}" if owner else name: self._framework.host(tensor).copy()
            for owner, _, name, tensor in state_of(self._framework, self._module)
        }
        if request.implementation is not None:
            self._module.forward = MethodType(_implementation(request.implementation), self._module)
        if request.evaluate:
            self._module.eval()
        self._module = self._player.moved(self._module, request.dtype, request.device)
        kept = self._part.arguments
        self._arguments = arranged(
            self._part.of("input"),
            kept if kept is None or request.device is None else moved(kept, request.device),
            self._module.forward,
            request.arguments,
            display_name(self._part.module),
        )

    def compared(self, folder: Path) -> Comparison:
        """Run it and compare; `folder` is for what is needed on the way."""
        part = self._part
        if not self._gradients() and any(kind in part.kinds for kind in GRADIENT_KINDS):
            what = "only summaries" if part.of("grad_output") else "nothing"
            note = f"no backward: of the gradients that came back to the module, the run has {what}"
            part = self._part = part.without(GRADIENT_KINDS, note)
        gradients = self._own_gradients()
        output = self._play(folder / "alone", gradients)
        copied(part.run, part.records, folder / "reference")
        with open_run(folder / "alone") as alone:
            copied(alone, _compared(part, alone), folder / "candidate", part.placed)
        result = compare(
            folder / "reference",
            folder / "candidate",
            rtol=self._request.rtol,
            atol=self._request.atol,
            workers=1,
            details=self._request.details,
        )
        notes = [*self._told(), *result.notes]
        if self._request.repro is not None:
            notes += self._write_repro(Path(self._request.repro), output, gradients)
        return replace(
            result,
            reference=str(part.run.path),
            candidate=self._described(),
            notes=notes,
            info={**result.info, "reference": part.run.info},
            options=None,
        )

    def _gradients(self) -> dict[str, Record]:
        """Those that can be sent back, by the output's path."""
        return {path: record for path, record in self._part.of("grad_output").items() if record.location is not None}

    def _own_gradients(self) -> dict[str, Any]:
        """What is sent back, by the output's path: of the recorded gradients, what came from outside the module."""
        recorded = {path: self._loaded(record) for path, record in self._gradients().items()}
        if len(recorded) < 2:
            return recorded
        # Some outputs may be made from others. That is looked at on a copy: a call may change buffers.
        outputs = self._outputs(self._called(copy.deepcopy(self._module)))
        different = {id(outputs[path]): path for path in reversed(recorded) if path in outputs}
        paths = [path for path in recorded if path in different.values()]
        own = self._player.own_gradients([outputs[path] for path in paths], [recorded[path] for path in paths])
        return dict(zip(paths, own, strict=True))

    def _play(self, folder: Path, gradients: Mapping[str, Any]) -> Any:
        """One call under a tap, and its backward; what the module returned."""
        part = self._part
        seen = {record.key.module for record in part.records}
        with capture(
            self._module,
            folder,
            keep="tensors",
            kinds=sorted(part.kinds),
            modules=lambda name, _: part.inside(name) in seen,
        ):
            output = self._called(self._module)
            outputs = self._outputs(output)
            paths = [path for path in gradients if path in outputs]
            if paths:
                with self._told_if_it_fails():
                    self._player.backward([outputs[path] for path in paths], [gradients[path] for path in paths])
        return output

    def _called(self, module: Any) -> Any:
        inputs, made = self._part.of("input"), dict[int, Any]()

        def tensor(path: str) -> Any:
            record = inputs[path]
            if record.tensor not in made:  # what was one tensor is one again
                made[record.tensor] = self._player.differentiable(self._loaded(record))
            return made[record.tensor]

        args, kwargs = self._arguments.filled(tensor, self._player.named)
        with self._told_if_it_fails():
            return module(*args, **kwargs)

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            assumed = f" (not kept: {', '.join(self._arguments.assumed)})" if self._arguments.assumed else ""
            said = f"{display_name(self._part.module)} failed on what the run recorded"
            raise UsageError(f"{said}: {type(error).__name__}: {error}{assumed}") from error

    def _outputs(self, output: Any) -> dict[str, Any]:
        """The tensors of an output that take part in autograd, by path."""
        tensors = open_value(output, self._framework.is_tensor).tensors
        return {path: tensor for path, tensor in tensors if self._framework.requires_gradient(tensor)}

    def _loaded(self, record: Record) -> Any:
        return self._player.tensor(self._part.run.load(record), self._module, self._request.dtype)

    def _described(self) -> str:
        """The candidate's name in reports."""
        request = self._request
        words = [f"{display_name(self._part.module)} of {self._built_by}, replayed"]
        if request.implementation is not None:
            words.append(f"with {_name_of(request.implementation)}")
        if request.dtype is not None:
            words.append(f"in {request.dtype}")
        if request.device is not None:
            words.append(f"on {request.device}")
        return " ".join(words)

    def _told(self) -> list[str]:
        part = self._part
        plain = f", called with {', '.join(self._arguments.plain)}" if self._arguments.plain else ""
        notes = [f"replayed: step {part.step}, micro {part.micro}, call {part.call}{plain}", *part.notes, *self._notes]
        if self._arguments.assumed:
            notes.append(
                f"arguments that the run did not keep; used are {', '.join(self._arguments.assumed)} "
                "(--arg NAME=VALUE gives another)"
            )
        if self._arguments.dropped:
            notes.append(f"left out, because its forward does not take them: {', '.join(self._arguments.dropped)}")
        if drops(self._framework, self._module):  # first, where it is always shown: it may be all there is to say
            notes.insert(
                0, "dropout is on and draws other numbers than it did in the run: try --eval, or evaluate=True"
            )
        return notes

    def _write_repro(self, folder: Path, output: Any, gradients: Mapping[str, Any]) -> list[str]:
        """Write it, and say what it lacks."""
        model, implementation = self._request.model, self._request.implementation
        if self._source is None and not isinstance(model, str):
            raise UsageError('repro: give the model as "file.py:function", so that the script can build it, too')
        if callable(implementation):
            raise UsageError('repro: give the implementation as "file.py:function", so that the script can use it, too')
        case = repro.Case(
            dialect=self._player.dialect,
            part=self._part,
            arguments=self._arguments,
            state=self._state,
            output=output,
            gradients={path: self._framework.host(tensor) for path, tensor in gradients.items()},
            source=self._source,
            model=Source.of(model, "model") if self._source is None else None,
            attribute=self._attribute,
            implementation=None if implementation is None else Source.of(implementation, "implementation"),
            dtype=self._request.dtype,
            device=self._request.device,
            training=bool(self._module.training),
        )
        repro.write(folder, case)
        return [
            f"repro: {source.file.name} imports {name}, which lies beside it: copy it to {folder}, too"
            for source in (case.model, case.implementation)
            if source is not None
            for name in source.neighbours()
        ]


def _compared(part: Excerpt, alone: Run) -> Iterator[Record]:
    """The records of the module run alone that have one in the run to be compared with, or should have."""
    known = {record.key for record in part.records}
    for record in alone:
        # Parameters after the step are nobody's concern. Inputs that had no gradient in the run have one here.
        if record.key.phase == "forward" or part.placed(record.key) in known:
            yield record


def _implementation(given: str | Callable[..., Any]) -> Callable[..., Any]:
    return given if callable(given) else function_of(Source.of(given, "implementation"), "implementation")


def _name_of(given: str | Callable[..., Any]) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", "a function")
