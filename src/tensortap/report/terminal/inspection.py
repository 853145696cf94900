"""A model's tensors on the terminal: a tree with repeated layers folded, the totals, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from tensortap.report import wording
from tensortap.report.terminal import table

__all__ = ["inspection_page"]

# Fields of a tensor that must be equal for two layers to be folded.
_PLAIN = ("own", "kind", "dtype", "initialised", "requires_grad", "gradient")
_LISTS = ("shape", "groups")
_COUNTED = ("saved_as", "shared_with")


@dataclass(slots=True)
class _ModuleLine:
    """A module in the tree; `key` is its own part of the name."""

    key: str
    facts: Mapping[str, Any] | None = None
    children: list[_ModuleLine] = field(default_factory=list)
    alike: list[_ModuleLine] = field(default_factory=list)
    """Following siblings that look the same."""
    like: str = ""
    """An earlier sibling that looks the same and is shown."""

    def look(self) -> tuple[Any, ...]:
        """Equal for two modules that would be shown the same."""
        facts = self.facts or {"class": "", "tensors": (), "also": (), "hidden_in": "", "ties": ()}
        tensors = tuple(
            (
                *(t[name] for name in _PLAIN),
                *(len(t[name]) for name in _COUNTED),
                tuple(t["shape"] or ()),
                str(t["groups"]),
            )
            for t in facts["tensors"]
        )
        known = facts["class"], facts["hidden_in"], len(facts["also"]), len(facts["ties"])
        return *known, tensors, tuple(child.look() for child in self.children)


@dataclass(slots=True)
class _Row:
    name: str
    style: str = ""
    cells: tuple[str, ...] = ()


def inspection_page(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    """Render the result of `Inspection.as_dict()`."""
    rows = _rows(_tree(facts["modules"]), facts)
    titles_at = [place for place, row in enumerate(rows) if not row.cells]
    optimizer = facts["optimizer"]
    titles = ("kind", "shape", "dtype", "group" if optimizer else "learns", "saved", "moved", "grad", "shared with")
    columns = [table.TableColumn("tensor", [row.name if row.cells else "" for row in rows], left=True, least=18)]
    for place, title in enumerate(titles):
        cells = [row.cells[place] if row.cells else "" for row in rows]
        if title == "shared with" and not any(cells):
            continue
        columns.append(
            table.TableColumn(
                title,
                cells,
                left=title in ("kind", "group", "learns", "saved", "moved", "grad", "shared with"),
                least=10 if title == "shared with" else None,
                optional={"shared with": 1, "dtype": 2}.get(title, 0),
                styles=["yellow" if cell == "no" else "" for cell in cells],
            )
        )
    head = f"{wording.clean(facts['model'])} · {facts['framework']}"
    if optimizer:
        head += f" · {wording.clean(optimizer)}, {wording.plural(facts['groups'], 'group')}"
    body = table.lines(columns, width)
    for place in titles_at:  # a module's line has the whole width
        name = rows[place].name
        body[place + 1] = Text(name if width is None else wording.middle(name, width), rows[place].style)
    lines = [Text(head, "bold"), Text(), *body, Text(), *_totals(facts, width)]
    if facts["warnings"]:
        lines.append(Text())
        for warning in facts["warnings"]:
            first, *rest = wording.wrap(wording.clean(warning["text"]), None if width is None else width - 2)
            lines.append(Text.assemble(("! ", "yellow bold"), first))
            lines += [Text(f"  {line}") for line in rest]
    return lines


def _tree(modules: Sequence[Mapping[str, Any]]) -> _ModuleLine:
    root = _ModuleLine("(root)")
    nodes: dict[str, _ModuleLine] = {"": root}
    for facts in modules:
        name = facts["name"]
        if not name:
            root.facts = facts
            continue
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in nodes:
                break
        node = _ModuleLine(name[len(parent) + 1 :] if parent else name, facts)
        nodes[parent].children.append(node)
        nodes[name] = node
    return root


def _folded(children: Sequence[_ModuleLine]) -> list[_ModuleLine]:
    """Merge neighbours with numbers as names that look the same."""
    result: list[_ModuleLine] = []
    shown: dict[tuple[Any, ...], str] = {}
    look: tuple[Any, ...] | None = None
    for child in children:
        own = child.look()
        if result and own == look and (_numbered(child.key) and _numbered(result[-1].key)):
            result[-1].alike.append(child)
            continue
        look = own
        if _numbered(child.key) and ((child.facts and child.facts["tensors"]) or child.children):
            child.like = shown.get(own, "")
            shown.setdefault(own, child.key)
        result.append(child)
    return result


def _numbered(key: str) -> bool:
    return key.isdecimal() or key.endswith("]")


def _rows(root: _ModuleLine, facts: Mapping[str, Any]) -> list[_Row]:
    rows: list[_Row] = []

    def visit(node: _ModuleLine, depth: int) -> None:
        indent = "  " * depth
        module = node.facts
        if module is not None:
            key = wording.clean(node.key)
            if node.alike:
                key += f" … {wording.clean(node.alike[-1].key)}"
            title = f"{indent}{key} {wording.clean(module['class'])}"
            if node.alike:
                title += f", {len(node.alike) + 1} alike"
            if node.like:
                title += f", like {wording.clean(node.like)}"
            if module["hidden_in"]:
                title += ", hidden"
            if module["also"]:
                title += f" = {wording.clean(', '.join(module['also'][:2]))}" + " …" * (len(module["also"]) > 2)
            rows.append(_Row(title, "bold" if depth == 0 else "cyan"))
            if node.like:
                return
            rows.extend(_Row(f"{indent}  {wording.clean(t['own'])}", "", _cells(t, facts)) for t in module["tensors"])
            rows.extend(_Row(f"{indent}  {wording.clean(f'{own} = {first}')}", "dim") for own, first in module["ties"])
        for child in _folded(node.children):
            visit(child, depth + 1)

    visit(root, 0)
    return rows


def _cells(tensor: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[str, ...]:
    kind = {"non-persistent buffer": "buffer, unsaved"}.get(tensor["kind"], tensor["kind"])
    if tensor["statistics"]:
        group, gradient = "statistics", "–"
    elif tensor["kind"] == "parameter" or tensor["is_parameter"]:
        if facts["optimizer"]:
            group = ", ".join(map(str, tensor["groups"])) or "none"
            if not tensor["requires_grad"]:
                group = f"{group} frozen" if tensor["groups"] else "frozen"
        else:
            group = "yes" if tensor["requires_grad"] else "frozen"
        gradient = tensor["gradient"] if tensor["requires_grad"] or tensor["gradient"] != "none" else "–"
    else:
        group = "–"
        gradient = tensor["gradient"] if tensor["gradient"] != "none" else "–"
    shape = "not yet" if tensor["shape"] is None else wording.shape(tensor["shape"])
    shared = tensor["shared_with"]
    return (
        kind,
        shape,
        wording.dtype(tensor["dtype"]),
        group,
        _times_saved(len(tensor["saved_as"])),
        "yes" if tensor["moved"] else "no",
        gradient,
        wording.clean(shared[0]) + (f" +{len(shared) - 1}" if len(shared) > 1 else "") if shared else "",
    )


def _times_saved(names: int) -> str:
    return {0: "no", 1: "yes", 2: "twice"}.get(names, f"{names} times")


def _totals(facts: Mapping[str, Any], width: int | None) -> list[Text]:
    totals = facts["totals"]
    parts = []
    for kind in ("parameters", "buffers", "attributes"):
        if (total := totals.get(kind)) is not None:
            parts.append(f"{wording.count(total['elements'])} in {kind} ({wording.nbytes(total['nbytes'])})")
            if kind == "parameters":
                trained = totals.get("trained", {"elements": 0})["elements"]
                word = "trained" if facts["optimizer"] else "can learn"
                parts[-1] += f", {'all' if trained == total['elements'] else wording.count(trained)} {word}"
                if (statistics := totals.get("statistics")) is not None:
                    parts[-1] += f", {wording.count(statistics['elements'])} running statistics (the role of buffers)"
    text = "; ".join(parts) or "no tensors"
    dtypes = totals["nbytes_by_dtype"]
    if len(dtypes) > 1:
        text += ". " + ", ".join(f"{wording.dtype(name)} {wording.nbytes(size)}" for name, size in dtypes.items())
    lines = [Text(line) for line in wording.wrap(text, width)]
    return lines + [Text(line, "dim") for line in wording.wrap(_clearing(facts), width)]


def _clearing(facts: Mapping[str, Any]) -> str:
    text = str(facts["clearing_choices"])
    left = [
        tensor
        for module in facts["modules"]
        for tensor in module["tensors"]
        if facts["optimizer"] and tensor["after_clearing"]["optimizer"] == "set"
    ]
    if left:
        text += f"; the optimizer's own reaches its groups only: {wording.plural(len(left), 'gradient')} would stay"
    return text
