"""`result.save`: the suffix selects the format, and a file appears complete or not at all."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet
import pytest

from support import comparisons
from tensortap.errors import StoreWriteError, UsageError
from tensortap.report.files import comparison_json
from tensortap.report.files.saving import SUFFIXES


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_suffix_writes_its_format(suffix: str, tmp_path: Path) -> None:
    result = comparisons.diverged()
    target = tmp_path / f"result{suffix}"
    assert result.save(target) == target
    readers: dict[str, Any] = {
        ".csv": lambda text: len(list(csv.DictReader(text.splitlines()))) == len(result),
        ".html": lambda text: text.startswith("<!doctype html>") and result.sentence.split(" (")[0] in text,
        ".json": lambda text: json.loads(text)["verdict"] == "diverged",
        ".md": lambda text: text.startswith("### ❌"),
        ".xml": lambda text: ElementTree.fromstring(text).tag == "testsuites",
    }
    if suffix == ".parquet":
        assert pyarrow.parquet.read_table(target).num_rows == len(result)
    else:
        assert readers[suffix](target.read_text())
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_the_path_may_be_text_and_the_suffix_in_capitals(tmp_path: Path) -> None:
    assert comparisons.matching().save(str(tmp_path / "A.JSON")) == tmp_path / "A.JSON"
    assert json.loads((tmp_path / "A.JSON").read_text())["verdict"] == "match"


@pytest.mark.parametrize("name", ["result.xlsx", "result", "-", ".json"])
def test_an_unknown_suffix_names_the_known_ones(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.csv, \.html, \.json, \.md, \.parquet or \.xml"):
        comparisons.matching().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreWriteError, match="missing"):
        comparisons.matching().save(tmp_path / "missing" / "a.json")


def test_a_failure_keeps_the_earlier_file_and_leaves_no_partial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.json"
    target.write_text("earlier")

    def fail(comparison: Any, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison_json, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        comparisons.matching().save(target)
    assert target.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [target]
