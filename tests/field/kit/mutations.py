"""Mistakes that nobody wrote: random small edits of the code of a family's modules.

Each edit changes one place of the `forward` of one module: a term or a factor is left out, a gradient is cut off, a
call is skipped, operands are exchanged, a constant is another one. An edit that raises, or that moves no gradient by
more than rounding, is no mistake, and another one is drawn. The module to name is the one whose code was edited.
"""

from __future__ import annotations

import ast
import inspect
import random
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from field.sets import EVERY

from .mistake import Mistake
from .patches import Apply, edits
from .running import Training, loss_of, training_of

__all__ = ["mutations"]

_LEAST = 1e-3
"""Relative change of the gradient of a parameter that makes an edit a mistake."""
_MOST_DRAWN = 8
"""Edits that are drawn for each one wanted."""

Edit = tuple[str, str, str]
"""What it does, and the code before and after."""


def mutations(family: str, count: int, seed: int) -> list[Mistake]:
    """Return so many mistakes in the code of a family, or fewer if it has no more."""
    draw = random.Random(f"{family} {seed}")
    model = training_of(family).model
    places = [(name, edit) for name, module in _modules(model) for edit in _edits(module)]
    draw.shuffle(places)
    kinds = ("eager", "sdpa") if EVERY[family].attention else ("eager",)
    references = {attention: _gradients(training_of(family, attention)) for attention in kinds}
    found: list[Mistake] = []
    used: set[tuple[str, str]] = set()
    for name, (what, old, new) in places[: _MOST_DRAWN * count]:
        cls = type(model.get_submodule(name)).__name__
        if (cls, old) in used:  # the same place in another layer
            continue
        apply = edits(name, old, new)
        if not all(_moves(training_of(family, attention), apply, known) for attention, known in references.items()):
            continue
        used.add((cls, old))
        kind = "backward" if what == "cut off" else "forward"
        found.append(Mistake(f"{what} in {cls}: {_line(old)}", family, name, kind, apply))
        if len(found) == count:
            break
    return found


def _moves(training: Training, apply: Apply, reference: dict[str, Any]) -> bool:
    """Whether an edit runs and changes a gradient."""
    try:
        apply(training)
        return _moved(reference, _gradients(training)) > _LEAST
    except Exception:  # any: the edited code is arbitrary
        return False


def _line(code: str) -> str:
    return " ".join(code.split())[:60]


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules whose code is not torch's own."""
    for name, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            yield name, module


def _edits(module: nn.Module) -> list[Edit]:
    """Return the possible edits of a module's forward."""
    try:
        plain = inspect.unwrap(type(module).forward)
        source = textwrap.dedent(inspect.getsource(plain))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return []
    found = []
    for node in ast.walk(tree):
        for what, new in _changes(node, source):
            old = ast.get_source_segment(source, node)
            if old and source.count(old) == 1:
                found.append((what, old, new))
    return found


def _changes(node: ast.AST, source: str) -> Iterator[tuple[str, str]]:
    def code(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.BinOp):
        left, right = code(node.left), code(node.right)
        if isinstance(node.op, ast.Add):
            yield "term left out", f"({left})"
            yield "term left out", f"({right})"
            yield "term subtracted", f"({left} - ({right}))"
        elif isinstance(node.op, ast.Mult):
            yield "factor left out", f"({left})"
            yield "factor left out", f"({right})"
        elif isinstance(node.op, ast.Div):
            yield "not divided", f"({left})"
        elif isinstance(node.op, ast.Sub):
            yield "exchanged", f"({right} - ({left}))"
        elif isinstance(node.op, ast.Pow):
            yield "not raised", f"({left})"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.BinOp):
        targets = ", ".join(code(target) for target in node.targets)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield "cut off", f"{targets} = ({code(node.value)}).detach()"
    elif isinstance(node, ast.Call) and node.args and not isinstance(node.args[0], ast.Starred):
        function = code(node.func)
        if function.startswith("self."):
            yield "call skipped", f"({code(node.args[0])})"
        if len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
            rest = [code(part) for part in node.args[2:]]
            rest += [f"{word.arg}={code(word.value)}" for word in node.keywords if word.arg]
            rest += [f"**{code(word.value)}" for word in node.keywords if not word.arg]
            yield "exchanged", f"{function}({', '.join([code(node.args[1]), code(node.args[0]), *rest])})"
    elif isinstance(node, ast.keyword) and node.arg and isinstance(node.value, ast.Name | ast.Attribute):
        if "mask" in node.arg or "bias" in node.arg or "position" in node.arg:
            yield "argument left out", f"{node.arg}=None"
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "another constant", repr(node.value * 1.25 or 0.1)


def _gradients(training: Training) -> dict[str, Any]:
    """Return the gradients of a first step."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(training.seed)
        loss = loss_of(training, training.model, training.batches[0][0])
        loss.backward()
    found = {name: p.grad for name, p in training.model.named_parameters() if p.grad is not None}
    return found | {"": loss.detach()}


def _moved(reference: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative change; infinity if a gradient came or went, 0 if one is not finite."""
    if reference.keys() != other.keys():
        return float("inf")
    most = 0.0
    for name, gradient in reference.items():
        if not bool(torch.isfinite(other[name]).all()):
            return 0.0
        size = float(gradient.norm())
        if size > 1e-6:
            most = max(most, float((other[name] - gradient).norm()) / size)
    return most
