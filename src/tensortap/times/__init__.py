"""Attribute the time of a profile to modules: profile → timeline → ledger → table."""

from __future__ import annotations

from tensortap.times.attribution import attribute
from tensortap.times.ledger import ModulePhase, TimeLedger, Usage
from tensortap.times.traces.profiles import read_profile

__all__ = ["ModulePhase", "TimeLedger", "Usage", "attribute", "read_profile"]
