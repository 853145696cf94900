"""The same capture on a CUDA device: the same bits, the same promises."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, everything, hooks_on
from tensortap.frameworks.torch.cuda import reader as torch_cuda
from tensortap.frameworks.torch.cuda.host_copies import CudaHostCopies
from tensortap.kernels import summarize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(path: Path | None, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = zoo.Residual().to("cuda", dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tap = path and tt.capture(model, path, optimizer=optimizer, kinds=ALL_KINDS, **options)
    found = []
    for step in range(3):
        loss = zoo_loss(model(zoo.batch(seed=step).to("cuda", dtype)))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    if tap:
        tap.close()
    assert hooks_on(model) == 0
    return found + [p.detach().clone() for p in model.parameters()] + [torch.cuda.get_rng_state()]


def zoo_loss(output: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, output.numel(), device=output.device).view_as(output)
    return (output.float() * weights).square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_training_is_unchanged(tmp_path: Path, keep: str, dtype: torch.dtype) -> None:
    plain, tapped = train(None, dtype), train(tmp_path / "run", dtype, keep=keep)
    assert all(map(torch.equal, plain, tapped))


def test_summaries_are_those_of_the_bytes_that_were_kept(tmp_path: Path) -> None:
    train(tmp_path / "run", torch.bfloat16, keep="tensors")
    run = tt.open(tmp_path / "run")
    assert len(run) > 100
    assert all(summarize(run.load(record)).digest == record.summary.digest for record in run)


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_a_run_in_memory(tmp_path: Path, keep: str) -> None:
    def recorded(path: Path | None) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 512)).to("cuda")
        with tt.capture(model, path, keep=keep, kinds=ALL_KINDS) as tap:
            for step in range(3):
                x = torch.randn(8192, 512, generator=torch.Generator().manual_seed(step)).to("cuda")  # 128 MiB inside
                model(x).square().mean().backward()
                model.zero_grad()
                tap.step()
        return tap.run

    disk, memory, again = recorded(tmp_path / "run"), recorded(None), recorded(None)
    assert everything(disk) == everything(memory) == everything(again)
    for record in memory.records(kept=True):
        assert summarize(memory.load(record)).digest == record.summary.digest
    assert memory.finished and tt.compare(disk, memory).verdict == "match"
    assert tt.compare(memory, again, device="cuda").verdict == "match"


def test_the_values_of_a_peek() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("cuda", torch.bfloat16)
    with tt.peek(model, "1", quiet=True) as p:
        out = model(torch.ones(2, 4, dtype=torch.bfloat16, device="cuda"))
        out.sum().backward()
    assert p["1"].output.astype("float32").tolist() == out.float().tolist() and p["1"].grad_output.min() == 1


def test_two_runs_are_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name, keep="summary")
    assert everything(tt.open(tmp_path / "a")) == everything(tt.open(tmp_path / "b"))
    assert tt.compare(tmp_path / "a", tmp_path / "b").verdict == "match"


def test_a_tensor_may_be_changed_or_freed_right_after(tmp_path: Path) -> None:
    class Hasty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for step in self.steps:
                y = step(x)
                x = y * 0.5
                y.fill_(-7)
                del y
            return x

    torch.manual_seed(0)
    model = Hasty().cuda()
    x = torch.randn(4096, 1024, device="cuda")
    true = []
    with torch.no_grad():
        for step in model.steps:
            true.append(step(x).cpu())
            x = true[-1].cuda() * 0.5
    torch.manual_seed(0)
    model, x = Hasty().cuda(), torch.randn(4096, 1024, device="cuda")
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds="output", classes="Linear"), torch.no_grad():
        model(x)
    run = tt.open(tmp_path / "run")
    for record, y in zip(run, true, strict=True):
        assert torch.allclose(torch.from_numpy(run.load(record).copy()), y, atol=1e-3)
    assert all(summarize(run.load(record)).digest == record.summary.digest for record in run)


def test_several_streams(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).cuda()
    x = torch.randn(2048, 512, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=("input", "output")) as tap:
        for round_ in range(4):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    model(x + round_)
                torch.cuda.current_stream().wait_stream(stream)
            tap.step()
    run = tt.open(tmp_path / "run")
    assert all(summarize(run.load(record)).digest == record.summary.digest for record in run)


def test_a_graph_being_captured_is_reported(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad(), tt.capture(model, tmp_path / "run", kinds=("input", "output")) as tap:
        model(x)
        tap.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
        graph.replay()
        tap.step()
    assert "CUDA graph" in " ".join(row.reason for row in tap.coverage)
    assert {record.key.step for record in tt.open(tmp_path / "run")} == {0}


def test_memory_does_not_grow(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))).cuda()
    x = torch.randn(512, 256, device="cuda")
    gc.collect()  # leftovers of other tests
    with tt.capture(model, tmp_path / "run", keep="tensors", max_buffer=8 << 20) as tap:
        seen = []
        for _ in range(20):
            model(x).sum().backward()
            model.zero_grad()
            tap.step()
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
        assert len(set(seen[3:])) == 1
        stats = tap.stats()
    assert stats["peak_buffer_bytes"] <= 9 << 20 and stats["bytes"] > 20 << 20


def test_a_ring_that_is_written_over_by_several_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_cuda, "CudaHostCopies", partial(CudaHostCopies, ring=8 << 20, part=1 << 20))
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).cuda()
    x = torch.randn(1500, 512, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=("input", "output")) as tap:
        for stream in streams * 2:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                model(x)
            x = x + 1
            tap.step()
    run = tt.open(tmp_path / "run")
    assert len(run) > 50
    assert all(summarize(run.load(record)).digest == record.summary.digest for record in run)


def test_one_tensor_kept_in_some_places_only(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity())
    with tt.capture(model.cuda(), tmp_path / "run", keep={"1": "tensors", "*": "summary"}, kinds=("input", "output")):
        model(torch.randn(32, 64, device="cuda"))
    run = tt.open(tmp_path / "run")
    one = [record for record in run if record.key.module != "0" or record.key.kind == "output"]
    one = [record for record in one if (record.key.module, record.key.kind) != ("", "input")]
    assert len({record.summary.digest for record in one}) == 1
    assert len({record.tensor for record in one}) == 1
    assert all(summarize(run.load(record)).digest == record.summary.digest for record in one if record.location)


def test_a_tensor_that_crosses_streams_is_still_the_same(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
    model = torch.nn.ModuleList([first, second])
    side = torch.cuda.Stream()
    with tt.capture(model, tmp_path / "run", keep="tensors", kinds=("input", "output")) as tap:
        between = first(torch.randn(32, 64, device="cuda"))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second(between)
        torch.cuda.current_stream().wait_stream(side)
        tap.step()
    records = {(record.key.module, record.key.kind): record for record in tt.open(tmp_path / "run")}
    assert records["0", "output"].location == records["1", "input"].location is not None
    assert records["0", "output"].tensor == records["1", "input"].tensor
    assert not tap.notices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_read_together_give_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    runs = []
    for name, gather in (("once", False), ("together", True)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width + 8) for width in range(1000, 1064, 8)))
        model = model.to("cuda", dtype)
        with tt.capture(model, tmp_path / name, gather=gather) as tap:
            for _ in range(4):
                model(torch.randn(3000, 1000, device="cuda", dtype=dtype)).square().mean().backward()
                model.zero_grad()
                tap.step()
                tap.flush()
        assert not tap.notices
        runs.append(tt.open(tmp_path / name))
    for one, other in zip(*runs, strict=True):
        a, b = one.summary, other.summary
        assert one.key == other.key and a.digest == b.digest and a.sketch.tobytes() == b.sketch.tobytes()
        assert (a.mean, a.std, a.min, a.max, a.l1, a.l2) == (b.mean, b.std, b.min, b.max, b.l1, b.l2)


def test_gradients_that_wait_to_be_read_are_not_copied_for_it(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))).cuda()
    x = torch.randn(64, 1024, device="cuda")
    peaks = []
    for gather in (False, True):
        with tt.capture(model, tmp_path / str(gather), gather=gather, kinds="param_grad") as tap:
            for _ in range(4):
                torch.cuda.reset_peak_memory_stats()
                model(x).sum().backward()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
                model.zero_grad()
                tap.step()
                tap.flush()
            peaks.append(peak)
    assert peaks[0] == peaks[1]


def test_a_tensor_that_waits_may_be_freed_or_changed(tmp_path: Path) -> None:
    class Hasty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(8))
            self.change = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, step in enumerate(self.steps):
                y = step(x)
                x = y * 0.5
                if number == 5:
                    y.data.fill_(-7)
                if number == 3 and self.change:
                    y.fill_(-7)
                del y
            return x

    digests = []
    for name, gather in (("once", False), ("together", True)):
        torch.manual_seed(0)
        model = Hasty().cuda()
        with tt.capture(model, tmp_path / name, kinds="output", classes="Linear", gather=gather) as tap:
            for number in range(5):
                model.change = number == 3
                model(torch.randn(4096, 1024, device="cuda"))
                tap.step()
                tap.flush()
        digests.append({record.key: record.summary.digest for record in tt.open(tmp_path / name)})
    once, together = digests
    assert [(key.step, key.module) for key in once if key not in together] == [(3, "steps.3")]
    assert all(once[key] == digest for key, digest in together.items())
    assert len(tap.notices) == 1 and "steps.3" in tap.notices[0]
