"""Names of tolerance rules that the judge and the reports ask for. `table` names all others itself."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS",
    "CAME_IN",
    "CANCELLED_GRADIENT",
    "FEW_STEPS",
    "KINK",
    "MOST_CAME_IN",
    "MOVED_TIES",
    "NAIVE_SUM",
    "OTHER_GELU",
    "ROUNDING",
    "ROUNDING_INSIDE",
    "SAME_MASK",
    "UNSEEN_PARAMETERS",
    "UNSEEN_USE",
]

ROUNDING = "rounding of its dtype"
SAME_MASK = "a mask: hides the same elements"
CAME_IN = "error that came in"
ACTIVATIONS = "error of the activations"
KINK = "few elements crossed a kink"
FEW_STEPS = "few elements, whose gradient is nearly zero, took another step"
CANCELLED_GRADIENT = "rounding of what cancels out in it"
NAIVE_SUM = "a sum of many short numbers, which is this far off if it is rounded after each of them"
ROUNDING_INSIDE = "the code computes in a short dtype, and numbers that cancel out or large scores magnify rounding"
MOVED_TIES = "rounding moved ties of a maximum, and neighbours share the gradients of these"
OTHER_GELU = "one side computes GELU by erf, the other one its approximation by tanh"
MOST_CAME_IN = "so much error came in that a mistake would not show"
UNSEEN_USE = "one side runs inside a graph, where the model reads this output itself, unseen"
UNSEEN_PARAMETERS = "earlier gradients' noise in parameters that were not recorded"
