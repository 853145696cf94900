"""Runs in an object store: a real S3 server on this machine, and memory://."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import fsspec
import numpy as np
import pytest
from typer.testing import CliRunner

import tensortap as tt
from support.run_conformance import Array, Example, RunConformance
from support.s3_server import BUCKET, SECRET, S3Server
from tensortap.cli import app
from tensortap.core.records import Key, Record
from tensortap.core.urls import Url, as_place
from tensortap.errors import (
    MissingDependency,
    RunExists,
    RunNotFound,
    RunUnreadable,
    StoreWriteError,
    UsageError,
    scrub,
)
from tensortap.kernels import summarize
from tensortap.store import RunWriter
from tensortap.store.range_cache import DiskCache, MemoryCache
from tensortap.store.remote import RemoteFiles, join_ranges, traffic
from tensortap.store.source import Range
from tensortap.store.upload import upload
from tensortap.store.writer.uploading import UploadingWriter

Values = dict[tuple[int, Key], Array]
HERE = Path(__file__).parent


@pytest.fixture(params=["memory", "s3"])
def base(request: pytest.FixtureRequest) -> str:
    """A URL below which nothing is."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"s3://{BUCKET}/{uuid4().hex}"
    return f"memory://{uuid4().hex}"


@pytest.fixture
def folder(s3: S3Server) -> str:
    """The URL of an empty folder on the server."""
    return f"s3://{BUCKET}/{uuid4().hex}"


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSORTAP_SPOOL", str(tmp_path / "spool"))
    return tmp_path / "spool"


def values(rank: int = 0, steps: int = 3, size: int = 16) -> Values:
    rng = np.random.default_rng(rank)
    return {
        (rank, Key(step, 0, "forward", f"layers.{n}", 0, "output", "0")): rng.normal(size=(size, n + 1)).astype("f4")
        for step in range(steps)
        for n in range(3)
    }


def record(writer: Any, content: Values, after_step: Callable[[int], None] = lambda step: None) -> None:
    writer.loop_fact(0, "world", "", {"size": 2})
    writer.loop_fact(0, "group", "0.0", {"lr": 0.5, "betas": {"tuple": [0.9, 0.99]}})
    writer.loop_fact(1, "group", "0.0", {"lr": {"float": "inf"}, "betas": {"tuple": [0.9, 0.99]}})
    for step in sorted({key.step for _, key in content}):
        for seq, ((rank, key), array) in enumerate(content.items()):
            if key.step == step:
                where = writer.put(str(key), array, step=step)
                writer.append(Record(key, rank, seq, "Linear", "float32", array.shape, seq, summarize(array), where))
        writer.end_step(step)
        after_step(step)


def uploaded(url: str, content: Values, rank: int = 0, world: int = 1, **options: Any) -> UploadingWriter:
    writer = UploadingWriter(
        as_place(url), rank=rank, world=world, info={"framework": "torch"}, loop=True, calls=True, **options
    )
    with writer:
        record(writer, content)
    return writer


class TestRemoteRun(RunConformance):
    urls: ClassVar[dict[str, str]] = {}
    """The run of each protocol, which all tests read."""

    @pytest.fixture
    def example(self, base: str) -> Example:
        protocol, url = base.partition(":")[0], f"{base}/run"
        if protocol not in self.urls:
            for rank in range(2):
                uploaded(url, values(rank), rank, 2)
            self.urls[protocol] = url
        return Example(lambda: tt.open(self.urls[protocol]), values(0) | values(1), [0, 1], has_loop_facts=True)


def train(path: Any, **options: Any) -> None:
    """Train a small model under a tap; the values are the same each time."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.capture(model, path, keep="tensors", optimizer=optimizer, **options):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()


def test_capture_compare_and_report_are_as_on_disk(base: str, tmp_path: Path) -> None:
    train(tmp_path / "local")
    train(f"{base}/a")
    train(f"{base}/b")
    local, remote = tt.open(tmp_path / "local"), tt.open(f"{base}/a")
    assert remote.finished and remote.notices == local.notices and remote.coverage == local.coverage
    assert [record.key for record in remote] == [record.key for record in local]
    result = tt.compare(tmp_path / "local", f"{base}/a")
    assert result.verdict == "match" and result.counts["equal"] == len(local)
    runner = CliRunner()
    for command in (
        ["compare", f"{base}/a", f"{base}/b", "--json", f"{base}/out.json"],
        ["report", f"{base}/a", f"{base}/b", "-o", f"{base}/out.html"],
        ["show", f"{base}/a", "--verify"],
        ["health", f"{base}/a"],
        ["watch", f"{base}/a"],
        ["export", f"{base}/a", "--to", "npz", "--out", f"{base}/a.npz"],
        ["show", f"{base}/a.npz"],
        ["export", f"{base}/a", "--to", "npy", "--out", f"{base}/tree"],
        ["show", f"{base}/tree"],
    ):
        found = runner.invoke(app, command)
        assert found.exit_code == 0, (command, found.output)
    fs, path = fsspec.core.url_to_fs(f"{base}/out.html")
    assert b"</html>" in fs.cat_file(path)
    with pytest.raises(RunExists, match="exists already"):
        train(f"{base}/a")
    train(f"{base}/a", overwrite=True)
    assert tt.compare(tmp_path / "local", f"{base}/a").verdict == "match"


def test_bytes_and_requests(s3: S3Server, folder: str, tmp_path: Path) -> None:
    """Reading a run by URL takes as many bytes as there are, and few requests."""
    changed = {where: array + np.float32(1e-3) for where, array in values(steps=4, size=4096).items()}
    for name, content in (("a", values(steps=4, size=4096)), ("b", changed)):
        with RunWriter(tmp_path / name, info={"framework": "torch"}, loop=True, calls=True) as writer:
            record(writer, content)
        upload(tmp_path / name, f"{folder}/{name}")
    stored = sum(path.stat().st_size for name in "ab" for path in (tmp_path / name).rglob("*") if path.is_file())
    s3.forget()
    before = traffic.requests
    result = tt.compare(f"{folder}/a", f"{folder}/b")
    gets = sum(line.startswith("GET") and "list-type" not in line for line in s3.requests)
    print(f"\ncompare over S3: {len(s3.requests)} requests ({gets} of objects), {s3.sent:,} bytes of {stored:,} stored")
    assert result.verdict == "diverged" and result.counts["diverged"] == 12
    assert s3.sent <= 1.1 * stored
    assert len(s3.requests) <= traffic.requests - before + 2, "the count of the library is that of the server"
    assert gets <= 2 * (4 + 6), "a shard is one request, and so is each small file"


def test_joined_ranges() -> None:
    near = [Range("a", 0, 10), Range("a", 500_000, 10), Range("a", 3 << 20, 5), Range("b", 0, 1)]
    assert join_ranges(near) == [Range("a", 0, 500_010), Range("a", 3 << 20, 5), Range("b", 0, 1)]
    assert join_ranges([Range("a", 0, 10), Range("a", 5, 10)]) == [Range("a", 0, 15)]
    assert len(join_ranges([Range("a", at << 20, 1 << 20) for at in range(64)])) == 2


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_caches_are_bounded_and_return_what_was_read(kind: str, tmp_path: Path) -> None:
    cache: Any = MemoryCache(1000) if kind == "memory" else DiskCache(tmp_path / "cache", 4000)
    cache.add("a", 100, bytes(range(200)))
    assert bytes(cache.get("a", 110, 20)) == bytes(range(10, 30)) and cache.get("a", 290, 20) is None
    assert cache.get("b", 100, 1) is None
    for number in range(40):
        cache.add("b", number * 500, bytes(500))
    assert cache.get("a", 100, 1) is None, "what was not used for longest goes first"
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert cache.get("b", 39 * 500, 500) is not None and held <= 5000


def test_a_cache_on_disk_serves_a_second_process(
    s3: S3Server, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded(f"{folder}/a", values())
    monkeypatch.setenv("TENSORTAP_CACHE", str(tmp_path / "cache"))
    assert tt.open(f"{folder}/a").verify().ok
    s3.forget()
    assert tt.open(f"{folder}/a").verify().ok
    assert not [line for line in s3.requests if "safetensors" in line], "only listings are asked for again"


def test_a_small_spool_holds_a_long_run(base: str, spool: Path) -> None:
    """The spool stays within its bound, though the run is many times as large."""
    largest = 0

    def measure(step: int) -> None:
        nonlocal largest
        total = 0
        for path in spool.rglob("*.safetensors*"):
            with suppress(FileNotFoundError):  # it was uploaded meanwhile
                total += path.stat().st_size
        largest = max(largest, total)

    content = {
        (0, Key(step, 0, "forward", f"layers.{n}", 0, "output", "0")): np.full((64, 1024), step + n, np.float32)
        for step in range(8)
        for n in range(4)
    }
    url = f"{base}/long"
    with UploadingWriter(as_place(url), info={"framework": "torch"}, loop=True, spool_size=1 << 20) as writer:
        record(writer, content, measure)
    assert writer.stats()["uploaded_bytes"] > 8 << 20 > 4 * largest
    run = tt.open(url)
    assert run.finished and len(run) == 32 and run.verify().ok
    assert not any(spool.iterdir()), "nothing is left"


def test_a_missing_segment_drops_what_follows(base: str) -> None:
    url = f"{base}/torn"
    with UploadingWriter(as_place(url), info={"framework": "torch"}, loop=True) as writer:
        record(writer, values(), lambda step: writer.flush())
    files = RemoteFiles(Url(f"{url}/rank_0"))
    segments = sorted(name for name in files.names() if name.startswith("index.arrows."))
    assert len(segments) >= 3 and len(tt.open(url)) == 9
    fs, path = fsspec.core.url_to_fs(f"{url}/rank_0/{segments[1]}")
    whole = fs.cat_file(path)
    for damaged in (whole[:-10], None):
        if damaged is None:
            fs.rm_file(path)
        else:
            fs.pipe_file(path, damaged)
        run = tt.open(url)
        assert 0 < len(run) < 9 and run.verify().ok
        assert any("a segment of the index is missing or cut off" in text for text in run.notices), run.notices


KILLED = """
import os, sys
sys.path[:0] = {paths!r}
from test_object_storage import record, values
from tensortap.core.urls import as_place
from tensortap.store.writer.uploading import UploadingWriter
writer = UploadingWriter(as_place({url!r}), info={{"framework": "torch"}}, loop=True, calls=True)
def after(step):
    if step == 1:
        writer.flush()
    if step == 2:
        RunWriter = type(writer).__mro__[1]
        RunWriter.flush(writer)
        os.kill(os.getpid(), 9)
record(writer, values(steps=4), after)
"""


def test_a_killed_process_leaves_what_was_uploaded(s3: S3Server, folder: str, spool: Path) -> None:
    url = f"{folder}/killed"
    code = KILLED.format(paths=[str(HERE), str(HERE.parent)], url=url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    run = tt.open(url)
    assert not run.finished and 6 <= len(run) < 12 and run.verify().ok
    assert any("still running, or was killed" in text for text in run.notices)
    found = CliRunner().invoke(app, ["upload", str(spool)])
    assert found.exit_code == 0 and url in found.output, found.output
    run = tt.open(url)
    assert len(run) == 9 and run.verify().ok and not run.finished, "all that had reached the spool; it was killed still"
    assert not any(spool.iterdir())


def test_a_server_that_goes_away_stops_the_recording_alone(s3: S3Server, folder: str, spool: Path, capsys: Any) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(8, 8)
    url = f"{folder}/broken"
    steps = 0
    try:
        with tt.capture(model, url, keep="tensors", upload_timeout=0.5) as tap:
            for steps in range(1, 7):
                model(torch.ones(2, 8)).sum().backward()
                tap.step()
                if steps == 2:
                    tap.flush()
                    s3.stop()
                if steps == 4:
                    tap.flush()  # waits for the network until it counts as broken
    finally:
        if not s3.is_reachable():
            s3.start()
    assert steps == 6, "training goes on"
    said = capsys.readouterr().err
    assert "tensortap upload" in said and "Traceback" not in said and SECRET not in said
    run = tt.open(url)
    assert not run.finished and run.recorded_steps == [0, 1] and run.verify().ok
    assert len(upload(spool)) == 1 and not any(spool.iterdir())
    run = tt.open(url)
    assert run.recorded_steps == [0, 1, 2, 3] and run.verify().ok, "what was recorded until it stopped"
    assert "tensortap upload" in run.failure


def test_an_interrupted_close_names_the_spool(base: str, spool: Path, monkeypatch: Any, capsys: Any) -> None:
    """Ctrl-C while the rest is uploaded: the training has ended, and nothing is lost."""
    from tensortap.store.writer import uploading

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(uploading._Uploader, "check_progress", interrupt)
        patch.setattr(uploading.RankUpload, "upload_rest", lambda self, closed: iter([Path()] if time.sleep(1) else []))
        patch.setattr(uploading, "remove_spool", lambda folder, rank: None)
        with pytest.raises(KeyboardInterrupt):
            train(f"{base}/a")
    assert f"tensortap upload {spool}" in capsys.readouterr().err
    assert not tt.open(f"{base}/a").finished


def test_an_upload_is_refused_where_another_recording_is(base: str, spool: Path, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", info={"framework": "torch"}) as writer:
        pass
    uploaded(f"{base}/other", values())
    with pytest.raises(RunExists, match="holds another run already"):
        upload(tmp_path / "run", f"{base}/other")
    with pytest.raises(UsageError, match="name the URL"):
        upload(tmp_path / "run")
    with pytest.raises(UsageError, match="is not a URL"):
        upload(tmp_path / "run", "elsewhere")
    writer = UploadingWriter(as_place(f"{base}/live"), info={"framework": "torch"}, loop=True)
    with writer, pytest.raises(UsageError, match="still being written"):
        upload(spool)
    with pytest.raises(RunUnreadable, match="neither a spool nor a run"):
        upload(spool)


def test_permission_denied(s3: S3Server, folder: str, spool: Path) -> None:
    uploaded(f"{folder}/a", values())
    s3.denied = True
    try:
        with pytest.raises(RunUnreadable, match="permission denied") as reading:
            tt.open(f"{folder}/a")
        with pytest.raises((StoreWriteError, RunUnreadable), match="permission denied") as writing:
            train(f"{folder}/b")
    finally:
        s3.denied = False
    for error in (reading.value, writing.value):
        assert SECRET not in "".join(traceback.format_exception(error))
    assert not any(spool.iterdir()), "nothing was recorded, so nothing is left"


def test_a_missing_bucket(s3: S3Server) -> None:
    with pytest.raises(RunNotFound, match="does not exist"):
        tt.open("s3://no-such-bucket/runs/a")
    with pytest.raises(StoreWriteError, match="the bucket does not exist"):
        train("s3://no-such-bucket/runs/a")


def test_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingDependency, match=r'needs gcsfs: pip install "tensortap\[gcs\]"'):
        tt.open("gs://bucket/runs/a")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://key:secret/with+slash@bucket/runs/a", "holds a password"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../other", "cannot hold the part"),
        ("s3://bucket/a\nb", "control characters"),
        ("nothing://bucket/a", "not a protocol"),
    ],
    ids=["password", "empty", "dots", "newline", "protocol"],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    for use in (tt.open, train):
        with pytest.raises(UsageError, match=message) as error:
            use(url)
        assert "secret" not in "".join(traceback.format_exception(error.value))


def test_hostile_names_are_names(base: str, tmp_path: Path) -> None:
    """Characters that mean something in a URL, a shell or a pattern are part of the name."""
    url = f"{base}/a b#c%20[d]*é"
    uploaded(url, values())
    assert len(tt.open(url)) == 9
    with pytest.raises(UsageError, match="with a query"):
        uploaded(f"{base}/a?token=abcdefgh", values())
    with pytest.raises(UsageError, match="has lost a slash"):
        tt.open(Path(f"{base}/run"))


def test_scrubbing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET_TOKEN", "hunter2-hunter2")
    text = "https://u:p@h/a?X-Amz-Signature=1f2e and s3://id:se/cr@b/x, hunter2-hunter2; http://host:80/a@b is plain"
    assert scrub(text) == "https://***@h/a?*** and s3://***@b/x, ***; http://host:80/a@b is plain"
    assert "hunter2" not in str(RunUnreadable("it said hunter2-hunter2"))
    assert str(as_place("https://host/file.npz?sig=abc")) == "https://host/file.npz?***"
    assert as_place("file:///tmp/a") == Path("/tmp/a") and as_place("runs/a") == Path("runs/a")


def test_no_credential_is_in_what_is_written(s3: S3Server, folder: str, spool: Path) -> None:
    info = {"framework": "torch", "config": {"data": f"s3://id:{SECRET}@data/x", "token": SECRET}}
    with UploadingWriter(as_place(f"{folder}/a"), info=info, loop=True, spool=spool) as writer:
        record(writer, values())
        kept = [path.read_bytes() for path in spool.rglob("*.json")]
    fs, path = fsspec.core.url_to_fs(f"{folder}/a")
    names = fs.find(path)
    assert len(names) >= 6 and len(kept) >= 3
    for data in (*kept, *map(fs.cat_file, names)):
        assert SECRET.encode() not in data


def test_checkpoints_by_url(base: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {f"layers.{n}.weight": np.arange(12, dtype=np.float32).reshape(3, 4) + n for n in range(3)}
    save_file(arrays, tmp_path / "model.safetensors")
    fs, _ = fsspec.core.url_to_fs(base)
    for name in ("one.safetensors", "folder/model.safetensors"):
        fs.pipe_file(fsspec.core.url_to_fs(f"{base}/{name}")[1], (tmp_path / "model.safetensors").read_bytes())
        result = tt.compare(tmp_path / "model.safetensors", f"{base}/{name}")
        assert result.verdict == "match" and result.counts["equal"] == 3
    fs.pipe_file(fsspec.core.url_to_fs(f"{base}/junk/notes.txt")[1], b"nothing")
    with pytest.raises(RunUnreadable, match=r"is not a run: it has no run.json. It holds notes.txt"):
        tt.open(f"{base}/junk")
    with pytest.raises(RunNotFound, match="does not exist"):
        tt.open(f"{base}/nothing")
    assert os.environ.get("TENSORTAP_CACHE") is None
