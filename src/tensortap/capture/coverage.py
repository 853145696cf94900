"""Coverage: what the tap saw of each module, so that a gap is never mistaken for agreement."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tensortap.capture.modules.tree import ModuleAlias, Site
from tensortap.core.records import ALL_FROZEN, GRADIENT_KINDS, Coverage, Status

__all__ = ["CoverageBook"]


@dataclass(slots=True)
class _ModuleCoverage:
    site: Site
    calls: int = 0
    gradients: int = 0
    without_autograd: int = 0
    evaluations: int = 0
    alias: bool = False
    remarks: dict[str, None] = field(default_factory=dict)


class CoverageBook:
    """Collects what happened to each module; `rows()` returns the report."""

    def __init__(
        self,
        sites: Sequence[Site],
        aliases: Sequence[ModuleAlias],
        kinds: Collection[str],
        frozen: Collection[str] = (),
        without_parameters: Collection[str] = (),
    ) -> None:
        """`frozen` names modules whose own parameters are all frozen, `without_parameters` those that have none."""
        self._entries = {site.name: _ModuleCoverage(site) for site in sites}
        self._aliases = list(aliases)
        gradients = set(GRADIENT_KINDS).intersection(kinds)
        self._expects_gradient = bool(gradients)
        self._without_gradient = set(without_parameters) if gradients == {"param_grad"} else set[str]()
        """Modules of which no recorded kind is a gradient, although others have one."""
        self._frozen = set(frozen)
        self._notices: dict[str, None] = {}
        self._repeated: tuple[Mapping[str, tuple[int, int, int]], int] = {}, 0
        """The counts of the last whole step, and the number of its repetitions that are not added yet."""
        self.changed = True
        self.captured_steps = 0
        self.sees_inside = False
        """Whether modules inside compiled graphs are seen."""

    def restart(self) -> None:
        """Forget the calls so far. Remarks and notices stay."""
        for entry in self._entries.values():
            entry.calls = entry.gradients = entry.without_autograd = entry.evaluations = 0
        self._repeated = {}, 0
        self.captured_steps = 0
        self.changed = True

    def follow(self, site: Site, text: str) -> None:
        """Take over a module that was added, replaced or compiled, with a remark on that."""
        entry = self._entries.setdefault(site.name, _ModuleCoverage(site))
        entry.site = site
        self.remark(site.name, text)

    def set_aliases(self, aliases: Sequence[ModuleAlias]) -> None:
        self.changed = self.changed or list(aliases) != self._aliases
        self._aliases = list(aliases)

    def called(self, name: str, autograd: bool) -> None:
        entry = self._entries.get(name)
        if entry is None:
            return
        self.changed = self.changed or entry.calls == 0
        entry.calls += 1
        entry.without_autograd += not autograd

    def count_step(self, counts: Mapping[str, tuple[int, int, int]]) -> None:
        """Add the calls, the calls without autograd and the gradients of a whole step, by module.

        Steps that repeat the one before, with the same object, are counted later, all at once.
        """
        known, times = self._repeated
        if counts is known:
            self._repeated = counts, times + 1
        else:
            self._count_repeated()
            self._count(counts, 1)
            self._repeated = counts, 0

    def _count_repeated(self) -> None:
        counts, times = self._repeated
        self._repeated = counts, 0
        if times:
            self._count(counts, times)

    def _count(self, counts: Mapping[str, tuple[int, int, int]], times: int) -> None:
        for name, (calls, without_autograd, gradients) in counts.items():
            if (entry := self._entries.get(name)) is not None:
                newly = (calls > 0 and not entry.calls) or (gradients > 0 and not entry.gradients)
                self.changed = self.changed or newly
                entry.calls += calls * times
                entry.without_autograd += without_autograd * times
                entry.gradients += gradients * times

    def evaluated(self, name: str) -> None:
        """Count a call in an evaluation that is recorded."""
        if (entry := self._entries.get(name)) is not None:
            self.changed = self.changed or entry.evaluations == 0
            entry.evaluations += 1

    def gradient(self, name: str) -> None:
        if (entry := self._entries.get(name)) is not None:
            self.changed = self.changed or entry.gradients == 0
            entry.gradients += 1

    @property
    def any_call(self) -> bool:
        return any(entry.calls or entry.evaluations for entry in self._entries.values())

    @property
    def any_gradient(self) -> bool:
        return any(entry.gradients for entry in self._entries.values())

    def alias(self, name: str) -> None:
        """Mark a module that returns its input tensor unchanged."""
        self._entries[name].alias = True

    def remark(self, name: str, text: str) -> None:
        """Add a remark about one module that its numbers do not show."""
        entry = self._entries.get(name)
        if entry is not None and text and text not in entry.remarks:
            entry.remarks[text] = None
            self.changed = True

    def notice(self, text: str) -> None:
        """Add a notice about the run as a whole."""
        if text and text not in self._notices:
            self._notices[text] = None
            self.changed = True

    @property
    def notices(self) -> list[str]:
        return list(self._notices)

    def rows(self) -> list[Coverage]:
        self._count_repeated()
        rows = [self._row(entry) for entry in self._entries.values()]
        rows += [
            Coverage(
                alias.name,
                alias.cls,
                "alias",
                0,
                f"the same module as {alias.first or '(root)'}; recorded there",
            )
            for alias in self._aliases
        ]
        return rows

    def _row(self, entry: _ModuleCoverage) -> Coverage:
        status, reason = self._judge(entry)
        reasons = [reason, *entry.remarks] if reason else list(entry.remarks)
        site = entry.site
        return Coverage(site.name, site.cls, status, entry.calls, "; ".join(reasons), site.base)

    def _judge(self, entry: _ModuleCoverage) -> tuple[Status, str]:
        site = entry.site
        if entry.calls == 0:
            if entry.evaluations:
                return "seen", "in evaluation alone"
            if not site.callable:
                return "skipped", "it only holds other modules"
            if site.inside is not None and not self.sees_inside:
                return "skipped", f"runs inside the compiled graph of {site.inside or '(root)'}"
            if not self.captured_steps:
                return "never called", "no captured step has run"
            return (
                "never called",
                "unused, called through .forward(), or its parent reads its weights directly",
            )
        if self._expects_gradient and entry.gradients == 0 and site.name not in self._without_gradient:
            if entry.alias:
                return "alias", ""
            if entry.without_autograd == entry.calls:
                return "no gradient", "ran with autograd off"
            if site.name in self._frozen:
                return "no gradient", ALL_FROZEN
            return "no gradient", "backward did not reach it"
        return "seen", ""
