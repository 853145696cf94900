"""A run held in memory is the run that a path would have given: the same records, the same comparisons."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tt
from support.libraries import Library
from support.tapping import ALL_KINDS
from tensortap.capture import tap as tap_module
from tensortap.errors import CaptureError, UsageError
from tensortap.pytest_plugin import assert_runs_match
from tensortap.report.files import comparison_csv, comparison_json, comparison_junit, comparison_markdown
from tensortap.report.html import comparison as comparison_html
from tensortap.store import memory
from tensortap.store.memory import RECORD_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


@pytest.fixture(params=["torch", "paddle"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param)


def recorded(library: Library, path: Path | None = None, scale: float = 1.0, train: int = 2, **options: Any) -> Any:
    """Train under a tap, with one weight changed by `scale`; the closed tap."""
    model = library.model()
    library.scale(model.blocks[1].fc2.weight, scale)
    options = {"kinds": ALL_KINDS} | options
    with tt.capture(model, path, **options) as tap:
        library.train(model, tap.step, steps=train)
    assert library.hooks_on(model) == 0
    return tap


@pytest.mark.parametrize("keep", ["summary", "tensors", {"blocks.0.*": "tensors", "*": "summary"}])
def test_the_same_records_as_on_disk(library: Library, run_path: Path, keep: Any) -> None:
    ours, theirs = recorded(library, keep=keep).run, recorded(library, run_path, keep=keep).run
    assert len(ours) == len(theirs) > 100
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.key, mine.seq, mine.cls, mine.dtype, mine.shape, mine.tensor) == (
            *(other.key, other.seq, other.cls, other.dtype, other.shape, other.tensor),
        )
        assert mine.summary.digest == other.summary.digest
        assert np.array_equal(mine.summary.sketch, other.summary.sketch)
        assert (mine.location is None) == (other.location is None)
        if mine.location is not None:
            assert np.array_equal(ours.load(mine), theirs.load(other))
    assert ours.finished and ours.notices == theirs.notices
    assert ours.coverage == theirs.coverage and ours.steps == theirs.steps == [0, 1]
    differing = ("file", "offset", "started")
    assert ours.to_pandas().drop(columns=["file", "offset"]).equals(theirs.to_pandas().drop(columns=["file", "offset"]))
    assert {k: v for k, v in ours.info.items() if k not in differing}.keys() == (
        {k: v for k, v in theirs.info.items() if k not in differing}.keys()
    )
    block = next(ours.records(module="blocks.0", kind="input", path="scale"))
    assert ours.arguments(block) == theirs.arguments(block)


def test_training_is_unchanged(library: Library) -> None:
    plain, tapped = library.model(), library.model()
    losses = library.train(plain, steps=3)
    with tt.capture(tapped, keep="tensors", kinds=ALL_KINDS) as tap:
        assert library.train(tapped, tap.step, steps=3) == losses
    for ours, theirs in zip(library.parameters(plain), library.parameters(tapped), strict=True):
        assert np.array_equal(ours, theirs)
    assert library.hooks_on(tapped) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensortap")]


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_memory_and_paths_compare_in_any_order(library: Library, tmp_path: Path, keep: str) -> None:
    memory = recorded(library, keep=keep).run
    paths = [tmp_path / "same", tmp_path / "off"]
    same, off = recorded(library, paths[0], keep=keep), recorded(library, paths[1], 1.01, keep=keep)
    assert same.run.path == paths[0]
    assert tt.compare(memory, recorded(library, keep=keep).run).verdict == "match"
    assert tt.compare(memory, paths[0]).verdict == tt.compare(paths[0], memory).verdict == "match"
    wrong = recorded(library, scale=1.01, keep=keep).run
    expected = tt.compare(paths[0], paths[1])
    assert expected.first is not None
    for reference, candidate in ((memory, wrong), (memory, paths[1]), (paths[0], wrong), (same.run, off.run)):
        found = tt.compare(reference, candidate)
        assert found.verdict == "diverged" and found.first is not None
        assert found.first.key == expected.first.key and found.first.module == "blocks.1.fc2"
        assert found.table.to_pandas().equals(expected.table.to_pandas())  # the same numbers to the last bit
        assert found.sentence == expected.sentence and found.counts == expected.counts


def test_filters_loading_and_views(library: Library) -> None:
    run = recorded(library, keep="tensors", modules=["blocks.*", "shared"], steps=[1]).run
    assert run.steps == [1] and {record.key.module for record in run} >= {"blocks.0", "shared"}
    (record,) = run.records(module="shared", call=1, kind="output")
    array = run.load(record)
    assert array.shape == record.shape == (3, 5, 8) and not array.flags.writeable
    assert bytes(run.bytes_of(record)) == array.tobytes()
    assert np.array_equal(run.torch(record).numpy(), array)
    streamed = {record.key: values for record, values in run.stream(kind="output")}
    assert np.array_equal(streamed[record.key], array)
    found = run.get(record.key)
    assert found is not None and (found.seq, found.location) == (record.seq, record.location)
    assert tt.open(run) is run and "records" in repr(run) and "in-memory" in repr(run)
    with run:
        pass
    assert np.array_equal(run.load(record), array)  # closing loses nothing


def test_the_run_can_be_read_inside_the_block(library: Library) -> None:
    model = library.model()
    with tt.capture(model, keep="tensors") as tap:
        library.train(model, tap.step, steps=1)
        early = tap.run
        assert early.steps == [0] and not early.finished and "still running" in early.notices[0]
        count = len(early)
        library.train(model, tap.step, steps=1)
        assert len(early) == count and len(tap.run) == 2 * count
        assert all(early.load(record).shape == record.shape for record in early)
        assert repr(tap) == "<Tap on Model into memory: recording, step 2>"
    assert repr(tap) == "<Tap on Model into memory: closed, step 2>"
    assert tap.run is tap.run and tap.run.steps == [0, 1] and tap.run.finished and not tap.run.notices


def test_the_run_of_a_tap_with_a_path(run_path: Path) -> None:
    library = Library("torch")
    model = library.model()
    with tt.capture(model, run_path) as tap:
        library.train(model, tap.step, steps=1)
        assert tap.run.steps == [0] and not tap.run.finished
    assert tap.run.finished and tap.run.path == run_path and tap.path == run_path


def test_an_exception_in_the_block_leaves_a_readable_run(library: Library) -> None:
    model = library.model()
    with pytest.raises(KeyError), tt.capture(model) as tap:
        library.train(model, tap.step, steps=1)
        raise KeyError("mine")
    assert not tap.run.finished and "KeyError" in tap.run.notices[0] and tap.run.steps == [0]
    assert library.hooks_on(model) == 0


def test_an_optimizer_counts_the_steps(library: Library) -> None:
    model = library.model()
    optimizer = library.optimizer(model)
    with tt.capture(model, optimizer=optimizer) as tap:
        library.train(model, steps=2, optimizer=optimizer)
    assert tap.run.steps == [0, 1]


# --- the bound -------------------------------------------------------------------------------------------------------
def test_beyond_the_bound_tensors_have_only_a_summary(
    library: Library, run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recorded(library, run_path, keep="tensors").run
    bound = 8 * (RECORD_BYTES * len(whole) + 24_000) // 7
    tap = recorded(library, keep="tensors", max_memory=bound)
    (line,) = capsys.readouterr().err.splitlines()
    assert "no room for more tensors" in line
    run = tap.run
    kept = [record.location is not None for record in run]
    first = kept.index(False)
    assert first > 0 and len(run) == len(whole)
    (notice,) = run.notices
    name = next(run.records(tensor=next(r for r in run if r.location is None).tensor)).key
    assert f"max_memory={bound}" in notice and name.module in notice and f"from step {name.step}" in notice
    assert tap.notices == [notice.removeprefix("rank 0: ")] and run.finished
    assert run.nbytes <= bound and tap.stats()["bytes"] == run.nbytes
    later = list(run)[first]
    assert whole.get(later.key).summary.digest == later.summary.digest  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="only the summary was kept"):
        run.load(later)
    assert tt.compare(whole, run).verdict == "match"
    wrong = tt.compare(run, recorded(library, scale=1.5, keep="tensors").run)
    assert wrong.first is not None and wrong.first.module == "blocks.1.fc2"


def test_records_beyond_the_bound_stop_the_recording(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    whole = recorded(library, train=3).run
    half = len(whole) // 2
    model, plain = library.model(), library.model()
    losses = library.train(plain, steps=3)
    with tt.capture(model, kinds=ALL_KINDS, max_memory=RECORD_BYTES * half) as tap:
        assert library.train(model, tap.step, steps=3) == losses
    (line,) = capsys.readouterr().err.splitlines()
    assert "stopped recording into memory at step 1: " in line and line.endswith("a path; training continues untapped")
    run = tap.run
    assert 0 < len(run) <= half and not run.finished and run.steps == [0, 1]
    assert "is full" in run.notices[0] and "max_memory" in run.notices[0]
    for reference, candidate in ((whole, run), (run, whole)):  # gradients that were not recorded are not lost ones
        result = tt.compare(reference, candidate)
        assert result.verdict == "incomparable" and "stopped early" in result.sentence
    assert tt.compare(run, run).verdict == "match"


def test_a_full_run_raises_where_errors_are_asked_for() -> None:
    library = Library("torch")
    model = library.model()
    tap = tt.capture(model, max_memory=60 * RECORD_BYTES, on_error="raise")
    with pytest.raises(CaptureError, match="is full: max_memory"):
        library.train(model, tap.step, steps=1)
    tap.close()
    assert library.hooks_on(model) == 0 and 0 < len(tap.run) <= 60


@pytest.mark.parametrize("bound", [0, -1, 1.5, "2GiB"])
def test_an_invalid_bound_is_refused(bound: Any) -> None:
    model = Library("torch").model()
    with pytest.raises(UsageError, match="max_memory"):
        tt.capture(model, max_memory=bound)
    assert Library("torch").hooks_on(model) == 0


def test_each_bound_is_for_one_kind_of_run(run_path: Path) -> None:
    model = Library("torch").model()
    with pytest.raises(UsageError, match="max_memory is for a run in memory"):
        tt.capture(model, run_path, max_memory=1 << 20)
    with pytest.raises(UsageError, match="max_buffer is for a run on disk"):
        tt.capture(model, max_buffer=1 << 20)
    assert not run_path.exists()


def test_a_record_takes_no_more_than_it_counts() -> None:
    run = recorded(Library("torch")).run
    assert run.nbytes <= RECORD_BYTES * len(run)


def test_ranks_that_record_nothing_have_no_run() -> None:
    model = Library("torch").model()
    with tt.capture(model, ranks=[3]) as tap:
        Library("torch").train(model, tap.step, steps=1)
    with pytest.raises(UsageError, match="rank 0 records nothing"):
        _ = tap.run


def test_one_rank_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = tap_module.framework_of(Library("torch").model())
    monkeypatch.setattr(type(framework), "world", lambda self: 4)
    run = recorded(Library("torch")).run
    first, unknown = run.notices
    assert first == "it holds rank 0 of 4 alone: in memory, each process has its own run"
    assert "how 4 processes share the model is not known" in unknown


def test_memory_is_freed_when_the_next_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_WORTH_COLLECTING", 1000)
    library = Library("torch")
    gc.collect()
    gc.disable()
    try:
        tap = recorded(library, keep="tensors")
        gone = weakref.ref(tap.run)
        del tap
        recorded(library)
        assert gone() is None
    finally:
        gc.enable()


# --- functions that take a run ----------------------------------------------------------------------------------------
KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


def test_a_check_against_a_run_in_memory(library: Library) -> None:
    reference = recorded(library, keep="tensors", kinds=KINDS, train=1).run
    again = recorded(library, keep="tensors", kinds=KINDS, train=1).run
    for scale, verdict in ((1.0, "match"), (1.01, "diverged")):
        model = library.model()
        library.scale(model.blocks[1].fc2.weight, scale)
        with tt.check(model, reference, noise=again) as check:
            library.train(model, steps=1)
        assert check.result.verdict == verdict
    assert check.result.first is not None and check.result.first.module == "blocks.1.fc2"


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_noise_from_a_run_in_memory(library: Library, tmp_path: Path, keep: str) -> None:
    reference, noisy = recorded(library, keep=keep).run, recorded(library, scale=1.001, keep=keep).run
    recorded(library, tmp_path / "b", scale=1.0005, keep=keep)
    assert tt.compare(reference, tmp_path / "b").verdict == "diverged"
    for noise in (noisy, [noisy], (noisy, noisy)):
        assert tt.compare(reference, tmp_path / "b", noise=noise).verdict == "match"
    recorded(library, tmp_path / "noisy", scale=1.001, keep=keep)
    assert tt.compare(reference, tmp_path / "b", noise=str(tmp_path / "noisy")).verdict == "match"


def test_replay_from_a_run_in_memory() -> None:
    library = Library("torch")
    kinds = ("input", "output", "grad_output", "grad_input", "param", "param_grad")
    run = recorded(library, keep="tensors", kinds=kinds, train=1).run
    result = tt.replay(run, "blocks.0.fc1", library.model())
    assert result.verdict == "match" and len(result) > 2


def test_workers_and_progress_do_not_matter() -> None:
    library = Library("torch")
    reference, candidate = recorded(library, keep="tensors").run, recorded(library, scale=1.1, keep="tensors").run
    told: list[tuple[int, int]] = []
    found = tt.compare(reference, candidate, workers=2, progress=lambda done, whole: told.append((done, whole)))
    assert found.table.equals(tt.compare(reference, candidate).table)
    assert told and told[-1][0] == told[-1][1]
    until = tt.compare(reference, candidate, until_first=True)
    assert until.first is not None and until.first.module == "blocks.1.fc2"


def test_bfloat16_is_kept_bit_for_bit(run_path: Path) -> None:
    def run(path: Path | None) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)).bfloat16()
        with tt.capture(model, path, keep="tensors") as tap:
            model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        return tap.run

    memory, disk = run(None), run(run_path)
    for ours, theirs in zip(memory, disk, strict=True):
        assert ours.dtype == theirs.dtype == "bfloat16"
        assert bytes(memory.bytes_of(ours)) == bytes(disk.bytes_of(theirs))
        assert torch.equal(memory.torch(ours), disk.torch(theirs))


def test_nothing_is_printed_below_the_bound(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(library, keep="tensors")
    assert not capsys.readouterr().err


def test_reports_of_runs_in_memory(tmp_path: Path) -> None:
    library = Library("torch")
    reference, candidate = recorded(library, keep="tensors").run, recorded(library, scale=1.1, keep="tensors").run
    result = tt.compare(reference, candidate, details=4)
    assert result.details and result.details[0].whole
    for report in (comparison_csv, comparison_html, comparison_json, comparison_junit, comparison_markdown):
        with (tmp_path / "report").open("wb") as file:
            report.write(result, file)
        text = (tmp_path / "report").read_text()
        assert "blocks.1.fc2" in text
        assert "tensortap compare 'in-memory" not in text  # no command can open what is in memory
    assert result.reference.startswith("in-memory run ") and result.reference != result.candidate


def test_the_assertion_names_no_command_for_runs_in_memory(tmp_path: Path) -> None:
    library = Library("torch")
    reference, wrong = recorded(library).run, recorded(library, tmp_path / "b", scale=1.1).run
    assert_runs_match(reference, recorded(library).run)
    with pytest.raises(AssertionError) as failed:
        assert_runs_match(reference, wrong)
    assert "blocks.1.fc2" in str(failed.value) and "To see more" not in str(failed.value)
    recorded(library, tmp_path / "a")
    with pytest.raises(AssertionError) as failed:
        assert_runs_match(tmp_path / "a", wrong, noise=tt.open(tmp_path / "a"))
    assert f"--noise {tmp_path / 'a'} -v" in str(failed.value)
