"""Allowed imports and calls of each room, and the cost of importing the package."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tensortap
from support import work_order

SOURCE = Path(tensortap.__file__).parent
COMMON = {"errors", "core"}
ROOMS = {
    "errors": set(),
    "core": {"errors"},
    "kernels": COMMON,
    "frameworks": COMMON | {"kernels", "native"},
    "native": COMMON,
    "store": COMMON | {"kernels"},  # for the digests that verify bytes
    "capture": COMMON | {"kernels", "native", "frameworks", "store"},
    "mapping": COMMON,
    "compare": COMMON | {"kernels", "frameworks", "store", "mapping"},
    "health": COMMON | {"kernels", "store", "compare"},
    "replay": COMMON | {"kernels", "frameworks", "store", "capture", "compare"},
    "zoom": COMMON | {"kernels", "frameworks", "store", "capture", "replay"},
    "isolate": COMMON | {"kernels", "frameworks", "store", "capture", "compare"},
    "report": COMMON,
    "view": COMMON | {"compare", "health", "store", "report"},
    "times": COMMON,
    "model": COMMON | {"kernels", "frameworks", "capture", "mapping", "report", "store", "times"},
    "compat": COMMON | {"", "kernels", "frameworks", "capture", "store", "compare", "report", "model"},
    "demo": COMMON | {"", "capture", "compare", "store"},
    "bench": COMMON | {"", "frameworks", "kernels"},  # the kernel alone, without a capture around it
    "integrations": COMMON | {"capture", "frameworks"},
    "launch": COMMON | {"capture", "frameworks", "store"},
    "pytest_plugin": COMMON | {"", "capture", "compare", "store", "report"},
    "cli": COMMON
    | {"", "capture", "compare", "health", "store", "report", "view", "demo", "bench", "compat", "model", "times"}
    | {"launch", "replay", "zoom"},
    "starting": set(),
    "__main__": {"cli", "starting"},
    "__init__": {"capture", "compare", "health", "isolate", "kernels", "store", "errors", "core", "model", "replay"}
    | {"report", "zoom", "starting"},
}


def modules() -> list[tuple[str, Path]]:
    """Yield (room, file) of every module; a file outside the rooms is its own room."""
    return [(path.relative_to(SOURCE).parts[0].removesuffix(".py"), path) for path in sorted(SOURCE.rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: str(value).rpartition("tensortap/")[2])
def test_rooms_import_only_what_they_may(room: str, path: Path) -> None:
    assert room in ROOMS, f"{room} is a new room: say in ROOMS what it may import"
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "tensortap":
            other = rest.partition(".")[0]
            if not ((SOURCE / other).is_dir() or (SOURCE / f"{other}.py").exists()):
                other = ""  # a name of the package itself
            assert other == room or other in ROOMS[room], f"{room} must not import {name}"
        if top in ("torch", "paddle"):
            # demo and bench train models of their own: they are torch programs that use the library.
            assert room in ("frameworks", "demo", "bench", "integrations"), f"only frameworks may import {top}"
        if top in ("transformers", "lightning", "pytorch_lightning", "accelerate"):
            assert room == "integrations", f"only integrations may import {top}"
        if top in ("rich", "typer"):
            assert room in ("report", "cli", "demo", "compat", "model"), (
                f"{room} shows nothing and must not import {top}"
            )
        assert top not in ("pickle", "cPickle", "dill", "shelve", "marshal"), f"{path} must not pickle"


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: str(value).rpartition("tensortap/")[2])
def test_only_the_command_line_prints_and_exits(room: str, path: Path) -> None:
    if room in ("cli", "__main__", "starting", "compat", "model"):  # some of these exist to print as tensors flow
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("print", "sys.exit", "exit", "quit", "breakpoint"), f"{path}:{node.lineno} calls {name}"
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != "sys.argv", f"{path}:{node.lineno} reads argv"


@pytest.mark.parametrize(("room", "path"), modules(), ids=lambda value: str(value).rpartition("tensortap/")[2])
def test_all_lists_the_public_names_of_a_module(room: str, path: Path) -> None:
    if path.name == "__main__.py" or "frameworks" in path.parts:
        return
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    offered = getattr(module, "__all__", None)
    if offered is None:
        assert path.name == "__init__.py", f"{name} has no __all__"
        return
    assert list(offered) == sorted(offered, key=lambda n: (not n.isupper(), not n[0].isupper(), n)) or list(
        offered
    ) == sorted(offered), f"{name}.__all__ is not sorted"
    for entry in offered:
        assert hasattr(module, entry), f"{name}.__all__ names {entry}, which is not there"


def test_public_names() -> None:
    public = {name for name in vars(tensortap) if not name.startswith(("_", "@"))}  # pytest puts @ names in
    submodules = {name for name in public if f"tensortap.{name}" in sys.modules} - set(tensortap.__all__)
    assert public - submodules - {"annotations"} <= set(tensortap.__all__)
    assert dir(tensortap) == sorted([*tensortap.__all__, "__version__"])
    for name in tensortap.__all__:
        assert getattr(tensortap, name).__module__.startswith("tensortap")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tensortap.nothing  # noqa: B018


def test_importing_loads_nothing_heavy_and_is_quick() -> None:
    """A ceiling far above the usual, so that a busy machine does not matter; what counts is what was loaded."""
    script = """
import sys, time
started = time.process_time()
import tensortap
spent = time.process_time() - started
heavy = {"torch", "paddle", "numba", "pyarrow", "pandas", "h5py", "rich", "typer", "safetensors"} & set(sys.modules)
assert not heavy, heavy
assert spent < 0.5, spent
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_only_a_frameworks_own_folder_knows_its_name() -> None:
    """Elsewhere a framework, or the facts it produced, supplies a property by name."""
    # A module name inside a pickle, and the name of a package that is not installed, are no frameworks.
    others = {"store/formats/pickles/refusal.py", "demo/__init__.py", "bench/__init__.py"}
    for room, path in modules():
        if room == "frameworks" or path.relative_to(SOURCE).as_posix() in others:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                constants = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                assert not constants & {"torch", "paddle"}, f"{path}:{node.lineno} branches on a framework's name"


@pytest.mark.parametrize("name", [*work_order.ONE_WORKER, *work_order.LONGEST])
def test_the_order_of_the_tests_names_files_that_exist(name: str) -> None:
    assert (Path(__file__).parents[1] / name).exists()
