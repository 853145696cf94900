"""The benchmark's figures: all are present and consistent. Their size depends on the machine."""

from __future__ import annotations

import copy
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tensortap.bench import BenchOptions, measure, measuring  # noqa: E402
from tensortap.bench.memory import available  # noqa: E402
from tensortap.bench.model import SIZES, Llama  # noqa: E402
from tensortap.bench.numpy_saving import _Saver, save_in_hooks  # noqa: E402
from tensortap.bench.trainer import Trainer, is_leaf  # noqa: E402
from tensortap.bench.verdict import Floor, floors, limit  # noqa: E402
from tensortap.bench.writing import warm_page_cache  # noqa: E402
from tensortap.core.machine import memory as machine_memory  # noqa: E402
from tensortap.errors import MissingDependency, UsageError  # noqa: E402
from tensortap.report.terminal.bench import bench_page  # noqa: E402

SHORT = {"device": "cpu", "model": "llama-tiny", "rounds": 2, "steps": 2}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench")
    found = measure(BenchOptions(**SHORT, out=out, np_save=True, leak_steps=4, kernel=True))
    assert not list(out.iterdir()), "nothing is left behind"
    return found


def test_the_large_model_has_the_size_in_its_name() -> None:
    with torch.device("meta"):
        model = Llama(SIZES["llama-0.95b"])
    assert 0.945e9 < sum(p.numel() for p in model.parameters()) < 0.955e9
    assert sum(is_leaf(name, module) for name, module in model.named_modules()) == 164


def test_a_step_trains() -> None:
    trainer = Trainer(SIZES["llama-tiny"], "cpu")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.step()
    assert all(not torch.equal(p, q) for p, q in zip(trainer.model.parameters(), before, strict=True))
    assert all(p.isfinite().all() for p in trainer.model.parameters())


def test_every_way_is_measured(facts: dict[str, Any]) -> None:
    assert list(facts["ways"]) == ["plain", "summary", "tensors", "np.save"]
    for way in facts["ways"].values():
        assert way["seconds"] > 0
        assert way["each"] > 0
        assert way["launching"] > 0
        assert way["ratio_waited"] is None, "a CPU is always waited for"
        assert way["ratio"] > 0
    assert facts["ways"]["plain"]["ratio"] == 1
    assert [facts["ways"][name]["rounds"] for name in facts["ways"]] == [2, 2, 2, 1]
    assert facts["left_out"] == []
    json.dumps(facts)


def test_the_page_of_a_gpu(facts: dict[str, Any]) -> None:
    """Without a GPU, the figures are those of a CPU."""
    there = copy.deepcopy(facts)
    there["machine"]["device"] = "cuda"
    there["limits"]["device_launch"] = 7e-6
    there["ways"]["summary"]["ratio_waited"] = 1.077
    head, _, names, *rows = [line.plain for line in bench_page(there, None)]
    assert "(cuda, " in head and "step by step" in names and "launching" in names
    found = {row.split()[0]: row.split() for row in rows[:4]}
    assert "1.077×" in found["summary"] and "–" in found["tensors"]


def test_tapped_tensors_are_counted(facts: dict[str, Any]) -> None:
    """Inputs, outputs and gradients of 24 leaves; an output that is the next one's input is one tensor."""
    tapped, tensors = facts["tapped"], facts["ways"]["tensors"]
    assert facts["model"]["leaves"] == 24
    assert tapped["records"] > tapped["tensors"] > 3 * 24
    assert tensors["stats"]["records"] == tensors["steps"] * tapped["records"]
    kept = tensors["stats"]["bytes"] / tensors["steps"]
    assert tapped["bytes"] < kept < 3 * tapped["bytes"] + (1 << 20)


def test_np_save_saves_outputs_and_gradients(facts: dict[str, Any]) -> None:
    stats = facts["ways"]["np.save"]["stats"]
    assert stats["files"] == 2 * 24  # each leaf's output and its gradient; the rotary has two outputs and no gradient
    assert stats["bytes_of_all"] == stats["bytes"] > 0


def test_np_save_ends_in_time_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(measuring, "save_in_hooks", lambda trainer, folder: save_in_hooks(trainer, folder, bound=0.0))
    found = measure(BenchOptions(**SHORT, keep=("summary",), out=tmp_path, np_save=True))
    stats = found["ways"]["np.save"]["stats"]
    assert stats["files"] == 1
    assert 0 < stats["bytes"] < stats["bytes_of_all"] == facts["ways"]["np.save"]["stats"]["bytes"]
    assert found["left_out"] == ["a part of np.save in hooks: its figures are projected from 0.0 of 0.0 GB"]
    rate = found["ways"]["np.save"]["bytes_per_second"]
    assert rate == pytest.approx(stats["bytes_of_all"] / found["ways"]["np.save"]["seconds"])


def test_a_part_stands_for_all_by_its_bytes(tmp_path: Path) -> None:
    saver = _Saver(tmp_path, bound=20.0)
    saver.saving, saver.removing, saver.written, saver.seen = 20.0, 1.0, 10, 40
    assert saver.projected(25.0) == 4.0 + 4 * 20.0


@pytest.mark.parametrize(
    ("free", "memory", "expected"),
    [
        (1 << 40, 1 << 40, 3 * 1000 << 20),
        ((1 << 30) + (700 << 20), 1 << 40, 700 << 20),
        (1 << 40, 1000 << 20, 750 << 20),
        (1 << 30, 1 << 40, 0),
    ],
)
def test_so_much_memory_is_warmed_as_a_block_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, memory: int, expected: int
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free, 0, free))
    monkeypatch.setattr(measuring, "available", lambda: memory)
    warmed, said = [], []
    monkeypatch.setattr(measuring, "warm_page_cache", lambda folder, nbytes: warmed.append(nbytes))
    trainer = Trainer(SIZES["llama-tiny"], "cpu")
    bench = measuring._Bench(BenchOptions(**SHORT), trainer, tmp_path, lambda doing, share: said.append(doing))
    bench._warm(1000 << 20, steps=2)
    assert warmed == [expected]
    assert said == [f"writing and removing {expected / 1e9:.1f} GB to warm up the page cache"]


def test_warming_leaves_nothing(tmp_path: Path) -> None:
    warm_page_cache(tmp_path, 0)
    warm_page_cache(tmp_path, 40 << 20)
    assert not list(tmp_path.iterdir())
    assert 0 < available() <= machine_memory()


def test_limits_and_leak(facts: dict[str, Any]) -> None:
    limits = facts["limits"]
    for name in ("memory_read", "page_cache_write", "page_cache_write_many"):
        assert limits[name] > 0
    assert limits["device_read"] is limits["device_to_host"] is limits["device_launch"] is None
    assert facts["kernel"] is None
    assert facts["leak"]["steps"] == 4
    assert facts["leak"]["device_allocated"] == 0


def test_a_time_limit_is_reported() -> None:
    found = measure(BenchOptions(**SHORT, keep=("summary",), np_save=True, leak_steps=30, seconds=1e-9))
    assert list(found["ways"]) == ["plain", "summary"]
    assert found["ways"]["summary"]["rounds"] == 1
    assert [line.partition(",")[0] for line in found["left_out"]] == [
        "1 of 2 rounds",
        "26 of 30 steps of the leak",
        "np.save in hooks",
    ]


def test_too_small_a_disk_is_reported_before_the_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2 << 30, 1 << 30, (1 << 30) + 1000))
    with pytest.raises(UsageError, match="--out"):
        measure(BenchOptions(**SHORT, out=tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "wrong", [{"device": "tpu"}, {"keep": ("all",)}, {"keep": ()}, {"rounds": 0}, {"seconds": 0}, {"leak_steps": -1}]
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchOptions(**wrong)


def test_an_unknown_model_raises_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"llama-0\.95b"):
        measure(BenchOptions(device="cpu", model="gpt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_missing_cuda_raises() -> None:
    with pytest.raises(UsageError, match="no CUDA"):
        measure(BenchOptions(device="cuda"))


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins
    import sys

    monkeypatch.delitem(sys.modules, "tensortap.bench.measuring")
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(MissingDependency, match=r"pip install"):
        measure(BenchOptions(device="cpu"))


# --- what limits it ------------------------------------------------------------------------------------------------
H200 = {
    "device_read": 3.8e12,
    "device_to_host": 55e9,
    "device_launch": 4e-6,
    "memory_read": 1e11,
    "page_cache_write_many": 20e9,
    "direct_write": 2e9,
}


def test_floors_of_a_gpu() -> None:
    found = {floor.name: floor.seconds for floor in floors("tensors", "cuda", 20_000_000_000, 500, H200)}
    assert list(found) == ["the page cache", "PCIe", "reading GPU memory", "launches"]
    assert found["the page cache"] == pytest.approx(1.0)
    assert found["PCIe"] == pytest.approx(20 / 55)
    assert found["launches"] == pytest.approx(2e-3)
    together = floors("summary", "cuda", 1000, 500, H200)  # up to 60 of them in a launch
    assert [floor.name for floor in together] == ["launches", "reading GPU memory"]
    assert together[0].seconds == pytest.approx(9 * 4e-6)


def test_the_faster_way_to_the_disk_counts() -> None:
    fast_disk = H200 | {"direct_write": 30e9}
    assert floors("tensors", "cpu", 1 << 30, 5, fast_disk)[0].name == "the disk"
    none = H200 | {"direct_write": None}
    assert floors("tensors", "cpu", 1 << 30, 5, none)[0].name == "the page cache"


def test_concurrent_parts_are_compared_with_the_whole_step() -> None:
    found = limit(1.0, 0.2, Floor("PCIe", 0.7, concurrent=True))
    assert found["said"] == "PCIe: 70% of the step is spent there"
    on_top = limit(1.0, 0.2, Floor("reading memory", 0.4))
    assert on_top["said"] == "reading memory: 50% of the time over the plain step is spent there"
    own = limit(1.0, 0.2, Floor("launches", 0.04), launching=0.6)
    assert own["said"].startswith("tensortap's own work: even launches, the slowest part, needs only 5%")
    assert limit(1.001, 1.0, Floor("launches", 0.04))["said"].startswith("nothing: it is within")


def test_a_host_that_is_busy_all_the_time_is_named() -> None:
    busy = limit(1.0, 0.2, Floor("launches", 0.04), launching=0.97)
    assert busy["said"] == "the host: launching takes 97% of the step, and the device waits for it"
