"""Engines on real local clusters of Ray and Dask: the same bits as in one process, also if a worker dies."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection, Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Seen, values, write
from typer.testing import CliRunner

import tensortap as tt
from tensortap.cli import app
from tensortap.compare.join.bands import Assembly, Piece
from tensortap.compare.measure import engine
from tensortap.compare.measure.engine import Batch, Serial, Span, Task
from tensortap.compare.measure.engines import engine_of
from tensortap.compare.measure.engines.pool import Outcome, PoolEngine, WorkerDied, WorkerPool, measure_batch
from tensortap.compare.options import ENGINES, ComparisonOptions
from tensortap.errors import MissingDependency, RunUnreadable, TensortapError, UsageError

CLUSTERS = ("ray", "dask")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def dask_cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture
def clusters(ray_cluster: None, dask_cluster: Any) -> Any:
    """Both clusters, one worker each; engines without an address find them."""
    return dask_cluster


def pool_of(name: str) -> PoolEngine:
    from contextlib import ExitStack

    found = engine_of(ComparisonOptions(engine=name, workers=None if name in CLUSTERS else 1), ExitStack())
    assert isinstance(found, PoolEngine)
    return found


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Tensors of some megabytes that take several batches."""
    monkeypatch.setattr(engine.batches, "__defaults__", (1 << 20,))
    dice, spans = np.random.default_rng(0), []
    for name, error in (("reference", 0.0), ("candidate", 1e-3)):
        path = tmp_path / name
        arrays = [
            (values(n, (200, 700)) * (1 + error * dice.normal(size=(200, 700)))).astype(np.float32) for n in range(6)
        ]
        path.write_bytes(b"".join(array.tobytes() for array in arrays))
        spans.append([Span(str(path), "float32", (200, 700), n * arrays[0].nbytes, arrays[0].nbytes) for n in range(6)])
    return [Task(*both, size=374.0) for both in zip(*spans, strict=True)]


# --- the same numbers everywhere -----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["processes", *CLUSTERS])
def test_a_killed_worker_changes_no_bit(name: str, clusters: Any, tasks: list[Task]) -> None:
    expected = {n: repr(measure) for n, measure in Serial().run(tasks)}
    with pool_of(name) as chosen:
        results = chosen.run(tasks)
        found = dict([next(results)])
        kill_worker(name, clusters)
        found |= dict(results)
    assert {n: repr(measure) for n, measure in found.items()} == expected


def kill_worker(name: str, dask: Any) -> None:
    """Kill every worker process of an engine."""
    if name == "processes":
        ids = [each.pid for each in multiprocessing.active_children()]
    elif name == "ray":
        psutil = pytest.importorskip("psutil")
        below = psutil.Process().children(recursive=True)
        ids = [each.pid for each in below if "".join(each.cmdline()).startswith(("ray::measure_batch", "ray::IDLE"))]
    else:
        ids = list(dask.run(os.getpid).values())
    assert ids
    for each in ids:
        assert each is not None
        os.kill(each, signal.SIGKILL)


def runs(folder: Path, ranks: int) -> tuple[Path, Path]:
    """Two runs of whole tensors, the candidate wrong in one module of the last rank."""
    for name in ("a", "b"):
        for rank in range(ranks):
            seen = []
            for number in range(4):
                wrong = 0.01 if name == "b" and rank == ranks - 1 and number >= 2 else 1e-7
                seen.append(Seen(f"fc{number}", values(10 * rank + number, (16, 32)), "input"))
                array = values(10 * rank + number + 1, (16, 32)) * np.float32(1 + (name == "b") * wrong)
                seen.append(Seen(f"fc{number}", array, "output"))
            write(folder / name, seen, rank, ranks, framework="none")
    return folder / "a", folder / "b"


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_comparison_is_the_same_on_every_engine(ranks: int, clusters: Any, tmp_path: Path) -> None:
    both, found = runs(tmp_path, ranks), {}
    for name in ENGINES:
        tt.compare(*both, engine=name).save(tmp_path / f"{name}.json")
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["serial"]["verdict"] == "diverged"
    assert found["serial"]["first"]["rank"] == ranks - 1
    for name in ENGINES[1:]:
        assert found[name] == found["serial"], name


def test_the_command_line_takes_an_engine(clusters: Any, tmp_path: Path) -> None:
    paths = [str(path) for path in runs(tmp_path, 1)]
    done = CliRunner().invoke(app, ["compare", *paths, "--engine", "ray", "--address", "auto"])
    assert done.exit_code == 1, done.output
    address = clusters.scheduler.address
    done = CliRunner().invoke(app, ["compare", *paths, "--engine", "dask", "--address", address])
    assert done.exit_code == 1, done.output


@pytest.mark.parametrize("name", ["processes", *CLUSTERS])
def test_a_damaged_file_is_reported_as_in_one_process(name: str, clusters: Any, tasks: list[Task]) -> None:
    path = Path(tasks[0].candidate.name)
    path.write_bytes(path.read_bytes()[:-5])
    with pool_of(name) as chosen, pytest.raises(RunUnreadable, match=r"candidate is cut off: bytes \d+ to \d+"):
        list(chosen.run(tasks))


# --- the loop that all pools share ---------------------------------------------------------------------------------
class HerePool(WorkerPool):
    """Measures in this process. `dies` says of each batch whether its worker dies."""

    workers = 2

    def __init__(self, dies: Callable[[], bool] = lambda: False) -> None:
        self.most, self.submitted, self.closed = 0, 0, False
        self.cancelled: list[Hashable] = []
        self.sizes: list[int] = []
        """Tasks of each batch."""
        self._dies = dies
        self._batches: dict[int, Batch] = {}

    def submit(self, batch: Batch) -> Hashable:
        self.submitted += 1
        self.sizes.append(len(batch))
        self._batches[self.submitted] = batch
        self.most = max(self.most, len(self._batches))
        return self.submitted

    def wait(self, running: Collection[Hashable]) -> Collection[Hashable]:
        return list(running)[-1:]  # not in the order of submission

    def outcome(self, finished: Hashable) -> Outcome:
        assert isinstance(finished, int)
        batch = self._batches.pop(finished)
        if self._dies():
            raise WorkerDied("out of memory")
        return measure_batch(batch)

    def cancel(self, running: Collection[Hashable]) -> None:
        self.cancelled += running

    def close(self) -> None:
        self.closed = True


def test_few_batches_are_in_flight(tasks: list[Task]) -> None:
    pool = HerePool()
    done: list[int] = []
    with PoolEngine(lambda: pool) as chosen:
        assert len(list(chosen.run(iter(tasks * 20), done.append))) == 120
        assert not pool.closed
    assert pool.most == 4
    assert pool.submitted > 100
    assert pool.closed
    assert done == sorted(done)
    assert done[-1] == sum(task.nbytes for task in tasks * 20)


def test_batches_are_joined_and_shrink_towards_the_end(tasks: list[Task]) -> None:
    """Each task is a batch. Two workers get eight at a time, then half of what is left."""
    pool = HerePool()
    assert len(list(PoolEngine(lambda: pool).run(tasks * 5))) == 30
    assert pool.sizes == [8, 8, 7, 3, 2, 1, 1]


def test_few_batches_of_small_tensors_are_joined(tasks: list[Task]) -> None:
    """A batch of a megabyte has 254 of them. Eight such would take long and be a large message."""
    small = Task(*(Span(span.name, "float32", (5,), 0, 20) for span in (tasks[0].reference, tasks[0].candidate)))
    pool = HerePool()
    assert len(list(PoolEngine(lambda: pool).run([small] * 5080))) == 5080
    assert pool.sizes[:2] == [4 * 254, 4 * 254]
    assert max(pool.sizes) == 4 * 254


def test_a_joined_batch_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger than what is requested together, and has whole tensors beside pieces of one."""
    monkeypatch.setattr(engine.batches, "__defaults__", (4 << 20,))
    sizes, at, spans = [(100, 100), (1500, 1000), (7,), (300, 300)] * 4, 0, []
    for shape in sizes:
        nbytes = 4 * int(np.prod(shape))
        spans.append([Span(str(tmp_path / name), "float32", shape, at, nbytes) for name in "rc"])
        at += nbytes
    for name, error in (("r", 0.0), ("c", 1e-3)):
        (tmp_path / name).write_bytes((values(3, (at // 4,)) * np.float32(1 + error)).tobytes())
    tasks = [Task(*both, size=100.0) for both in spans]
    pool, expected = HerePool(), {n: repr(measure) for n, measure in Serial().run(tasks)}
    assert {n: repr(measure) for n, measure in PoolEngine(lambda: pool).run(tasks)} == expected
    assert max(pool.sizes) > len(set(sizes))
    whole = {n: repr(measure) for n, measure in PoolEngine(HerePool).run(iter(tasks))}
    assert whole == expected


def test_a_task_survives_pickling() -> None:
    whole = Assembly((4, 2), ((Piece("part", 3, (4, 2), (((0, 4), (0, 2)),)),),), 0.5)
    task = Task(Span("a", "bfloat16", (4, 2), 3, 16, whole), Span("b", "float32", (4, 2), 5, 32), 1, 6, 0.5, 0.25, 7.0)
    assert copy.deepcopy(task) == task  # calls what pickling calls


def test_a_batch_is_given_up_after_three_deaths(tasks: list[Task]) -> None:
    deaths = iter([True, True, False, *[False] * 100])
    pool = HerePool(lambda: next(deaths))
    assert len(list(PoolEngine(lambda: pool).run(tasks))) == len(tasks)
    pool = HerePool(lambda: True)
    with pytest.raises(TensortapError, match="3 workers died over the batch that begins with float32"):
        list(PoolEngine(lambda: pool).run(tasks))
    assert pool.closed


def test_a_file_that_cannot_be_read_is_not_tried_again(tasks: list[Task]) -> None:
    Path(tasks[0].reference.name).unlink()
    pool = HerePool()
    with pytest.raises(RunUnreadable, match="reference is missing"):
        list(PoolEngine(lambda: pool).run(tasks))
    assert pool.submitted == 4


def test_an_interrupt_cancels_what_runs(tasks: list[Task]) -> None:
    pool = HerePool()
    results = PoolEngine(lambda: pool).run(tasks)
    next(results)
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert pool.cancelled
    assert pool.closed


# --- options -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_package_is_one_line(
    name: str, package: str, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"engine='{name}' needs \w+: pip install 'tensortap\[{name}\]'$"):
        list(pool_of(name).run(tasks))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "spark"}, "engine='spark': give one of serial, processes, ray, dask"),
        ({"address": "auto"}, "address='auto': give engine='ray' or engine='dask' with it"),
        ({"engine": "processes", "address": "here"}, "address='here'"),
        ({"engine": "serial", "workers": 2}, "workers=2: engine='serial' measures in this process alone"),
        ({"engine": "ray", "device": "cuda"}, "engine measure on the CPU"),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        tt.compare(*runs(tmp_path, 1), **given)
    assert message in str(raised.value)


def test_no_cluster_at_the_address(clusters: Any, tasks: list[Task]) -> None:
    from tensortap.compare.measure.engines.dask_workers import DaskWorkers
    from tensortap.compare.measure.engines.ray_workers import RayWorkers

    with pytest.raises(UsageError, match="connected to a Ray cluster already"):
        RayWorkers(None, "127.0.0.1:1")
    with pytest.raises(UsageError, match="no Dask scheduler to connect to"):
        DaskWorkers(None, "nonsense://x")
