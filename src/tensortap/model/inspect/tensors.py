"""Collect every tensor that a model holds, and how the framework treats it, as plain data in one walk."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.capture.modules.tree import Tree
from tensortap.frameworks.ownership import Ownership
from tensortap.frameworks.registered import registered

__all__ = ["HiddenModule", "InspectedModel", "InspectedModule", "InspectedTensor", "collect_tensors"]

_MAX_DEPTH = 3  # models hold lists of dicts of tensors; deeper nesting is data, not a model
_MAX_ITEMS = 10_000


@dataclass(slots=True, eq=False)
class InspectedTensor:
    """One tensor under its first name."""

    name: str
    """Full name from the root: `layers.0.fc1.weight`; in a plain list or dict `tables[0]`, `cache['k']`."""
    module: str
    own: str
    """Name of the tensor within its module."""
    kind: str
    """parameter | buffer | non-persistent buffer | attribute"""
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    device: str
    requires_grad: bool
    gradient: str
    """none | zero | set"""
    groups: tuple[int, ...] = ()
    """Optimizer groups that hold the tensor."""
    saved_as: tuple[str, ...] = ()
    """Keys of the state_dict."""
    moved: bool = False
    """Whether `model.to()` moves it."""
    shared_with: tuple[str, ...] = ()
    """Other names of the same tensor, or of tensors that share its memory."""
    initialised: bool = True
    is_parameter: bool = False
    """Whether its class is Parameter, registered or not."""
    statistics: bool = False
    """Whether it is a parameter used as a buffer for running statistics, such as paddle's running mean."""
    hidden_in: str = ""
    """The plain attribute that hides this tensor's module from the model."""

    @property
    def elements(self) -> int:
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def registered(self) -> bool:
        return self.kind != "attribute"


@dataclass(slots=True, eq=False)
class InspectedModule:
    name: str
    cls: str
    tensors: list[InspectedTensor] = field(default_factory=list)
    hidden_in: str = ""
    also: list[str] = field(default_factory=list)
    """Other names of the same module."""
    ties: list[tuple[str, str]] = field(default_factory=list)
    """Tied tensors: the name within this module, and the full name under which the tensor is listed."""


@dataclass(slots=True, eq=False)
class HiddenModule:
    """A module in a plain list, dict or attribute, which the framework does not traverse."""

    attribute: str
    container: str
    name: str
    tensors: list[InspectedTensor]


@dataclass(slots=True, eq=False)
class InspectedModel:
    modules: list[InspectedModule]
    hidden: list[HiddenModule]
    foreign_tensors: int
    """Number of the optimizer's tensors that the model does not hold."""
    state_dict_error: str
    objects: dict[str, Any]
    """The tensors by first name."""

    @property
    def tensors(self) -> list[InspectedTensor]:
        """Every tensor once, in definition order."""
        return [tensor for module in self.modules for tensor in module.tensors]


class _TensorCollector:
    def __init__(self, ownership: Ownership, model: Any, optimizers: Sequence[Any]) -> None:
        self._ownership = ownership
        self._groups: dict[int, list[int]] = defaultdict(list)
        for number, members in enumerate(group for each in optimizers for group in ownership.groups(each)):
            for tensor in members:
                self._groups[id(tensor)].append(number)
        self.state_dict_error = ""
        self._saved_keys: dict[int, list[str]] = defaultdict(list)
        self._infer_saved = False
        try:
            for key, tensor in ownership.saved(model).items():
                self._saved_keys[id(tensor)].append(key)
        except Exception as error:  # a state_dict hook of the user may need state that does not exist yet
            self.state_dict_error, self._infer_saved = f"{type(error).__name__}: {error}", True
        self.objects: dict[str, Any] = {}
        self._first_entry: dict[int, InspectedTensor] = {}
        self._names: dict[int, list[str]] = defaultdict(list)
        self.hidden: list[HiddenModule] = []

    def module(self, name: str, cls: str, module: Any, hidden_in: str = "") -> InspectedModule:
        facts = InspectedModule(name, cls, hidden_in=hidden_in)
        for own, tensor, registration in registered(self._ownership.framework, module):
            kind = "attribute" if hidden_in else registration.kind
            self._add(facts, own, tensor, kind, statistics=registration.statistics and not hidden_in)
        return facts

    def attributes(self, facts: InspectedModule, module: Any, known: set[int]) -> Iterator[InspectedModule]:
        """Add the plain attributes of a module, and yield the modules hidden in them.

        Call it after all registered tensors were added: an attribute that refers to one of them is not a new tensor.
        """
        for attribute, value in self._ownership.attributes(module):
            for path, found in _find_inside(attribute, value, self._ownership):
                if not self._ownership.is_module(found):
                    first = self._first_entry.get(id(found))
                    if first is None or first.kind.endswith("buffer"):
                        self._add(facts, path, found, "attribute")
                elif id(found) not in known:
                    full = f"{facts.name}.{path}" if facts.name else path
                    yield from self._collect_hidden(full, type(value).__name__, facts.name, attribute, found, known)

    def _collect_hidden(
        self, path: str, container: str, owner: str, attribute: str, module: Any, known: set[int]
    ) -> Iterator[InspectedModule]:
        where = f"{owner}.{attribute}" if owner else attribute
        tensors: list[InspectedTensor] = []
        for site in Tree(self._ownership.framework, module).sites:
            if id(site.owner) in known:
                continue
            known.add(id(site.owner))
            name = f"{path}.{site.name}" if site.name else path
            facts = self.module(name, site.cls, site.owner, hidden_in=where)
            tensors += facts.tensors
            yield facts
        self.hidden.append(HiddenModule(where, container, path, tensors))

    def _add(self, facts: InspectedModule, own: str, tensor: Any, kind: str, statistics: bool = False) -> None:
        name = f"{facts.name}.{own}" if facts.name else own
        self._names[id(tensor)].append(name)
        if (first := self._first_entry.get(id(tensor))) is not None and first.kind == kind != "attribute":
            facts.ties.append((own, first.name))
            return
        dtype, shape, size, device = self._ownership.described(tensor)
        tensor_entry = InspectedTensor(
            name=name,
            module=facts.name,
            own=own,
            kind=kind,
            dtype=dtype,
            shape=shape,
            nbytes=0,
            device=device,
            requires_grad=self._ownership.framework.requires_gradient(tensor),
            gradient=self._ownership.gradient(tensor),
            groups=tuple(self._groups.pop(id(tensor), ())),
            saved_as=self._keys_of(name, tensor, kind),
            moved=kind != "attribute",
            initialised=self._ownership.initialised(tensor),
            is_parameter=self._ownership.is_parameter(tensor),
            statistics=statistics,
            hidden_in=facts.hidden_in,
        )
        tensor_entry.nbytes = tensor_entry.elements * size
        self._first_entry.setdefault(id(tensor), tensor_entry)
        self.objects[name] = tensor
        facts.tensors.append(tensor_entry)

    def _keys_of(self, name: str, tensor: Any, kind: str) -> tuple[str, ...]:
        if self._infer_saved:
            return (name,) if kind in ("parameter", "buffer") else ()
        return tuple(self._saved_keys.get(id(tensor), ()))

    @property
    def foreign_tensors(self) -> int:
        return len(self._groups)

    def fill_shared(self, modules: list[InspectedModule]) -> None:
        """Set `shared_with` of all tensors."""
        by_storage: dict[int, list[str]] = defaultdict(list)
        for facts in modules:
            for tensor_entry in facts.tensors:
                tensor = self.objects[tensor_entry.name]
                key = self._ownership.storage(tensor)
                by_storage[key if key is not None else -id(tensor)] += self._names[id(tensor)]
        for facts in modules:
            for tensor_entry in facts.tensors:
                tensor = self.objects[tensor_entry.name]
                key = self._ownership.storage(tensor)
                names = by_storage[key if key is not None else -id(tensor)]
                tensor_entry.shared_with = tuple(dict.fromkeys(name for name in names if name != tensor_entry.name))


def collect_tensors(ownership: Ownership, model: Any, optimizers: Sequence[Any]) -> InspectedModel:
    """Walk the model once, without changing it. Gradients are read to distinguish zero from set."""
    tree = Tree(ownership.framework, model)
    collector = _TensorCollector(ownership, model, optimizers)
    modules = [collector.module(site.name, site.cls, site.owner) for site in tree.sites]
    by_name = {facts.name: facts for facts in modules}
    for alias in tree.aliases:
        by_name[alias.first].also.append(alias.name)
    known = {id(site.owner) for site in tree.sites} | {id(site.module) for site in tree.sites}
    known |= _wrapper_ids(ownership, model)
    result: list[InspectedModule] = []
    for facts, site in zip(modules, tree.sites, strict=True):
        result += [facts, *collector.attributes(facts, site.owner, known)]
    collector.fill_shared(result)
    return InspectedModel(
        result, collector.hidden, collector.foreign_tensors, collector.state_dict_error, collector.objects
    )


def _wrapper_ids(ownership: Ownership, model: Any) -> set[int]:
    """Return the ids of the model and all modules in it. Wrapped modules often refer back to their wrapper."""
    found = {id(model)}
    for _, child in ownership.framework.children(model):
        found |= _wrapper_ids(ownership, child)
    return found


def _find_inside(path: str, value: Any, ownership: Ownership, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the tensors and modules in plain lists, tuples and dicts."""
    if ownership.framework.is_tensor(value) or ownership.is_module(value):
        yield path, value
    elif depth < _MAX_DEPTH and isinstance(value, (list, tuple, Mapping)) and len(value) <= _MAX_ITEMS:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _find_inside(f"{path}[{key!r}]", item, ownership, depth + 1)
