"""Every tensor that a model holds, and what the framework will do with it: plain data, gathered in one walk."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tensortap.capture.tree import Tree
from tensortap.frameworks.ownership import Ownership
from tensortap.frameworks.registered import registered

__all__ = ["Gathered", "HiddenModule", "ModuleFacts", "TensorFacts", "gather"]

_DEEPEST = 3  # lists of dicts of tensors happen; deeper things are data, not a model
_MOST_ITEMS = 10_000


@dataclass(slots=True, eq=False)
class TensorFacts:
    """One tensor at its first name."""

    name: str
    """From the root: `layers.0.fc1.weight`; of a plain list or dict `tables[0]`, `cache['k']`."""
    module: str
    own: str
    """The last part of the name, as its module knows it."""
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
    """Groups of the optimizer that hold it."""
    saved_as: tuple[str, ...] = ()
    """Keys of the state_dict."""
    moved: bool = False
    """Whether `model.to()` takes it along."""
    shared_with: tuple[str, ...] = ()
    """Other names of the same tensor, or of tensors that look into the same memory."""
    initialised: bool = True
    is_parameter: bool = False
    """Of class Parameter, registered or not."""
    statistics: bool = False
    """A parameter that holds running statistics and plays the role of a buffer: paddle's running mean and variance."""
    hidden_in: str = ""
    """The plain attribute that keeps this tensor's module from being seen."""

    @property
    def elements(self) -> int:
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def registered(self) -> bool:
        return self.kind != "attribute"


@dataclass(slots=True, eq=False)
class ModuleFacts:
    name: str
    cls: str
    tensors: list[TensorFacts] = field(default_factory=list)
    hidden_in: str = ""
    also: list[str] = field(default_factory=list)
    """Other names of the same module."""
    ties: list[tuple[str, str]] = field(default_factory=list)
    """Own names of tensors that were met before, and the names under which they stand."""


@dataclass(slots=True, eq=False)
class HiddenModule:
    """A module that stands in a plain list, dict or attribute, where nobody looks for it."""

    attribute: str
    container: str
    name: str
    tensors: list[TensorFacts]


@dataclass(slots=True, eq=False)
class Gathered:
    modules: list[ModuleFacts]
    hidden: list[HiddenModule]
    strangers: int
    """Tensors of the optimizer that are nowhere in the model."""
    state_dict_error: str
    objects: dict[str, Any]
    """The tensors themselves, by first name."""


class _Walk:
    def __init__(self, ownership: Ownership, model: Any, optimizer: Any) -> None:
        self._own = ownership
        self._groups: dict[int, list[int]] = defaultdict(list)
        if optimizer is not None:
            for number, members in enumerate(ownership.groups(optimizer)):
                for tensor in members:
                    self._groups[id(tensor)].append(number)
        self.error = ""
        self._keys: dict[int, list[str]] = defaultdict(list)
        self._guess = False
        try:
            for key, tensor in ownership.saved(model).items():
                self._keys[id(tensor)].append(key)
        except Exception as error:  # a user's own hook may need what is not there yet; the rules still hold
            self.error, self._guess = f"{type(error).__name__}: {error}", True
        self.objects: dict[str, Any] = {}
        self._first: dict[int, TensorFacts] = {}
        self._names: dict[int, list[str]] = defaultdict(list)
        self.hidden: list[HiddenModule] = []

    def module(self, name: str, cls: str, module: Any, hidden_in: str = "") -> ModuleFacts:
        facts = ModuleFacts(name, cls, hidden_in=hidden_in)
        for own, tensor, registration in registered(self._own.framework, module):
            kind = "attribute" if hidden_in else registration.kind
            self._add(facts, own, tensor, kind, statistics=registration.statistics and not hidden_in)
        return facts

    def attributes(self, facts: ModuleFacts, module: Any, known: set[int]) -> Iterator[ModuleFacts]:
        """After all that is registered: an attribute that is only another handle on it is no tensor of its own."""
        for attribute, value in self._own.attributes(module):
            for path, found in _inside(attribute, value, self._own):
                if not self._own.is_module(found):
                    first = self._first.get(id(found))
                    if first is None or first.kind.endswith("buffer"):
                        self._add(facts, path, found, "attribute")
                elif id(found) not in known:
                    full = f"{facts.name}.{path}" if facts.name else path
                    yield from self._unseen(full, type(value).__name__, facts.name, attribute, found, known)

    def _unseen(
        self, path: str, container: str, owner: str, attribute: str, module: Any, known: set[int]
    ) -> Iterator[ModuleFacts]:
        where = f"{owner}.{attribute}" if owner else attribute
        tensors: list[TensorFacts] = []
        for site in Tree(self._own.framework, module).sites:
            if id(site.owner) in known:
                continue
            known.add(id(site.owner))
            name = f"{path}.{site.name}" if site.name else path
            facts = self.module(name, site.cls, site.owner, hidden_in=where)
            tensors += facts.tensors
            yield facts
        self.hidden.append(HiddenModule(where, container, path, tensors))

    def _add(self, facts: ModuleFacts, own: str, tensor: Any, kind: str, statistics: bool = False) -> None:
        name = f"{facts.name}.{own}" if facts.name else own
        self._names[id(tensor)].append(name)
        if (first := self._first.get(id(tensor))) is not None and first.kind == kind != "attribute":
            facts.ties.append((own, first.name))
            return
        dtype, shape, size, device = self._own.described(tensor)
        entry = TensorFacts(
            name=name,
            module=facts.name,
            own=own,
            kind=kind,
            dtype=dtype,
            shape=shape,
            nbytes=0,
            device=device,
            requires_grad=self._own.framework.requires_gradient(tensor),
            gradient=self._own.gradient(tensor),
            groups=tuple(self._groups.pop(id(tensor), ())),
            saved_as=self._saved(name, tensor, kind),
            moved=kind != "attribute",
            initialised=self._own.initialised(tensor),
            is_parameter=self._own.is_parameter(tensor),
            statistics=statistics,
            hidden_in=facts.hidden_in,
        )
        entry.nbytes = entry.elements * size
        self._first.setdefault(id(tensor), entry)
        self.objects[name] = tensor
        facts.tensors.append(entry)

    def _saved(self, name: str, tensor: Any, kind: str) -> tuple[str, ...]:
        if self._guess:
            return (name,) if kind in ("parameter", "buffer") else ()
        return tuple(self._keys.get(id(tensor), ()))

    @property
    def strangers(self) -> int:
        return len(self._groups)

    def share(self, modules: list[ModuleFacts]) -> None:
        """Fill in who shares memory with whom."""
        by_storage: dict[int, list[str]] = defaultdict(list)
        for facts in modules:
            for entry in facts.tensors:
                tensor = self.objects[entry.name]
                key = self._own.storage(tensor)
                by_storage[key if key is not None else -id(tensor)] += self._names[id(tensor)]
        for facts in modules:
            for entry in facts.tensors:
                tensor = self.objects[entry.name]
                key = self._own.storage(tensor)
                names = by_storage[key if key is not None else -id(tensor)]
                entry.shared_with = tuple(dict.fromkeys(name for name in names if name != entry.name))


def gather(ownership: Ownership, model: Any, optimizer: Any) -> Gathered:
    """Walk the model once. Nothing is changed; a gradient is read to tell zero from set."""
    tree = Tree(ownership.framework, model)
    walk = _Walk(ownership, model, optimizer)
    modules = [walk.module(site.name, site.cls, site.owner) for site in tree.sites]
    by_name = {facts.name: facts for facts in modules}
    for alias in tree.aliases:
        by_name[alias.first].also.append(alias.name)
    known = {id(site.owner) for site in tree.sites} | {id(site.module) for site in tree.sites}
    known |= _wrappers(ownership, model)
    result: list[ModuleFacts] = []
    for facts, site in zip(modules, tree.sites, strict=True):
        result += [facts, *walk.attributes(facts, site.owner, known)]
    walk.share(result)
    return Gathered(result, walk.hidden, walk.strangers, walk.error, walk.objects)


def _wrappers(ownership: Ownership, model: Any) -> set[int]:
    """A wrapper around the model is known, too: what it wraps often points back at it."""
    found = {id(model)}
    for _, child in ownership.framework.children(model):
        found |= _wrappers(ownership, child)
    return found


def _inside(path: str, value: Any, ownership: Ownership, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors and modules in plain lists, tuples and dicts."""
    if ownership.framework.is_tensor(value) or ownership.is_module(value):
        yield path, value
    elif depth < _DEEPEST and isinstance(value, (list, tuple, Mapping)) and len(value) <= _MOST_ITEMS:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _inside(f"{path}[{key!r}]", item, ownership, depth + 1)
