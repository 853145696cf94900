"""Checks the bytes of kept tensors against the digests of their records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from tensortap.core.records import Record
from tensortap.errors import RunUnreadable

if TYPE_CHECKING:
    from tensortap.store.run import Run

__all__ = ["Verification", "check_digest", "verify_run"]

Progress = Callable[[int, int], None]
_SHOWN = 3


@dataclass(frozen=True)
class Verification:
    """The result of checking all kept tensors of a run."""

    tensors: int
    """Tensors that were checked. Records that share their bytes count once."""
    nbytes: int
    damaged: list[tuple[Record, str]] = field(default_factory=list)
    """Records whose bytes are missing or changed, each with the reason."""

    @property
    def ok(self) -> bool:
        return not self.damaged

    def check(self, path: object) -> None:
        """Raise RunUnreadable if a tensor is damaged; the message names the first ones."""
        if not self.damaged:
            return
        count = len(self.damaged)
        shown = "; ".join(reason for _, reason in self.damaged[:_SHOWN])
        more = f"; and {count - _SHOWN} more" if count > _SHOWN else ""
        raise RunUnreadable(f"{path}: {count} of {self.tensors} kept tensors are damaged: {shown}{more}")


def check_digest(record: Record, array: npt.NDArray[Any]) -> None:
    """Raise RunUnreadable if the values are not those that were recorded."""
    from tensortap.kernels import summarize  # loads the compiler: only if something is verified

    if (found := summarize(array, placement=record.placement).digest) != record.summary.digest:
        raise RunUnreadable(
            f"{record.key} (rank {record.rank}): its bytes are damaged. Their digest is {found:016x}, and "
            f"{record.summary.digest:016x} was recorded."
        )


def verify_run(run: Run, progress: Progress | None = None) -> Verification:
    """Check all kept tensors. `progress` is called with the bytes checked so far, and all bytes."""
    records = list(_distinct(run))
    whole = sum(record.location.nbytes for record in records if record.location)
    done, damaged = 0, []
    for record in run.ahead(records):
        try:
            run.load(record, verify=True)
        except RunUnreadable as error:
            damaged.append((record, str(error)))
        done += record.location.nbytes if record.location else 0
        if progress is not None:
            progress(done, whole)
    return Verification(len(records), whole, damaged)


def _distinct(run: Run) -> Iterator[Record]:
    """Yield one record for each range of bytes and digest."""
    for rank in run.ranks:
        seen = set()
        for record in run.records(rank=rank, kept=True):
            what = record.location, record.summary.digest
            if what not in seen:
                seen.add(what)
                yield record
