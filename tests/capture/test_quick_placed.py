"""In a run of several processes, reads on a device are deferred and joined as in a run of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support.fake_gpu import FakeReader, choose_language, install
from tensortap.capture import native_classes
from tensortap.capture.recording.recorder import Recorder

LAYOUT = {"mesh": {"dp": 2}}
WIDTH = 512


@pytest.fixture(autouse=True)
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> FakeReader:
    return install(monkeypatch)()


class Model(nn.Module):
    """Its outputs begin at a row of the whole, except those of `odd`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd(torch.tanh(self.second(torch.tanh(self.first(x))))) * x.mean()


def train(path: Path, sizes: Sequence[int] = (8,) * 6, micros: int = 1, **options: Any) -> list[Any]:
    """Train on batches of these sizes, and return the rows of the run."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with tt.capture(model, path, optimizer=optimizer, layout=LAYOUT, **options) as tap:
        for size in sizes:
            for _ in range(micros):
                model(torch.randn(size, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tap.flush()
    assert not tap.notices
    return [
        (row.key, row.seq, row.dtype, row.shape, row.tensor, row.summary.digest, row.placement) for row in tt.open(path)
    ]


@pytest.mark.parametrize("language", ["C++", "C", "Python"])
@pytest.mark.parametrize(("sizes", "micros"), [((8,) * 6, 1), ((8,) * 6, 2), ((8, 8, 8, 8, 16, 8, 8, 16, 16, 8), 1)])
def test_rows_are_those_of_reads_at_once(
    tmp_path: Path,
    reader: FakeReader,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sequence[int],
    micros: int,
    language: str,
) -> None:
    choose_language(monkeypatch, language)
    later = train(tmp_path / "later", sizes, micros)
    assert reader.waited > 3 * len(sizes) * micros, "reads were deferred"
    assert max(reader.gpu.together_) > 3, "and joined"
    waited = reader.waited
    at_once = train(tmp_path / "once", sizes, micros, gather=False)
    assert reader.waited == waited
    assert later == at_once
    outputs = [row for row in later if row[0].kind == "output" and row[0].module == "first"]
    assert len(outputs) == micros * len(sizes)
    for (*_, shape, _, _, placement), size in zip(
        outputs, [size for size in sizes for _ in range(micros)], strict=True
    ):
        assert shape == (size, WIDTH) and placement.shape == (2 * size, WIDTH)
        assert placement.boxes == (((0, size, size), (0, 0, WIDTH)),)


def test_digests_are_those_of_the_whole(tmp_path: Path, reader: FakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests of both halves of a batch add up to that of a process that has all of it."""
    torch.manual_seed(1)
    model, batches = Model(), [torch.randn(16, WIDTH) for _ in range(6)]
    digests = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        with tt.capture(model, tmp_path / str(rank), layout=LAYOUT, kinds=("input", "output")) as tap:
            for batch in batches:
                model(batch[8 * rank : 8 * rank + 8]).sum().backward()
                tap.step()
                tap.flush()
        digests.append(inputs_of_first(tmp_path / str(rank)))
    assert reader.waited
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with tt.capture(model, tmp_path / "whole", kinds=("input", "output")) as tap:
        for batch in batches:
            model(batch).sum().backward()
            tap.step()
    halves = [sum(both) % 2**64 for both in zip(*digests, strict=True)]
    assert halves == inputs_of_first(tmp_path / "whole")


def inputs_of_first(path: Path) -> list[int]:
    rows = [row for row in tt.open(path) if row.key.module == "first" and row.key.kind == "input"]
    return [int(row.summary.digest) for row in rows]


def test_the_c_code_takes_what_has_a_place(tmp_path: Path, reader: FakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what begins a forward or backward, or does not begin at a row, goes through Python in later steps."""
    if native_classes.load() is None:
        pytest.skip("no C compiler, or no headers of Python")
    taken: Counter[tuple[int, str, str]] = Counter()
    take = Recorder.take

    def counted(self: Recorder, tensor: Any, slot: Any, step: int) -> bool:
        taken[step, slot.module, slot.kind] += 1
        return take(self, tensor, slot, step)

    monkeypatch.setattr(Recorder, "take", counted)
    steps = 30  # until each slot has been tried again
    train(tmp_path / "run", (8,) * steps, kinds=("input", "output", "grad_output", "param_grad"))
    assert taken[0, "first", "output"]
    in_python = {where[1:] for where in taken if where[0] == steps - 2}
    begins = {("", "input"), ("first", "input"), ("", "grad_output")}
    assert in_python == begins | {("", "output"), ("odd", "output"), ("odd", "grad_output")}


def test_a_tensor_without_known_position_is_deferred_as_well(tmp_path: Path, reader: FakeReader) -> None:
    """Which dimension holds the tokens of context parallelism, only the user knows."""
    model = Model()
    with tt.capture(model, tmp_path / "run", layout={"mesh": {"cp": 2}}) as tap:
        for _ in range(6):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            tap.step()
            tap.flush()
    rows = [row for row in tt.open(tmp_path / "run") if row.key.kind == "output"]
    assert {row.placement for row in rows} == {None}
    assert reader.waited


def test_a_tensor_is_forgotten_with_its_placement(tmp_path: Path, reader: FakeReader) -> None:
    """Compiled code reuses memory without counting a version: what is forgotten is read again."""
    model = Model()
    seen: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda _, __, output: seen.append(output))
    with tt.capture(model, tmp_path / "run", layout=LAYOUT, kinds="output", gather=False) as tap:
        model(torch.randn(8, WIDTH))
        recorder = tap._sink._recorder
        token = reader.describe(seen[0])[0]
        tokens = [token, *recorder._places.tokens(token)]
        assert any(recorder._pending.entries.find(each) >= 0 for each in tokens)
        recorder.forget(seen[0])
        assert not any(recorder._pending.entries.find(each) >= 0 for each in tokens)
