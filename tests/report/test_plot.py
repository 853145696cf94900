"""Columns of numbers, drawn on the terminal and as pictures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tensortap.errors import MissingDependency
from tensortap.report.files import plot_picture
from tensortap.report.terminal import plot


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot_picture, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"pip install 'tensortap\[plot\]'"):
        plot_picture.check(tmp_path / "a.png")


def two_ranks(layers: int = 12, steps: int = 3) -> list[plot.Series]:
    """Tensors and gradients of two ranks; layer 3 is worst in the last micro step of rank 1."""
    names = [f"model.encoder.layers.{layer}.feed_forward.dense" for layer in range(layers)]
    found = []
    for panel in ("tensors", "grads"):
        for rank in range(2):
            values = [1 - 1e-6 * (at + rank) for at in range(layers * steps)]
            values[layers * (steps - 1) + 3] -= 1e-3 * rank
            found.append(
                plot.Series(
                    label=f"{panel} rank_{rank}",
                    names=[f"{name}.npy" for _ in range(steps) for name in names],
                    values=values,
                    layers=[name for _ in range(steps) for name in names],
                    steps=[step for step in range(steps) for _ in names],
                    panel=panel,
                    member=f"rank {rank}",
                )
            )
    return found


def drawn(figure: Any) -> Any:
    """Lay out and draw, so that all texts have their place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize(("layers", "steps"), [(4, 1), (12, 3), (40, 25)])
def test_layers_are_named_on_the_axis_without_overlap(layers: int, steps: int) -> None:
    figure = drawn(plot_picture.figure_of(two_ranks(layers, steps), "cosine similarity", "layers"))
    assert len(figure.axes) == 2
    for axis in figure.axes:
        labels = [label for label in axis.get_xticklabels() if label.get_text()]
        assert len(labels) == layers * steps or f"of {layers * steps} names is shown" in axis.get_xlabel()
        assert len(labels) > 20 or len(labels) == layers * steps
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
        assert all("feed_forward" in label.get_text() or "…" in label.get_text() for label in labels)
        steps_named = [
            text.get_window_extent() for text in axis.texts if text.get_text().removeprefix("micro step ").isdigit()
        ]
        assert len(steps_named) == steps and all(left.x1 <= right.x0 for left, right in pairwise(steps_named))
        assert [text.get_text() for text in axis.get_legend().get_texts()] == ["rank 0", "rank 1"]
        (worst,) = (text.get_text() for text in axis.texts if "dense, micro step" in text.get_text())
        assert "layers.3." in worst and f"micro step {steps - 1}: 0.99" in worst


def test_a_micro_step_has_a_line_of_its_own() -> None:
    (first, *_) = plot_picture.figure_of(two_ranks(12, 3), "cosine similarity", "layers").axes
    lines = [line for line in first.lines if len(line.get_xdata()) == 12]
    assert len(lines) == 6  # of two ranks
    assert sorted({(min(line.get_xdata()), max(line.get_xdata())) for line in lines}) == [(0, 11), (12, 23), (24, 35)]


def test_over_steps_each_layer_has_a_line_and_the_worst_are_named() -> None:
    figure = drawn(plot_picture.figure_of(two_ranks(12, 5), "cosine similarity", "steps"))
    axis = figure.axes[0]
    lines = [line for line in axis.lines if len(line.get_xdata()) == 5]
    assert len(lines) == 24 and all(list(line.get_xdata()) == [0, 1, 2, 3, 4] for line in lines)
    assert {line.get_linestyle() for line in lines} == {"-", "--"}
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert len(texts) == 13 and texts[-3:] == ["2 more layers", "rank 0", "rank 1"]
    assert any("layers.3." in text for text in texts)
    assert axis.get_legend().get_window_extent().x1 <= figure.bbox.x1


def test_names_that_matplotlib_would_interpret_are_shown_as_they_are() -> None:
    names = ["_hidden", "a$b$c", "层.0", "x\ny"]
    series = plot.Series("t", names, [1.0, 2.0, 3.0, float("nan")], panel="t")
    for over in plot_picture.OVER:
        axis = plot_picture.figure_of([series], "meanA", over).axes[0]
        texts = axis.get_xticklabels() if over == "layers" else axis.get_legend().get_texts()
        shown = [text.get_text().strip().replace(r"\$", "$") for text in texts]
        assert [name for name in ("_hidden", "a$b$c", "层.0", "x\\ny") if name not in shown] == []


def test_over_steps_the_terminal_has_a_line_for_each_layer() -> None:
    lines = plot.terminal_of_layers(two_ranks(30, 4)[1], "cosine similarity", 80)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0] == "tensors rank_1: cosine similarity over micro steps, 30 layers"
    assert lines[-1] == "  10 more layers differ less"
    (worst,) = [line for line in lines if "layers.3." in line]
    assert "███▁" in worst or "▇▇▇▁" in worst
    lost = plot.Series("t", ["a", "b"], [float("nan"), 1.0], steps=[0, 1], layers=["a", "a"])
    assert "×" in plot.terminal_of_layers(lost, "meanA", 80)[-1]


@pytest.mark.parametrize(
    "values", [[1.0], [1.0] * 5, [0.0, float("nan"), 2.0], [-1.7e308, 1.7e308], [float("nan")], list(range(1000))]
)
def test_plots_of_all_sorts(tmp_path: Path, values: list[float]) -> None:
    series = plot.Series("tensors", [str(i) for i in range(len(values))], values)
    lines = plot.terminal(series, "meanA", 80)
    assert all(len(line) <= 80 for line in lines)
    assert all(len(line) <= 80 for line in plot.terminal_of_layers(series, "meanA", 80))
    for over in plot_picture.OVER:
        plot_picture.write(tmp_path / f"{over}.png", [series], "meanA", over)
        assert (tmp_path / f"{over}.png").stat().st_size > 1000


def test_a_line_that_rises_is_drawn_rising() -> None:
    lines = plot.terminal(plot.Series("t", ["a", "b", "c", "d"], [0.0, 1.0, 2.0, 3.0]), "meanA", 80)
    assert lines[1].startswith("3 ┤")
    assert lines[10].startswith("0 ┤")
    drawn = [line.partition("┤")[2] for line in lines[1:11]]
    assert drawn[-1][0] != "\u2800"
    assert drawn[0][1] != "\u2800"
    assert drawn[0][0] == "\u2800"
    assert drawn[-1][1] == "\u2800"


def test_numbers_have_the_digits_that_tell_them_apart() -> None:
    """Cosines of a nearly right pair: six digits of each are a one."""
    layers = ["a", "b", "a", "b"]
    series = plot.Series("t", layers, [1 - 1.4e-6, 1.0, 1 - 7e-7, 1.0], layers, [0, 0, 1, 1])
    lines = plot.terminal(series, "cosine similarity", 80)
    assert lines[1].startswith("        1 ┤") and lines[10].startswith("0.9999986 ┤")
    lines = plot.terminal_of_layers(series, "cosine similarity", 80)
    assert lines[1].split() == ["▁", "0.9999986", "█", "1"]
    assert lines[2].endswith("0.9999986 → 0.9999993") and lines[3].endswith("1 → 1")
    same = plot.Series("t", ["a"], [0.1 + 0.2])
    assert plot.terminal(same, "meanA", 80)[1].startswith("0.3 ┤")
    close = plot.Series("t", ["a" * 40, "b" * 40] * 50, [-1.234567890123e-207, -1.234567890124e-207] * 50)
    assert all(len(line) <= 80 for line in plot.terminal_of_layers(close, "meanA", 80))


def test_the_axis_on_the_terminal_separates_micro_steps() -> None:
    lines = plot.terminal(two_ranks(12, 3)[0], "cosine similarity", 80)
    at = next(number for number, line in enumerate(lines) if "└" in line)
    start = lines[at].index("└") + 1
    assert lines[at][start:] == "──────┴─────┴─────"
    assert lines[at + 1][start:] == "0     1     2  micro step"
    crowded = plot.terminal(two_ranks(4, 150)[0], "cosine similarity", 80)
    assert all(len(line) <= 80 for line in crowded[:-2])
    assert not any("┴" in line or "micro step" in line for line in crowded)
    for layers in range(4, 40):  # the number of the last micro step may be at the end of the line
        lines = plot.terminal(two_ranks(layers, 9)[0], "cosine similarity", 80)
        assert all(len(line) <= 80 for line in lines[:-2])
