"""The cost of a tap on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from tensortap.report import wording
from tensortap.report.terminal import table
from tensortap.report.terminal.times import duration

__all__ = ["bench_page", "rate", "signed"]

_LIMITS = {
    "device_read": "reading GPU memory",
    "device_to_host": "GPU to pinned host memory",
    "memory_read": "reading host memory",
    "page_cache_write": "page cache, one file",
    "page_cache_write_many": "page cache, {files} files",
    "direct_write": "disk, past the page cache",
}


def bench_page(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    """Render the result of `bench.measure()`."""
    lines = [Text(line, "bold") for line in wording.wrap(_head(facts), width)]
    lines += [Text(), *table.lines(_ways(facts), width), Text()]
    lines += [*table.lines(_limits(facts["limits"]), width), Text()]
    for name, way in facts["ways"].items():
        if "limit" in way:
            lines += [Text(line) for line in wording.wrap(f"{name} is limited by {way['limit']['said']}.", width)]
    for left in facts["left_out"]:
        lines += [Text(line, "yellow") for line in wording.wrap(f"left out: {left}", width)]
    return lines


def rate(value: float | None) -> str:
    """
    >>> rate(3.81e12), rate(55.2e9), rate(None)
    ('3.81 TB/s', '55.2 GB/s', '–')
    """
    return "–" if value is None else f"{wording.nbytes(int(value))}/s"


def signed(value: int) -> str:
    """
    >>> signed(1500), signed(-1500)
    ('1.50 kB', '-1.50 kB')
    """
    return f"-{wording.nbytes(-value)}" if value < 0 else wording.nbytes(value)


def _head(facts: Mapping[str, Any]) -> str:
    model, machine, tapped = facts["model"], facts["machine"], facts["tapped"]
    return (
        f"{model['name']}: {model['parameters'] / 1e6:,.1f} M parameters in {wording.dtype(model['dtype'])}, "
        f"batch {model['batch']} × {model['length']}, on {machine['name']} ({machine['device']}, "
        f"{wording.plural(machine['cores'], 'core')}) · {wording.plural(model['leaves'], 'leaf module')}, "
        f"{wording.plural(tapped['records'], 'record')} and {wording.nbytes(tapped['bytes'])} of "
        f"{wording.plural(tapped['tensors'], 'tensor')} a step"
    )


def _ways(facts: Mapping[str, Any]) -> Sequence[table.TableColumn]:
    ways = facts["ways"]
    on_device = facts["machine"]["device"] == "cuda"
    memory = "allocated" if on_device else "host"

    def cells(what: str, form: Any, but: str = "–") -> list[str]:
        return [form(way[what]) if what in way else but for way in ways.values()]

    columns = [
        table.TableColumn("way", list(ways), left=True),
        table.TableColumn("a step", [duration(way["seconds"] * 1e6) for way in ways.values()]),
        table.TableColumn("ratio", [f"{way['ratio']:.3f}×" for way in ways.values()], style="bold"),
        table.TableColumn("not waiting", [f"{way['ratio_each']:.3f}×" for way in ways.values()], optional=2),
        table.TableColumn("bytes", cells("bytes_per_second", rate), optional=1),
        table.TableColumn(
            "GPU memory" if on_device else "host memory",
            ["–" if name == "plain" else signed(way["memory"][memory]) for name, way in ways.items()],
        ),
    ]
    if on_device:
        launching = [duration(way["launching"] * 1e6) for way in ways.values()]
        columns.insert(2, table.TableColumn("launching", launching, optional=3))
        waited = [f"{way['ratio_waited']:.3f}×" if way["ratio_waited"] else "–" for way in ways.values()]
        columns.insert(5, table.TableColumn("step by step", waited, optional=2))
        held = ["–" if name == "plain" else signed(way["memory"]["host"]) for name, way in ways.items()]
        columns.append(table.TableColumn("host memory", held, optional=4))
    stalled = [duration(way["stats"].get("stalled_seconds", 0) / max(way["steps"], 1) * 1e6) for way in ways.values()]
    columns.append(table.TableColumn("stalled", stalled, optional=5))
    return columns


def _limits(limits: Mapping[str, Any]) -> Sequence[table.TableColumn]:
    shown = {name.format(**limits): rate(limits[key]) for key, name in _LIMITS.items() if limits[key] is not None}
    if limits["device_launch"] is not None:
        shown["a launch on the GPU"] = duration(limits["device_launch"] * 1e6)
    return [
        table.TableColumn("what the machine can do", list(shown), left=True),
        table.TableColumn("", list(shown.values())),
    ]
