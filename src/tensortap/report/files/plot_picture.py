"""Draw columns of numbers as a picture with matplotlib: over the layers of each micro step, or over the micro steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tensortap.errors import MissingDependency, UsageError
from tensortap.report.files import output
from tensortap.report.terminal.plot import Series, badness_of, lines_of_layers
from tensortap.report.terminal.shortening import cut
from tensortap.report.wording import clean

__all__ = ["OVER", "check", "figure_of", "write"]

OVER = ("layers", "steps")
"""The choices for the horizontal axis."""

_FORMATS = (".png", ".pdf", ".svg")
_LARGEST = 1e300  # matplotlib's margins need some room above
_NAME = 36
_INCHES_PER_NAME = 0.16
_NARROWEST, _WIDEST = 10.0, 24.0
_MARGIN = 2.2
"""Inches around the axes."""
_PANEL = 5.2
_MOST_MEMBERS, _MOST_LINES = 12, 10
_DASHES: Sequence[Any] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_PALE = "0.8"

Spot = tuple[int, str]
"""Micro step and layer."""


def check(path: Path) -> None:
    """Raise the error now that `write` would raise after the work is done."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: the suffix of a picture must be one of {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise MissingDependency("pictures need matplotlib: pip install 'tensortap[plot]'")
    output.check(path)


def write(path: Path, series: Sequence[Series], column: str, over: str = "layers") -> None:
    """Write a picture with one part for each panel; series of one panel share its axes.

    over: "layers" puts all numbers in order, micro step by micro step; "steps" draws one line for each layer.
    """
    check(path)
    figure = figure_of(series, column, over)
    with output.opened(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # names may be in any script
        figure.savefig(file, format=path.suffix[1:].lower(), metadata={}, dpi=110)


def figure_of(series: Sequence[Series], column: str, over: str) -> Any:
    """Return the picture as a figure of matplotlib."""
    panels: dict[str, list[Series]] = {}
    for each in series:
        panels.setdefault(each.panel or each.label, []).append(each)
    figures = import_module("matplotlib.figure")  # not pyplot, which needs a display and keeps state
    width = _width(panels.values()) if over == "layers" else _NARROWEST + 2
    figure = figures.Figure(figsize=(width, _PANEL * max(1, len(panels))), layout="constrained")
    axes = figure.subplots(max(1, len(panels)), squeeze=False)[:, 0]
    for axis, (name, members) in zip(axes, panels.items(), strict=False):
        if over == "layers":
            _over_layers(axis, members, column, width)
        else:
            _over_steps(axis, members, column)
        axis.set_title(_text(f"{name}: {column}"), loc="left", fontsize=11, fontweight="bold", pad=20)
        axis.set_ylabel(column)
        axis.ticklabel_format(axis="y", useOffset=False)  # a cosine of 0.99999 must not show as "0.0"
        axis.spines[["top", "right"]].set_visible(False)
    return figure


# --- over the layers of each micro step ----------------------------------------------------------------------------
def _over_layers(axis: Any, members: Sequence[Series], column: str, width: float) -> None:
    spots = _spots(members)
    place = {spot: at for at, spot in enumerate(spots)}
    _separate_steps(axis, spots, width)
    lost: list[int] = []
    for member, color in zip(members, _colors(len(members)), strict=True):
        style = {"color": color, "marker": "o", "markersize": 3, "linewidth": 1.0, "alpha": 0.9}
        if len(members) > 1:
            axis.plot([], [], label=member.member, **style)
        for points in _by_step(member).values():  # a line of its own for each micro step
            own = sorted((place[step, layer], value) for step, layer, value in points)
            lost += [at for at, value in own if not abs(value) < _LARGEST]
            axis.plot([at for at, _ in own], [_finite(value) for _, value in own], **style)
    _mark_lost(axis, lost)
    _name_worst(axis, members, column, place)
    names = [_text(name) for name in cut([layer for _, layer in spots], _NAME)]
    stride = math.ceil(len(spots) / max(1.0, (width - _MARGIN) / _INCHES_PER_NAME))
    shown = range(0, len(spots), max(1, stride))
    axis.set_xticks(list(shown), [names[at] for at in shown], rotation=90, fontsize=7)
    axis.set_xlim(-0.6, max(0.6, len(spots) - 0.4))
    axis.grid(axis="y", alpha=0.3)
    if stride > 1:
        axis.set_xlabel(f"every {_ordinal(stride)} of {len(spots)} names is shown", fontsize=8)
    _legend(axis)


def _by_step(member: Series) -> dict[int, list[tuple[int, str, float]]]:
    found: dict[int, list[tuple[int, str, float]]] = {}
    for point in member.points:
        found.setdefault(point[0], []).append(point)
    return found


def _spots(members: Sequence[Series]) -> list[Spot]:
    """Return all micro steps and layers, in the order of the series."""
    first: dict[Spot, int] = {}
    for member in members:
        for at, (step, layer, _) in enumerate(member.points):
            first[step, layer] = min(at, first.get((step, layer), at))
    return sorted(first, key=lambda spot: (spot[0], first[spot]))


def _separate_steps(axis: Any, spots: Sequence[Spot], width: float) -> None:
    """Shade every second micro step, and number them above the axes."""
    begins: dict[int, int] = {}
    for at, (step, _) in enumerate(spots):
        begins.setdefault(step, at)
    ends = [*list(begins.values())[1:], len(spots)]
    inches = (width - _MARGIN) / max(1, len(spots))
    in_full = min((end - begin for begin, end in zip(begins.values(), ends, strict=True)), default=0) * inches > 1.0
    stride = 1 if in_full else math.ceil(0.3 * len(begins) / (width - _MARGIN))
    for number, ((step, begin), end) in enumerate(zip(begins.items(), ends, strict=True)):
        if number % 2:
            axis.axvspan(begin - 0.5, end - 0.5, color="0.95", zorder=0)
        if number:
            axis.axvline(begin - 0.5, color="0.6", linewidth=0.8, linestyle=":", zorder=1)
        if number % stride == 0:
            text, middle = f"micro step {step}" if in_full else str(step), (begin + end - 1) / 2
            axis.text(middle, 1.01, text, transform=axis.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
    if not in_full:
        axis.text(-0.01, 1.01, "micro step", transform=axis.transAxes, ha="right", va="bottom", fontsize=8)


def _name_worst(axis: Any, members: Sequence[Series], column: str, place: dict[Spot, int]) -> None:
    """Label the worst point, if a column has one, with its layer and number."""
    if column != "cosine similarity" and " - " not in column:
        return
    bad = badness_of(column)
    points = [point for member in members for point in member.points if abs(point[2]) < _LARGEST]
    if not points:
        return
    step, layer, value = max(points, key=lambda point: bad([point[2]]))
    left = place[step, layer] < len(place) / 2
    axis.annotate(
        _text(f"{cut([layer], _NAME)[0]}, micro step {step}: {value:.7g}"),
        (place[step, layer], value),
        xytext=(10 if left else -10, 10),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=8,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "0.6", "alpha": 0.9},
        arrowprops={"arrowstyle": "-", "color": "0.4"},
        zorder=5,
    )


# --- over the micro steps ------------------------------------------------------------------------------------------
def _over_steps(axis: Any, members: Sequence[Series], column: str) -> None:
    bad = badness_of(column)
    layers: dict[str, list[float]] = {}
    for member in members:
        for layer, line in lines_of_layers(member).items():
            layers.setdefault(layer, []).extend(value for _, value in line)
    worst = sorted(layers, key=lambda layer: bad(layers[layer]), reverse=True)[:_MOST_LINES]
    chosen = [layer for layer in layers if layer in set(worst)]  # in execution order
    colors = dict(zip(chosen, _colors(len(chosen)), strict=True))
    names = dict(zip(chosen, map(_text, cut(chosen, _NAME)), strict=True))
    lost: list[int] = []
    for number, member in enumerate(members):
        for layer, line in lines_of_layers(member).items():
            lost += [step for step, value in line if not abs(value) < _LARGEST]
            axis.plot(
                [step for step, _ in line],
                [_finite(value) for _, value in line],
                color=colors.get(layer, _PALE),
                linestyle=_DASHES[number % len(_DASHES)],
                linewidth=1.4 if layer in colors else 0.7,
                marker="o" if layer in colors else None,
                markersize=3,
                zorder=3 if layer in colors else 2,
                label=names.get(layer) if number == 0 or layer not in lines_of_layers(members[0]) else None,
            )
    _mark_lost(axis, lost)
    if len(chosen) < len(layers):
        axis.plot([], [], color=_PALE, linewidth=0.7, label=f"{len(layers) - len(chosen)} more layers")
    if len(members) > 1:
        for number, member in enumerate(members[:_MOST_MEMBERS]):
            axis.plot([], [], color="0.3", linestyle=_DASHES[number % len(_DASHES)], label=member.member)
    ticker = import_module("matplotlib.ticker")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axis.set_xlabel("micro step")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8, frameon=False)


# --- what both need ------------------------------------------------------------------------------------------------
def _width(panels: Iterable[Sequence[Series]]) -> float:
    longest = max((len(_spots(members)) for members in panels), default=0)
    return min(_WIDEST, max(_NARROWEST, _INCHES_PER_NAME * longest + _MARGIN))


def _colors(count: int) -> list[Any]:
    maps = import_module("matplotlib").colormaps
    if count <= 10:
        return [maps["tab10"](at) for at in range(count)]
    if count <= 20:
        return [maps["tab20"](at) for at in range(count)]
    return [maps["viridis"](at / (count - 1)) for at in range(count)]


def _text(name: str) -> str:
    """Escape a name for matplotlib, which reads $ as formulas and hides labels that begin with _."""
    text = clean(name).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _finite(value: float) -> float:
    return value if abs(value) < _LARGEST else math.nan


def _mark_lost(axis: Any, places: Sequence[int]) -> None:
    if places:
        axis.plot(
            places,
            [0.02] * len(places),
            "rx",
            transform=axis.get_xaxis_transform(),
            label="not finite",
            clip_on=False,
            zorder=4,
        )


def _legend(axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    if len(handles) > _MOST_MEMBERS:
        labels[_MOST_MEMBERS] = f"… {len(handles) - _MOST_MEMBERS} more"
    if handles:
        shown = slice(_MOST_MEMBERS + 1)
        axis.legend(handles[shown], labels[shown], loc="best", fontsize=8, ncols=min(4, len(handles)))


def _ordinal(value: int) -> str:
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value}{ending}"
