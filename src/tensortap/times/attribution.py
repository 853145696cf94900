"""Attribution: from a timeline to a ledger.

Every moment of the host, every kernel and every allocation has exactly one owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from tensortap.times.chains import Chains
from tensortap.times.ledger import LedgerEntry, TimeLedger
from tensortap.times.marks import SpanKind
from tensortap.times.paddle_backward import node_makers
from tensortap.times.sweep import ANNOTATION, NO_OWNER, Calibration, Sweep, TimedSpan, calibration_of
from tensortap.times.timeline import IntColumns, Timeline

__all__ = ["attribute"]

Numbers = npt.NDArray[np.int64]


def attribute(timeline: Timeline) -> TimeLedger:
    """Return the ledger of a whole timeline."""
    chains = Chains()
    threads = _owners_by_thread(timeline, chains)
    host = np.zeros(len(chains.all), np.int64)
    for owners in threads.values():
        lengths = np.diff(owners.at)
        covered = owners.covered[:-1]
        np.add.at(host, owners.host[:-1][covered], lengths[covered])
    host[chains.no_module] += _unowned_time(threads.values(), timeline)
    span = max(0, timeline.end - timeline.begin)
    steps = _count_steps(timeline, chains)
    ledger = TimeLedger(timeline.framework, timeline.backward_calls, [], dict(chains.calls), span, steps)
    device = _device_time(timeline, threads, chains, ledger)
    memory, device_memory = _memory_by_chain(timeline, threads, chains)
    amounts = zip(chains.all, *(each.tolist() for each in (host, device, memory, device_memory)), strict=True)
    ledger.entries = [LedgerEntry(chain, *rest) for chain, *rest in amounts if any(rest)]
    return ledger


class _ThreadOwners:
    """Owners on one thread: boundaries, and between them the numbers of the chains that own host time and work."""

    def __init__(self, sweep: Sweep, chains: Chains) -> None:
        numbers = chains.number_owners(sweep.owners)
        host = [chains.annotating if owner.link else own for owner, own in zip(sweep.owners, numbers, strict=True)]
        special = [chains.annotating, chains.no_module]  # the negative ANNOTATION and NO_OWNER index from the end
        self.at = np.array(sweep.at, np.int64)
        self.covered = np.array(sweep.host, np.int64) != NO_OWNER
        self.host = np.array(host + special, np.int64)[np.array(sweep.host, np.int64)]
        self.work = np.array(numbers + special, np.int64)[np.array(sweep.work, np.int64)]

    def work_at(self, times: Numbers, no_module: int) -> Numbers:
        """Return the chains that own work launched at these times."""
        places = np.searchsorted(self.at, times, side="right") - 1
        return np.where(places >= 0, self.work[np.maximum(places, 0)], no_module)


assert (NO_OWNER, ANNOTATION) == (-1, -2)


def _owners_by_thread(timeline: Timeline, chains: Chains) -> dict[int, _ThreadOwners]:
    threads = _spans_by_thread(timeline)
    known = [found for spans in threads.values() if (found := calibration_of(spans)) is not None]
    calibration = min(known, key=lambda each: each.outside + each.inside, default=Calibration())
    marked = any(meaning.kind is SpanKind.BEFORE for meaning in timeline.meanings)
    owners = {}
    for thread, spans in threads.items():
        makers = node_makers(spans) if timeline.backward_calls == "module calls" else {}
        owners[thread] = _ThreadOwners(Sweep(spans, calibration, marked, makers), chains)
        for _, _, meaning in spans if makers else ():
            if meaning.kind is SpanKind.BEGINS:
                chains.count(meaning)
    return owners


def _spans_by_thread(timeline: Timeline) -> dict[int, list[TimedSpan]]:
    """Return the spans of each thread by start, an outer span before those inside it. The earliest thread is first."""
    spans = timeline.spans
    thread, start, end, meaning = (spans[name] for name in ("thread", "start", "end", "meaning"))
    order = np.lexsort((-end, start, thread))
    found: dict[int, list[TimedSpan]] = {}
    columns = (column[order].tolist() for column in (thread, start, end, meaning))
    for which, begin, until, number in zip(*columns, strict=True):
        found.setdefault(which, []).append((begin, until, timeline.meanings[number]))
    return dict(sorted(found.items(), key=lambda item: item[1][0][0]))


def _count_steps(timeline: Timeline, chains: Chains) -> int:
    """Count the profiler's steps in which a module ran; if none, the optimizer's calls; if none, the model's."""
    kinds = np.array([meaning.kind for meaning in timeline.meanings], np.int64)[timeline.spans["meaning"]]
    start, end = timeline.spans["start"], timeline.spans["end"]
    modules = np.sort(start[kinds == SpanKind.MODULE])
    ran = np.searchsorted(modules, end[kinds == SpanKind.STEP]) - np.searchsorted(
        modules, start[kinds == SpanKind.STEP]
    )
    optimizers = [count for place, count in chains.calls.items() if place.module == "(optimizer)"]
    roots = [count for place, count in chains.calls.items() if (place.module, place.phase) == ("(root)", "forward")]
    return int((ran > 0).sum()) or max(optimizers, default=0) or max(roots, default=1)


def _unowned_time(threads: Collection[_ThreadOwners], timeline: Timeline) -> int:
    """Return the nanoseconds in which no thread has an owner.

    A thread that waits for another one is not idle: torch's main thread waits while a thread of the engine runs
    backward on a device.
    """
    bounds = [np.stack([owners.at[:-1][owners.covered[:-1]], owners.at[1:][owners.covered[:-1]]]) for owners in threads]
    covered = _union(np.concatenate(bounds, axis=1)) if bounds else 0
    return max(0, timeline.end - timeline.begin - covered)


def _union(bounds: Numbers) -> int:
    """Return the length of the union of intervals. Row 0 has their starts, row 1 their ends."""
    if not bounds.shape[1]:
        return 0
    start, end = bounds[:, np.argsort(bounds[0], kind="stable")]
    reached = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], reached[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def _device_time(
    timeline: Timeline, threads: Mapping[int, _ThreadOwners], chains: Chains, ledger: TimeLedger
) -> Numbers:
    """Return device time by chain. A kernel belongs to the chain that launched it on the host."""
    kernels, found = timeline.kernels, np.zeros(len(chains.all), np.int64)
    start, end, device = kernels["start"], kernels["end"], kernels["device"]
    thread, at = _find_launches(timeline)
    np.add.at(found, _chains_at(threads, thread, at, chains.no_module), end - start)
    ledger.kernels, ledger.kernel_time = len(kernels), int((end - start).sum())
    ledger.unlinked = int((thread < 0).sum())
    ledger.device_busy = sum(_union(np.stack([start, end])[:, device == each]) for each in np.unique(device).tolist())
    return found


def _find_launches(timeline: Timeline) -> tuple[Numbers, Numbers]:
    """Return thread and time of each kernel's launch; the thread is -1 if the launch is unknown."""
    kernels = timeline.kernels
    thread, at = _look_up(kernels["correlation"], timeline.launches, "correlation")
    missing = thread < 0
    if missing.any():  # the runtime's own calls may not have been recorded
        thread[missing], at[missing] = _look_up(kernels["operator"][missing], timeline.operators, "id")
    return thread, at


def _look_up(wanted: Numbers, table: IntColumns, key: str) -> tuple[Numbers, Numbers]:
    known, thread, start = (table[name] for name in (key, "thread", "start"))
    nothing = np.full(len(wanted), -1, np.int64)
    if not len(known):
        return nothing, nothing.copy()
    order = np.argsort(known, kind="stable")
    places = order[np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)]
    hit = (known[places] == wanted) & (wanted >= 0)
    return np.where(hit, thread[places], -1), np.where(hit, start[places], -1)


def _memory_by_chain(
    timeline: Timeline, threads: Mapping[int, _ThreadOwners], chains: Chains
) -> tuple[Numbers, Numbers]:
    """Return bytes by chain, on the host and on devices."""
    memory = timeline.memory
    where = _chains_at(threads, memory["thread"], memory["at"], chains.no_module)
    found = []
    for on_device in (0, 1):
        amounts, chosen = np.zeros(len(chains.all), np.int64), memory["on_device"] == on_device
        np.add.at(amounts, where[chosen], memory["bytes"][chosen])
        found.append(amounts)
    return found[0], found[1]


def _chains_at(threads: Mapping[int, _ThreadOwners], thread: Numbers, at: Numbers, no_module: int) -> Numbers:
    found = np.full(len(thread), no_module, np.int64)
    for number, owners in threads.items():
        here = thread == number
        if len(owners.at):
            found[here] = owners.work_at(at[here], no_module)
    return found
