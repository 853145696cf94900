"""Families of models with the mistakes planted in them, one folder for each occasion on which they were written.

In a folder, `families` has the models and their data, and each other module has the mistakes of a part of them as
`MISTAKES`. `original` and `newer` were written while rules were made; a part of each is held out. Each of `TRIALS` was
written without a look at any result, and run once before a rule was changed for it. `after_sixth` was written once
the rules had been changed for the sixth trial. `further` has families for right pairs alone.
"""

from __future__ import annotations

from field.kit.building import Family

from .after_sixth.families import FAMILIES as AFTER_SIXTH
from .eighth.families import FAMILIES as EIGHTH
from .fifth.families import FAMILIES as FIFTH
from .first.families import FAMILIES as FIRST
from .fourth.families import FAMILIES as FOURTH
from .further.families import FAMILIES as FURTHER
from .newer.families import FAMILIES as NEWER
from .ninth.families import FAMILIES as NINTH
from .original.families import FAMILIES as ORIGINAL
from .second.families import FAMILIES as SECOND
from .seventh.families import FAMILIES as SEVENTH
from .sixth.families import FAMILIES as SIXTH
from .tenth.families import FAMILIES as TENTH
from .third.families import FAMILIES as THIRD

__all__ = ["EVERY", "FAMILIES", "FURTHER", "SETS", "TRIALS"]

SETS: dict[str, dict[str, Family]] = {
    "original": ORIGINAL,
    "newer": NEWER,
    "first": FIRST,
    "second": SECOND,
    "third": THIRD,
    "fourth": FOURTH,
    "fifth": FIFTH,
    "sixth": SIXTH,
    "after_sixth": AFTER_SIXTH,
    "seventh": SEVENTH,
    "eighth": EIGHTH,
    "ninth": NINTH,
    "tenth": TENTH,
}
"""All families that have mistakes, by folder."""
TRIALS = {name: families for name, families in SETS.items() if name not in ("original", "newer", "after_sixth")}

FAMILIES: dict[str, Family] = {name: family for families in SETS.values() for name, family in families.items()}
EVERY: dict[str, Family] = FAMILIES | FURTHER
