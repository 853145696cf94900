"""Which folder a run may use. Foreign files are never deleted, files of a run only on request."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
from storing import write

from tensortap.errors import RunExists, StoreWriteError, UsageError
from tensortap.store import RunWriter, open_run
from tensortap.store import folder as folder_module


def files(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_run_is_not_overwritten_by_default(tmp_path):
    write(tmp_path / "a", 5)
    before = files(tmp_path)
    with pytest.raises(RunExists, match=r"a/rank_0 exists already: pass overwrite=True.*another path"):
        RunWriter(tmp_path / "a", info={})
    assert files(tmp_path) == before
    write(tmp_path / "a", 2, overwrite=True)
    run = open_run(tmp_path / "a")
    assert run.finished and len(run) == 2


def test_a_foreign_folder_is_left_alone(tmp_path):
    for name in ("notes.txt", "run.json", "rank_0", "index.arrows"):
        path = tmp_path / name.replace(".", "_")
        path.mkdir()
        if name == "rank_0":
            (path / name).mkdir()
            (path / name / "index.arrows").write_text("mine")
        else:
            (path / name).write_text('{"format": "other"}')
        before = files(path)
        for overwrite in (False, True):
            with pytest.raises(RunExists, match=str(path)):
                RunWriter(path, info={}, overwrite=overwrite)
            assert files(path) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunExists, match="is a file"):
        RunWriter(tmp_path / "file", info={}, overwrite=True)


def test_overwrite_deletes_only_files_of_a_run(tmp_path):
    for rank in range(3):
        write(tmp_path / "a", 2, rank=rank, world=3)
    (tmp_path / "a/notes.txt").write_text("mine")
    (tmp_path / "a/rank_0/weights.safetensors").write_text("mine")
    (tmp_path / "a/rank_2/plot.png").write_text("mine")
    (tmp_path / "a/rank_0/step_000000.9.safetensors.partial").write_text("old")
    with pytest.raises(RunExists, match="3 ranks, this one has 1"):
        RunWriter(tmp_path / "a", info={})
    write(tmp_path / "a", 1, overwrite=True)
    left = set(files(tmp_path / "a"))
    own = {"rank.json", "index.arrows", "step_000000.0.safetensors"}
    kept = {"notes.txt", "rank_0/weights.safetensors", "rank_2/plot.png"}
    assert left == {f"rank_0/{name}" for name in own} | {"run.json"} | kept
    assert len(open_run(tmp_path / "a")) == 1


def test_a_link_is_not_followed_to_delete(tmp_path):
    write(tmp_path / "elsewhere", 2)
    write(tmp_path / "a", 2, rank=1, world=2)
    (tmp_path / "a/rank_0").symlink_to(tmp_path / "elsewhere/rank_0")
    before = files(tmp_path / "elsewhere")
    with pytest.raises(RunExists, match="nothing was deleted"):
        RunWriter(tmp_path / "a", info={}, world=2, overwrite=True)
    assert files(tmp_path / "elsewhere") == before


def test_a_damaged_run_can_be_overwritten(tmp_path):
    write(tmp_path / "a", 2)
    (tmp_path / "a/run.json").write_text("{")
    with pytest.raises(RunExists, match="damaged"):
        RunWriter(tmp_path / "a", info={})
    write(tmp_path / "a", 1, overwrite=True)
    assert len(open_run(tmp_path / "a")) == 1


def test_ranks_share_a_folder_whatever_their_order(tmp_path):
    world = 6
    start = threading.Barrier(world)
    errors = []

    def work(rank):
        start.wait()
        try:
            write(tmp_path / "a", 3 + rank, rank=rank, world=world)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []
    run = open_run(tmp_path / "a")
    assert run.ranks == list(range(world)) and run.finished and run.notices == [] and run.info["world"] == world
    assert [(r.rank, r.seq) for r in run] == [(rank, n) for rank in range(world) for n in range(3 + rank)]
    assert all((run.load(found) == found.seq).all() for found in run)
    assert len(list(run.records(rank=2))) == 5 and len(list(run.records(rank=[0, 5]))) == 11
    assert run.to_arrow().column("rank").to_pylist().count(4) == 7
    assert [p.name for p in (tmp_path / "a").iterdir() if "run.json" in p.name] == ["run.json"]


def test_a_rank_that_left_nothing_is_reported(tmp_path):
    write(tmp_path / "a", 1, rank=1, world=3)
    assert open_run(tmp_path / "a").notices == ["2 of 3 ranks left nothing: 0, 2"]


def test_ranks_overwrite_in_any_order(tmp_path):
    for order in ((0, 1), (1, 0)):
        path = tmp_path / str(order[0])
        for rank in range(3):
            write(path, 4, rank=rank, world=3)
        for rank in order:
            write(path, 1, rank=rank, world=2, overwrite=True)
        run = open_run(path)
        assert run.info["world"] == 2 and run.ranks == [0, 1] and len(run) == 2


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(folder_module.os, "link", refuse)
    write(tmp_path / "a", 1)
    assert json.loads((tmp_path / "a/run.json").read_text())["world"] == 1


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(RunExists, match=f"{name} is a file, or a link to nothing"):
            RunWriter(tmp_path / name, info={})
    message = "file/a cannot be created: Not a directory; a part of the path is a file"
    with pytest.raises(StoreWriteError, match=message):
        RunWriter(tmp_path / "file" / "a", info={})
    with pytest.raises(StoreWriteError, match="xxx cannot be created: File name too long; choose another path"):
        RunWriter(tmp_path / ("x" * 300), info={})

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(StoreWriteError, match="b cannot be created: Permission denied; check that you may write there"):
        RunWriter(tmp_path / "b", info={})


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which nobody can make others")
@pytest.mark.parametrize("path", ["/proc/tensortap", "/proc/tensortap/a"])
def test_a_missing_parent_folder_is_not_called_removed(path):
    with pytest.raises(StoreWriteError) as caught:
        RunWriter(path, info={})
    assert str(caught.value) == f"the folder {path} cannot be created: No such file or directory; choose another path."
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("file", ["run.json", "rank.json", "index.arrows"])
def test_a_folder_that_may_not_be_written_to(tmp_path, monkeypatch, file, number):
    """Root may write anywhere: hence as if."""

    def refused(real):
        def call(path, *args, **kwargs):
            if file in str(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **kwargs)

        return call

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(Path, "write_text", refused(Path.write_text))
    monkeypatch.setattr("tensortap.store.writer.index_file.os.open", refused(os.open))
    with pytest.raises(StoreWriteError, match=rf"could not write {tmp_path}/a.*: {os.strerror(number)}; ") as caught:
        RunWriter(tmp_path / "a", info={})
    assert str(caught.value).endswith("choose another path.") and ".tmp" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"rank": 1}, {"rank": -1}, {"writers": 0}, {"max_buffer": 0}, {"info": {"version": 3}}]
)
def test_invalid_arguments_are_refused(tmp_path, options):
    with pytest.raises(UsageError):
        RunWriter(tmp_path / "a", **{"info": {}, **options})
    assert not (tmp_path / "a").exists()
