"""Runs with different numbers of ranks: nothing is called a match that was not compared, in any report."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from made_runs import Seen, chain, write
from torch import nn

import tensortap as tt
from tensortap.cli import main
from tensortap.pytest_plugin import assert_runs_match
from tensortap.report.files import comparison_json, comparison_junit, comparison_markdown
from tensortap.report.html import comparison as comparison_html
from tensortap.report.terminal import comparison as comparison_page

ALL = (0, 1)


def run(path: Path, ranks: Sequence[int], off: Mapping[int, float] | None = None, world: int = 8) -> Path:
    for rank in ranks:
        seen = chain(off={"fc2": (off or {}).get(rank, 0.0)})
        write(path, [Seen(s.module, s.array + rank, s.kind) for s in seen], rank, world)
    return path


def exit_code(*argv: object) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("sys.argv", ["tensortap", "compare", *map(str, argv), "--quiet"])
        main()
    return int(ended.value.code or 0)


SIDES = [((0, 1), (0,), "reference"), ((0,), (0, 1), "candidate")]


@pytest.mark.parametrize(("ours", "theirs", "side"), SIDES, ids=["reference has more", "candidate has more"])
def test_a_rank_without_counterpart_prevents_a_match(
    tmp_path: Path, ours: Sequence[int], theirs: Sequence[int], side: str
) -> None:
    a, b = run(tmp_path / "a", ours), run(tmp_path / "b", theirs)
    result = tt.compare(a, b)
    assert (result.verdict, result.first) == ("incomparable", None)
    begin = f"Too little in common to judge: rank 1 of the {side} has no counterpart. "
    assert result.sentence.startswith(f"{begin}Everything that was compared matches: all 6 pairs are equal")
    assert result.notes[0].startswith(f"not compared: rank 1 of the {side} has no counterpart; select the ranks")
    other = "candidate" if side == "reference" else "reference"
    assert result.unpaired_ranks == {side: [1], other: []}
    assert exit_code(a, b) == 3
    with pytest.raises(AssertionError, match=f"rank 1 of the {side} has no counterpart"):
        assert_runs_match(a, b)


@pytest.mark.parametrize(("ours", "theirs", "side"), SIDES, ids=["reference has more", "candidate has more"])
def test_a_divergence_among_the_compared_ranks_stays_one(
    tmp_path: Path, ours: Sequence[int], theirs: Sequence[int], side: str
) -> None:
    a, b = run(tmp_path / "a", ours), run(tmp_path / "b", theirs, off={0: 0.5})
    result = tt.compare(a, b)
    assert result.verdict == "diverged" and "in step 0, rank 0, its output" in result.sentence
    assert result.notes[0].startswith(f"not compared: rank 1 of the {side} has no counterpart")
    assert exit_code(a, b) == 1


def test_another_number_of_ranks_is_said(tmp_path: Path) -> None:
    """Only rank 0 was recorded on both sides: what the others did is not known."""
    a, b = run(tmp_path / "a", (0,), world=1), run(tmp_path / "b", (0,), world=2)
    result = tt.compare(a, b)
    worlds = "the reference ran on 1 rank and the candidate on 2"
    assert (result.verdict, exit_code(a, b)) == ("incomparable", 3)
    assert f"{worlds}, and 1 of the candidate left no record" in result.sentence
    chosen = tt.compare(a, b, ranks=[0])
    assert chosen.verdict == "match" and any(note.startswith(worlds) for note in chosen.notes)
    wrong = tt.compare(a, run(tmp_path / "c", (0,), off={0: 0.5}, world=2))
    assert wrong.verdict == "diverged" and worlds in wrong.notes[0]
    same = tt.compare(b, run(tmp_path / "d", (0,), world=2))
    assert same.verdict == "match" and not any("ran on" in note for note in same.notes)


def test_few_common_ranks_do_not_hide_a_divergence(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", range(12), world=23), run(tmp_path / "b", range(11, 23), {11: 0.5}, world=23)
    result = tt.compare(a, b)
    assert result.verdict == "diverged" and result.first is not None and result.first.rank == 11
    assert "ranks 0, 1, 2, 3 and 7 more of the reference have no counterpart, and ranks 12, 13" in result.notes[0]


def test_selected_ranks_get_a_normal_verdict(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", (0, 1)), run(tmp_path / "b", (0, 1, 2), off={1: 0.5})
    chosen = tt.compare(a, b, ranks=[0])
    assert (chosen.verdict, chosen.unpaired_ranks) == ("match", {"reference": [], "candidate": []})
    assert not [note for note in chosen.notes if "not compared" in note]
    assert (exit_code(a, b, "--rank", 0), exit_code(a, b, "--rank", 1)) == (0, 1)
    assert tt.compare(a, b, ranks={0: 0}).verdict == "match"
    assert assert_runs_match(a, b, ranks=[0]).verdict == "match"


def test_a_selected_rank_that_one_side_lacks_was_not_compared(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", (0, 1)), run(tmp_path / "b", (0,))
    result = tt.compare(a, b, ranks=[0, 1])
    assert result.verdict == "incomparable" and "rank 1 of the reference has no counterpart" in result.sentence
    assert tt.compare(a, b, ranks={0: 5}).verdict == "incomparable"
    nowhere = tt.compare(a, b, ranks=[0, 7])
    assert nowhere.verdict == "incomparable" and "neither run has rank 7" in nowhere.sentence


def test_no_rank_in_common(tmp_path: Path) -> None:
    result = tt.compare(run(tmp_path / "a", (0,)), run(tmp_path / "b", (1,)))
    expected = "rank 0 of the reference has no counterpart, and rank 1 of the candidate has no counterpart"
    assert result.sentence == (
        f"Too little in common to judge: {expected}; of 6 records of the reference and 6 of the candidate "
        "only 0 have the same identity."
    )


def test_a_rank_that_shares_no_record_was_not_compared(tmp_path: Path) -> None:
    """As where two runs are cut into other stages of a pipeline."""
    for name, stages in (("a", (("fc1", "fc2"), ("fc3",))), ("b", (("fc1", "fc2"), ("fc4",)))):
        for rank, modules in enumerate(stages):
            write(tmp_path / name, chain(modules), rank, world=2)
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "incomparable"
    assert result.unpaired_ranks == {"reference": [1], "candidate": [1]}


def test_a_rank_of_which_nothing_takes_part_is_not_missed(tmp_path: Path) -> None:
    for rank, modules in enumerate((("fc1",), ("fc2",))):
        write(tmp_path / "a", chain(modules), rank, world=2)
    write(tmp_path / "b", chain(("fc1",)))
    assert tt.compare(tmp_path / "a", tmp_path / "b", modules="fc1").verdict == "match"


# --- reports ----------------------------------------------------------------------------------------------------------
def written(report: Any, result: Any) -> str:
    file = io.BytesIO()
    report.write(result, file)
    return file.getvalue().decode()


def test_every_report_names_unpaired_ranks(tmp_path: Path) -> None:
    result = tt.compare(run(tmp_path / "a", (0,)), run(tmp_path / "b", ALL))
    said = json.loads(written(comparison_json, result))
    assert said["verdict"] == "incomparable"
    assert said["unpaired_ranks"] == {"reference": [], "candidate": [1]}
    words = "rank 1 of the candidate has no counterpart"
    assert words in said["sentence"] and words in said["notes"][0]
    assert words in written(comparison_markdown, result) and words in written(comparison_html, result)
    page = "\n".join(line.plain for line in comparison_page.render(comparison_page.build(result), None))
    assert page.startswith("∅ ") and words in page
    assert "candidate only: fc1 (2 tensors, rank 1)" in page


def test_junit_has_an_error_and_a_skipped_case_for_the_rank(tmp_path: Path) -> None:
    for name, off in (("a", None), ("b", None), ("c", {0: 0.5})):
        run(tmp_path / name, ALL if name == "a" else (0,), off)
    for candidate, errors in (("b", 1), ("c", 0)):
        suite = ElementTree.fromstring(written(comparison_junit, tt.compare(tmp_path / "a", tmp_path / candidate)))[0]
        cases = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
        assert cases["rank 1 of the reference"] == ["skipped"]
        assert [int(suite.get(name, "")) for name in ("tests", "errors", "skipped")] == [len(cases), errors, 1]
        assert cases["fc2"] == ([] if errors else ["properties", "failure"])


# --- real runs --------------------------------------------------------------------------------------------------------
def trained(path: Path, ranks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ranks of a run one after the other, each with other weights."""
    monkeypatch.setenv("WORLD_SIZE", str(len(ranks)))
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with tt.capture(model, path, keep="tensors") as tap:
            model(torch.ones(2, 4)).sum().backward()
            tap.step()
    return path


def test_a_check_names_the_unchecked_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = trained(tmp_path / "a", ALL, monkeypatch)
    for world in (1, 2):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        with tt.check(model, reference) as check:
            model(torch.ones(2, 4)).sum().backward()
        alone = world == 1
        assert check.result.verdict == ("incomparable" if alone else "match")
        assert check.result.sentence.startswith("Cannot tell whether all ranks match. ") is alone
        assert check.result.sentence.endswith(" Rank 1 of the reference was not checked.") is alone
        assert any(note.startswith("rank 1 of the reference was not checked") for note in check.result.notes) is alone
