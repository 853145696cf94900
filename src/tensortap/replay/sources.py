"""Loads models and functions from a user's file: "file.py:function"."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tensortap.errors import UsageError

__all__ = ["FunctionSource", "build_model", "load_function"]


@dataclass(frozen=True)
class FunctionSource:
    """A function in a user's file."""

    file: Path
    name: str

    @classmethod
    def of(cls, text: str, option: str) -> FunctionSource:
        file, colon, name = text.rpartition(":")
        if not colon or not file or not name.isidentifier():
            raise UsageError(f"{option} {text}: expected file.py:function")
        if not Path(file).is_file():
            raise UsageError(f"{option} {text}: there is no file {file}")
        return cls(Path(file), name)

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    def neighbours(self) -> list[str]:
        """Return the files and folders in the same folder that it imports: a copy of it alone does not run."""
        nodes = list(ast.walk(ast.parse(self.file.read_bytes())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        first = dict.fromkeys(name.partition(".")[0] for name in names)
        beside = [self.file.parent / part for name in first for part in (f"{name}.py", name)]
        return [path.name for path in beside if path.is_file() or (path / "__init__.py").is_file()]


def load_function(source: FunctionSource, option: str) -> Callable[..., Any]:
    """Run the file and return the function. `option` names the user's argument in errors."""
    module = _import_file(source.file, option)
    found = getattr(module, source.name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]  # any callable of the user's file
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    suggestions = difflib.get_close_matches(source.name, names, 3, 0.4) or names[:5]
    hint = f"; it has {', '.join(suggestions)}" if suggestions else "; it has no function at all"
    raise UsageError(f"{option} {source}: {source.file} has no function {source.name}{hint}")


def build_model(source: FunctionSource, option: str) -> Any:
    """Call the function and return its model."""
    function = load_function(source, option)
    with _importable_folder(source.file):
        try:
            return function()
        except Exception as error:
            raise UsageError(f"{option} {source}: {source.name}() failed: {type(error).__name__}: {error}") from error


def _import_file(file: Path, option: str) -> ModuleType:
    name = f"tensortap_replayed_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option} {file}: it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    with _importable_folder(file):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UsageError(f"{option} {file}: it could not be run: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def _importable_folder(file: Path) -> Iterator[None]:
    """Put the file's folder on sys.path, as running the file would."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
