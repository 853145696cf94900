"""All mistakes of the field zoo."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from field.kit.mistake import Mistake
from field.sets import SETS

_PARTS = ("decoders", "encoders", "vision", "senses", "held_out", "mistakes")
"""The modules of mistakes that the folder of a set may have, in the order of the zoo."""


def _mistakes() -> Iterator[Mistake]:
    for folder in SETS:
        for part in _PARTS:
            if Path(__file__).with_name("sets").joinpath(folder, f"{part}.py").exists():
                yield from import_module(f"field.sets.{folder}.{part}").MISTAKES


MISTAKES = list(_mistakes())
