"""All mistakes of the field zoo."""

from __future__ import annotations

from .blind_after_sixth import AFTER_SIXTH_MISTAKES
from .blind_decoders import BLIND_DECODERS
from .blind_eighth_decoders import EIGHTH_DECODERS
from .blind_eighth_encoders import EIGHTH_ENCODERS
from .blind_eighth_senses import EIGHTH_SENSES
from .blind_encoders import BLIND_ENCODERS
from .blind_fifth_decoders import FIFTH_DECODERS
from .blind_fifth_encoders import FIFTH_ENCODERS
from .blind_fourth_decoders import FOURTH_DECODERS
from .blind_fourth_encoders import FOURTH_ENCODERS
from .blind_second_decoders import SECOND_DECODERS
from .blind_second_encoders import SECOND_ENCODERS
from .blind_seventh_decoders import SEVENTH_DECODERS
from .blind_seventh_encoders import SEVENTH_ENCODERS
from .blind_seventh_senses import SEVENTH_SENSES
from .blind_sixth_decoders import SIXTH_DECODERS
from .blind_sixth_encoders import SIXTH_ENCODERS
from .blind_third_decoders import THIRD_DECODERS
from .blind_third_encoders import THIRD_ENCODERS
from .decoders import DECODERS
from .encoders import ENCODERS
from .held_out import HELD_OUT
from .newer_decoders import NEWER_DECODERS
from .newer_encoders import NEWER_ENCODERS
from .newer_held_out import NEWER_HELD_OUT
from .vision import VISION

MISTAKES = [
    *DECODERS,
    *ENCODERS,
    *VISION,
    *HELD_OUT,
    *NEWER_DECODERS,
    *NEWER_ENCODERS,
    *NEWER_HELD_OUT,
    *BLIND_DECODERS,
    *BLIND_ENCODERS,
    *SECOND_DECODERS,
    *SECOND_ENCODERS,
    *THIRD_DECODERS,
    *THIRD_ENCODERS,
    *FOURTH_DECODERS,
    *FOURTH_ENCODERS,
    *FIFTH_DECODERS,
    *FIFTH_ENCODERS,
    *SIXTH_DECODERS,
    *SIXTH_ENCODERS,
    *AFTER_SIXTH_MISTAKES,
    *SEVENTH_DECODERS,
    *SEVENTH_ENCODERS,
    *SEVENTH_SENSES,
    *EIGHTH_DECODERS,
    *EIGHTH_ENCODERS,
    *EIGHTH_SENSES,
]
