"""Where the time of a profile went, by module: profile → timeline → ledger → table."""

from __future__ import annotations

from tensortap.times.attribution import attribute
from tensortap.times.ledger import Ledger, Place, Spent
from tensortap.times.traces.profiles import read_profile

__all__ = ["Ledger", "Place", "Spent", "attribute", "read_profile"]
