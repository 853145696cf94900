"""Models and functions from a user's own file: "file.py:function"."""

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

__all__ = ["Source", "build", "function_of"]


@dataclass(frozen=True)
class Source:
    """Where a function stands."""

    file: Path
    name: str

    @classmethod
    def of(cls, text: str, option: str) -> Source:
        file, colon, name = text.rpartition(":")
        if not colon or not file or not name.isidentifier():
            raise UsageError(f"{option} {text}: say file.py:function, the file and the function in it")
        if not Path(file).is_file():
            raise UsageError(f"{option} {text}: there is no file {file}")
        return cls(Path(file), name)

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"

    def neighbours(self) -> list[str]:
        """Files and folders beside it that it imports: a copy of it alone does not run."""
        nodes = list(ast.walk(ast.parse(self.file.read_bytes())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        first = dict.fromkeys(name.partition(".")[0] for name in names)
        beside = [self.file.parent / part for name in first for part in (f"{name}.py", name)]
        return [path.name for path in beside if path.is_file() or (path / "__init__.py").is_file()]


def function_of(source: Source, option: str) -> Callable[..., Any]:
    """The function itself; its file is run for it."""
    module = _imported(source.file, option)
    found = getattr(module, source.name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]  # whatever the user's file has there
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    close = difflib.get_close_matches(source.name, names, 3, 0.4) or names[:5]
    hint = f"; it has {', '.join(close)}" if close else "; it has no function at all"
    raise UsageError(f"{option} {source}: {source.file} has no function {source.name}{hint}")


def build(source: Source, option: str) -> Any:
    """The model that the function returns."""
    function = function_of(source, option)
    with _beside(source.file):
        try:
            return function()
        except Exception as error:
            raise UsageError(f"{option} {source}: {source.name}() failed: {type(error).__name__}: {error}") from error


def _imported(file: Path, option: str) -> ModuleType:
    name = f"tensortap_replayed_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{option} {file}: it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and others look their own module up there
    with _beside(file):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise UsageError(f"{option} {file}: it could not be run: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def _beside(file: Path) -> Iterator[None]:
    """What lies beside the file can be imported, as if it were run."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
