"""All mistakes of the field zoo."""

from __future__ import annotations

from .decoders import DECODERS
from .encoders import ENCODERS
from .held_out import HELD_OUT
from .vision import VISION

MISTAKES = [*DECODERS, *ENCODERS, *VISION, *HELD_OUT]
