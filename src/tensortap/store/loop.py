"""Loop facts: what a training loop does beside tensors, a line of JSON for each fact that changed.

    {"step": 3, "fact": "group", "of": "0.1", "value": {"lr": 0.0003, "betas": {"tuple": [0.9, 0.999]}}}

A value is an object of names and plain values, in the form of `tensortap.core.arguments`. It holds from its step on,
until the next line with the same `fact` and `of`. Facts:

    world       of ""           size: the number of ranks
    launch      of ""           number: which run of its launch this is, from the second on
    ties        of ""           a name for each parameter or buffer that is another one's tensor: the other's name
    frozen      of ""           names: the parameters that require no gradient
    buffers     of ""           names: all buffers
    moved       of a module     micro: the first micro step before which its parameters changed within a step, after
                                they were recorded; written once
    attributes  of a module     its plain attributes, and those of a config object as "config.NAME"
    detached    of a module     paths that autograd does not reach: inputs; outputs_of_detached, made from nothing
                                that it reaches; other outputs
    recomputation  of a module  its code made another value in backward than in the first forward: module, micro, call,
                                kind, path and rel_l2 of the value; written once for a module
    rows        of ""           for each input in host memory, by micro step and path ("0.input_ids"): a digest of its
                                rows, whatever their order
    visible     of a module     in the first recorded step, if its batch has padding, for each value with
                                the axes of its mask, by micro step, call, kind and path ("0.0.output.0"): its sketch
                                without the hidden positions (`kernels.summary.visible`), 64 float32 in base64,
                                after "copies:" if it may hold several copies of all positions; of "" also "0.hidden":
                                digests of the hidden positions of a micro step, and "0.behind" if all of
                                these are behind a text
    random      of a generator  digest of its state at the start of the step; of "torch.cpu", "python", ...
    optimizer   of "0", ...     class, number of groups, clipping inside of it; of its place or key in optimizer=
    group       of "0.1", ...   settings of a parameter group, as the step used them: lr, betas, weight_decay, ...
    parameters  of "0.1", ...   names: the parameters of the group
    step_grad   of "0", ...     absent: how a missing step_grad is to be read; no_gradient: parameters that had none
    scaler      of "0", ...     scale of the gradient scaler at the step
    skipped     of "0", ...     skipped: whether a gradient scaler left the step out; None if only a device knows
    steps       of "0", ...     steps: how often it stepped within the step; only with several optimizers
    loss        of ""           value: the loss of the step, where `loss=` or `tap.loss()` names it

Only recorded steps have facts. A run without the file knows nothing about its loop, which is not the same as no change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Any, NamedTuple

from tensortap.core.arguments import read
from tensortap.store.format import utf8
from tensortap.store.lines import LinesWriter, read_lines
from tensortap.store.rotation import RemainingSteps, holding
from tensortap.store.source import Bytes

__all__ = ["LoopFact", "LoopFacts", "LoopWriter", "read_loop"]


class LoopFact(NamedTuple):
    """A fact about the loop that holds from its step on, until the next one with the same `fact` and `of`."""

    step: int
    fact: str
    of: str
    value: Mapping[str, Any]


class LoopWriter(LinesWriter):
    """Writes loop.jsonl."""

    def add(self, fact: LoopFact) -> None:
        self.add_line(fact._asdict(), fact.step, (fact.fact, fact.of))


class LoopFacts:
    """The loop facts of one rank. It is empty, and false, if the run has none.

    >>> facts = run.loop()                                                     # doctest: +SKIP
    >>> facts.value("group", 3, "0.0")["lr"]                                   # doctest: +SKIP
    0.0003
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[LoopFact]] = {}

    def add(self, fact: LoopFact) -> None:
        """Add a fact whose value is in the form of `core.arguments`, in the order of steps."""
        value = read({utf8(name): part for name, part in fact.value.items()})
        known = self._found.setdefault((utf8(fact.fact), utf8(fact.of)), [])
        known.append(LoopFact(fact.step, utf8(fact.fact), utf8(fact.of), value))

    def drop_all_but(self, remaining: RemainingSteps) -> None:
        """Remove the facts that hold in none of these steps. A copy that was made before keeps them."""
        self._found = {
            subject: list(compress(known, holding([each.step for each in known], remaining, several=False)))
            for subject, known in self._found.items()
        }

    def names(self) -> list[str]:
        """Return the names of all facts, in the order in which they first came."""
        return list(dict.fromkeys(fact for fact, _ in list(self._found)))

    def subjects(self, fact: str) -> list[str]:
        """Return the subjects of a fact: modules, optimizers, groups or generators."""
        return [of for each, of in list(self._found) if each == fact]

    def value(self, fact: str, step: int, of: str = "") -> Mapping[str, Any] | None:
        """Return the value that holds at a step; None if nothing is known of it by then."""
        known = self._found.get((fact, of), [])
        place = bisect_right(known, step, key=lambda each: each.step)
        return known[place - 1].value if place else None

    def changes(self, fact: str, of: str = "") -> list[LoopFact]:
        """Return every value of a fact, each with the step from which on it holds."""
        return list(self._found.get((fact, of), ()))

    def __iter__(self) -> Iterator[LoopFact]:
        """Yield all changes, fact by fact."""
        for known in list(self._found.values()):
            yield from list(known)

    def __len__(self) -> int:
        """Return the number of changes."""
        return sum(len(known) for known in list(self._found.values()))

    def __repr__(self) -> str:
        return f"<LoopFacts: {', '.join(self.names()) or 'none'}>"


def read_loop(source: Bytes, name: str) -> LoopFacts | None:
    """Read a loop.jsonl. Return None if the run has none; raise ValueError if it is damaged."""
    facts = LoopFacts()
    last: dict[tuple[str, str], int] = {}
    try:
        for line in read_lines(source, name):
            fact = _parse(line)
            if fact.step < last.get((fact.fact, fact.of), fact.step):
                raise ValueError(f"the steps of {fact.fact} {fact.of!r} are not in order")
            last[fact.fact, fact.of] = fact.step
            facts.add(fact)
    except FileNotFoundError:
        return None
    return facts


def _parse(line: Mapping[str, Any]) -> LoopFact:
    step, fact, of, value = (line.get(name) for name in LoopFact._fields)
    if type(step) is not int or not 0 <= step < 1 << 63:
        raise ValueError("the step of a fact is not a whole number")
    if not isinstance(fact, str) or not isinstance(of, str) or not isinstance(value, dict):
        raise ValueError("a fact lacks its name, its subject or its value")
    return LoopFact(step, fact, of, value)
