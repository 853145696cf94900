"""Imported by Python at the start of every process of a launch, because its folder is on PYTHONPATH.

Until a framework is imported it loads nothing but the standard library: a program may set variables that NumPy and
others read when they are loaded. It hides its folder and runs the `sitecustomize` that it stands in front of.
"""

import atexit
import importlib.machinery
import importlib.util
import json
import os
import sys
from functools import partial
from typing import Any

__all__: list[str] = []


def _load(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _wait_for_frameworks(here: str, settings: dict[str, Any]) -> None:
    imports = _load("_tensortap_imports", os.path.join(here, "..", "..", "core", "imports.py"))  # noqa: PTH118
    for root in settings["frameworks"]:
        imports.around_import(root, after=partial(_imported, root))
    if settings["main"] == os.getpid():
        atexit.register(_report_nothing, settings["out"])


def _imported(root: str) -> None:
    try:
        from tensortap.launch.startup import attach_framework

        attach_framework(root)
    except Exception as error:  # as in the interpreter of another environment; the program must go on
        sys.stderr.write(f"tensortap: nothing is recorded by {sys.executable}: {type(error).__name__}: {error}\n")


def _report_nothing(out: str) -> None:
    if not os.path.exists(out) and os.environ.get("TENSORTAP_RUN"):  # noqa: PTH110
        sys.stderr.write(
            "tensortap: nothing was recorded: no model was called and no optimizer trained the parameters of one\n"
        )


def _run_hidden_module(here: str) -> None:
    sys.path[:] = [path for path in sys.path if path != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("TENSORTAP_RUN"):
    _here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib slows every start
    _wait_for_frameworks(_here, json.loads(os.environ["TENSORTAP_RUN"]))
    _run_hidden_module(_here)
