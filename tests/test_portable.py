"""On portable paths alone, a run is captured, read and compared to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortap.core import file_io

pytestmark = pytest.mark.portable

LACKING = ("preadv", "preadv2", "pread", "pwritev", "pwritev2", "pwrite", "O_DIRECT", "sched_getaffinity", "sysconf")
"""Functions that Windows lacks, and macOS has only in part."""

SCRIPT = f"""
import hashlib, importlib, json, os, sys
from pathlib import Path
import torch

torch.set_num_threads(2)
if sys.argv[2] == "lacking":
    for name in {LACKING!r}:
        if hasattr(os, name):
            delattr(os, name)
    import mmap
    for name in [name for name in dir(mmap) if name.startswith(("MADV_", "MAP_"))]:
        delattr(mmap, name)
    sys.modules["fcntl"] = sys.modules["resource"] = None

import tensortap
from tensortap.core import file_io, machine
from tensortap.frameworks.libraries import loaded_openmp
from tensortap.store.writer.route import supports_direct_io

folder = Path(sys.argv[1])
for name, scale in (("a", 1.0), ("b", 1.5)):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 700), torch.nn.Tanh(), torch.nn.Linear(700, 3))
    with torch.no_grad():
        model[2].weight *= scale
    with tensortap.capture(model, folder / name, keep="tensors") as tap:
        for _ in range(2):
            model(torch.randn(256, 1024)).square().mean().backward()
            tap.step()
run = tensortap.open(folder / "a")
tensors = [hashlib.sha256(array.tobytes()).hexdigest() for _, array in run.stream()]
copied = [hashlib.sha256(run.torch(record).numpy().tobytes()).hexdigest() for record in run.records(kind="output")]
comparison = tensortap.compare(folder / "a", folder / "b")
index = run.to_arrow().drop_columns(["offset"]).to_pylist()
print(json.dumps({{
    "paths": [file_io.read_at.__name__, file_io.write_at.__name__],
    "direct": supports_direct_io(folder),
    "openmp": loaded_openmp(Path(torch.__file__).parent),
    "cores": machine.cores() == os.cpu_count(),
    "index": hashlib.sha256(json.dumps(index).encode()).hexdigest(),
    "tensors": tensors,
    "copied": copied,
    "notices": [*run.notices],
    "files": sorted(path.name for path in folder.glob("*/*/*")),
    "sentence": comparison.sentence,
    "rows": [str(row) for row in comparison.rows],
}}))
"""
SAME = ("index", "tensors", "copied", "notices", "files", "sentence", "rows")


def outcome(folder: Path, mode: str, **environment: str) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), mode],
        capture_output=True,
        text=True,
        env={**os.environ, "TENSORTAP_PORTABLE": "", **environment},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1].replace(str(folder), "FOLDER"))
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = outcome(tmp_path_factory.mktemp("usual") / "runs", "all")
    assert found["sentence"].startswith("The runs part") and len(found["tensors"]) > 5
    return found


def test_the_switch_forces_every_fallback(usual: dict[str, Any], tmp_path: Path) -> None:
    found = outcome(tmp_path / "runs", "all", TENSORTAP_PORTABLE="1")
    assert found["paths"] == ["_read_by_seek", "_write_by_seek"]
    assert (found["direct"], found["openmp"], found["cores"]) == (False, None, True)
    assert {name: found[name] for name in SAME} == {name: usual[name] for name in SAME}


def test_a_platform_that_lacks_them_falls_back(usual: dict[str, Any], tmp_path: Path) -> None:
    found = outcome(tmp_path / "runs", "lacking")
    assert found["paths"] == ["_read_by_seek", "_write_by_seek"]
    assert (found["direct"], found["cores"]) == (False, True)
    assert {name: found[name] for name in SAME} == {name: usual[name] for name in SAME}


def test_the_switch_is_off_by_default(usual: dict[str, Any]) -> None:
    wanted = "_read_by_preadv" if hasattr(os, "preadv") else "_read_by_pread" if hasattr(os, "pread") else None
    if wanted is None:
        pytest.skip("this platform has no positioned reads")
    assert usual["paths"] == [wanted, "_write_by_pwrite"]


@pytest.mark.parametrize("read", [file_io._read_by_preadv, file_io._read_by_pread, file_io._read_by_seek])
@pytest.mark.parametrize("write", [file_io._write_by_pwrite, file_io._write_by_seek])
def test_bytes_at_an_offset(tmp_path: Path, read: Any, write: Any) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | file_io.BINARY)
    try:
        assert write(descriptor, memoryview(b"\r\n0123456789"), 0) == 12
        assert write(descriptor, memoryview(b"xyz"), 5) == 3
        into = np.zeros(8, np.uint8)
        assert read(descriptor, into.data, 4) == 8
        assert bytes(into) == b"2xyz6789"
        assert read(descriptor, into.data, 9) == 3
        assert bytes(into[:3]) == b"789"
        assert read(descriptor, into.data, 12) == 0
    finally:
        os.close(descriptor)


def test_a_part_of_the_suite_without_them() -> None:
    modules = ("store/test_store_roundtrip.py", "store/test_store_folder.py", "capture/test_lifecycle.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + [str(Path(__file__).parent / module) for module in modules],
        capture_output=True,
        text=True,
        env={**os.environ, "TENSORTAP_PORTABLE": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
