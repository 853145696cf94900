"""Helpers for tests: an assertion that two runs match, and fixtures.

One fixture captures into the test's own folder. The other compares with a golden run that is stored beside the test.

pytest finds the fixture wherever tensortap is installed; tests import the assertion:

>>> from tensortap.pytest_plugin import assert_runs_match
>>>
>>> def test_my_attention(tensortap_capture):
...     for name, model in (("old", old_model), ("new", new_model)):
...         with tensortap_capture(model, name) as tap:
...             model(batch).sum().backward()
...             tap.step()
...     assert_runs_match(tap.path.parent / "old", tap.path.parent / "new")

>>> def test_numbers_stay(tensortap_golden):
...     with tensortap_golden(model, optimizer=optimizer):
...         train(model)

`pytest --tensortap-update` writes the golden runs.

pytest loads this module at every start, in projects that may never use it: heavy imports wait until it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from tensortap.capture.tap import Tap
    from tensortap.core.records import Comparison
    from tensortap.store import Run

__all__ = ["assert_runs_match", "pytest_addoption", "tensortap_capture", "tensortap_golden"]

GOLDEN_FOLDER = "golden"
_UPDATE = "--tensortap-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes golden runs."""
    parser.getgroup("tensortap").addoption(
        _UPDATE, action="store_true", help="Write the golden runs of tensortap_golden instead of comparing with them."
    )


class NamedCapture(Protocol):
    """The value of the fixture: `tensortap.capture` with a name instead of a path."""

    def __call__(self, model: Any, name: str | None = None, **options: Any) -> Tap: ...


def assert_runs_match(reference: str | Path | Run, candidate: str | Path | Run, **options: Any) -> Comparison:
    """Compare two runs with `tensortap.compare` and its options; fail if they diverge or have too little in common.

    A run is a path or an open run, such as the `tap.run` of a capture in memory.

    Return the comparison.
    """
    __tracebackhide__ = True
    import tensortap
    from tensortap.compare.sources import noise_sources
    from tensortap.report.terminal.assertion import message

    result: Comparison = tensortap.compare(reference, candidate, **options)
    if result.verdict != "match":
        noise = noise_sources(options.get("noise"))
        in_memory = any(getattr(source, "in_memory", False) for source in (reference, candidate, *noise))
        raise AssertionError(message(result, None if in_memory else _as_arguments(options | {"noise": noise})))
    return result


@pytest.fixture
def tensortap_capture(tmp_path: Path) -> Iterator[NamedCapture]:
    """Capture into `tmp_path / name`. Taps that the test leaves open are closed at its end.

    Without a name, runs are `run`, `run-2`, `run-3` and so on. An error inside the tap fails the test, unless
    `on_error="warn"` is given.
    """
    import tensortap
    from tensortap.errors import RunExists

    def opened(model: Any, name: str | None, options: dict[str, Any]) -> Tap:
        if name is not None:
            return tensortap.capture(model, tmp_path / name, **options)
        for number in count(1):
            with suppress(RunExists):
                return tensortap.capture(model, tmp_path / (f"run-{number}" if number > 1 else "run"), **options)
        raise AssertionError  # there is always another number

    with ExitStack() as open_taps:

        def capture(model: Any, name: str | None = None, **options: Any) -> Tap:
            tap = opened(model, name, {"on_error": "raise"} | options)
            open_taps.callback(partial(tap.close, "finished", "closed at the end of the test"))
            return tap

        yield capture


@pytest.fixture
def tensortap_golden(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., AbstractContextManager[Tap]]:
    """Capture, and compare with the golden run `golden/TEST` beside the test file when the block ends.

    With --tensortap-update, the block writes the golden run instead. `name` distinguishes several runs of one test,
    `compare` has options of `tensortap.compare`, and the others are those of `tensortap.capture`. Sketches have 64
    numbers, with `optimizer=` 32.
    """
    import tensortap

    update = bool(request.config.getoption(_UPDATE, default=False))
    test = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    folder = Path(request.node.path).parent / GOLDEN_FOLDER

    @contextmanager
    def golden(
        model: Any, name: str = "", *, compare: Mapping[str, Any] | None = None, **options: Any
    ) -> Iterator[Tap]:
        __tracebackhide__ = True
        stored = folder / (f"{test}-{name}" if name else test)
        path = stored if update else tmp_path / stored.name
        if not update and not stored.exists():
            command = f"pytest {request.node.nodeid!r} {_UPDATE}"
            pytest.fail(f"{stored} does not exist: make it with `{command}`, then commit the folder", pytrace=False)
        # Golden runs are committed: 100 modules and 3 steps take at most half a megabyte.
        sketch = 64 if options.get("optimizer") is None else 32
        chosen: dict[str, Any] = {"on_error": "raise", "overwrite": update, "sketch": sketch} | options
        with tensortap.capture(model, path, **chosen) as tap:
            yield tap
        if not update:
            assert_runs_match(stored, path, **(compare or {}))

    return golden


def _as_arguments(options: dict[str, Any]) -> list[str]:
    """Return the options in the form of the command line, as far as it has them."""
    from tensortap.compare.options import ComparisonOptions

    if isinstance(options.get("mapping"), Mapping):  # rules that are in no file
        options = options | {"mapping": None}
    return ComparisonOptions(**options).as_arguments() or []
