"""The module that is replayed: found in a model, and what of it is shared with others."""

from __future__ import annotations

import difflib
from dataclasses import replace
from typing import Any

from tensortap.capture.tree import Tree
from tensortap.core.records import display_name
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of
from tensortap.frameworks.base import Framework
from tensortap.replay.excerpt import Excerpt
from tensortap.replay.sources import Source, build

__all__ = ["attribute_of", "drops", "found", "model_of", "without_tied"]


def model_of(given: Any) -> tuple[Any, str]:
    """The model, and what to call whoever made it."""
    if not isinstance(given, str):
        return network_of(given), "the model"
    source = Source.of(given, "model")
    model = network_of(build(source, "model"))
    try:
        framework_of(model)
    except UsageError:
        kinds = "a torch.nn.Module or a paddle.nn.Layer"
        raise UsageError(f"model {given}: {source.name}() returned {type(model).__qualname__}, not {kinds}") from None
    return model, given


def found(framework: Framework, root: Any, name: str, built_by: str) -> Any:
    tree = Tree(framework, root)
    sites = {site.name: site for site in tree.sites}
    first = next((alias.first for alias in tree.aliases if alias.name == name), name)
    if first in sites:
        return sites[first].owner
    close = [display_name(each) for each in difflib.get_close_matches(name, list(sites), 3, 0.4)]
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise UsageError(f"{built_by} has no module {display_name(name)}{hint}")


def without_tied(framework: Framework, root: Any, module: Any, part: Excerpt) -> Excerpt:
    """A parameter that other modules use too got gradient from them as well."""
    own = {id(site.owner) for site in Tree(framework, module).sites}
    others = [site for site in Tree(framework, root).sites if id(site.owner) not in own]
    shared = {id(tensor) for site in others for _, tensor in framework.parameters(site.owner)}
    tied = {
        (part.inside(site.name), name)
        for site in Tree(framework, module).sites
        for name, tensor in framework.parameters(site.owner)
        if id(tensor) in shared
    }
    dropped = [r for r in part.records if r.key.kind == "param_grad" and (r.key.module, r.key.path) in tied]
    if not dropped:
        return part
    names = ", ".join(f"{display_name(r.key.module)}.{r.key.path}" for r in dropped)
    note = f"the gradient of a parameter that other modules use too has their share in it and is not compared: {names}"
    kept = [record for record in part.records if record not in dropped]
    return replace(part, records=kept, notes=[*part.notes, note])


def attribute_of(root: Any, module: Any) -> str:
    """The module's name with all wrappers that stand around it."""
    named = root.named_modules() if hasattr(root, "named_modules") else root.named_sublayers(include_self=True)
    return next((name for name, each in named if each is module), "")


def drops(framework: Framework, module: Any) -> bool:
    parts = [site.owner for site in Tree(framework, module).sites]
    return any("Dropout" in type(each).__name__ and each.training and getattr(each, "p", 0) for each in parts)
