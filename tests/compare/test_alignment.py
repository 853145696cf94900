"""Pairing of records: by identity, after renames, over shifted steps and ranks; and unmatched records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Seen, chain, rows, sides, values, write

import tensortap as tt
from tensortap.core.records import Comparison
from tensortap.errors import RunNotFound, RunUnreadable, UsageError


def compared(tmp_path: Path, reference: Sequence[Seen], candidate: Sequence[Seen], **options: Any) -> Comparison:
    return tt.compare(write(tmp_path / "a", reference), write(tmp_path / "b", candidate), **options)


def suggested(result: Comparison) -> list[str]:
    """The rules of a note, as one would copy them."""
    return [rule for note in result.notes for rule in re.findall(r"--rename '([^']*)'", note)]


# --- identity ------------------------------------------------------------------------------------------------------
def test_records_go_by_identity_not_by_order(tmp_path: Path) -> None:
    seen = chain(steps=(0, 1))
    result = compared(tmp_path, seen, seen[::-1])
    assert (result.verdict, len(result), result.unmatched) == ("match", 12, [])
    assert [row["seq"] for row in result.rows] == list(range(12)), "in the reference's order"


@pytest.mark.parametrize(
    "change", [{"step": 1}, {"micro": 1}, {"call": 1}, {"path": "1"}, {"kind": "input"}, {"module": "other"}]
)
def test_every_part_of_an_identity_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    ours = [*chain(("same",)), Seen("fc", values(9))]
    theirs = [*chain(("same",)), Seen(**({"module": "fc", "array": values(9)} | change))]
    result = compared(tmp_path, ours, theirs)
    assert [(each.side, each.key) for each in result.unmatched] == [
        ("reference", ours[-1].key),
        ("candidate", theirs[-1].key),
    ]
    assert result.counts == {"equal": 2, "unmatched": 2}


def test_one_sided_records_are_reported_in_full(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(("fc1", "fc2")), chain(("fc2", "fc3")))
    assert sides(result) == {"reference": ["fc1", "fc1"], "candidate": ["fc3", "fc3"]}
    assert (len(result), result.counts["unmatched"]) == (2, 4)
    assert {each.cls for each in result.unmatched} == {"Linear"}


def test_the_classes_and_dtypes_of_a_module_are_no_part_of_its_identity(tmp_path: Path) -> None:
    ours, theirs = Seen("fc", values(0), cls="Linear"), Seen("fc", values(0).astype(np.float64), cls="ColumnLinear")
    result = compared(tmp_path, [ours], [theirs])
    assert (len(result), result.unmatched) == (1, [])


def test_the_same_identity_twice_goes_in_order(tmp_path: Path) -> None:
    twice = [Seen("fc", values(0)), Seen("fc", values(1))]
    assert compared(tmp_path, twice, twice).counts == {"equal": 2}


def test_the_same_identity_more_often_on_one_side(tmp_path: Path) -> None:
    once, twice = [Seen("fc", values(0))], [Seen("fc", values(0)), Seen("fc", values(1))]
    for ours, theirs, side in ((twice, once, "reference"), (once, twice, "candidate")):
        result = compared(tmp_path / side, ours, theirs)
        assert (result.counts, len(result)) == ({"equal": 1, "unmatched": 1}, 1)
        assert [each.side for each in result.unmatched] == [side]


# --- too little ----------------------------------------------------------------------------------------------------
def test_nothing_in_common(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(("a", "b")), chain(("x", "y", "z")))
    assert (result.verdict, result.first, len(result)) == ("incomparable", None, 0)
    assert len(result.unmatched) == result.counts["unmatched"] == 10
    assert "Too little in common to judge: of 4 records of the reference and 6 of the candidate only 0" in str(result)


@pytest.mark.parametrize("empty", ["reference", "candidate", "both"])
def test_empty_runs(tmp_path: Path, empty: str) -> None:
    ours, theirs = ([] if empty in (side, "both") else chain() for side in ("reference", "candidate"))
    result = compared(tmp_path, ours, theirs)
    assert (result.verdict, result.first, len(result)) == ("incomparable", None, 0)
    assert f"the {'reference' if empty == 'both' else empty} has no records" in str(result)
    assert len(result.unmatched) == (0 if empty == "both" else 6)


def test_a_difference_among_too_few_pairs_gives_no_verdict(tmp_path: Path) -> None:
    names = [f"a{n}" for n in range(20)]
    theirs = [f"b{n}" for n in range(20)]
    result = compared(tmp_path, chain([*names, "x"]), chain([*theirs, "x"], off={"x": 1.0}))
    assert (result.verdict, result.first) == ("incomparable", None)
    assert rows(result)["x", "output", 0]["status"] == "diverged", "the pairs there are can still be looked at"


# --- renames -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("theirs", "rules"),
    [
        (("model.fc1", "model.fc2", "model.fc3"), [r"^model\.="]),
        (("blocks_1", "blocks_2", "blocks_3"), [r"blocks_(\d)=fc\1"]),
        (("linear1", "linear2", "linear3"), ["(?=linear)l=L", "Linear=fc"]),
        (("fc1", "fc2", "out"), ["^out$=fc3"]),
    ],
)
def test_renames(tmp_path: Path, theirs: tuple[str, ...], rules: list[str]) -> None:
    result = compared(tmp_path, chain(), chain(theirs), rename=rules)
    assert (result.verdict, result.unmatched, result.counts) == ("match", [], {"equal": 6})
    assert {row["module"] for row in result.rows} == {"fc1", "fc2", "fc3"}, "the reference's names"


def test_a_record_left_over_by_a_rename_keeps_its_name(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(), chain(("m.fc1", "m.fc2", "m.head")), rename=[r"^m\.="])
    assert sides(result) == {"reference": ["fc3", "fc3"], "candidate": ["m.head", "m.head"]}


def test_two_modules_renamed_into_one_are_not_dropped(tmp_path: Path) -> None:
    result = compared(tmp_path, chain(("fc",)), chain(("fc1", "fc2")), rename=[r"fc\d=fc"])
    assert len(result) == 2
    assert sides(result) == {"reference": [], "candidate": ["fc2", "fc2"]}


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("fc1", "has no '='"),
        ("(=x", "not a regular expression"),
        ("a{99999999999999999999}=x", "not a regular expression"),
        (r"fc=\1", "not a replacement"),
        (r"fc=\g<nobody>", "not a replacement"),
    ],
)
def test_invalid_renames_are_refused(tmp_path: Path, rule: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        compared(tmp_path, chain(("a",)), chain(("a",)), rename=[rule])
    assert repr(rule) in str(raised.value)


def test_a_rename_that_is_nested_too_deeply(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        compared(tmp_path, chain(("a",)), chain(("a",)), rename=["(" * 5_000 + "=x"])


def names(*pairs: tuple[str, str]) -> dict[str, object]:
    """Rules that only map names."""
    modules = [{"candidate": theirs, "reference": ours} for theirs, ours in pairs]
    return {"structure": False, "module": modules}


def test_rules_of_exact_names(tmp_path: Path) -> None:
    theirs = chain(("first", "second", "layers.(3)"))
    rules = names(("first", "fc1"), ("second", "fc2"), ("layers.(3)", "fc3"))
    result = compared(tmp_path, chain(), theirs, mapping=rules)
    assert result.counts == {"equal": 6}
    assert result.mapping is None, "names alone need no mapping"


def test_exact_names_go_before_renames(tmp_path: Path) -> None:
    theirs = chain(("m.fc1", "m.fc2", "m.head"))
    result = compared(tmp_path, chain(), theirs, mapping=names(("m.head", "fc3")), rename=[r"^m\.="])
    assert result.counts == {"equal": 6}


@pytest.mark.parametrize("root", ["(root)", ""])
def test_exact_names_may_name_the_root(tmp_path: Path, root: str) -> None:
    rules = names(("net", root))
    assert compared(tmp_path, chain(("", "fc")), chain(("net", "fc")), mapping=rules).counts == {"equal": 4}


@pytest.mark.parametrize(
    "text", ["# theirs = ours\n\n first = fc1\nsecond=fc2  \n", "first = fc1", " first = fc1\nnet = \n"]
)
def test_a_list_of_names_is_shown_as_toml(tmp_path: Path, text: str) -> None:
    file = tmp_path / "names.txt"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"names\.txt is a list of names.*TOML") as raised:
        compared(tmp_path, chain(), chain(), mapping=file)
    shown = str(raised.value).partition("a line of its own: ")[2]
    rules = shown.replace(", then for each name ", "\n").replace(", ", "\n")
    file.write_text(rules)
    theirs = chain(("first", "fc2", "fc3"))
    write(tmp_path / "c", theirs)
    assert tt.compare(tmp_path / "a", tmp_path / "c", mapping=file).counts == {"equal": 6}


def test_rules_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "names.toml"
    file.write_text("fc1 = fc1\nfc2 -> fc2\n")
    with pytest.raises(UsageError, match=r"names\.toml is not TOML"):
        compared(tmp_path, chain(), chain(), mapping=file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunUnreadable, match=r"names\.toml cannot be read"):
        tt.compare(tmp_path / "a", tmp_path / "b", mapping=file)
    with pytest.raises(RunUnreadable, match="cannot be read"):
        tt.compare(tmp_path / "a", tmp_path / "b", mapping=tmp_path)
    with pytest.raises(RunNotFound, match="no rules file"):
        tt.compare(tmp_path / "a", tmp_path / "b", mapping=tmp_path / "gone.toml")


# --- suggestions ---------------------------------------------------------------------------------------------------
BLOCKS = [f"layers.{n}.{leaf}" for n in range(3) for leaf in ("norm", "attn.q", "attn.k", "attn", "mlp.up", "mlp")]
MODEL = ["embed", *BLOCKS, "norm", ""]


def shaped(names: Sequence[str]) -> list[Seen]:
    """Modules whose outputs have shapes of their own, so that order and shape say which is which."""
    return [
        Seen(name, values(number, (2, 3 + number % 7)), kind, cls=f"{name.title()}Class")
        for number, name in enumerate(names)
        for kind in ("input", "output")
    ]


def renamed(*pairs: tuple[str, str], names: Sequence[str] = MODEL) -> list[str]:
    for old, new in pairs:
        names = [re.sub(rf"(?<![^.]){old}(?![^.])", new, name) for name in names]
    return list(names)


@pytest.mark.parametrize(
    "theirs",
    [
        [f"model.{name}" if name else "" for name in MODEL],
        [f"module.model.{name}" if name else "" for name in MODEL],
        renamed(("layers", "blocks")),
        renamed(("attn", "self_attention"), ("q", "query"), ("k", "key")),
        renamed(("layers", "encoder.layer"), ("mlp", "feed_forward")),
        ["embed", *renamed(("norm", "ln"), names=BLOCKS), "norm", ""],
    ],
    ids=["prefix", "two prefixes", "a word", "words", "a word for two", "a word with two meanings"],
)
@pytest.mark.parametrize("turned", [False, True], ids=["added", "removed"])
def test_a_suggestion_that_is_followed_gives_a_full_match(tmp_path: Path, theirs: list[str], turned: bool) -> None:
    ours, theirs = (theirs, MODEL) if turned else (MODEL, theirs)
    rules = suggested(compared(tmp_path, shaped(ours), shaped(theirs)))
    assert rules
    again = tt.compare(tmp_path / "a", tmp_path / "b", rename=rules)
    assert (again.verdict, again.counts) == ("match", {"equal": 2 * len(MODEL)}), rules
    assert not suggested(again)


def test_a_wrapper_around_the_model(tmp_path: Path) -> None:
    """The wrapper's root is the model's, and the module it holds is one more."""
    theirs = ["embed", *BLOCKS, "norm"]
    wrapped = [*(f"net.{name}" for name in theirs), "net", ""]
    rules = suggested(compared(tmp_path, shaped([*theirs, ""]), shaped(wrapped)))
    again = tt.compare(tmp_path / "a", tmp_path / "b", rename=rules)
    assert sides(again) == {"reference": [], "candidate": ["net", "net"]}


def test_nothing_is_suggested_where_nothing_helps(tmp_path: Path) -> None:
    assert not suggested(compared(tmp_path, shaped(MODEL), shaped(["conv1", "conv2", "pool", ""])))
    assert not suggested(compared(tmp_path / "same", shaped(MODEL), shaped(MODEL)))


# --- steps and ranks -----------------------------------------------------------------------------------------------
def test_steps_selected(tmp_path: Path) -> None:
    ours = chain(steps=range(6))
    result = compared(tmp_path, ours, [*chain(steps=range(5)), *chain(steps=(5,), off={"fc1": 1.0})], steps=(1, 3))
    assert (result.verdict, {row["step"] for row in result.rows}) == ("match", {1, 3})
    assert not result.unmatched, "what was not asked for is not missing"
    assert tt.compare(tmp_path / "a", tmp_path / "b", steps=range(3, 100)).first.key.step == 5


def test_steps_shifted(tmp_path: Path) -> None:
    def late(seen: Seen) -> Seen:
        return Seen(seen.module, seen.array, seen.kind, seen.step + 10)

    theirs = [late(each) for each in chain(steps=range(3))]
    result = compared(tmp_path, chain(steps=range(3)), theirs, steps={0: 10, 2: 12})
    assert (result.verdict, result.counts) == ("match", {"equal": 12})
    assert {row["step"] for row in result.rows} == {0, 2}, "the reference's numbers"
    assert tt.compare(tmp_path / "a", tmp_path / "b", steps={0: 11}).verdict == "diverged"
    assert tt.compare(tmp_path / "a", tmp_path / "b").verdict == "incomparable"


def test_a_step_cannot_be_compared_with_two(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="several"):
        compared(tmp_path, chain(steps=(0, 1)), chain(), steps={0: 0, 1: 0})


def ranked(path: Path, ranks: Sequence[int], world: int = 2, off: dict[int, float] | None = None) -> Path:
    for rank in ranks:
        seen = chain(off={"fc2": (off or {}).get(rank, 0.0)})
        write(path, [Seen(s.module, s.array + rank, s.kind) for s in seen], rank, world)
    return path


def test_ranks_selected(tmp_path: Path) -> None:
    ours, theirs = ranked(tmp_path / "a", (0, 1)), ranked(tmp_path / "b", (0, 1), off={1: 0.5})
    assert tt.compare(ours, theirs, ranks=[0]).counts == {"equal": 6}
    assert tt.compare(ours, theirs, ranks=[1]).first.rank == 1
    result = tt.compare(ours, theirs)
    assert (result.counts, result.first.rank) == ({"equal": 11, "diverged": 1}, 1)
    assert "rank 1" in str(result)


def test_ranks_shifted(tmp_path: Path) -> None:
    ours, theirs = ranked(tmp_path / "a", (0, 1)), ranked(tmp_path / "b", (0, 1))
    assert tt.compare(ours, theirs, ranks={1: 1, 0: 0}).verdict == "match"
    crossed = tt.compare(ours, theirs, ranks={0: 1})
    assert (crossed.verdict, crossed.unmatched) == ("diverged", [])
    turned = tmp_path / "c"
    write(turned, chain(), rank=1, world=2)
    write(turned, [Seen(s.module, s.array + 1, s.kind) for s in chain()], rank=0, world=2)
    assert tt.compare(ours, turned, ranks={0: 1, 1: 0}).counts == {"equal": 12}


def test_a_rank_that_is_missing(tmp_path: Path) -> None:
    ours, theirs = ranked(tmp_path / "a", (0, 1)), ranked(tmp_path / "b", (0,))
    result = tt.compare(ours, theirs)
    assert (result.verdict, result.counts) == ("incomparable", {"equal": 6, "unmatched": 6})
    assert {(each.side, each.rank) for each in result.unmatched} == {("reference", 1)}
    assert "candidate: 1 of 2 ranks left nothing: 1" in result.notes


# --- filters -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("(root)", {""}),
        ("", {""}),
        (["(root)", "layers.0.*"], {"", "layers.0.fc"}),
        ("layers.*", {"layers.0.fc", "layers.1.fc"}),
        ({"*.fc", "head"}, {"layers.0.fc", "layers.1.fc", "head"}),
        ("*", {"", "layers.0.fc", "layers.1.fc", "head"}),
        (None, {"", "layers.0.fc", "layers.1.fc", "head"}),
    ],
)
def test_modules(tmp_path: Path, modules: Any, expected: set[str]) -> None:
    seen = chain(("", "layers.0.fc", "layers.1.fc", "head"))
    result = compared(tmp_path, seen, seen, modules=modules)
    assert {row["module"] for row in result.rows} == expected
    assert not result.unmatched


def test_patterns_mean_the_references_names(tmp_path: Path) -> None:
    theirs = chain(("m.fc1", "m.fc2", "m.fc3"), off={"m.fc3": 1.0})
    result = compared(tmp_path, chain(), theirs, modules=["fc1", "fc2"], rename=[r"^m\.="])
    assert (result.verdict, result.counts) == ("match", {"equal": 4})


def test_kinds(tmp_path: Path) -> None:
    seen = [*chain(), Seen("fc1", values(3), "param", path="weight")]
    for kinds, expected in (("output", {"output"}), (("input", "param"), {"input", "param"})):
        result = compared(tmp_path / str(kinds), seen, seen, kinds=kinds)
        assert {row["kind"] for row in result.rows} == expected
        assert not result.unmatched


def test_a_filter_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no module of either run is called 'nobody'"):
        compared(tmp_path / "nobody", chain(), chain(), modules="nobody")
    result = compared(tmp_path / "root", chain(), chain(), modules="(root)")  # every model has one, recorded or not
    assert result.verdict == "incomparable"
    assert "has no records that take part" in str(result)


def test_open_runs_and_paths_are_the_same(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "a", chain()), write(tmp_path / "b", chain(off={"fc2": 1.0}))
    from_paths, from_runs = tt.compare(ours, str(theirs)), tt.compare(tt.open(ours), tt.open(theirs))
    assert from_paths.table.equals(from_runs.table)
    assert (from_paths.sentence, from_paths.first) == (from_runs.sentence, from_runs.first)
