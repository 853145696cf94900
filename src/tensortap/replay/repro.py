"""A minimal reproduction: a short script and its tensors in a folder, for a bug report. It needs no tensortap."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.core import dtypes
from tensortap.core.records import Record, display_name
from tensortap.errors import StoreWriteError
from tensortap.frameworks.player import Dialect
from tensortap.replay.arguments import Arguments, parts_of
from tensortap.replay.excerpt import Excerpt
from tensortap.replay.sources import Source
from tensortap.store.writer.header import Header, room_for

__all__ = ["Case", "write"]

SCRIPT, TENSORS = "repro.py", "tensors.safetensors"

_HEAD = '''\
"""{title}

    python {script}        needs {framework} and safetensors

Recorded {versions}. What was recorded is in {tensors}.
"""

from pathlib import Path
{imports}
{helpers}

module = {module}
'''


@dataclass(frozen=True)
class Case:
    """What is to be reproduced."""

    dialect: Dialect
    part: Excerpt
    arguments: Arguments
    state: Mapping[str, npt.NDArray[Any]]
    gradients: Mapping[str, npt.NDArray[Any]]
    """What is sent back, by the output's path."""
    output: Any
    """What the module returned, for how its tensors are reached."""
    source: str | None
    """An expression that builds the module; None if it takes the user's own file."""
    model: Source | None
    attribute: str
    implementation: Source | None
    dtype: str | None
    device: str | None
    training: bool


def write(folder: Path, case: Case) -> None:
    """The folder is made; what is in it under the same names is replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_tensors(folder / TENSORS, dict(_tensors(case)))
        for source, name in ((case.model, "model.py"), (case.implementation, "implementation.py")):
            if source is not None:
                shutil.copyfile(source.file, folder / name)
        (folder / SCRIPT).write_text("\n".join(_lines(case)))
    except OSError as error:
        raise StoreWriteError(f"{folder} could not be written: {error.strerror or error}") from error


# --- the tensors ---------------------------------------------------------------------------------------------------
def _tensors(case: Case) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    yield from ((f"state.{name}", values) for name, values in case.state.items())
    yield from ((f"grad_output.{path}", values) for path, values in case.gradients.items())
    for kind in ("input", "output", "grad_input"):
        for path, record in _kept(case, kind).items():
            if kind != "input" or _first(case, path) == path:
                yield f"{kind}.{path}", case.part.run.load(record)
    for name, record in _parameter_gradients(case).items():
        yield f"param_grad.{name}", case.part.run.load(record)


def _kept(case: Case, kind: str) -> dict[str, Record]:
    return {path: record for path, record in case.part.of(kind).items() if record.location is not None}


def _parameter_gradients(case: Case) -> dict[str, Record]:
    """By the parameter's name within the module."""
    above = len(case.part.module) + 1 if case.part.module else 0
    found = {}
    for record in case.part.records:
        if record.key.kind == "param_grad" and record.location is not None:
            owner = record.key.module[above:]
            found[f"{owner}.{record.key.path}" if owner else record.key.path] = record
    return found


def _first(case: Case, path: str) -> str:
    """The first path of the tensor that stands at this one: what was one tensor is one again."""
    inputs = case.part.of("input")
    return next(other for other, record in inputs.items() if record.tensor == inputs[path].tensor)


def _write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    names = {name: dtypes.name_of(values.dtype) for name, values in tensors.items()}
    header = Header(sum(room_for(name, names[name], values.shape, 1 << 60) for name, values in tensors.items()))
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.nbytes
        entry = header.plan(name, names[name], values.shape, begin, end)
        assert entry is not None, "the region has room for every entry"
        header.add(entry)
    with path.open("wb") as file:
        file.write(header.pack())
        for values in tensors.values():
            file.write(np.ascontiguousarray(values).tobytes())


# --- the script ----------------------------------------------------------------------------------------------------
def _lines(case: Case) -> Iterator[str]:
    dialect = case.dialect
    yield _HEAD.format(
        framework=dialect.name,
        helpers=dialect.helpers.format(tensors=TENSORS),
        title=_harmless(_title(case)),
        script=SCRIPT,
        tensors=TENSORS,
        versions=_harmless(_versions(case)),
        imports="".join(_imports(case)),
        module=case.source or _built(case),
    ).rstrip()
    if case.state:
        yield dialect.restore
    if case.implementation is not None:
        yield f"module.forward = MethodType({case.implementation.name}, module)"
    yield "module.train()" if case.training else "module.eval()"
    move = dialect.moved_module(case.device, case.dtype)
    yield f"{move}\n" if move else ""
    yield from _call(case)
    yield from _backward(case)
    yield ""


def _title(case: Case) -> str:
    part = case.part
    how = "".join([f" in {case.dtype}" if case.dtype else "", f" on {case.device}" if case.device else ""])
    return (
        f"{display_name(part.module)} ({part.cls}) alone{how}, on the inputs that a run recorded in step {part.step}."
    )


def _harmless(text: str) -> str:
    """What a run tells, so that it cannot end the docstring that it stands in."""
    return "".join(letter for letter in text if letter.isprintable()).replace("\\", "/").replace('"', "'")


def _versions(case: Case) -> str:
    environment = case.part.run.info.get("environment") or {}
    versions = [f"{name} {value}" for name, value in (environment.get("versions") or {}).items() if value]
    devices = environment.get("devices") or []
    return f"with {', '.join(versions) or 'versions unknown'} on {', '.join(map(str, devices)) or 'a device unknown'}"


def _imports(case: Case) -> Iterator[str]:
    if case.implementation is not None:
        yield "from types import MethodType\n"
    yield f"\n{case.dialect.imports}\n"
    own = [(case.implementation, "implementation"), (case.model, "model")]
    lines = [f"from {name} import {source.name}  # a copy of {source.file.name}" for source, name in own if source]
    yield "".join(f"\n{line}" for line in lines) + ("\n" if lines else "")


def _built(case: Case) -> str:
    assert case.model is not None, "without an expression there is a file"
    model = f"{case.model.name}()"
    return case.dialect.submodule(model, _quoted(case.attribute)) if case.attribute else model


def _call(case: Case) -> Iterator[str]:
    inputs = case.part.of("input")
    variables = {path: f"x{at}" for at, path in enumerate(dict.fromkeys(_first(case, path) for path in inputs))}
    for path, variable in variables.items():
        record = inputs[path]
        floating = record.dtype.startswith(("float", "bfloat"))
        tensor = case.dialect.moved(_recorded("input", path), case.device, case.dtype if floating else None)
        yield case.dialect.leaf(variable, tensor) if floating else f"{variable} = {tensor}"

    def used(path: str) -> str:
        first = _first(case, path)
        # A leaf must not be changed in place; what is made from it may.
        return variables[first] + (".clone()" if inputs[first].dtype.startswith(("float", "bfloat")) else "")

    shared = {path for path in inputs if sum(_first(case, other) == _first(case, path) for other in inputs) > 1}
    if shared:  # the very same tensor in several places
        for first in dict.fromkeys(_first(case, path) for path in shared):
            yield f"{variables[first]}_again = {used(first)}"
    written = case.arguments.written(
        lambda path: f"{variables[_first(case, path)]}_again" if path in shared else used(path), case.dialect.opaque
    )
    yield f"output = module({written})\n"
    for path, record in case.part.of("output").items():
        reached = _reached(case.output, path)
        if record.location is not None:
            yield _show("output", path, reached)
        elif reached != "None":
            norm = case.dialect.norm(reached)
            yield f'print({_quoted(f"output {path}")}, "norm", {norm}, "recorded", float("{record.summary.l2}"))'


def _backward(case: Case) -> Iterator[str]:
    sent = [path for path in case.gradients if _reached(case.output, path) != "None"]
    if not sent:
        return
    outputs = [_reached(case.output, path) for path in sent]
    gradients = [_recorded("grad_output", path) for path in sent]
    yield "\n" + case.dialect.backward(outputs, gradients)
    inputs = list(dict.fromkeys(_first(case, path) for path in case.part.of("input")))
    for path in _kept(case, "grad_input"):
        variable = f"x{inputs.index(_first(case, path))}"
        yield _show("grad_input", path, f"{variable}.grad")
    for name in _parameter_gradients(case):
        yield _show("param_grad", name, f"{case.dialect.parameter(_quoted(name))}.grad")


def _show(kind: str, path: str, ours: str) -> str:
    return f"show({_quoted(f'{kind} {path}')}, {ours}, {_recorded(kind, path)})"


def _recorded(kind: str, path: str) -> str:
    return f"recorded[{_quoted(f'{kind}.{path}')}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _reached(output: Any, path: str) -> str:
    """How a tensor of the output is written; None if it has no such tensor, as another implementation may not."""
    code, value = "output", output
    if hasattr(output, "shape"):  # a bare tensor has the path 0
        return code if path == "0" else "None"
    for part in parts_of(path):
        if isinstance(value, Mapping):
            name = next((key for key in value if str(key) == part), None)
            code, value = f"{code}[{name!r}]", value.get(name)
        elif isinstance(value, (list, tuple)) and part.isdecimal():
            code, value = f"{code}[{part}]", value[int(part)] if int(part) < len(value) else None
        else:
            code, value = f"{code}.{part}", getattr(value, part, None) if part.isidentifier() else None
    return code if hasattr(value, "shape") else "None"
