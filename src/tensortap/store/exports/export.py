"""Writes the kept tensors of any run in a foreign format: completely, or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from tensortap.core.records import Record
from tensortap.core.urls import Place, Url, as_place, filesystem, upload_error
from tensortap.errors import RunExists, StoreWriteError, TensortapError, UsageError, shorten
from tensortap.store.exports.manifest import MANIFEST, is_manifest
from tensortap.store.exports.writers import WRITERS
from tensortap.store.query import Filter
from tensortap.store.run import Run

__all__ = ["FORMATS", "Exported", "export"]

FORMATS = tuple(WRITERS)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Place
    manifest: Place | None
    """None if the file itself identifies each tensor."""
    tensors: int
    nbytes: int
    skipped: int
    """Records that pass the filters but have only a summary."""


def export(
    run: Run,
    to: str,
    out: str | Path,
    *,
    ranks: Sequence[int] | None = None,
    filters: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write the tensors that pass the filters (see `Run`) to `out`. One is in memory at a time.

    >>> export(tensortap.open("runs/a"), "npz", "a.npz", filters={"kind": "output"})          # doctest: +SKIP
    """
    if to not in WRITERS:
        raise UsageError(f"{to!r} is not a format to export to; there are {', '.join(FORMATS)}")
    target = as_place(out)
    if isinstance(target, Url):
        return _export_to_url(run, to, target, ranks, filters, overwrite, progress)
    _check_room(target, overwrite)
    chosen = {name: value for name, value in (filters or {}).items() if name != "kept"}
    wanted = [rank for rank in run.ranks if ranks is None or rank in ranks]
    found, total, whole = _counted(run, wanted, chosen)
    if total and not found:
        raise UsageError(
            f"{run.path} kept no tensor that passes the filters, only {total} summaries: there is nothing to export. "
            'Capture with keep="tensors", or with keep={"layers.0.*": "tensors"} for some modules. Summaries are in '
            "`tensortap show`, and in tensortap.open(...).to_pandas()"
        )
    done, written = 0, 0

    def advance(record: Record) -> None:
        nonlocal done, written
        written += 1
        done += record.location.nbytes if record.location else 0
        if progress is not None:
            progress(done, whole)

    with _staged(target, to) as staging:
        writer = WRITERS[to](staging, run, wanted)
        try:
            for rank in wanted:
                for step in _steps(run, chosen):
                    records = list(run.records(rank=rank, **{**chosen, "step": step, "kept": True}))
                    if records:
                        writer.step(run, records, advance)
        finally:
            writer.close()
    manifest = {"npz": _manifest_of(target), "hdf5": None}.get(to, target / MANIFEST)
    return Exported(target, manifest, written, done, total - found)


def _export_to_url(
    run: Run,
    to: str,
    url: Url,
    ranks: Sequence[int] | None,
    filters: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress | None,
) -> Exported:
    """Export to a temporary folder of this disk, and upload that. A file that is there is replaced if asked."""
    fs, path = filesystem(url)
    try:
        exists = bool(fs.exists(path))
        if exists and not overwrite:
            raise RunExists(f"{url} exists already: choose another URL, or pass --overwrite (overwrite=True).")
        with tempfile.TemporaryDirectory(prefix="tensortap-export-") as folder:
            done = export(run, to, Path(folder) / url.name, ranks=ranks, filters=filters, progress=progress)
            for each in sorted(Path(folder).rglob("*")):
                if each.is_file():
                    parts = each.relative_to(folder).as_posix()
                    fs.put_file(str(each), filesystem(url.with_name(parts))[1])
    except TensortapError:
        raise
    except Exception as error:
        raise upload_error(error, url) from None
    listed = done.manifest
    manifest = url.with_name(listed.relative_to(folder).as_posix()) if isinstance(listed, Path) else None
    return replace(done, path=url, manifest=manifest)


def _steps(run: Run, filters: Mapping[str, Any]) -> list[int]:
    wanted = filters.get("step")
    if wanted is None:
        return run.recorded_steps
    return [step for step in run.recorded_steps if (step == wanted if isinstance(wanted, int) else step in wanted)]


def _counted(run: Run, ranks: Sequence[int], filters: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the numbers of records with tensors, of all records, and of the tensors' bytes."""
    kept = total = nbytes = 0
    for rank in ranks:
        index = run.columns(rank)
        total += len(Filter(**filters).rows(index))
        rows = Filter(**{**filters, "kept": True}).rows(index)
        kept += len(rows)
        nbytes += pc.sum(index.column("nbytes").take(rows)).as_py() or 0
    return kept, total, nbytes


def _manifest_of(target: Path) -> Path:
    return target.with_name(f"{target.stem}.{MANIFEST}")


def _check_room(target: Path, overwrite: bool) -> None:
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise RunExists(f"{target} exists already: choose another path, or pass --overwrite (overwrite=True).")
    if target.is_dir() and not is_manifest(target / MANIFEST):
        raise RunExists(f"{target} is a folder that is not an export, so it is not replaced: choose another path.")


def _reason(error: OSError | RuntimeError) -> str:
    """Return why a write failed. The HDF5 library puts the number of the system's error into a text of its own."""
    found = re.search(r"errno = (\d+)", str(error))
    if found is not None:
        return os.strerror(int(found[1]))
    return getattr(error, "strerror", None) or shorten(" ".join(str(error).split()))


@contextmanager
def _staged(target: Path, to: str) -> Iterator[Path]:
    """Yield a temporary path next to the target. Its content is renamed to the target at the end, or removed."""
    staging = target.with_name(f".{secrets.token_hex(6)}.partial")
    manifest = staging.with_name(staging.name + MANIFEST)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        if target.is_dir() and not target.is_symlink():
            old = target.with_name(f".{secrets.token_hex(6)}.old")
            target.rename(old)
            staging.rename(target)
            shutil.rmtree(old)
        else:
            if target.exists() and staging.is_dir():
                target.unlink()
            staging.replace(target)
        if manifest.exists():
            manifest.replace(_manifest_of(target))
    except TensortapError:
        raise
    except (OSError, RuntimeError) as error:
        raise StoreWriteError(f"{target} could not be written: {_reason(error)}") from error
    finally:
        with suppress(OSError):
            manifest.unlink(missing_ok=True)
            if staging.is_dir():
                shutil.rmtree(staging)
            else:
                staging.unlink(missing_ok=True)
