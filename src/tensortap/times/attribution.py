"""From a timeline to a ledger: every moment of the host, every kernel and every allocation goes to one place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from tensortap.times.chains import Chains
from tensortap.times.ledger import Entry, Ledger
from tensortap.times.marks import Kind
from tensortap.times.paddle_backward import node_makers
from tensortap.times.sweep import ANNOTATION, NOBODY, Calibration, Span, Sweep, calibration_of
from tensortap.times.timeline import Columns, Timeline

__all__ = ["attribute"]

Numbers = npt.NDArray[np.int64]


def attribute(timeline: Timeline) -> Ledger:
    """Book a whole timeline."""
    chains = Chains()
    lines = _lines(timeline, chains)
    host = np.zeros(len(chains.all), np.int64)
    for line in lines.values():
        lengths = np.diff(line.at)
        covered = line.covered[:-1]
        np.add.at(host, line.host[:-1][covered], lengths[covered])
    host[chains.nobody] += _uncovered(lines.values(), timeline)
    span = max(0, timeline.end - timeline.begin)
    steps = _steps(timeline, chains)
    ledger = Ledger(timeline.framework, timeline.backward_calls, [], dict(chains.calls), span, steps)
    device = _kernels(timeline, lines, chains, ledger)
    memory, device_memory = _memory(timeline, lines, chains)
    amounts = zip(chains.all, *(each.tolist() for each in (host, device, memory, device_memory)), strict=True)
    ledger.entries = [Entry(chain, *rest) for chain, *rest in amounts if any(rest)]
    return ledger


class _Line:
    """One thread: boundaries, and the numbers of the chains to which host time and work between them belong."""

    def __init__(self, sweep: Sweep, chains: Chains) -> None:
        numbers = chains.of(sweep.owners)
        host = [chains.annotating if owner.link else own for owner, own in zip(sweep.owners, numbers, strict=True)]
        special = [chains.annotating, chains.nobody]  # ANNOTATION and NOBODY count from the end
        self.at = np.array(sweep.at, np.int64)
        self.covered = np.array(sweep.host, np.int64) != NOBODY
        self.host = np.array(host + special, np.int64)[np.array(sweep.host, np.int64)]
        self.work = np.array(numbers + special, np.int64)[np.array(sweep.work, np.int64)]

    def work_at(self, times: Numbers, nobody: int) -> Numbers:
        """The chains to which things belong that happen at these times."""
        places = np.searchsorted(self.at, times, side="right") - 1
        return np.where(places >= 0, self.work[np.maximum(places, 0)], nobody)


assert (NOBODY, ANNOTATION) == (-1, -2)


def _lines(timeline: Timeline, chains: Chains) -> dict[int, _Line]:
    threads = _spans_by_thread(timeline)
    known = [found for spans in threads.values() if (found := calibration_of(spans)) is not None]
    calibration = min(known, key=lambda each: each.outside + each.inside, default=Calibration())
    marked = any(meaning.kind is Kind.BEFORE for meaning in timeline.meanings)
    lines = {}
    for thread, spans in threads.items():
        makers = node_makers(spans) if timeline.backward_calls == "module calls" else {}
        lines[thread] = _Line(Sweep(spans, calibration, marked, makers), chains)
        for _, _, meaning in spans if makers else ():
            if meaning.kind is Kind.BEGINS:
                chains.count(meaning)
    return lines


def _spans_by_thread(timeline: Timeline) -> dict[int, list[Span]]:
    """Each thread's spans in the order of their start, an outer one before those inside it; the first thread first."""
    spans = timeline.spans
    thread, start, end, meaning = (spans[name] for name in ("thread", "start", "end", "meaning"))
    order = np.lexsort((-end, start, thread))
    found: dict[int, list[Span]] = {}
    columns = (column[order].tolist() for column in (thread, start, end, meaning))
    for which, begin, until, number in zip(*columns, strict=True):
        found.setdefault(which, []).append((begin, until, timeline.meanings[number]))
    return dict(sorted(found.items(), key=lambda item: item[1][0][0]))


def _steps(timeline: Timeline, chains: Chains) -> int:
    """Steps of the profiler in which a module ran; else calls of an optimizer; else of the model itself."""
    kinds = np.array([meaning.kind for meaning in timeline.meanings], np.int64)[timeline.spans["meaning"]]
    start, end = timeline.spans["start"], timeline.spans["end"]
    modules = np.sort(start[kinds == Kind.MODULE])
    ran = np.searchsorted(modules, end[kinds == Kind.STEP]) - np.searchsorted(modules, start[kinds == Kind.STEP])
    optimizers = [count for place, count in chains.calls.items() if place.module == "(optimizer)"]
    roots = [count for place, count in chains.calls.items() if (place.module, place.phase) == ("(root)", "forward")]
    return int((ran > 0).sum()) or max(optimizers, default=0) or max(roots, default=1)


def _uncovered(lines: Collection[_Line], timeline: Timeline) -> int:
    """Nanoseconds in which no thread does anything that has a place.

    A thread that waits for another one is not idle: torch's main thread waits while a thread of the engine runs
    backward on a device.
    """
    bounds = [np.stack([line.at[:-1][line.covered[:-1]], line.at[1:][line.covered[:-1]]]) for line in lines]
    covered = _union(np.concatenate(bounds, axis=1)) if bounds else 0
    return max(0, timeline.end - timeline.begin - covered)


def _union(bounds: Numbers) -> int:
    """The length that intervals cover together; starts in the first row, ends in the second."""
    if not bounds.shape[1]:
        return 0
    start, end = bounds[:, np.argsort(bounds[0], kind="stable")]
    reached = np.maximum.accumulate(end)
    before = np.concatenate([start[:1], reached[:-1]])
    return int(np.maximum(end - np.maximum(start, before), 0).sum())


def _kernels(timeline: Timeline, lines: Mapping[int, _Line], chains: Chains, ledger: Ledger) -> Numbers:
    """Device time by chain: that of the place on the host which launched the kernel."""
    kernels, found = timeline.kernels, np.zeros(len(chains.all), np.int64)
    start, end, device = kernels["start"], kernels["end"], kernels["device"]
    thread, at = _launched(timeline)
    np.add.at(found, _work(lines, thread, at, chains.nobody), end - start)
    ledger.kernels, ledger.kernel_time = len(kernels), int((end - start).sum())
    ledger.unlinked = int((thread < 0).sum())
    ledger.device_busy = sum(_union(np.stack([start, end])[:, device == each]) for each in np.unique(device).tolist())
    return found


def _launched(timeline: Timeline) -> tuple[Numbers, Numbers]:
    """The thread and the time of each kernel's launch; thread -1 if it is not known."""
    kernels = timeline.kernels
    thread, at = _looked_up(kernels["correlation"], timeline.launches, "correlation")
    missing = thread < 0
    if missing.any():  # the runtime's own calls may not have been recorded
        thread[missing], at[missing] = _looked_up(kernels["operator"][missing], timeline.operators, "id")
    return thread, at


def _looked_up(wanted: Numbers, table: Columns, key: str) -> tuple[Numbers, Numbers]:
    known, thread, start = (table[name] for name in (key, "thread", "start"))
    nothing = np.full(len(wanted), -1, np.int64)
    if not len(known):
        return nothing, nothing.copy()
    order = np.argsort(known, kind="stable")
    places = order[np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)]
    hit = (known[places] == wanted) & (wanted >= 0)
    return np.where(hit, thread[places], -1), np.where(hit, start[places], -1)


def _memory(timeline: Timeline, lines: Mapping[int, _Line], chains: Chains) -> tuple[Numbers, Numbers]:
    """Bytes by chain, of the host and of devices."""
    memory = timeline.memory
    where = _work(lines, memory["thread"], memory["at"], chains.nobody)
    found = []
    for on_device in (0, 1):
        amounts, chosen = np.zeros(len(chains.all), np.int64), memory["on_device"] == on_device
        np.add.at(amounts, where[chosen], memory["bytes"][chosen])
        found.append(amounts)
    return found[0], found[1]


def _work(lines: Mapping[int, _Line], thread: Numbers, at: Numbers, nobody: int) -> Numbers:
    found = np.full(len(thread), nobody, np.int64)
    for number, line in lines.items():
        here = thread == number
        if len(line.at):
            found[here] = line.work_at(at[here], nobody)
    return found
