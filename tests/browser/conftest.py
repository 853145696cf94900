"""Real pages of real runs in a real browser. In every test, the page must stay silent and offline.

The browser is Debian's chromium, or the program that TENSORTAP_BROWSER names. Without one, the tests are
skipped; if TENSORTAP_REQUIRE_BROWSER is set, they fail instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tensortap as tt
from support import comparisons, pages
from tensortap.cli import main
from tensortap.report.html import comparison as comparison_html

SWITCHES = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
Open = Callable[..., Any]


def absent(why: str) -> None:
    if os.environ.get("TENSORTAP_REQUIRE_BROWSER"):
        pytest.fail(f"{why}, and TENSORTAP_REQUIRE_BROWSER asks for it")
    pytest.skip(f"{why}: `make browser` installs what these tests need")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = os.environ.get("TENSORTAP_BROWSER") or shutil.which("chromium")
    if program is None:
        absent("no chromium is installed")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("Playwright is not installed")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=SWITCHES.split())
        yield found
        found.close()


@dataclass(frozen=True)
class Runs:
    """Two runs on two ranks that diverge in two places, a run with a NaN and a dead layer, and their pages."""

    reference: Path
    candidate: Path
    broken: Path
    comparison: Path
    summaries: Path
    run: Path


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Runs:
    folder = tmp_path_factory.mktemp("pages")
    torch.set_num_threads(1)
    made = Runs(*(folder / name for name in ("reference", "candidate", "broken", "a.html", "s.html", "run.html")))
    pages.trained(made.reference, factor=1.0)
    pages.trained(made.candidate, factor=1.01, extra=True)
    pages.broken(made.broken)
    for side, factor in (("sr", 1.0), ("sc", 1.01)):
        pages.trained(folder / side, factor=factor, ranks=1, keep="summary")
    written(made.comparison, made.reference, made.candidate)
    written(made.summaries, folder / "sr", folder / "sc")
    written(made.run, made.broken)
    return made


def written(page: Path, *runs: Path) -> None:
    """Through the command, as people do it."""
    words = ["tensortap", "report", *map(str, runs), "-o", str(page), "--exit-zero", "--quiet"]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.fixture(scope="session")
def long_page(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    """400,000 pairs: more than a browser's tallest element could show one below the other."""
    path = tmp_path_factory.mktemp("long") / "long.html"
    with path.open("wb") as file:
        comparison_html.write(comparisons.large(400_000), file)
    return path


@pytest.fixture(scope="session")
def wide_page(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Path:
    """50,000 modules side by side, each with another in it; the one in the middle is the first that is wrong."""
    path = tmp_path_factory.mktemp("wide") / "wide.html"
    with path.open("wb") as file:
        comparison_html.write(comparisons.large(50_000, layers=50_000), file)
    return path


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Opens a page in a new profile. At the end, the console is empty and only the page itself was requested."""
    contexts, trouble = [], []

    def watch(page: Any, origin: str) -> None:
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request", lambda request: request.url.startswith(origin) or trouble.append(f"request: {request.url[:200]}")
        )

    def visited(where: Path | str, hash: str = "", scripts: bool = True, wide: int = 1280, **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": wide, "height": 900}, java_script_enabled=scripts, reduced_motion="reduce", **options
        )
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        url = where if isinstance(where, str) else where.as_uri()
        watch(page, url)
        page.goto(f"{url}#{hash}" if hash else url)
        if scripts:
            page.wait_for_selector("body[data-ready]")
        return page

    yield visited
    for context in contexts:
        context.close()
    assert trouble == []


@pytest.fixture(scope="session")
def served(runs: Runs) -> Iterator[str]:
    """The address at which `tensortap view` answers."""
    with viewing(runs.reference, runs.candidate) as url:
        yield url


@pytest.fixture
def served_run(runs: Runs) -> Iterator[str]:
    """The same of one run."""
    with viewing(runs.broken) as url:
        yield url


@contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tensortap", "view", *map(str, runs), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url = next(line.strip() for line in process.stdout if line.startswith("http://127.0.0.1"))
        yield url
        process.terminate()


@pytest.fixture(scope="session")
def pairs(runs: Runs) -> list[dict[str, Any]]:
    """The comparison itself, to check the page against."""
    return list(tt.compare(runs.reference, runs.candidate).rows)


@pytest.fixture(scope="session")
def births(runs: Runs) -> list[Any]:
    return list(tt.compare(runs.reference, runs.candidate).births)
