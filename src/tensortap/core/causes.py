"""Why a finding is wrong, as a value, and every phrase that reports use for it.

`compare.judge.causes` decides the cause of a finding, once. The terminal's sentence, JSON, JUnit, Markdown and the page
read the cause and the table `CAUSES`. A new class of mistake takes a member of `Cause`, an entry of `CAUSES` and a rule
in `compare.judge.causes`.

A cause names the code to inspect. A finding's status says how its value is wrong (diverged, nonfinite, shape), whatever
the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "CAUSES", "CONTAINER_CAUSES", "LAYOUT_CAUSES", "OUTSIDE_CAUSES", "PARAMETER_CAUSES", "UNCALLED", "Cause",
    "CauseWording",
]  # fmt: skip

UNCALLED = "the reference has one, and the candidate never calls the module"
"""The rule of a gradient that never comes because code leaves a module out."""


class Cause(str, Enum):
    """The code that made a value wrong. Members are strings, equal to what JSON and tables hold."""

    OUTPUT = "output"
    """A module returns a wrong value although its inputs are right."""
    OUTPUT_ON_UNKNOWN_INPUTS = "output_on_unknown_inputs"
    """A module returns a wrong value. None of its inputs was recorded, or none could be judged."""
    CONTAINER_CODE = "container_code"
    """The code of a container, between the modules that it calls, makes a wrong value."""
    LOST_MASK = "lost_mask"
    """The code of a container passes no mask to a module, where the reference's mask hides something from it."""
    EXTRA_MASK = "extra_mask"
    """The code of a container passes a mask to a module, where the reference's passes none."""
    LOST_INPUT = "lost_input"
    """The code of a container passes None to a module, where the reference's passes numbers."""
    EXTRA_INPUT = "extra_input"
    """The code of a container passes numbers to a module, where the reference's passes None."""
    HANDED_ON = "handed_on"
    """A module, whose output was not recorded, passes a wrong value to another."""
    BUFFER = "buffer"
    """A module leaves a wrong buffer behind although its inputs are right."""
    INPUT = "input"
    """The model is given another input."""
    UNRECORDED_INPUT = "unrecorded_input"
    """A module is given a wrong input, and nothing that made it was recorded."""
    PARAMETER_AT_START = "parameter_at_start"
    """A parameter differs before the first step."""
    PARAMETER_CHANGED = "parameter_changed"
    """A parameter differs before a later step; unrecorded code changed it."""
    BUFFER_AT_START = "buffer_at_start"
    """A buffer differs before the first step."""
    BUFFER_CHANGED = "buffer_changed"
    """A buffer differs before a later step; unrecorded code changed it."""
    CHECKPOINT = "checkpoint"
    """Two checkpoints hold different values."""
    OPTIMIZER = "optimizer"
    """The optimizer computes a wrong parameter from a right gradient."""
    STEP_GRADIENT = "step_gradient"
    """The optimizer is given a wrong gradient, although backward computed the right one."""
    PARAMETER_GRADIENT = "parameter_gradient"
    """A module's backward makes a wrong gradient of one of its parameters."""
    SENT_GRADIENT = "sent_gradient"
    """A module's backward sends a wrong gradient back."""
    CONTAINER_BACKWARD = "container_backward"
    """The backward of a container's own code makes a wrong gradient."""
    LOSS = "loss"
    """Code outside the model, such as the loss, makes a wrong gradient."""
    UNRECORDED_GRADIENT = "unrecorded_gradient"
    """The gradient at the model's output is wrong, and no forward was recorded to explain it."""
    MISSING_GRADIENT = "missing_gradient"
    """A module propagates no gradient where the reference does."""
    MISSING_IN_CONTAINER = "missing_gradient_in_container"
    """The code of a container detaches a value, so that no gradient passes where the reference has one."""
    EXTRA_GRADIENT = "extra_gradient"
    """A parameter gets a gradient that the reference's does not get."""
    EXTRA_IN_CONTAINER = "extra_gradient_in_container"
    """The code of a container lets a gradient pass that the reference's cuts off."""

    RECOMPUTATION = "recomputation"
    """Activation checkpointing recomputes other values than the first forward made."""
    LESS_EXACT = "less_exact"
    """A module rounds more than the reference's: it is within tolerance, but further from the truth."""

    REPLICA = "replica"
    """A rank holds another value than the replicas of it on other ranks."""
    STALE_REPLICA = "stale_replica"
    """A rank still holds an earlier value, while its replicas were updated."""
    LAYOUT = "layout"
    """The parts that ranks hold do not cover the whole once."""
    MISSING_REDUCTION = "missing_reduction"
    """Each rank holds a summand where the reduced value belongs."""
    REPEATED_REDUCTION = "repeated_reduction"
    """A value was summed over ranks that hold the whole sum already."""
    MEAN_FOR_SUM = "mean_for_sum"
    """A value was averaged over ranks where it should be summed."""
    SWAPPED_RANKS = "swapped_ranks"
    """Ranks hold the parts that belong to other ranks."""
    INTERLEAVING = "interleaving"
    """Parts that are fused into one tensor, such as query, key and value, are interleaved in another way."""
    EXPERT_PLACEMENT = "expert_placement"
    """A module holds the parameters of another expert."""
    STAGE_OFFSET = "stage_offset"
    """A module holds the parameters of another layer: the numbering of a pipeline stage is off."""
    PADDING = "padding"
    """Padding, as of a vocabulary, takes part in the computation."""
    SEQUENCE_ORDER = "sequence_order"
    """The ranks hold the positions of a sequence in another order."""
    GRADIENT_SCALE = "gradient_scale"
    """All gradients, also those that the optimizer uses, are scaled by one factor."""

    def __str__(self) -> str:
        return str(self.value)  # versions of Python differ in what they print for such an enum


LAYOUT_CAUSES = frozenset(
    {
        Cause.REPLICA,
        Cause.STALE_REPLICA,
        Cause.LAYOUT,
        Cause.MISSING_REDUCTION,
        Cause.REPEATED_REDUCTION,
        Cause.MEAN_FOR_SUM,
        Cause.SWAPPED_RANKS,
        Cause.INTERLEAVING,
        Cause.EXPERT_PLACEMENT,
        Cause.STAGE_OFFSET,
        Cause.PADDING,
        Cause.SEQUENCE_ORDER,
        Cause.GRADIENT_SCALE,
    }
)
"""Causes that only runs of several ranks have."""
PARAMETER_CAUSES = frozenset({Cause.PARAMETER_AT_START, Cause.PARAMETER_CHANGED, Cause.OPTIMIZER})
"""Causes that are about a parameter's value: no module computed it."""
OUTSIDE_CAUSES = frozenset(
    {Cause.INPUT, Cause.UNRECORDED_INPUT, Cause.LOSS, Cause.BUFFER_AT_START, Cause.BUFFER_CHANGED}
)
"""Causes outside the modules: the model's inputs, and the gradients that come back from the loss."""
CONTAINER_CAUSES = frozenset(
    {
        Cause.CONTAINER_CODE,
        Cause.CONTAINER_BACKWARD,
        Cause.MISSING_IN_CONTAINER,
        Cause.EXTRA_IN_CONTAINER,
        Cause.LOST_MASK,
        Cause.EXTRA_MASK,
        Cause.LOST_INPUT,
        Cause.EXTRA_INPUT,
    }
)
"""Causes in the code of a container, between the modules that it calls."""


@dataclass(frozen=True)
class CauseWording:
    """The phrases of reports for a cause. The fields in braces are those of `compare.say.divergence`."""

    label: str
    """A few words, for tables and lists."""
    sentence: str
    """The verdict of a comparison whose first finding has this cause."""
    isolated: str
    """The clause that shows the fault of a module that ran on the reference's own inputs."""
    isolated_verdict: str = "{name} is wrong on the reference's own inputs: {clause}."
    """The verdict of such a comparison, around the clause `isolated`."""
    sources_match: str = ""
    """About the value's sources, if they match."""
    sources_match_so_far: str = ""
    """The same if the sides ran the steps so far a different number of times; empty: as `sources_match`."""
    sources_unrecorded: str = ""
    """About the value's sources, if none was recorded."""
    born_in: str = "in {container}"
    """Where the value was born, if another module than the record's own is to blame."""


_OUTPUT = CauseWording(
    "wrong output on right inputs",
    "The runs part in {name}: in {where}, its output {path} {off}, {sources}.",
    "in {where}, its output {path} {off}",
    sources_match="while its inputs match",
    sources_unrecorded="and its inputs were not recorded",
)
_SENT = CauseWording(
    "wrong gradient sent back",
    "{agrees} runs part in the backward of {name}: in {where}, the gradient that it sends back to {target} {off}, "
    "{sources}.",
    "in {where}, {sent} {off}",
    sources_match="while the gradient that it was given matches",
    sources_unrecorded="and what it was given was not recorded",
    born_in="in the backward of {container}",
)
_CHANGED = "{full} differs before step {step}: it {off}. The code that changed it was not recorded."
_BEFORE, _AFTER = "before {where}, {full} {off}", "after {where}, {full} {off}"
_ALREADY = "The parameters already differed: {clause}{more}."
_BUFFER_ALREADY = "A buffer already differed: {clause}."
_BETWEEN = "code of {container}, between the modules it calls"
_NEVER_COMES = "the gradient of {module}'s {part} {path} never comes"
_PASSES = "a gradient comes to {module}'s {part} {path}"
_COMES = "a gradient comes to {module}'s parameter {path}"

CAUSES: dict[Cause, CauseWording] = {
    Cause.OUTPUT: _OUTPUT,
    Cause.OUTPUT_ON_UNKNOWN_INPUTS: CauseWording(
        "wrong output on unknown inputs",
        _OUTPUT.sentence,
        _OUTPUT.isolated,
        sources_unrecorded=_OUTPUT.sources_unrecorded,
    ),
    Cause.CONTAINER_CODE: CauseWording(
        "wrong value between modules",
        "The runs part in the own code of {name}: in {where}, what it passes to {module} (input {path}) {off}, "
        "{sources}.",
        "in {where}, what the own code of {name} passes to {module} (input {path}) {off}",
        sources_match="while all that it was made from matches",
        sources_unrecorded="and what it was made from was not recorded",
        born_in=f"in the {_BETWEEN}",
    ),
    Cause.HANDED_ON: CauseWording(
        "wrong value passed on",
        "The runs part in {name}: in {where}, what it passes to {module} (input {path}) {off}, {sources}.",
        "in {where}, what {name} passes to {module} (input {path}) {off}",
        sources_match="while all that it was made from matches",
        sources_unrecorded="and what it was made from was not recorded",
    ),
    Cause.LOST_MASK: CauseWording(
        "mask not passed on",
        "The runs part in the own code of {name}: in {where}, it passes no mask to {module} (input {path}), and the "
        "reference's hides elements there.",
        "in {where}, the own code of {name} passes no mask to {module} (input {path}), and the reference's hides "
        "elements there",
        born_in=f"in the {_BETWEEN}",
    ),
    Cause.EXTRA_MASK: CauseWording(
        "mask that the reference lacks",
        "The runs part in the own code of {name}: in {where}, it passes a mask to {module} (input {path}), and the "
        "reference passes none.",
        "in {where}, the own code of {name} passes a mask to {module} (input {path}), and the reference passes none",
        born_in=f"in the {_BETWEEN}",
    ),
    Cause.LOST_INPUT: CauseWording(
        "tensor not passed on",
        "The runs part in the own code of {name}: in {where}, it passes None to {module} (input {path}), and the "
        "reference passes a tensor.",
        "in {where}, the own code of {name} passes None to {module} (input {path}), and the reference passes a tensor",
        born_in=f"in the {_BETWEEN}",
    ),
    Cause.EXTRA_INPUT: CauseWording(
        "tensor that the reference does not pass on",
        "The runs part in the own code of {name}: in {where}, it passes a tensor to {module} (input {path}), and the "
        "reference passes None.",
        "in {where}, the own code of {name} passes a tensor to {module} (input {path}), and the reference passes None",
        born_in=f"in the {_BETWEEN}",
    ),
    Cause.BUFFER: CauseWording(
        "wrong buffer on right inputs",
        "The runs part in {name}: after {where}, its buffer {path} {off}, {sources}.",
        _AFTER,
        sources_match=_OUTPUT.sources_match,
        sources_unrecorded=_OUTPUT.sources_unrecorded,
    ),
    Cause.INPUT: CauseWording(
        "different input given",
        "The runs were not given the same input: in {where}, input {path} of {name} {off}.",
        "in {where}, input {path} of {name} {off}",
        isolated_verdict="The model was not given what the reference was: {clause}.",
    ),
    Cause.UNRECORDED_INPUT: CauseWording(
        "wrong input of unrecorded origin",
        "In {where}, input {path} of {name} {off} already; what made it was not recorded.",
        "in {where}, input {path} of {name} {off}",
    ),
    Cause.PARAMETER_AT_START: CauseWording(
        "wrong parameter at the start",
        "The parameters already differed before {start}: {full}{more}; {it} {off}.",
        _BEFORE,
        isolated_verdict=_ALREADY,
    ),
    Cause.PARAMETER_CHANGED: CauseWording(
        "parameter changed by unrecorded code", _CHANGED, _BEFORE, isolated_verdict=_ALREADY
    ),
    Cause.BUFFER_AT_START: CauseWording(
        "wrong buffer at the start",
        "The buffers already differed before {start}: {full}{more}; {it} {off}.",
        _BEFORE,
        isolated_verdict=_BUFFER_ALREADY,
    ),
    Cause.BUFFER_CHANGED: CauseWording(
        "buffer changed by unrecorded code", _CHANGED, _BEFORE, isolated_verdict=_BUFFER_ALREADY
    ),
    Cause.CHECKPOINT: CauseWording(
        "different value in a checkpoint", "The checkpoints differ in {full}{more}; {it} {off}.", _BEFORE
    ),
    Cause.OPTIMIZER: CauseWording(
        "wrong parameter after the optimizer",
        "The runs part in the update of parameters: after {where}, {full} {off}, {sources}. Check the optimizer, its "
        "settings and what the loop does around its step.",
        _AFTER,
        isolated_verdict="The update of parameters is wrong: {clause}.",
        sources_match="although its gradient matches",
        sources_match_so_far="and the gradients that both have match",
        sources_unrecorded="and its gradient was not recorded",
    ),
    Cause.STEP_GRADIENT: CauseWording(
        "wrong gradient given to the optimizer",
        "{agrees} runs part between backward and optimizer: in {where}, the gradient of {full} that the optimizer uses "
        "{off}, {sources}: check accumulation, clipping, unscaling and averaging.",
        "in {where}, the gradient of {full} that the optimizer uses {off}",
        isolated_verdict="Backward is right, but what the optimizer gets is not: {clause}. Check accumulation, "
        "clipping, unscaling and averaging.",
        sources_match="while the gradient from backward matches",
        sources_match_so_far="while the gradients from backward that both have match",
        sources_unrecorded="and the gradient from backward was not recorded",
        born_in="between backward and optimizer",
    ),
    Cause.PARAMETER_GRADIENT: CauseWording(
        "wrong gradient of a parameter",
        "{agrees} runs part in the backward of {name}: in {where}, the gradient of its {path} {off}, {sources}.",
        "in {where}, the gradient of its {path} {off}",
        sources_match="while the gradient at its output matches",
        sources_unrecorded="and the gradient at its output was not recorded",
        born_in=_SENT.born_in,
    ),
    Cause.SENT_GRADIENT: _SENT,
    Cause.CONTAINER_BACKWARD: CauseWording(
        "wrong gradient between modules",
        _SENT.sentence,
        _SENT.isolated,
        sources_match=_SENT.sources_match,
        sources_unrecorded=_SENT.sources_unrecorded,
        born_in=f"in the backward of the {_BETWEEN}",
    ),
    Cause.LOSS: CauseWording(
        "wrong gradient from the loss",
        "{forward}, but the gradient that enters {entered} at its output {off} in {where}: "
        "check the loss and its scaling.",
        "in {where}, the gradient that enters {name} {off}: check the loss and its scaling",
        isolated_verdict="The model agrees, but not what came back from outside: {clause}.",
        born_in="outside the model, at the output of {container}",
    ),
    Cause.UNRECORDED_GRADIENT: CauseWording(
        "wrong gradient of unrecorded origin",
        "In {where}, the gradient at the output of {name} {off} already; what made it was not recorded.",
        "in {where}, the gradient that enters {name} {off}",
        born_in="outside the model, at the output of {container}",
    ),
    Cause.MISSING_GRADIENT: CauseWording(
        "missing gradient",
        f"{{but_in}} {_NEVER_COMES}, though the reference has it{{cut_by}}{{elsewhere}}.",
        f"in {{where}}, {_NEVER_COMES}",
        born_in=_SENT.born_in,
    ),
    Cause.MISSING_IN_CONTAINER: CauseWording(
        "missing gradient between modules",
        f"{{but_in}} {_NEVER_COMES}, though the reference has it: the own code of {{name}} cuts it off.",
        f"in {{where}}, {_NEVER_COMES}",
        born_in=f"in the backward of the {_BETWEEN}",
    ),
    Cause.EXTRA_GRADIENT: CauseWording(
        "extra gradient",
        f"{{but_in}} {_COMES}, which it does not in the reference{{elsewhere}}.",
        _COMES,
        isolated_verdict="In {where}, {clause}, which it does not in the reference{more}.",
    ),
    Cause.EXTRA_IN_CONTAINER: CauseWording(
        "extra gradient between modules",
        f"{{but_in}} {_PASSES}, which it does not in the reference: the own code of {{name}} does not cut it off.",
        f"in {{where}}, {_PASSES}",
        born_in=f"in the backward of the {_BETWEEN}",
    ),
    Cause.RECOMPUTATION: CauseWording(
        "recomputation of other values",
        "{but_in} the recomputation in {name} makes another {value} than its first forward: a random state, or a mode "
        "such as autocast, was lost, and the gradients are those of other values.",
        "in {where}, its recomputation makes another {value} than its first forward",
        born_in="in the recomputation of {container}",
    ),
    Cause.LESS_EXACT: CauseWording(
        "less exact than the reference",
        "{name} {how} the reference's: in {where}, {value} is {distances}.",
        "in {where}, its {path} is further from the exact result",
    ),
    Cause.REPLICA: CauseWording(
        "replica that differs",
        "{ranks} of {count} replicas of {record} {verb} {since} {step}: {fact}.",
        "{ranks} of {count} replicas of {record} {verb} {since} {step}",
    ),
    Cause.STALE_REPLICA: CauseWording(
        "replica that was not updated",
        "{ranks} of {count} replicas of {record} {verb} {since} {step}: {fact}.",
        "{ranks} of {count} replicas of {record} {verb} {since} {step}",
    ),
    Cause.LAYOUT: CauseWording(
        "parts that do not make up the whole",
        "The ranks do not hold {record} once: {fact}.",
        "its ranks do not hold {record} once",
    ),
    Cause.MISSING_REDUCTION: CauseWording(
        "missing reduction",
        "{name}: in {where}, each of the {count} {axis} ranks holds a partial sum; {fact}: an all-reduce is "
        "missing{pass}.",
        "in {where}, each of the {count} {axis} ranks holds a partial sum; {fact}",
    ),
    Cause.REPEATED_REDUCTION: CauseWording(
        "repeated reduction",
        "{name}: in {where}, {record} is {count} times the reference's on each of the {count} {axis} ranks: it is "
        "summed over {axis} once too often{pass}.",
        "in {where}, {record} is {count} times the reference's",
    ),
    Cause.MEAN_FOR_SUM: CauseWording(
        "mean instead of a sum",
        "{name}: in {where}, {record} is 1/{count} of the reference's on each of the {count} {axis} ranks: it is "
        "averaged over {axis} where it must be summed{pass}.",
        "in {where}, {record} is 1/{count} of the reference's",
    ),
    Cause.SWAPPED_RANKS: CauseWording(
        "parts on the wrong ranks",
        "{name}: in {where}, the {count} {axis} ranks hold the parts of {record} in another order: {fact}.",
        "in {where}, the {count} {axis} ranks hold the parts of {record} in another order",
    ),
    Cause.INTERLEAVING: CauseWording(
        "other interleaving",
        "{name}: in {where}, {record} has the reference's numbers in another order over the {count} {axis} ranks: "
        "{fact}.",
        "in {where}, {record} is interleaved in another way",
    ),
    Cause.EXPERT_PLACEMENT: CauseWording(
        "expert on the wrong rank",
        "{name}: in {where}, {record} is not its own: {fact}. Check which experts each {axis} rank holds.",
        "in {where}, {record} is that of another expert",
    ),
    Cause.STAGE_OFFSET: CauseWording(
        "layer of another stage",
        "{name}: in {where}, {record} is not its own: {fact}. Check the first layer of each {axis} stage.",
        "in {where}, {record} is that of another layer",
    ),
    Cause.PADDING: CauseWording(
        "padding that takes part",
        "{name}: in {where}, padding of {record} takes part in the computation: {fact}.",
        "in {where}, padding of {record} takes part in the computation",
    ),
    Cause.SEQUENCE_ORDER: CauseWording(
        "other order of the sequence",
        "{name}: in {where}, the {count} {axis} ranks hold the positions of {record} in another order: {fact}.",
        "in {where}, the {axis} ranks hold the positions of {record} in another order",
    ),
    Cause.GRADIENT_SCALE: CauseWording(
        "all gradients scaled",
        "{agrees} gradients are scaled: in {where}, all of them are {fact} times the reference's, also those that the "
        "optimizer uses: check the averaging of the loss over {axis} ranks.",
        "in {where}, all gradients are {fact} times the reference's",
    ),
}
