"""Real profiles of torch: properties that hold whatever the times are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint

from tensortap.bench.model import SIZES, Llama
from tensortap.errors import UsageError
from tensortap.model.profile.annotate import annotate
from tensortap.model.profile.module_times import ModuleTimes, module_times
from tensortap.times import Usage


@dataclass(frozen=True)
class Profiled:
    live: ModuleTimes
    exported: ModuleTimes

    @property
    def usage(self) -> dict[tuple[str, str], Usage]:
        return self.live.ledger.usage_by(lambda place: (place.module, place.phase))


def profiled(model: nn.Module, loss: Callable[[], torch.Tensor], folder: Path, steps: int = 2) -> Profiled:
    optimizer = torch.optim.AdamW(model.parameters())
    with annotate(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        for _ in range(steps):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    path = folder / "trace.json.gz"
    live = module_times(prof)
    prof.export_chrome_trace(str(path))
    return Profiled(live, module_times(path))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    size = SIZES["llama-tiny"]
    torch.manual_seed(0)
    model = Llama(size)
    words = torch.randint(0, size.words, (size.batch, size.length))
    return profiled(model, lambda: model(words).float().square().mean(), tmp_path_factory.mktemp("llama"))


def test_a_table_prints_as_the_page_of_the_command(llama: Profiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = llama.live.table(by="class", sort="class", top=2)
    shown = str(table).splitlines()
    assert shown[2].split()[:3] == ["class", "phase", "calls"] and "more rows" in shown[5] and len(shown) < 10
    assert repr(table) == "<TimesTable of 2 rows by class>"
    assert str(llama.live.table()) == str(llama.live)
    assert table.as_dict()["by"] == "class" and len(table.as_dict()["rows"]) == 2


def test_own_times_sum_to_the_span_of_the_profile(llama: Profiled) -> None:
    ledger = llama.live.ledger
    assert sum(usage.own for usage in llama.usage.values()) == pytest.approx(ledger.span / 1000)
    assert all(usage.own >= 0 and usage.total >= usage.own for usage in llama.usage.values())


def test_an_exported_trace_gives_the_same_times(llama: Profiled) -> None:
    def rows(times: ModuleTimes) -> dict[tuple[str, str, str], tuple[int, float]]:
        return {(row.module, row.cls, row.phase): (row.calls, row.memory) for row in times.table(sort="order").rows}

    assert rows(llama.exported) == rows(llama.live)
    for ours, theirs in zip(llama.live.table().rows, llama.exported.table().rows, strict=True):
        assert ours.own == pytest.approx(theirs.own, abs=0.1)


def test_every_module_has_its_calls_and_steps_are_counted(llama: Profiled) -> None:
    calls = {name: usage.pieces for name, usage in llama.usage.items()}
    assert llama.live.ledger.steps == 2
    assert calls["(root)", "forward"] == calls["layers.0.mlp.up_proj", "forward"] == 2
    assert calls["(optimizer)", "other"] == calls["(zero_grad)", "other"] == 2
    assert calls["(AccumulateGrad)", "backward"] == 2 * len(list(Llama(SIZES["llama-tiny"]).parameters()))
    assert {phase for _, phase in calls} == {"forward", "backward", "other"}


def test_totals_of_submodules_are_within_their_parents_total(llama: Profiled) -> None:
    usage = llama.usage
    for phase in ("forward", "backward"):
        inside = sum(each.own for name, each in usage.items() if name[0][0] != "(" and name[1] == phase)
        root = usage["(root)", phase]
        assert root.total == pytest.approx(inside + root.own)
        for block in ("layers.0", "layers.1"):
            parts = [each.own for name, each in usage.items() if name[0].startswith(block) and name[1] == phase]
            assert usage[block, phase].total == pytest.approx(sum(parts))


def test_a_container_without_its_own_nodes_has_no_own_backward_time(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), nn.Sequential(nn.Linear(4, 4)))
    usage = profiled(model, lambda: model(torch.ones(2, 4)).sum(), tmp_path).usage
    for name in ("(root)", "0", "1"):
        assert usage[name, "backward"].own == 0 < usage[name, "backward"].total
    assert usage["0.0", "backward"].own > 0


def test_no_container_without_operators_has_a_hundredth_of_a_llamas_step(tmp_path: Path) -> None:
    """The hooks of sixty parts cost several per cent of the step. A busy machine may interrupt a container once."""
    size = SIZES["llama-tiny"]
    torch.manual_seed(0)
    model = nn.Sequential(Llama(size), nn.Sequential(*(nn.Identity() for _ in range(60))))
    for layer in model[0].layers:
        layer.mlp = nn.Sequential(layer.mlp)
    containers = {name or "(root)" for name, part in model.named_modules() if type(part) is nn.Sequential}
    words = torch.randint(0, size.words, (size.batch, size.length))
    shares = []
    for _ in range(5):
        found = profiled(model, lambda: model(words).float().square().mean(), tmp_path)
        spent = {name: each.own for name, each in found.usage.items() if name[0] in containers}
        assert {name for name, phase in spent if phase == "forward"} == containers
        span = found.live.ledger.span / 1000
        assert sum(row.own for row in found.exported.rows) == pytest.approx(span, rel=0.03)
        shares.append(max(spent.values()) / span)
        if shares[-1] < 0.01:
            return
    raise AssertionError(f"containers had {shares} of the step")


class Blocks(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_counts_in_no_other_phase(reentrant: bool, tmp_path: Path) -> None:
    model = Blocks(reentrant)
    found = profiled(model, lambda: model(torch.ones(2, 4)).sum(), tmp_path)
    usage = found.usage
    assert sum(each.own for each in usage.values()) == pytest.approx(found.live.ledger.span / 1000)
    for i in (0, 1):
        again = usage[f"blocks.{i}", "recompute"]
        assert again.pieces == 2
        assert again.total == pytest.approx(again.own + sum(usage[f"blocks.{i}.{j}", "recompute"].own for j in (0, 1)))
    assert ("first", "recompute") not in usage and ("(root)", "recompute") not in usage
    (row,) = [row for row in found.live.rows if row.module == "blocks.0"]
    assert row.total == pytest.approx(row.forward.total + row.backward.total + row.recompute.total)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle:UserWarning")
def test_each_cycle_of_a_schedule_is_calibrated() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    seen = []

    def keep(prof: profile) -> None:
        seen.append(sum(event.name() == "tensortap calibration" for event in prof.profiler.kineto_results.events()))

    plan = schedule(wait=1, warmup=1, active=2, repeat=2)
    with annotate(model), profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=keep) as prof:
        for _ in range(8):
            model(torch.ones(1, 4))
            prof.step()
    assert seen == [1, 1]


def test_global_hooks_of_the_user_see_only_the_model() -> None:
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4))
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        with annotate(model), profile(activities=[ProfilerActivity.CPU]) as prof:
            model(torch.ones(1, 4))
    finally:
        handle.remove()
    assert seen == ["Linear", "Sequential"]
    assert module_times(prof).ledger.calls


def test_the_table_fits_and_can_be_sorted(llama: Profiled) -> None:
    text = str(llama.live)
    assert max(map(len, text.splitlines())) <= 80
    assert "(no module)" in text and "layers.1.mlp.down_proj" in text
    rows = llama.live.rows
    assert [row.own for row in rows] == sorted((row.own for row in rows), reverse=True)


def test_unreadable_profiles_are_refused_with_a_remedy(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        torch.ones(1)
    with pytest.raises(UsageError, match=r"no spans of tensortap\.annotate"):
        module_times(prof)
    with pytest.raises(UsageError, match="sort: 'size' is not one of own, total"):
        module_times(prof, sort="size")
    with pytest.raises(UsageError, match="holds no events"):
        module_times(profile(activities=[ProfilerActivity.CPU]))
