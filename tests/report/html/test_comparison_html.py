"""The page about a comparison: its data match the comparison, names are text, and it makes no requests."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from support import comparisons
from support.read_page import ReadPage, hashed, number, outside
from tensortap.compare.say.columns import SCHEMA
from tensortap.core.details import Detail, Element, Histogram, Needed, TensorFacts, TileMap, Ulps, Window
from tensortap.core.records import STATUSES, Comparison, Difference, Key, Unmatched
from tensortap.report.html import comparison as comparison_html
from tensortap.report.wording import clean

ALL = ("diverged", "from_sketches", "with_nan", "matching", "incomparable")
HOSTILE = (
    '</script><img src=x onerror="alert(1)">',
    "<!-- <script>",
    "a\"b'c&amp;d<b>",
    "line\nbreak\r\x00\x1b[2J",
    "\u2028\u2029\u202egnol",
    "×…日本語🎉",
    "${x}`${y}`",
    "]]><svg/onload=alert(1)>",
)


def read(comparison: Comparison) -> ReadPage:
    file = io.BytesIO()
    comparison_html.write(comparison, file)
    return ReadPage(file.getvalue().decode())


def values(comparison: Comparison, name: str) -> Any:
    return np.asarray(comparison.table.column(name).to_numpy())


def facts(**changes: Any) -> TensorFacts:
    given: dict[str, Any] = {
        "dtype": "float32",
        "shape": (2, 16, 64),
        "elements": 2048,
        "zeros": 1,
        "edge": 0,
        "digest": 0xABC,
    }
    given |= {
        "nan": 0,
        "posinf": 0,
        "neginf": 0,
        "min": -1.0,
        "max": 1.0,
        "mean": 0.0,
        "std": 0.5,
        "l1": 9.0,
        "l2": 5.0,
    }
    return TensorFacts(**{**given, **changes})


def detail(*rows: int, **changes: Any) -> Detail:
    difference = Difference(
        2048, False, True, 4.1e-3, 0.0, 0.99, 0.1, 0.2, (0, 1, 2), 1.0, 1.2, 50.0, 0.06, 0.3, (1, 7)
    )
    tiles = np.array([[0.0, 1e-3], [np.inf, 1e-6]])
    given: dict[str, Any] = {
        "whole": True,
        "reference": facts(),
        "candidate": facts(nan=1),
        "difference": difference,
        "judged": 4.1e-3,
        "tolerances": (1.3e-6, 1e-5),
        "histogram": Histogram(np.linspace(-1, 1, 3), np.array([1, 2]), np.array([2, 1]), None),
        "ulps": Ulps(np.array([0, 1, np.inf]), np.array([2000, 48])),
        "map": TileMap(tiles, (32, 64), Window(0, 32, 0, 64), "rows 2×16, columns 64"),
        "worst": (Element((0, 1, 2), 1.0, float("nan"), float("nan"), float("inf")),),
        "needed": Needed(0.2, float("inf"), 0.1),
    }
    return Detail(rows=rows, **{**given, **changes})


# --- the data ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_columns_match_the_table(name: str) -> None:
    comparison = getattr(comparisons, name)()
    page = read(comparison)
    assert page.head["rows"] == len(comparison)
    for column in ("rank", "step", "micro", "call", "seq", "birth", "exact", "nan_candidate", "inf_reference"):
        assert page.column(column).tolist() == values(comparison, column).astype(int).tolist(), column
    for column in ("phase", "kind", "module", "path", "cls", "status", "rule", "dtype_reference", "dtype_candidate"):
        assert page.words(column) == values(comparison, column).tolist(), column
    assert page.words("container") == [each or "" for each in values(comparison, "container").tolist()]
    for column in (
        "rel_l2",
        "tolerance",
        "row_rel_l2",
        "row_tolerance",
        "max_abs",
        "max_ulp",
        "mismatched",
        "mean_reference",
        "l2_candidate",
    ):
        expected = values(comparison, column).astype(np.float64).astype(np.float32)
        np.testing.assert_array_equal(page.column(column), expected, column)
    cosine = values(comparison, "cosine").astype(np.float64)
    np.testing.assert_array_equal(page.column("one_minus_cosine"), (1 - cosine).astype(np.float32))
    shapes = ["×".join(map(str, shape)) or "scalar" for shape in comparison.table.column("shape_reference").to_pylist()]
    assert page.words("shape_reference") == shapes
    elements = [int(np.prod(shape)) for shape in comparison.table.column("shape_reference").to_pylist()]
    assert page.column("elements").tolist() == elements


@pytest.mark.parametrize("name", ALL)
def test_the_head_matches_the_comparison(name: str) -> None:
    comparison = getattr(comparisons, name)()
    head = read(comparison).head
    assert (head["schema"], head["page"]) == (1, "comparison")
    assert (head["verdict"], head["sentence"]) == (comparison.verdict, comparison.sentence)
    assert head["counts"] == dict(comparison.counts)
    assert len(head["births"]) == len(comparison.births)
    assert head["first"] == (0 if comparison.first is not None else None)
    assert head["unmatched"]["count"] == len(comparison.unmatched)
    assert len(head["unmatched"]["rows"]) == len(comparison.unmatched)
    assert head["notes"] == list(comparison.notes)
    assert head["words"]["status"] == list(STATUSES)


def test_an_error_of_the_finite_elements_alone_does_not_count() -> None:
    rows = [
        comparisons.row("fc1", rel_l2=1e-3),
        comparisons.row("fc2", rel_l2=0.5, status="nonfinite", nan_candidate=3),
    ]
    comparison = replace(comparisons.comparison(rows), details=[detail(0), detail(1, whole=False, why="no\nelements")])
    page = read(comparison)
    assert page.head["by_step"]["worst"] == [pytest.approx(1e-3)]
    assert [page.json(f"detail-{row}")["needed"]["rel_l2"] for row in (0, 1)] == [4.1e-3, "Infinity"]
    assert [page.json(f"detail-{row}")["why"] for row in (0, 1)] == [None, "no\\nelements"]


def test_births_point_at_their_rows() -> None:
    comparison = comparisons.diverged()
    page = read(comparison)
    marked = np.flatnonzero(page.column("birth")).tolist()
    assert sorted(birth["row"] for birth in page.head["births"]) == marked
    first = page.head["births"][page.head["first"]]
    assert page.words("module")[first["row"]] == comparisons.BORN == first["place"]
    assert page.head["modules"]["name"][first["module"]] == comparisons.BORN
    assert page.head["start"] == {"step": 3, "rank": 0, "row": first["row"]}
    assert f"--module {comparisons.BORN}" in first["command"]


def test_the_command_means_this_module_alone() -> None:
    rows = [comparisons.wrong(name, birth=True, step=0) for name in ("*[a]?", "it's\n")]
    found = [birth["command"] for birth in read(comparisons.comparison(rows)).head["births"]]
    assert "--module '[*][[]a][?]' " in found[0]
    assert "--module $'it\\'s\\x0a' " in found[1]


def test_the_command_has_the_options_that_the_comparison_was_made_with() -> None:
    usual = read(comparisons.diverged()).head["births"][0]["command"]
    assert usual == f"tensortap compare runs/a runs/b --step 3 --module {comparisons.BORN} --kind output"
    options = ["--rename", "^model\\.=", "--step", "3:4"]
    found = read(comparisons.diverged(options=options)).head["births"][0]["command"]
    assert found.startswith("tensortap compare runs/a runs/b --rename '^model\\.=' --step 3:4 --module")


def test_mapped_names_have_their_own_columns() -> None:
    rows = [
        comparisons.row("fc1", module_candidate="0", path_candidate="x", layout="transposed"),
        comparisons.estimated("fc2", 0.25, rel_l2_bar=float("inf")),
        comparisons.estimated("fc3", 1e-9, rel_l2_bar=1.0),
    ]
    page = read(comparisons.comparison(rows))
    assert page.words("module_candidate") == ["0", "", ""]
    assert page.words("path_candidate") == ["x", "", ""]
    assert page.words("layout") == ["transposed", "", ""]
    assert page.column("bar_percent").tolist() == [0, 65535, 65534]  # none, at least that far, very wide


def test_no_command_is_shown_if_none_repeats_the_comparison() -> None:
    page = read(comparisons.diverged(options=None))
    assert {birth["command"] for birth in page.head["births"]} == {""}
    names = [attributes.get("id") for _, attributes in page.parsed.tags]
    assert "copy-command" not in names
    assert "next-birth" in names


def test_a_nan_that_comes_later_is_named_as_well() -> None:
    rows = comparisons.decoder()
    nan = next(row for row in rows if row["module"] == "layers.9.mlp.up" and row["kind"] == "output")
    nan |= {"status": "nonfinite", "nan_candidate": 3, "birth": True}
    page = read(comparisons.comparison(rows, sentence="They part."))
    assert page.head["first"] == 0
    assert page.head["births"][page.head["first_nonfinite"]]["place"] == "layers.9.mlp.up"
    assert "The first NaN or Inf" in page.parsed.text


def test_scopes_are_the_steps_of_each_rank_and_cover_all_rows() -> None:
    rows = [comparisons.row("fc", rank=rank, step=step) for rank in (0, 1) for step in (2, 5) for _ in range(3)]
    head = read(comparisons.comparison(rows)).head
    assert head["scopes"] == [
        {"rank": 0, "step": 2, "begin": 0, "end": 3},
        {"rank": 0, "step": 5, "begin": 3, "end": 6},
        {"rank": 1, "step": 2, "begin": 6, "end": 9},
        {"rank": 1, "step": 5, "begin": 9, "end": 12},
    ]
    assert (head["ranks"], head["steps"]) == ([0, 1], [2, 5])


def test_a_series_is_the_same_tensor_over_the_steps() -> None:
    rows = [
        comparisons.row(module, step=step, kind=kind)
        for step in (0, 1, 2)
        for module in ("a", "b")
        for kind in ("input", "output")
    ]
    series = read(comparisons.comparison(rows)).column("series").tolist()
    assert series == [0, 1, 2, 3] * 3


def test_the_tree_has_parents_before_children_in_the_order_they_ran() -> None:
    names = ["emb", "layers.0.attn.q", "layers.0.attn", "layers.0.mlp", "layers.1.attn.q", ""]
    rows = [comparisons.row("head", phase="state", kind="param"), *(comparisons.row(name, cls=name) for name in names)]
    modules = read(comparisons.comparison(rows)).head["modules"]
    assert modules["name"] == [
        *("", "emb", "layers", "layers.0", "layers.0.attn", "layers.0.attn.q", "layers.0.mlp"),
        *("layers.1", "layers.1.attn", "layers.1.attn.q", "head"),
    ]
    assert modules["label"][:4] == ["(root)", "emb", "layers", "0"]
    for place, parent in enumerate(modules["parent"]):
        name = modules["name"][place]
        assert parent < place
        assert parent == (-1 if not name else modules["name"].index(name.rpartition(".")[0]))
    assert modules["cls"][modules["name"].index("layers.0.attn")] == "layers.0.attn"


def test_layers_are_named_up_to_their_number() -> None:
    rows = [comparisons.row(name) for name in ("emb.tok", "layers.0.attn.q", "layers.0", "layers.1.mlp.2.fc", "norm")]
    head = read(comparisons.comparison(rows)).head
    assert [layer["label"] for layer in head["layers"]] == ["emb", "layers.0", "layers.1", "norm"]
    modules = head["modules"]
    of = dict(zip(modules["name"], modules["layer"], strict=True))
    assert [of[name] for name in ("emb.tok", "layers.0.attn", "layers.1.mlp.2", "norm", "layers")] == [0, 1, 2, 3, -1]
    assert [modules["name"][layer["module"]] for layer in head["layers"]] == ["emb", "layers.0", "layers.1", "norm"]


def test_steps_are_counted() -> None:
    rows = [
        comparisons.equal("a", step=0),
        comparisons.wrong("b", 3e-3, step=1, birth=True),
        comparisons.wrong("c", 9e-3, step=1),
        comparisons.wrong("d", 9e-3, step=1),
    ]
    found = read(comparisons.comparison(rows, sentence="x")).head["by_step"]
    assert (found["pairs"], found["equal"], found["diverged"], found["births"]) == ([1, 3], [1, 0], [0, 3], [0, 1])
    assert found["worst"] == [0.0, 9e-3]
    assert found["worst_row"] == [0, 2]


def test_the_bar_of_an_estimate_is_in_percent() -> None:
    rows = [comparisons.estimated("a", 1e-3), comparisons.row("b"), comparisons.estimated("c", 0.0, rel_l2_bar=1e-7)]
    page = read(comparisons.comparison(rows))
    assert page.column("bar_percent").tolist() == [7, 0, 65534]
    assert page.column("exact").tolist() == [0, 1, 0]


def test_details_are_documents_of_their_own_and_shared_by_rows() -> None:
    comparison = comparisons.diverged(details=[detail(4, 5), detail(9, whole=False, histogram=None, map=None)])
    page = read(comparison)
    assert page.head["details"] == {"4": "detail-4", "5": "detail-4", "9": "detail-9"}
    found = page.json("detail-4")
    assert (found["row"], found["source"]) == (4, "tensors")
    assert found["sides"]["candidate"]["nan"] == 1
    assert found["sides"]["reference"]["shape"] == "2×16×64"
    assert found["sides"]["reference"]["digest"] == "0000000000000abc"
    assert found["difference"]["rel_l2"] == 4.1e-3
    assert (found["difference"]["row_rel_l2"], found["difference"]["row_index"]) == (0.3, [1, 7])
    assert found["difference"]["max_abs_index"] == [0, 1, 2]
    assert found["needed"] == {"rel_l2": 4.1e-3, "atol": 0.2, "rtol": "Infinity", "atol_with_rtol": 0.1}
    assert found["worst"][0]["candidate"] == "NaN"
    assert number(found["ulps"]["edges"][-1]) == float("inf")
    assert sum(found["histogram"]["reference"]) == 3
    assert page.json("detail-9")["source"] == "summaries"
    assert page.json("detail-9")["map"] is None


def test_a_map_has_a_logarithmic_scale() -> None:
    import base64

    found = read(comparisons.diverged(details=[detail(4)])).json("detail-4")["map"]
    codes = np.frombuffer(base64.b64decode(found["codes"]), np.uint8).reshape(found["height"], found["width"])
    assert codes.tolist() == [[0, 254], [255, 1]]
    assert (found["low"], found["high"]) == (1e-6, 1e-3)


def test_a_cosine_that_sketches_cannot_tell_is_not_shown_as_nan() -> None:
    estimate = replace(detail(4).difference, exact=False, cosine=math.nan)
    found = read(comparisons.diverged(details=[detail(4, difference=estimate)])).json("detail-4")["difference"]
    assert found["one_minus_cosine"] is None
    found = read(comparisons.diverged(details=[detail(4)])).json("detail-4")["difference"]
    assert found["one_minus_cosine"] == pytest.approx(0.01)


def test_details_stop_where_the_page_would_grow_too_large() -> None:
    rng = np.random.default_rng(0)
    many = [detail(row, map=TileMap(rng.random((64, 64)), (64, 64), Window(0, 64, 0, 64), "")) for row in range(120)]
    page = read(comparisons.diverged(details=many))
    there = [block for block in page.blocks if block.startswith("detail-")]
    assert 20 < len(there) < 120
    assert sum(len(page.blocks[block]) for block in there) <= 300_000


def test_nothing_in_common_makes_a_page_too() -> None:
    page = read(comparisons.comparison([], verdict="incomparable", sentence="Too little."))
    assert page.head["rows"] == 0
    assert page.column("rel_l2").tolist() == []
    assert "Too little." in page.parsed.text


def test_environments_are_side_by_side_differences_first() -> None:
    ours = {"framework": "torch", "environment": {"versions": {"torch": "2.4"}, "flags": {"tf32": True}, "seed": 0}}
    theirs = {"framework": "torch", "environment": {"versions": {"torch": "2.5"}, "flags": {}, "seed": 0}}
    page = read(comparisons.diverged(info={"reference": ours, "candidate": theirs}))
    rows = {(row["group"], row["name"]): row for row in page.head["environment"]}
    assert rows["versions", "torch"]["differs"]
    assert (rows["flags", "tf32"]["reference"], rows["flags", "tf32"]["candidate"]) == ("on", "–")
    assert not rows["process", "seed"]["differs"]
    assert [row["differs"] for row in page.head["environment"]] == [True, True, False, False]
    assert "Environment: 2 differences" in page.parsed.text


# --- the file ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL)
def test_the_policy_allows_this_pages_own_scripts_and_styles_alone(name: str) -> None:
    page = read(getattr(comparisons, name)()).parsed
    scripts = [text for attributes, text in page.scripts if "type" not in attributes]
    assert page.policy["default-src"] == ["'none'"]
    assert page.policy["script-src"] == [hashed(script) for script in scripts]
    assert page.policy["style-src"] == [hashed(style) for style in page.styles]
    assert "connect-src" not in page.policy
    assert page.policy["base-uri"] == page.policy["form-action"] == ["'none'"]


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_fetched(name: str) -> None:
    page = read(getattr(comparisons, name)())
    assert not outside(page.html)
    assert not [tag for tag, _ in page.parsed.tags if tag in ("link", "img", "iframe", "object", "embed", "base")]


@pytest.mark.parametrize("name", ALL)
def test_the_answer_is_there_without_scripts(name: str) -> None:
    comparison = getattr(comparisons, name)()
    page = read(comparison).parsed
    assert comparison.sentence in page.text
    assert comparison.reference in page.text
    assert comparison.policy in page.text
    assert page.element("banner")["data-verdict"] == comparison.verdict
    for id in ("header", "app", "births", "definitions"):
        page.element(id)
    for note in comparison.notes:
        assert note in page.text


def test_ids_are_unique() -> None:
    page = read(comparisons.diverged(details=[detail(4), detail(9)]))
    ids = [attributes["id"] for _, attributes in page.parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_stand(name: str) -> None:
    rows = [
        comparisons.row(name, cls=name, path=name, rule=name, kind="input"),
        comparisons.wrong(name, cls=name, path=name, rule=name, container=name, birth=True),
    ]
    key = Key(0, 0, "forward", name, 0, "output", name)
    info = {"framework": name, "model": name, "environment": {name: {name: name}, "devices": [name]}}
    comparison = comparisons.comparison(
        rows,
        reference=name,
        candidate=name,
        sentence=f"They part in {name}.",
        policy=name,
        notes=[name],
        unmatched=[Unmatched("reference", key, 0, name)],
        info={"reference": info, "candidate": {**info, "model": f"{name}2"}},
        details=[detail(0)],
    )
    plain = comparisons.comparison(
        [comparisons.row("a", kind="input"), comparisons.wrong("a", container="a", birth=True)],
        sentence="x",
        policy="x",
        notes=["x"],
        unmatched=[Unmatched("reference", key, 0, "x")],
        info={
            side: {"framework": "x", "model": side, "environment": {"x": {"x": "x"}, "devices": ["x"]}}
            for side in ("reference", "candidate")
        },
        details=[detail(0)],
    )
    page, usual = read(comparison), read(plain)
    assert [tag for tag, _ in page.parsed.tags] == [tag for tag, _ in usual.parsed.tags]
    assert [set(attributes) for _, attributes in page.parsed.tags] == [
        set(attributes) for _, attributes in usual.parsed.tags
    ]
    assert page.words("module") == [name, name]
    assert page.words("path") == [clean(name), clean(name)]
    assert clean(name) in page.head["modules"]["shown"]
    for letter in "\x00\x1b\r\u2028\u2029\u202e":
        assert letter not in page.html


def test_a_path_of_odd_bytes_is_accepted() -> None:
    odd = b"runs/\xff".decode("utf-8", "surrogateescape")
    assert "\\udcff" in read(comparisons.comparison([comparisons.row("fc")], reference=odd)).parsed.text


def test_a_hundred_thousand_pairs_fit_into_three_megabytes() -> None:
    """A comparison of random numbers, which compress badly, with as many details as fit."""
    count, rng = 100_000, np.random.default_rng(0)
    one = pa.Table.from_pylist([comparisons.wrong("fc")], schema=SCHEMA)
    columns = {name: one.column(name).take(pa.array(np.zeros(count, int))) for name in SCHEMA.names}
    place, error = np.arange(count), 10 ** rng.uniform(-8, -1, count)
    modules = pa.array([f"model.layers.{n // 40}.block.{n % 40}" for n in range(2500)])
    columns |= {"seq": pa.array(place), "step": pa.array(place // 5000), "module": modules.take(pa.array(place % 2500))}
    columns |= {"rel_l2": pa.array(error), "cosine": pa.array(1 - error**2 * rng.random(count))}
    columns |= {"status": pa.array(np.where(error > 1e-5, "diverged", "close")), "tolerance": pa.array(error * 2)}
    for name in ("max_abs", "max_ulp", "mismatched", "mean_reference", "std_reference", "l2_reference"):
        columns[name] = pa.array(rng.random(count) * 10.0 ** rng.integers(-3, 3, count))
    for name in ("mean", "std", "l2"):
        columns[f"{name}_candidate"] = pa.array(np.asarray(columns[f"{name}_reference"]) * (1 + error))
    table = pa.table([columns[name].cast(SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)
    tiles = [TileMap(rng.random((64, 64)), (64, 64), Window(0, 64, 0, 64), "") for _ in range(48)]
    details = [detail(row, map=tile) for row, tile in enumerate(tiles)]
    comparison = comparisons.comparison([], table=table, counts={"diverged": count}, details=details)
    file = io.BytesIO()
    comparison_html.write(comparison, file)
    assert len(file.getvalue()) <= 3_000_000
    page = ReadPage(file.getvalue().decode())
    np.testing.assert_allclose(page.column("rel_l2"), error, rtol=2.0**-7)
    np.testing.assert_allclose(page.column("std_candidate"), np.asarray(columns["std_candidate"]), rtol=2.0**-10)
