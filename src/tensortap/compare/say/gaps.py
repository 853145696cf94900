"""Further sentences about gaps: what was not recorded and may be wrong instead, and steps that one side lacks."""

from __future__ import annotations

from collections.abc import Mapping

from tensortap.compare.say.formatting import listed, rounded

__all__ = [
    "about_selection",
    "describe_hidden_optimizer",
    "describe_moved_parameters",
    "describe_other_steps",
    "describe_unseen_parameters",
    "describe_unseen_start",
]


def describe_unseen_parameters() -> str:
    """Return a further sentence for a module that may be right while its parameters are wrong."""
    return ' Its parameters were not recorded, so the optimizer may be wrong instead: capture kinds=(..., "param").'


def describe_moved_parameters() -> str:
    """Return a further sentence for a module whose parameters changed after they were recorded."""
    return (
        " Its parameters changed within the step, after they were recorded, so what changes them may be wrong instead."
    )


def describe_unseen_start(kind: str) -> str:
    """Return a further sentence for a module whose parameters or buffers, by their kind, may differ from the start."""
    what = {"param": "parameters", "buffer": "buffers"}[kind]
    return f' Its {what} were not recorded, and may differ already: capture kinds=(..., "{kind}").'


def describe_hidden_optimizer(allowed: float | None) -> str:
    """Return a further sentence about the tolerance that is due to unrecorded parameters."""
    if allowed is None:
        return ""
    return (
        f" Parameters were not recorded: up to {rounded(allowed)} was allowed for gradient noise that an optimizer "
        'magnifies. This may hide a wrong optimizer: capture kinds=(..., "param").'
    )


def about_selection(text: str) -> str:
    """Return a sentence about a selection of records: what it lacks was left out, and may be recorded.

    >>> about_selection("its output 0 is off, and its inputs were not recorded.")
    'its output 0 is off, and its inputs were not selected.'
    """
    return text.replace("was not recorded", "was not selected").replace("were not recorded", "were not selected")


def describe_other_steps(reference: Mapping[int, int], candidate: Mapping[int, int]) -> str:
    """Return a further sentence about steps that one side lacks or ran more often, from the runs of each step.

    >>> describe_other_steps({0: 2, 1: 2, 2: 2}, {0: 2, 1: 4})
    ' The reference alone has step 2, and in step 1 it ran 2 times and the candidate 4 times.'
    """
    parts = []
    for name, own, other in (("reference", reference, candidate), ("candidate", candidate, reference)):
        if alone := sorted(set(own) - set(other)):
            parts.append(f"the {name} alone has step{'s' * (len(alone) > 1)} {listed(alone)}")
    both = sorted(step for step in set(reference) & set(candidate) if reference[step] != candidate[step])
    if both:
        ours, theirs = (f"{counts[both[0]]} time{'s' * (counts[both[0]] > 1)}" for counts in (reference, candidate))
        subject = "it ran" if parts and parts[-1].startswith("the reference") else "the reference ran"
        parts.append(f"in step{'s' * (len(both) > 1)} {listed(both)} {subject} {ours} and the candidate {theirs}")
    text = ", and ".join(parts)
    return f" {text[0].upper()}{text[1:]}." if text else ""
