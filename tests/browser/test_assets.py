"""The assets themselves, which need no browser: third-party code is unmodified, and our code cannot inject markup."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import tensortap.report.html

ASSETS = Path(tensortap.report.html.__file__).parent / "assets"
MODULES = sorted(ASSETS.glob("*.js"))


def test_vendored_files_are_the_published_ones() -> None:
    listed = dict(re.findall(r"- `([\w.]+)` ([0-9a-f]{64})", (ASSETS / "vendor/README.md").read_text()))
    present = {path.name for path in (ASSETS / "vendor").iterdir()} - {"README.md"}
    assert listed.keys() == present
    for name, checksum in listed.items():
        assert hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest() == checksum, name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_text_never_becomes_markup_or_code(path: Path) -> None:
    source = path.read_text()
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("style"',
        "DOMParser",
    ):
        assert way not in source, f"{path.name} uses {way}"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source), f"{path.name} names an address"


def test_styles_load_nothing() -> None:
    for path in ASSETS.glob("*.css"):
        assert not re.search(r"url\(|@import", path.read_text()), path.name
