"""Finds the module to replay in a model, and the parameters that it shares with other modules."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from tensortap.capture.modules.tree import Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.replay.recorded_call import RecordedCall
from tensortap.replay.sources import FunctionSource, build_model

__all__ = ["attribute_of", "find_module", "has_dropout", "model_of", "without_tied"]


def model_of(given: Any) -> tuple[Any, str]:
    """Return the model, and a name for its origin."""
    if not isinstance(given, str):
        return network_of(given), "the model"
    source = FunctionSource.of(given, "model")
    model = network_of(build_model(source, "model"))
    try:
        framework_of(model)
    except UsageError:
        kinds = "a torch.nn.Module or a paddle.nn.Layer"
        raise UsageError(f"model {given}: {source.name}() returned {type(model).__qualname__}, not {kinds}") from None
    return model, given


def find_module(framework: Framework, root: Any, name: str, built_by: str) -> Any:
    """Return a module by its name; raise UsageError if there is none, and suggest similar names."""
    tree = Tree(framework, root)
    sites = {site.name: site for site in tree.sites}
    first = next((alias.first for alias in tree.aliases if alias.name == name), name)
    if first in sites:
        return sites[first].owner
    suggestions = [display_name(each) for each in difflib.get_close_matches(name, list(sites), 3, 0.4)]
    hint = f"; did you mean {', '.join(suggestions)}?" if suggestions else ""
    raise UsageError(f"{built_by} has no module {display_name(name)}{hint}")


def without_tied(framework: Framework, root: Any, module: Any, recorded: RecordedCall) -> RecordedCall:
    """Drop the gradients of parameters that other modules use, too: they contain the gradients of those uses."""
    own = {id(site.owner) for site in Tree(framework, module).sites}
    others = [site for site in Tree(framework, root).sites if id(site.owner) not in own]
    shared = {id(tensor) for site in others for _, tensor in framework.parameters(site.owner)}
    tied = {
        (recorded.inside(site.name), name)
        for site in Tree(framework, module).sites
        for name, tensor in framework.parameters(site.owner)
        if id(tensor) in shared
    }
    dropped = [r for r in recorded.records if r.key.kind == "param_grad" and (r.key.module, r.key.path) in tied]
    if not dropped:
        return recorded
    names = ", ".join(f"{display_name(r.key.module)}.{r.key.path}" for r in dropped)
    note = f"not compared, because other modules use the parameter and add to its gradient: {names}"
    kept = [record for record in recorded.records if record not in dropped]
    return replace(recorded, records=kept, notes=[*recorded.notes, note])


def attribute_of(root: Any, module: Any) -> str:
    """Return the module's name including all wrappers around it."""
    named = root.named_modules() if hasattr(root, "named_modules") else root.named_sublayers(include_self=True)
    return next((name for name, each in named if each is module), "")


def has_dropout(framework: Framework, module: Any) -> bool:
    """Whether a module in training mode drops elements at random."""
    parts = [site.owner for site in Tree(framework, module).sites]
    return any("Dropout" in type(each).__name__ and each.training and getattr(each, "p", 0) for each in parts)
