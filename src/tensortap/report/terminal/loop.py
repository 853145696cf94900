"""The loop facts of a run on the terminal: a table over steps, what stayed the same, and what changed in modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from tensortap.core.arguments import all_in_words, in_words
from tensortap.core.records import display_name
from tensortap.report.terminal import table
from tensortap.report.wording import clean, plural, wrap

__all__ = ["LoopPage", "LoopStep", "render"]

_DIGITS = 6
"""Characters of a digest that are shown."""


@dataclass(frozen=True)
class LoopStep:
    """One step of a loop: the value of each fact that holds, by fact and subject."""

    step: int
    values: Mapping[tuple[str, str], Mapping[str, Any]]
    gradient_norm: float | None = None
    """Norm of all gradients that the optimizer used; None if they were not recorded."""
    backward_norm: float | None = None
    """Norm of all gradients from backward, if each parameter has one."""


@dataclass(frozen=True)
class LoopPage:
    """The contents of the page, before layout."""

    title: str
    steps: Sequence[LoopStep]
    more: int = 0
    """Steps that are left out."""
    changes: Sequence[tuple[int, str, str, Any, Any]] = field(default_factory=tuple)
    """Changes in modules: step, module, attribute, value before and after."""


def render(page: LoopPage, width: int | None) -> list[Text]:
    """Return the page as lines of at most `width` cells; without a width, nothing is cut or wrapped."""
    lines = [Text.assemble(Text(clean(page.title), "bold"), " · the loop"), Text()]
    if not any(step.values for step in page.steps):
        return [*lines, Text("no loop facts: the run is not a capture, or one of an older version", "yellow")]
    columns, constant = _columns(page.steps)
    lines += table.lines(columns, width)
    if page.more:
        lines.append(Text(f"{plural(page.more, 'step')} more: --limit 0 shows all", "dim"))
    lines.append(Text())
    for text in constant:
        lines += [Text(line) for line in _wrapped(text, width)]
    for step, module, name, before, after in page.changes:
        said = f"step {step}: {display_name(module)} {name} {in_words(before)} → {in_words(after)}"
        lines += [Text(line, "yellow") for line in _wrapped(said, width)]
    return lines


def _wrapped(text: str, width: int | None) -> list[str]:
    return [clean(text)] if width is None else wrap(clean(text), width)


def _columns(steps: Sequence[LoopStep]) -> tuple[list[table.TableColumn], list[str]]:
    """Return a column for each setting that varies, and texts about the others."""
    columns = [table.TableColumn("step", [str(each.step) for each in steps], style="bold")]
    constant: list[str] = []
    groups = _subjects(steps, "group")
    for of in groups:
        settings = [each.values.get(("group", of), {}) for each in steps]
        names = list(dict.fromkeys(name for value in settings for name in value))
        varying = [name for name in names if name == "lr" or len({repr(value.get(name)) for value in settings}) > 1]
        title = f" {of}" if len(groups) > 1 else ""
        columns += [table.TableColumn(f"{name}{title}", [_cell(v.get(name)) for v in settings]) for name in varying]
        rest = {
            name: settings[-1][name] for name in names if name not in varying and settings[-1].get(name) is not None
        }
        constant.append(f"group {of}: {_class_of(steps, of)}{all_in_words(rest)}")
    columns += _norms(steps)
    for fact, name in (("scaler", "scale"), ("skipped", "skipped"), ("steps", "steps")):
        found = _subjects(steps, fact)
        for of in found:
            values = [each.values.get((fact, of), {}).get(name) for each in steps]
            if fact == "skipped" and not any(values):
                continue
            cells = ["yes" if value is True else "" if value is False else _cell(value) for value in values]
            columns.append(table.TableColumn(f"{name} {of}" if len(found) > 1 else name, cells))
    for place, of in enumerate(_subjects(steps, "random")):
        digests = [str(each.values.get(("random", of), {}).get("digest", ""))[:_DIGITS] for each in steps]
        columns.append(table.TableColumn(f"random {of}", digests, left=True, optional=1 + place, style="dim"))
    return columns, [*_others(steps[-1]), *constant]


def _norms(steps: Sequence[LoopStep]) -> list[table.TableColumn]:
    used, made = [each.gradient_norm for each in steps], [each.backward_norm for each in steps]
    if all(norm is None for norm in used):
        return []
    columns = [table.TableColumn("gradient norm", [_cell(norm) for norm in used])]
    if any(one != other for one, other in zip(used, made, strict=True)):
        columns.append(table.TableColumn("from backward", [_cell(norm) for norm in made]))
    return columns


def _others(last: LoopStep) -> list[str]:
    values = last.values
    found = []
    if world := values.get(("world", "")):
        found.append(f"world size: {world.get('size')}")
    if ties := values.get(("ties", "")):
        found.append(f"tied: {', '.join(f'{name} is {first}' for name, first in ties.items())}")
    for (fact, of), value in values.items():
        if fact == "parameters" and value.get("others"):
            found.append(f"group {of}: {plural(value['others'], 'parameter')} not in the model")
        if fact == "step_grad" and value.get("no_gradient"):
            found.append(f"optimizer {of}: no gradient for {', '.join(map(str, value['no_gradient']))}")
    return found


def _class_of(steps: Sequence[LoopStep], group: str) -> str:
    cls = steps[-1].values.get(("optimizer", group.rpartition(".")[0]), {}).get("class")
    return f"{cls}, " if cls else ""


def _subjects(steps: Sequence[LoopStep], fact: str) -> list[str]:
    return list(dict.fromkeys(of for each in steps for found, of in each.values if found == fact))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else in_words(value)
