"""Counting, and which earlier call a repeated one repeats."""

from __future__ import annotations

from tensortap.capture.watching.clock import Clock
from tensortap.frameworks.base import Identity


def identity(name: str) -> Identity:
    return Identity(name, lambda: True)


def test_the_roots_forwards_count_micro_steps_and_steps_begin_anew() -> None:
    clock = Clock()
    for expected in range(3):
        assert clock.enter("", []).micro == expected
        assert [clock.enter("layer", []).number for _ in range(2)] == [0, 1]
        clock.leave("")
    clock.next_step()
    assert clock.enter("", []).micro == 0 and clock.step == 1


def test_a_root_that_calls_itself_is_one_micro_step() -> None:
    clock = Clock()
    assert [clock.enter("", []).micro, clock.enter("", []).micro] == [0, 0]


def test_recomputed_regions_are_distinguished_by_their_inputs() -> None:
    clock = Clock()
    clock.enter("", [])
    for region in ("a", "b"):
        clock.enter("block", [identity(region)])
        for _ in range(2):
            clock.enter("shared", [identity(f"inside {region}")])
            clock.leave("shared")
        clock.leave("block")
    clock.leave("")
    repeated = []
    for region in ("b", "a"):
        clock.enter_recomputation("block", [identity(region)])
        repeated += [clock.enter_recomputation("shared", [identity("made anew")]).number for _ in range(2)]
    assert repeated == [2, 3, 0, 1]


def test_a_module_that_only_runs_in_backward_is_a_new_call() -> None:
    clock = Clock()
    clock.enter("", [])
    assert not clock.enter_recomputation("helper", []).recomputed


def test_a_loop_that_never_ends_its_step_is_not_remembered_for_ever() -> None:
    clock = Clock()
    for _ in range(2000):
        clock.enter("", [])
        clock.enter("layer", [])
        clock.leave("")
    assert sum(map(len, clock._past.values())) < 1100
    assert clock.micro == 1999
