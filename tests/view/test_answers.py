"""The requests of a served page to open runs, and their answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tt
from support.read_page import Parsed, column, number
from support.tapping import tapped
from tensortap.compare.align.side import Scope
from tensortap.compare.comparing import open_comparison
from tensortap.compare.options import ComparisonOptions
from tensortap.health.diagnosis import open_health_report
from tensortap.report.facts import RunFacts
from tensortap.view.answers import Answers, Refused, about_one, about_two


def captured(path: Path, scale: float = 1.0, **options: Any) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 24))
    with torch.no_grad():
        model[2].weight *= scale
    tapped(model, path, torch.ones(100, 20), **options)
    return path


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Answers]:
    reference, candidate = captured(tmp_path / "a"), captured(tmp_path / "b", 1.5)
    with ExitStack() as opened:
        yield about_two(*open_comparison(reference, candidate, ComparisonOptions(), opened))


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Answers]:
    with ExitStack() as opened:
        run = opened.enter_context(tt.open(captured(tmp_path / "a")))
        facts = RunFacts(str(run.path), run.info, True, run.steps, run.ranks, len(run), 1, 1, 1)
        yield about_one(facts, *open_health_report(run, Scope(), opened))


def asked(answers: Answers, path: str, **query: object) -> Any:
    return json.loads(answers.answer(path, {name: str(value) for name, value in query.items()}).body)


def head_of(answers: Answers) -> tuple[Parsed, Any]:
    parsed = Parsed(answers.answer("", {}).body.decode())
    import base64

    text = next(text for attributes, text in parsed.scripts if attributes.get("id") == "head")
    return parsed, json.loads(gzip.decompress(base64.b64decode(text)))


def row_of(answers: Answers, module: str, kind: str) -> int:
    _, head = head_of(answers)
    raw = {}
    for name in ("module", "kind"):
        raw[f"column-{name}"] = gzip.decompress(answers.answer(f"block/column-{name}", {}).body)
    modules = column(head, raw, "module").tolist()
    kinds = column(head, raw, "kind").tolist()
    wanted = head["modules"]["name"].index(module), head["words"]["kind"].index(kind)
    return list(zip(modules, kinds, strict=True)).index(wanted)


def test_the_page_leaves_columns_to_be_asked_for(two: Answers) -> None:
    parsed, head = head_of(two)
    assert "data-served" in next(attributes for tag, attributes in parsed.tags if tag == "body")
    assert parsed.policy["connect-src"] == ["'self'"]
    blocks = [attributes["id"] for attributes, _ in parsed.scripts if "id" in attributes]
    assert blocks == ["head"]
    for entry in head["columns"]:
        assert gzip.decompress(two.answer(f"block/column-{entry['name']}", {}).body)


def test_every_row_has_a_detail(two: Answers) -> None:
    _, head = head_of(two)
    for row in range(head["rows"]):
        found = asked(two, "detail", row=row)
        assert found["row"] == row
        assert found["source"] == "tensors"
        assert sum(found["histogram"]["reference"]) == found["sides"]["reference"]["elements"]


def test_a_slice_has_the_exact_values_of_both(two: Answers) -> None:
    row = row_of(two, "2", "param")
    found = asked(two, "slice", row=row, window="3,5,30,99")
    assert (found["window"], found["whole"]) == ([3, 5, 30, 32], [24, 32])
    np.testing.assert_allclose(found["candidate"], 1.5 * np.array(found["reference"]), rtol=1e-6)
    large = asked(two, "slice", row=row_of(two, "2", "output"), window="0,1000,0,1000")
    assert large["window"] == [0, 64, 0, 24]


def test_a_part_of_the_map(two: Answers) -> None:
    row = row_of(two, "2", "param")
    part = asked(two, "map", row=row, window="3,5,30,99")
    values = asked(two, "slice", row=row, window="3,5,30,99")
    gaps = np.abs(np.array(values["candidate"]) - np.array(values["reference"]))
    assert (part["height"], part["width"]) == (2, 2)
    assert number(part["high"]) == gaps.max()


@pytest.mark.parametrize(
    ("path", "query", "status"),
    [
        ("detail", {}, 400),
        ("detail", {"row": "x"}, 400),
        ("detail", {"row": "-1"}, 400),
        ("detail", {"row": "²"}, 400),
        ("detail", {"row": "99999"}, 404),
        ("detail", {"row": "9" * 5000}, 404),
        ("slice", {"row": "0"}, 400),
        ("slice", {"row": "0", "window": "1,2,3"}, 400),
        ("slice", {"row": "0", "window": "1,2,3,-4"}, 400),
        ("map", {"row": "0", "window": "a,b,c,d"}, 400),
        ("block/head", {}, 404),
        ("block/../../etc/passwd", {}, 404),
        ("index.html", {}, 404),
        ("detail/", {"row": "0"}, 404),
    ],
)
def test_invalid_requests_are_refused(two: Answers, path: str, query: dict[str, str], status: int) -> None:
    with pytest.raises(Refused) as refused:
        two.answer(path, query)
    assert refused.value.status == status


def test_without_bytes_there_are_no_elements(tmp_path: Path) -> None:
    paths = captured(tmp_path / "a", keep="summary"), captured(tmp_path / "b", 1.5, keep="summary")
    with ExitStack() as opened:
        answers = about_two(*open_comparison(*paths, ComparisonOptions(), opened))
        found = asked(answers, "detail", row=0)
        assert (found["source"], found["histogram"], found["map"]) == ("summaries", None, None)
        for path in ("slice", "map"):
            with pytest.raises(Refused, match="summary") as refused:
                answers.answer(path, {"row": "0", "window": "0,1,0,1"})
            assert refused.value.status == 409


def test_one_run_alone(one: Answers) -> None:
    _, head = head_of(one)
    assert head["page"] == "run"
    found = asked(one, "detail", row=head["rows"] - 1)
    assert found["sides"]["candidate"] is found["difference"] is found["map"] is None
    assert found["histogram"]["candidate"] is None
    values = asked(one, "slice", row=row_of(one, "2", "param"), window="0,2,0,2")
    assert len(values["reference"]) == 4
    assert values["candidate"] is None
    with pytest.raises(Refused) as refused:
        one.answer("map", {"row": "0", "window": "0,1,0,1"})
    assert refused.value.status == 404


def test_where_shapes_differ_each_side_has_its_own_elements(tmp_path: Path) -> None:
    for name, wide in (("a", 24), ("b", 30)):
        torch.manual_seed(0)
        tapped(torch.nn.Sequential(torch.nn.Linear(20, wide)), tmp_path / name, torch.ones(100, 20))
    with ExitStack() as opened:
        answers = about_two(*open_comparison(tmp_path / "a", tmp_path / "b", ComparisonOptions(), opened))
        row = row_of(answers, "0", "output")
        assert "shapes differ" in asked(answers, "detail", row=row)["why"]
        for side, wide in (("reference", 24), ("candidate", 30)):
            found = asked(answers, "slice", row=row, window="0,2,20,99", side=side)
            assert (found["whole"], found["window"]) == ([100, wide], [0, 2, 20, wide])
            assert len(found["reference"]) == 2 * (wide - 20)
        for query, status in (({}, 409), ({"side": "both"}, 400)):
            with pytest.raises(Refused) as refused:
                answers.answer("slice", {"row": str(row), "window": "0,1,0,1", **query})
            assert refused.value.status == status
