"""Weights from one model into another of the same architecture: another framework, other names, another layout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tensortap.core import dtypes
from tensortap.core.name_mapping import MappedName, UnmappedName
from tensortap.errors import UsageError
from tensortap.frameworks import Framework, framework_of, network_of

if TYPE_CHECKING:
    from tensortap.mapping.model_mapping import ModelMapping
    from tensortap.mapping.outline import ModelOutline

__all__ = ["Copied", "Transfer", "transfer"]

_MOST_NAMED = 5


def transfer(
    source_model: Any,
    target_model: Any,
    rules: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> Transfer:
    """Copy parameters and buffers into another model of the same architecture, and report what was done.

    source_model, target_model: torch or paddle, in any combination. The target's tensors keep their dtype and device.
    rules: a TOML file, or a mapping of the same form, for what names and structure do not say; a rule may call the
        source `reference` and the target `candidate`.
    strict: raise, and copy nothing, if anything of either model could not be placed.

    >>> report = tensortap.transfer(torch_model, paddle_model)
    >>> print(report)
    34 tensors copied from Net (torch) to Net (paddle): 20 as they are, 14 transposed.
    >>> report.left
    []
    """
    from tensortap.mapping.model_mapping import map_models
    from tensortap.mapping.rules_file import read_rules

    source_model, target_model = network_of(source_model), network_of(target_model)
    ends = _End(framework_of(source_model), source_model), _End(framework_of(target_model), target_model)
    source, target = ends
    found = map_models(
        target.outline, source.outline, None if rules is None else read_rules(rules), roles=("candidate", "reference")
    )
    report = Transfer(
        source=f"{type(source_model).__name__} ({source.framework.name})",
        target=f"{type(target_model).__name__} ({target.framework.name})",
        modules=[
            MappedName(given, made, found.module_matches.how[made])
            for made, given in found.module_matches.source_of.items()
        ],
        left=[each for each, saved in _left(found, ends[::-1]) if saved],
        ignored=[
            *(
                UnmappedName(role, name, why)
                for side, role in enumerate(("target", "source"))
                for name, why in found.tensor_matches.ignored[side].items()
            ),
            *(replace(each, why="not saved with the model") for each, saved in _left(found, ends[::-1]) if not saved),
        ],
        unused=found.unused,
    )
    if strict and report.left:
        named = "; ".join(f"{left.side} {left.name}: {left.why}" for left in report.left[:_MOST_NAMED])
        raise UsageError(f"{len(report.left)} tensors could not be placed, and nothing was copied: {named}")
    _copy(found, source, target, report)
    return report


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor of the target, and what it was made of."""

    target: str
    source: tuple[str, ...]
    how: str
    """By what it was found: same name, rule, shape, order."""
    change: str
    """What was done to it on the way: "transposed"; empty if nothing."""
    shape: tuple[int, ...]
    dtype: str
    cast_from: str = ""
    """The source's dtype, if it is another."""


@dataclass
class Transfer:
    """What a transfer did."""

    source: str
    target: str
    copied: list[Copied] = field(default_factory=list)
    modules: Sequence[MappedName] = ()
    """Modules that belong together; `reference` is the source's."""
    left: list[UnmappedName] = field(default_factory=list)
    """What could not be placed, of either side ("source", "target"), and why."""
    ignored: Sequence[UnmappedName] = ()
    """What a rule says has no counterpart."""
    unused: Sequence[str] = ()
    """Rules that fitted nothing."""

    @property
    def complete(self) -> bool:
        """Whether everything found its place."""
        return not self.left

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for json.dumps."""
        return asdict(self) | {"complete": self.complete}

    def __str__(self) -> str:
        from tensortap.report.terminal.transfer import transfer_page  # loads rich; importing tensortap must not

        width = os.environ.get("COLUMNS", "")
        return "\n".join(transfer_page(self.as_dict(), int(width) if width.isdecimal() and int(width) >= 40 else 80))

    def __repr__(self) -> str:
        return f"<Transfer {self.source} → {self.target}: {len(self.copied)} copied, {len(self.left)} left>"


class _End:
    """One of the two models: its outline, and its tensors by full name."""

    def __init__(self, framework: Framework, model: Any) -> None:
        from tensortap.capture.tree import Tree
        from tensortap.frameworks.registered import registered
        from tensortap.mapping.outline import ModelOutline, ModuleOutline, TensorOutline, full_name

        self.framework = framework
        self.tensors: dict[str, Any] = {}
        self.unsaved: set[str] = set()
        """Buffers that are computed when the model is built, and are no part of its state dict."""
        first: dict[int, str] = {}
        modules = []
        for site in Tree(framework, model).sites:
            own: dict[str, TensorOutline] = {}
            for kind, found in (
                ("param", framework.parameters(site.owner)),
                ("buffer", framework.buffers(site.owner)),
            ):
                for name, tensor in found:
                    full = full_name(site.name, name)
                    self.tensors[full] = tensor
                    tied = first.setdefault(id(tensor), full)
                    own[name] = TensorOutline(_shape(framework, tensor), kind, tied if tied != full else "")
            self.unsaved |= {
                full_name(site.name, n) for n, _, how in registered(framework, site.owner) if not how.saved
            }
            modules.append(ModuleOutline(site.name, site.cls, own, base=site.base))
        self.outline: ModelOutline = ModelOutline(framework.name, modules)


def _left(found: ModelMapping, ends: Sequence[_End]) -> Iterator[tuple[UnmappedName, bool]]:
    """Tensors that could not be placed, and whether a state dict has them. Modules without tensors do not matter."""
    for side, (role, end) in enumerate(zip(("target", "source"), ends, strict=True)):
        for name, why in found.tensor_matches.left(side):
            why = why.replace("candidate", "target").replace("reference", "source")
            yield UnmappedName(role, name, why), name not in end.unsaved


def _copy(found: ModelMapping, source: _End, target: _End, report: Transfer) -> None:
    filled = dict[int, tuple[str, Any]]()
    for name, reading in found.tensor_matches.conversions.items():
        tensor, parts = target.tensors[name], [source.tensors[part] for part in reading.parts]
        why = next((w for t in parts if (w := source.framework.unreadable(t))), target.framework.unreadable(tensor))
        if why:
            report.left.append(UnmappedName("target", name, why))
            continue
        array = reading.apply([source.framework.host(part) for part in parts])
        if (known := filled.get(id(tensor))) is not None:
            if known[1].tobytes() != array.tobytes():
                report.left.append(UnmappedName("source", reading.parts[0], f"the target ties {name} to {known[0]}"))
            continue
        target.framework.fill(tensor, array)
        filled[id(tensor)] = name, array
        dtype = dtypes.name_of(target.framework.host(tensor).dtype)
        given = dtypes.name_of(array.dtype)
        report.copied.append(
            Copied(
                target=name,
                source=reading.parts,
                how=found.tensor_matches.how[name],
                change=reading.words(),
                shape=tuple(array.shape),
                dtype=dtype,
                cast_from=given if given != dtype else "",
            )
        )


def _shape(framework: Framework, tensor: Any) -> tuple[int, ...]:
    """A lazy tensor has none yet."""
    try:
        return tuple(int(size) for size in tensor.shape)
    except RuntimeError:
        return ()
