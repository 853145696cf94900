"""Copy weights between models of one architecture that differ in framework, names or tensor layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tensortap.core import dtypes
from tensortap.core.name_mapping import MappedName, UnmappedName
from tensortap.errors import UsageError
from tensortap.frameworks import Framework, framework_of, network_of, require
from tensortap.frameworks.capabilities import ValueWriting
from tensortap.model.page_width import page_width

if TYPE_CHECKING:
    from tensortap.mapping.model_mapping import ModelMapping
    from tensortap.mapping.outline import ModelOutline

__all__ = ["CopiedTensor", "Transfer", "transfer"]

_MAX_NAMED = 5


def transfer(
    source_model: Any,
    target_model: Any,
    rules: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
) -> Transfer:
    """Copy parameters and buffers into another model of the same architecture, and return a report.

    source_model, target_model: torch or paddle, in any combination. The target's tensors keep their dtype and device.
    rules: a TOML file, or a dict of the same form, for modules and tensors that names and structure do not identify. A
        rule may call the source `reference` and the target `candidate`.
    strict: raise UsageError and copy nothing if a tensor of either model has no counterpart.

    >>> report = tensortap.transfer(torch_model, paddle_model)
    >>> print(report)
    34 tensors copied from Net (torch) to Net (paddle): 20 as they are, 14 transposed.
    >>> report.left
    []
    """
    from tensortap.mapping.model_mapping import map_models
    from tensortap.mapping.rules_file import read_rules

    source_model, target_model = network_of(source_model), network_of(target_model)
    ends = _ModelEnd(framework_of(source_model), source_model), _ModelEnd(framework_of(target_model), target_model)
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
        left=[each for each, saved in _find_unplaced(found, ends[::-1]) if saved],
        ignored=[
            *(
                UnmappedName(role, name, why)
                for side, role in enumerate(("target", "source"))
                for name, why in found.tensor_matches.ignored[side].items()
            ),
            *(
                replace(each, why="not saved with the model")
                for each, saved in _find_unplaced(found, ends[::-1])
                if not saved
            ),
        ],
        unused=found.unused,
    )
    if strict and report.left:
        named = "; ".join(f"{left.side} {left.name}: {left.why}" for left in report.left[:_MAX_NAMED])
        raise UsageError(
            f"{len(report.left)} tensors could not be placed, and nothing was copied: {named}. Place them with rules=, "
            "or copy the others with strict=False"
        )
    _copy(found, source, target, report)
    return report


@dataclass(frozen=True, slots=True)
class CopiedTensor:
    """A tensor of the target, and the tensors that it was copied from."""

    target: str
    source: tuple[str, ...]
    how: str
    """The method that found the source: same name, rule, shape, order."""
    change: str
    """The change of the values, like "transposed"; empty if there was none."""
    shape: tuple[int, ...]
    dtype: str
    cast_from: str = ""
    """The source's dtype, if it differs."""


@dataclass
class Transfer:
    """The report of a transfer."""

    source: str
    target: str
    copied: list[CopiedTensor] = field(default_factory=list)
    modules: Sequence[MappedName] = ()
    """Corresponding modules; `reference` is the source's."""
    left: list[UnmappedName] = field(default_factory=list)
    """Tensors of either side ("source", "target") without a counterpart, and why."""
    ignored: Sequence[UnmappedName] = ()
    """Tensors that have no counterpart by a rule, or because they are not saved with the model."""
    unused: Sequence[str] = ()
    """Rules that matched nothing."""

    @property
    def complete(self) -> bool:
        """Whether every tensor has a counterpart."""
        return not self.left

    def as_dict(self) -> dict[str, Any]:
        """Return the whole report, ready for json.dumps."""
        return asdict(self) | {"complete": self.complete}

    def __str__(self) -> str:
        from tensortap.report.terminal.transfer import transfer_page  # loads rich; importing tensortap must not

        return "\n".join(transfer_page(self.as_dict(), page_width()))

    def __repr__(self) -> str:
        return f"<Transfer {self.source} → {self.target}: {len(self.copied)} copied, {len(self.left)} left>"


class _ModelEnd:
    """One of the two models: its outline, and its tensors by full name."""

    def __init__(self, framework: Framework, model: Any) -> None:
        from tensortap.capture.modules.tree import Tree
        from tensortap.frameworks.registered import registered
        from tensortap.mapping.outline import ModelOutline, ModuleOutline, TensorOutline, full_name

        self.framework = framework
        self.tensors: dict[str, Any] = {}
        self.unsaved: set[str] = set()
        """Buffers that the model computes when it is built and does not save."""
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


def _find_unplaced(found: ModelMapping, ends: Sequence[_ModelEnd]) -> Iterator[tuple[UnmappedName, bool]]:
    """Yield the tensors without a counterpart, and whether a state dict has them."""
    for side, (role, end) in enumerate(zip(("target", "source"), ends, strict=True)):
        for name, why in found.tensor_matches.left(side):
            why = why.replace("candidate", "target").replace("reference", "source")
            yield UnmappedName(role, name, why), name not in end.unsaved


def _copy(found: ModelMapping, source: _ModelEnd, target: _ModelEnd, report: Transfer) -> None:
    writing: ValueWriting = require(target.framework, ValueWriting, "transferring weights into a model")
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
        writing.fill(tensor, array)
        filled[id(tensor)] = name, array
        dtype = dtypes.name_of(target.framework.host(tensor).dtype)
        given = dtypes.name_of(array.dtype)
        report.copied.append(
            CopiedTensor(
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
    """Return the shape; empty for a lazy tensor, which has none yet."""
    try:
        return tuple(int(size) for size in tensor.shape)
    except RuntimeError:
        return ()
