"""Requests and bytes of a capture and a comparison over S3, against a server on this machine, beside local files."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tensortap as tt
from support.s3_server import BUCKET, S3Server
from tensortap.core.records import Key, Record
from tensortap.core.urls import as_place
from tensortap.kernels import summarize
from tensortap.store import RunWriter
from tensortap.store.writer.uploading import UploadingWriter


def fill(writer: RunWriter, steps: int, tensors: int, elements: int, off: float) -> None:
    rng = np.random.default_rng(0)
    for step in range(steps):
        for number in range(tensors):
            array = rng.normal(size=elements).astype(np.float32) * np.float32(1 + off)
            seq = step * tensors + number
            where = writer.put(f"{step} {number}", array, step=step)
            key = Key(step, 0, "forward", f"layers.{number}", 0, "output", "0")
            writer.append(Record(key, 0, seq, "Linear", "float32", array.shape, seq, summarize(array), where))
        writer.end_step(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--elements", type=int, default=65_536)
    chosen = parser.parse_args()
    size = chosen.steps, chosen.tensors, chosen.elements
    server = S3Server()
    server.start()
    os.environ.update(server.environment)
    import s3fs

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request, from another thread

    s3fs.S3FileSystem().mkdir(BUCKET)
    with tempfile.TemporaryDirectory() as folder:
        for name, off in (("a", 0.0), ("b", 1e-3)):
            with RunWriter(Path(folder) / name, info={"framework": "none"}) as local:
                fill(local, *size, off)
            server.forget()
            began = time.perf_counter()
            url = as_place(f"s3://{BUCKET}/{name}")
            with UploadingWriter(url, info={"framework": "none"}, spool=Path(folder) / "spool") as remote:
                fill(remote, *size, off)
            print(f"capture {name}: {len(server.requests)} requests, {time.perf_counter() - began:.1f} s")
        stored = sum(
            path.stat().st_size for name in "ab" for path in (Path(folder) / name).rglob("*") if path.is_file()
        )
        tt.compare(Path(folder) / "a", Path(folder) / "b")  # loads the kernels
        began = time.perf_counter()
        tt.compare(Path(folder) / "a", Path(folder) / "b")
        here = time.perf_counter() - began
        server.forget()
        began = time.perf_counter()
        result = tt.compare(f"s3://{BUCKET}/a", f"s3://{BUCKET}/b")
        there = time.perf_counter() - began
    print(f"compare: {len(result)} pairs, {stored:,} bytes on disk")
    print(f"  S3: {len(server.requests)} requests, {server.sent:,} bytes, {server.sent / stored:.3f} of those on disk")
    print(f"  {there:.1f} s, local files {here:.1f} s")
    server.stop()


if __name__ == "__main__":
    main()
