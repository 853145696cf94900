"""The environments of two runs side by side; a difference is often the cause of a divergence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensortap.report.wording import clean

__all__ = ["Setting", "settings"]

_TITLES = {"variables": "environment variables", "random_states": "random states at the start"}
_NOWHERE = "–"


@dataclass(frozen=True)
class Setting:
    """One setting of a run."""

    group: str
    name: str
    reference: str
    candidate: str | None
    """The candidate's value; None if there is only one run."""

    @property
    def differs(self) -> bool:
        return self.candidate is not None and self.candidate != self.reference

    def object(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "name": self.name,
            "reference": self.reference,
            "candidate": self.candidate,
            "differs": self.differs,
        }


def settings(reference: Mapping[str, Any], candidate: Mapping[str, Any] | None = None) -> list[Setting]:
    """Return the settings in run.json of one run or both; those that differ come first."""
    ours, theirs = _flat(reference), {} if candidate is None else _flat(candidate)
    found = [
        Setting(*spot, ours.get(spot, _NOWHERE), None if candidate is None else theirs.get(spot, _NOWHERE))
        for spot in dict.fromkeys([*ours, *theirs])
    ]
    return sorted(found, key=lambda setting: not setting.differs)


def _flat(info: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Return the value of each (group, name) as text."""
    found = {("run", name): _said(info[name]) for name in ("framework", "model", "modules", "world") if name in info}
    environment = info.get("environment")
    for name, value in (environment if isinstance(environment, Mapping) else {}).items():
        if isinstance(value, Mapping):
            found |= {(_TITLES.get(name, str(name)), str(key)): _said(each) for key, each in value.items()}
        else:
            found["process", str(name)] = _said(value)
    config = info.get("config")
    for name, value in (config if isinstance(config, Mapping) else {}).items():
        found["capture", str(name)] = _said(value)
    return {(clean(group), clean(name)): text for (group, name), text in found.items()}


def _said(value: Any) -> str:
    if value is None:
        return _NOWHERE
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return clean(", ".join(map(str, value)))
    return clean(value)
