"""Writes a minimal reproduction for a bug report: a short script and its tensors. It does not need tensortap."""

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
from tensortap.replay.arguments import CallArguments, split_path
from tensortap.replay.recorded_call import RecordedCall
from tensortap.replay.sources import FunctionSource
from tensortap.store.writer.header import Header, room_for

__all__ = ["ReproCase", "write_repro"]

SCRIPT, TENSORS = "repro.py", "tensors.safetensors"

_HEAD = '''\
"""{title}

    python {script}        needs {framework} and safetensors

Recorded {versions}. The recorded tensors are in {tensors}.
"""

from pathlib import Path
{imports}
{helpers}

module = {module}
'''


@dataclass(frozen=True)
class ReproCase:
    """A replayed call, and everything that its script needs."""

    dialect: Dialect
    recorded: RecordedCall
    arguments: CallArguments
    state: Mapping[str, npt.NDArray[Any]]
    gradients: Mapping[str, npt.NDArray[Any]]
    """Gradients of the outputs, by path."""
    output: Any
    """The module's return value, which shows how to access its tensors."""
    source: str | None
    """An expression that builds the module; None if only the user's file can build it."""
    model: FunctionSource | None
    attribute: str
    implementation: FunctionSource | None
    dtype: str | None
    device: str | None
    training: bool


def write_repro(folder: Path, case: ReproCase) -> None:
    """Create the folder if necessary, and write script, tensors and copies of the user's files."""
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
def _tensors(case: ReproCase) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    yield from ((f"state.{name}", values) for name, values in case.state.items())
    yield from ((f"grad_output.{path}", values) for path, values in case.gradients.items())
    for kind in ("input", "output", "grad_input"):
        for path, record in _kept(case, kind).items():
            if kind != "input" or _first_path(case, path) == path:
                yield f"{kind}.{path}", case.recorded.run.load(record)
    for name, record in _parameter_gradients(case).items():
        yield f"param_grad.{name}", case.recorded.run.load(record)


def _kept(case: ReproCase, kind: str) -> dict[str, Record]:
    return {path: record for path, record in case.recorded.of(kind).items() if record.location is not None}


def _parameter_gradients(case: ReproCase) -> dict[str, Record]:
    """Return kept gradients of parameters, by the parameter's name relative to the module."""
    above = len(case.recorded.module) + 1 if case.recorded.module else 0
    found = {}
    for record in case.recorded.records:
        if record.key.kind == "param_grad" and record.location is not None:
            owner = record.key.module[above:]
            found[f"{owner}.{record.key.path}" if owner else record.key.path] = record
    return found


def _first_path(case: ReproCase, path: str) -> str:
    """Return the first path of the tensor at this path, so that an aliased input stays one tensor."""
    inputs = case.recorded.of("input")
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
def _lines(case: ReproCase) -> Iterator[str]:
    dialect = case.dialect
    yield _HEAD.format(
        framework=dialect.name,
        helpers=dialect.helpers.format(tensors=TENSORS),
        title=_escape_docstring(_title(case)),
        script=SCRIPT,
        tensors=TENSORS,
        versions=_escape_docstring(_versions(case)),
        imports="".join(_import_lines(case)),
        module=case.source or _model_expression(case),
    ).rstrip()
    if case.state:
        yield dialect.restore
    if case.implementation is not None:
        yield f"module.forward = MethodType({case.implementation.name}, module)"
    yield "module.train()" if case.training else "module.eval()"
    move = dialect.moved_module(case.device, case.dtype)
    yield f"{move}\n" if move else ""
    yield from _call_lines(case)
    yield from _backward_lines(case)
    yield ""


def _title(case: ReproCase) -> str:
    recorded = case.recorded
    how = "".join([f" in {case.dtype}" if case.dtype else "", f" on {case.device}" if case.device else ""])
    return (
        f"{display_name(recorded.module)} ({recorded.cls}) alone{how}, on the inputs recorded in step {recorded.step}."
    )


def _escape_docstring(text: str) -> str:
    """Remove characters with which text from a run could end the docstring that contains it."""
    return "".join(letter for letter in text if letter.isprintable()).replace("\\", "/").replace('"', "'")


def _versions(case: ReproCase) -> str:
    environment = case.recorded.run.info.get("environment") or {}
    versions = [f"{name} {value}" for name, value in (environment.get("versions") or {}).items() if value]
    devices = environment.get("devices") or []
    return f"with {', '.join(versions) or 'versions unknown'} on {', '.join(map(str, devices)) or 'a device unknown'}"


def _import_lines(case: ReproCase) -> Iterator[str]:
    if case.implementation is not None:
        yield "from types import MethodType\n"
    yield f"\n{case.dialect.imports}\n"
    own = [(case.implementation, "implementation"), (case.model, "model")]
    lines = [f"from {name} import {source.name}  # a copy of {source.file.name}" for source, name in own if source]
    yield "".join(f"\n{line}" for line in lines) + ("\n" if lines else "")


def _model_expression(case: ReproCase) -> str:
    assert case.model is not None, "without an expression there is a file"
    model = f"{case.model.name}()"
    return case.dialect.submodule(model, _quoted(case.attribute)) if case.attribute else model


def _call_lines(case: ReproCase) -> Iterator[str]:
    inputs = case.recorded.of("input")
    variables = {path: f"x{at}" for at, path in enumerate(dict.fromkeys(_first_path(case, path) for path in inputs))}
    for path, variable in variables.items():
        record = inputs[path]
        floating = record.dtype.startswith(("float", "bfloat"))
        tensor = case.dialect.moved(_recorded_tensor("input", path), case.device, case.dtype if floating else None)
        yield case.dialect.leaf(variable, tensor) if floating else f"{variable} = {tensor}"

    def argument(path: str) -> str:
        first = _first_path(case, path)
        # The module may change its input in place, which autograd forbids for a leaf.
        return variables[first] + (".clone()" if inputs[first].dtype.startswith(("float", "bfloat")) else "")

    shared = {
        path for path in inputs if sum(_first_path(case, other) == _first_path(case, path) for other in inputs) > 1
    }
    if shared:  # one tensor at several paths
        for first in dict.fromkeys(_first_path(case, path) for path in shared):
            yield f"{variables[first]}_again = {argument(first)}"
    written = case.arguments.as_code(
        lambda path: f"{variables[_first_path(case, path)]}_again" if path in shared else argument(path),
        case.dialect.opaque,
    )
    yield f"output = module({written})\n"
    for path, record in case.recorded.of("output").items():
        expression = _output_expression(case.output, path)
        if record.location is not None:
            yield _show_call("output", path, expression)
        elif expression != "None":
            norm = case.dialect.norm(expression)
            yield f'print({_quoted(f"output {path}")}, "norm", {norm}, "recorded", float("{record.summary.l2}"))'


def _backward_lines(case: ReproCase) -> Iterator[str]:
    sent = [path for path in case.gradients if _output_expression(case.output, path) != "None"]
    if not sent:
        return
    outputs = [_output_expression(case.output, path) for path in sent]
    gradients = [_recorded_tensor("grad_output", path) for path in sent]
    yield "\n" + case.dialect.backward(outputs, gradients)
    inputs = list(dict.fromkeys(_first_path(case, path) for path in case.recorded.of("input")))
    for path in _kept(case, "grad_input"):
        variable = f"x{inputs.index(_first_path(case, path))}"
        yield _show_call("grad_input", path, f"{variable}.grad")
    for name in _parameter_gradients(case):
        yield _show_call("param_grad", name, f"{case.dialect.parameter(_quoted(name))}.grad")


def _show_call(kind: str, path: str, ours: str) -> str:
    return f"show({_quoted(f'{kind} {path}')}, {ours}, {_recorded_tensor(kind, path)})"


def _recorded_tensor(kind: str, path: str) -> str:
    return f"recorded[{_quoted(f'{kind}.{path}')}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _output_expression(output: Any, path: str) -> str:
    """Return the expression for a tensor of the output; "None" if another implementation returns no such tensor."""
    code, value = "output", output
    if hasattr(output, "shape"):  # a bare tensor has the path 0
        return code if path == "0" else "None"
    for part in split_path(path):
        if isinstance(value, Mapping):
            name = next((key for key in value if str(key) == part), None)
            code, value = f"{code}[{name!r}]", value.get(name)
        elif isinstance(value, (list, tuple)) and part.isdecimal():
            code, value = f"{code}[{part}]", value[int(part)] if int(part) < len(value) else None
        else:
            code, value = f"{code}.{part}", getattr(value, part, None) if part.isidentifier() else None
    return code if hasattr(value, "shape") else "None"
