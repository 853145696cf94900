"""The page about one run: its data, its health, and names that are text."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support.read_page import ReadPage, hashed, outside
from tensortap.core.records import Coverage, HealthFinding, HealthReport, Key
from tensortap.report.facts import RunFacts
from tensortap.report.html import run as run_html
from tensortap.report.wording import clean

COLUMNS = ("rank", "seq", "step", "micro", "phase", "module", "call", "kind", "path", "cls", "dtype", "shape")
NUMBERS = ("elements", "nan", "posinf", "neginf", "zeros", "edge", "min", "max", "mean", "std", "l1", "l2")


def row(module: str = "fc", **changes: Any) -> dict[str, Any]:
    values = dict(
        zip(COLUMNS, (0, 0, 0, 0, "forward", module, 0, "output", "0", "Linear", "float32", [3, 4]), strict=True)
    )
    values |= dict(zip(NUMBERS, (12, 0, 0, 0, 3, 0, -2.5, 1.5, 0.25, 0.5, 9.0, 6.0), strict=True))
    return {**values, "digest": 5, "status": "ok", "birth": False, **changes}


def examination(rows: list[dict[str, Any]], **changes: Any) -> HealthReport:
    rows = [{**each, "seq": seq} for seq, each in enumerate(rows)]
    births = [
        HealthFinding(
            at, Key(*(each[name] for name in Key._fields)), each["rank"], each["cls"], each["status"], "is odd"
        )
        for at, each in enumerate(rows)
        if each["birth"]
    ]
    values: dict[str, Any] = {
        "path": "runs/a",
        "verdict": "suspicious" if births else "healthy",
        "sentence": "What there is to say.",
        "policy": "Suspicious: much.",
        "births": births,
        "counts": Counter(each["status"] for each in rows),
        "table": pa.Table.from_pylist(rows),
    }
    return HealthReport(**{**values, **changes})


def facts(**changes: Any) -> RunFacts:
    values: dict[str, Any] = {"path": "runs/a", "info": {"framework": "torch"}, "finished": True, "steps": [0, 1]}
    values |= {"ranks": [0], "records": 4, "tensors": 4, "kept": 0, "bytes_on_disk": 1000}
    return RunFacts(**{**values, **changes})


def read(found: HealthReport, about: RunFacts | None = None) -> ReadPage:
    file = io.BytesIO()
    run_html.write(about or facts(), found, file)
    return ReadPage(file.getvalue().decode())


ROWS = [
    row("a", step=0),
    row("a", step=0, kind="param_grad", phase="backward", path="weight", l2=3.0),
    row("layers.0.b", step=0, kind="param_grad", phase="backward", path="weight", l2=4.0),
    row("a", step=1, status="dead", birth=True, zeros=12, l2=0.0, min=0.0, max=0.0),
    row("layers.0.b", step=1, status="nonfinite", birth=True, nan=11, posinf=1, min=np.nan, max=np.nan),
]


def test_columns_match_the_records() -> None:
    page = read(examination(ROWS))
    assert page.head["page"] == "run"
    assert page.head["rows"] == 5
    assert page.words("status") == [each["status"] for each in ROWS]
    assert page.words("shape") == ["3×4"] * 5
    np.testing.assert_allclose(page.column("rms")[:4], np.array([6.0, 3.0, 4.0, 0.0]) / 12**0.5, rtol=1e-6)
    assert np.isnan(page.column("rms")[4])
    assert page.column("absmax")[:4].tolist() == [2.5, 2.5, 2.5, 0]
    assert page.column("zeros").tolist()[:4] == [0.25, 0.25, 0.25, 1]
    assert page.column("inf").tolist() == [0, 0, 0, 0, 1]
    assert page.column("nan").tolist() == [0, 0, 0, 0, 11]
    assert page.column("mean").tolist() == [0.25] * 5


def test_gradient_norms_are_those_of_all_parameters_together() -> None:
    head = read(examination(ROWS)).head
    assert head["by_step"]["gradient_norm"] == [5.0, None]
    names = [head["modules"]["name"][code] for code in head["gradients"]["layers"]]
    assert dict(zip(names, head["gradients"]["norm"], strict=True)) == {"a": [3.0, None], "layers.0": [4.0, None]}
    assert head["by_step"]["dead"] == [0, 1]
    assert head["by_step"]["worst"] == [2.5, 0.0]


def test_the_norm_of_gradients_that_are_not_finite_is_infinite() -> None:
    lost = row("a", step=1, kind="param_grad", phase="backward", path="weight", l2=0.0, nan=12)
    head = read(examination([*ROWS, lost])).head
    assert head["by_step"]["gradient_norm"] == [5.0, "Infinity"]
    assert head["gradients"]["norm"][0] == [3.0, "Infinity"]


def test_the_page_begins_with_a_nan() -> None:
    head = read(examination(ROWS)).head
    assert [birth["status"] for birth in head["births"]] == ["dead", "nonfinite"]
    assert head["first"] == head["first_nonfinite"] == 1
    assert head["start"]["row"] == 4
    assert head["births"][1]["command"] == "tensortap show runs/a --module layers.0.b --kind output --step 1"


def test_of_several_ranks_the_command_names_one() -> None:
    rows = [row("a", rank=rank, status="dead", birth=bool(rank)) for rank in (0, 1)]
    head = read(examination(rows), facts(ranks=[0, 1])).head
    assert head["births"][0]["command"].endswith("--step 0 --rank 1")


def test_the_answer_is_there_without_scripts() -> None:
    seen = Coverage("drop", "Dropout", "never called", 0, "unused")
    page = read(
        examination(ROWS),
        facts(notices=["rank 0: it was killed"], coverage={0: [seen, Coverage("a", "Linear", "seen", 2)]}),
    )
    told = page.parsed.text
    for words in ("What there is to say.", "runs/a", "rank 0: it was killed", "never called", "is odd", "✖", "dead"):
        assert words in told
    assert page.parsed.element("banner")["data-verdict"] == "suspicious"
    assert [each["module"] for each in page.head["coverage"]] == ["drop"]
    assert not outside(page.html)
    scripts = [text for attributes, text in page.parsed.scripts if "type" not in attributes]
    assert page.parsed.policy["script-src"] == [hashed(script) for script in scripts]


def test_plain_arguments_are_a_table() -> None:
    told = read(examination(ROWS), facts(calls=[("", "1=None"), ("a", "is_causal=True, past=a Cache object")])).parsed
    assert "Plain arguments" in told.text
    assert "(root)" in told.text
    assert "is_causal=True, past=a Cache object" in told.text
    assert told.element("calls")
    many = read(examination(ROWS), facts(calls=[(f"m{at}", "x=1") for at in range(600)])).parsed.text
    assert "and 100 more" in many
    assert "Plain arguments" not in read(examination(ROWS)).parsed.text


def test_an_empty_run_has_a_page() -> None:
    table = pa.Table.from_pylist([row()]).slice(0, 0)
    page = read(examination([], table=table), facts(steps=[], ranks=[]))
    assert page.head["rows"] == 0
    assert page.head["by_step"]["gradient_norm"] == []
    assert page.head["births"] == []


@pytest.mark.parametrize("name", ["</script><img src=x onerror=alert(1)>", "\u2028<b>&\"'", "<!--"])
def test_names_are_text(name: str) -> None:
    hostile = examination(
        [row(name, cls=name, path=name, status="dead", birth=True)], path=name, sentence=name, policy=name
    )
    about = facts(
        path=name,
        info={"framework": name, "environment": {"flags": {name: name}}},
        notices=[name],
        coverage={0: [Coverage(name, name, "skipped", 0, name)]},
        calls=[(name, name)],
    )
    usual = read(
        examination([row("x", status="dead", birth=True)]),
        facts(
            info={"framework": "x", "environment": {"flags": {"x": "x"}}},
            notices=["x"],
            coverage={0: [Coverage("x", "x", "skipped", 0, "x")]},
            calls=[("x", "x")],
        ),
    )
    page = read(hostile, about)
    assert [tag for tag, _ in page.parsed.tags] == [tag for tag, _ in usual.parsed.tags]
    assert page.words("module") == [name]
    assert page.head["policy"] == page.head["sentence"] == clean(name)
