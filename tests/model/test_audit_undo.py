"""An undone load is found and attributed, and not confused with training, whatever the step size."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from support.audited import Library, MasterSGD
from tensortap.core.records import Summary
from tensortap.kernels import summarize
from tensortap.model.audit import audit
from tensortap.model.audit.undone_loads import UndoneLoadDetector

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")
WEIGHTS = ("embed.weight", "head.weight")


def undone(found: Any) -> set[str]:
    return {name for name, _ in found.facts().names["undone"]}


def weights(model: Any) -> list[Any]:
    return [model.embed.weight, model.head.weight]


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.1])
def test_an_optimizer_with_copies_from_before_the_load_undoes_it(library: Library, rate: float) -> None:
    model = library.net(0)
    optimizer = MasterSGD(library, model, rate)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=3)
    assert undone(found) >= set(WEIGHTS)
    event = next(event for event in found.timeline("head.weight") if event.undone)
    assert (event.what, event.step, event.detail) == ("stepped", 0, "back at its initial values")
    assert [event.undone for event in found.timeline("head.weight")].count(True) == 1
    text = " ".join(str(found).split())
    assert f"The optimizer undid the load of {len(undone(found))} tensors at step 0, at " in text
    assert "the initial values are back." in text and "(MasterSGD) keeps copies from before the load" in text
    entry = json.loads(json.dumps(found.as_dict(), allow_nan=False))["tensors"]["embed.weight"]
    assert entry["status"] == "undone" and entry["undone"]["by"] == "optimizer" and entry["undone"]["share"] > 0.9


def test_an_undone_load_is_found_although_some_steps_are_too_large(library: Library) -> None:
    model = library.net(0)
    with audit(model, optimizer := MasterSGD(library, model, rate=1.0)) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
    assert "embed.weight" in undone(found)


def test_biases_follow_the_weights(library: Library) -> None:
    model = library.net(0)
    optimizer = MasterSGD(library, model, rate=1e-3)
    state = library.checkpoint()
    state["head.bias"] = library.tensor(3)
    with audit(model, optimizer) as found:
        library.load(model, state)
        library.train(model, optimizer)
    assert found.status("head.bias") == "undone"


def test_an_optimizer_made_after_the_load_undoes_nothing(library: Library) -> None:
    model = library.net(0)
    with audit(model) as before:
        library.load(model, library.checkpoint())
    with audit(model, optimizer := MasterSGD(library, model)) as found:
        library.train(model, optimizer, steps=3)
    assert not undone(before) and not undone(found)


@pytest.mark.parametrize("made", ["sgd", "adam"])
@pytest.mark.parametrize("rate", [1e-3, 0.3, 3.0, 100.0])
def test_continued_training_does_not_undo_a_load_however_large_the_step(
    library: Library, made: str, rate: float
) -> None:
    model = library.net(0)
    optimizer = (library.optimizer if made == "sgd" else library.adam)(model, rate)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=3)
    assert not undone(found)


@pytest.mark.parametrize("difference", [0.0, 1e-7, 1e-5, 1e-3, 1e-1])
def test_a_checkpoint_that_hardly_differs(library: Library, difference: float) -> None:
    model = library.net(0)
    random = np.random.default_rng(0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for key in WEIGHTS:
        values = library.read(state[key])
        library.write(state[key], values + difference * random.standard_normal(values.shape).astype(np.float32))
    optimizer = library.optimizer(model, 0.5)
    with audit(model, optimizer) as found:
        library.load(model, state)
        library.train(model, optimizer, steps=3)
    assert not undone(found)


def test_a_copy_between_two_steps_is_not_attributed_to_the_optimizer(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    initial = [library.read(tensor) for tensor in weights(model)]
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=2)
        for tensor, values in zip(weights(model), initial, strict=True):
            library.write(tensor, values)
        library.train(model, optimizer)
    assert undone(found) == set(WEIGHTS)
    facts = found.facts().undone[0]
    assert (facts.by, facts.step, len(facts.shares)) == ("something else", 2, 2)
    assert "undid the load of 2 tensors before step 2, noticed at" in " ".join(str(found).split())


def test_a_forward_that_writes_its_weights(library: Library) -> None:
    class Stubborn(library.base):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = library.nn.Linear(4, 16)
            self.mine = library.read(self.inner.weight)

        def forward(self, x: Any) -> Any:
            library.write(self.inner.weight, self.mine)
            return self.inner(x)

    model, other = Stubborn(), Stubborn()
    with audit(model) as found:
        library.load(model, other.state_dict())
        model(library.tensor(6, 4))
    assert undone(found) == {"inner.weight"} and found.facts().undone[0].by == "forward"


def test_swapping_averaged_weights_does_not_undo_a_load(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        average = [library.read(tensor) for tensor in weights(model)]
        for _ in range(3):
            library.train(model, optimizer)
            now = [library.read(tensor) for tensor in weights(model)]
            average = [0.9 * mean + 0.1 * value for mean, value in zip(average, now, strict=True)]
            for values in (average, now):
                for tensor, value in zip(weights(model), values, strict=True):
                    library.write(tensor, value)
                found.check()
    assert not undone(found)


def test_restored_values_count_as_loaded_again(library: Library) -> None:
    model = library.net(0)
    initial = [library.read(tensor) for tensor in weights(model)]
    with audit(model) as found:
        library.load(model, library.checkpoint())
        given = [library.read(tensor) for tensor in weights(model)]
        for tensor, values in zip(weights(model), initial, strict=True):
            library.write(tensor, values)
        found.check()
        assert undone(found) == set(WEIGHTS)
        for tensor, values in zip(weights(model), given, strict=True):
            library.write(tensor, values)
    assert not undone(found)


def test_loading_again_ends_an_undone_load(library: Library) -> None:
    model = library.net(0)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = MasterSGD(library, model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.load(model, initial)
        assert not undone(found)
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
        assert undone(found) >= set(WEIGHTS)
        library.load(model, library.checkpoint())
        assert not undone(found) and found.status("embed.weight") == "loaded"
        assert any(event.undone for event in found.timeline("embed.weight"))


def test_the_second_of_two_loads_is_undone(library: Library) -> None:
    model = library.net(0)
    with audit(model, optimizer := MasterSGD(library, model)) as found:
        library.load(model, library.checkpoint(7))
        optimizer.masters = [library.read(param) for param in optimizer.params]
        library.load(model, library.checkpoint(8))
        library.train(model, optimizer)
    assert undone(found) >= set(WEIGHTS)
    second = found.timeline("embed.weight").events[2]
    assert found.timeline("embed.weight").events[3].detail == f"back at its values from before {second.where}"


def test_a_load_in_the_middle_of_training_is_undone(library: Library) -> None:
    model = library.net(0)
    with audit(model, optimizer := MasterSGD(library, model, rate=0.01)) as found:
        library.train(model, optimizer, steps=3)
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
    assert undone(found) >= set(WEIGHTS)
    assert {facts.step for facts in found.facts().undone} == {3}


def test_values_copied_in_by_user_code(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    with audit(model, optimizer := MasterSGD(library, model)) as found:
        for name, tensor in zip(WEIGHTS, weights(model), strict=True):
            library.write(tensor, library.read(state[name]))
        library.train(model, optimizer)
    assert undone(found) == set(WEIGHTS)
    assert "No checkpoint was loaded" in str(found) and "The optimizer undid" in " ".join(str(found).split())


def test_an_optimizer_that_averages_with_its_copies_undoes_a_share(library: Library) -> None:
    model = library.net(0)
    with audit(model, optimizer := MasterSGD(library, model, rate=1e-3, share=0.5)) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
    assert undone(found) >= set(WEIGHTS)
    assert 0.45 < found.as_dict()["tensors"]["embed.weight"]["undone"]["share"] < 0.55
    assert "are back, by about 50" in " ".join(str(found).split())


def test_resetting_a_head_and_pruning_overwrite(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    library.fill(model.head.bias, 0.0)
    state["head.bias"] = library.tensor(3)
    with audit(model) as found:
        library.load(model, state)
        library.write(model.head.weight, library.read(library.net(3).head.weight))
        library.fill(model.head.bias, 0.0)  # also its initial value
        library.write(model.embed.weight, library.read(model.embed.weight) * 0.01)
    assert not undone(found)
    assert {found.status(name) for name in (*WEIGHTS, "head.bias")} == {"overwritten"}


# --- the test itself, on plain numbers ------------------------------------------------------------------------------
def share_back(initial: Any, given: Any, now: Any, by: str) -> float | None:
    """Return the share that is back after one event."""

    def seen(values: Any) -> Summary:
        return summarize(np.asarray(values, np.float32))

    detector = UndoneLoadDetector()
    detector.set_initial("x", seen(initial))
    detector.set_loaded("x", seen(initial), seen(given), "there")
    found = detector.detect({"x": seen(now)}, by, 0, "here")
    return found["x"].share if found else None


@pytest.mark.parametrize("by", ["optimizer", "something else"])
@pytest.mark.parametrize("size", [12, 64, 4097])
def test_no_kind_of_step_looks_like_an_undone_load(by: str, size: int) -> None:
    random = np.random.default_rng(size)
    initial = random.normal(0, 0.02, size)
    checkpoints = (random.normal(0, 0.05, size), 3 * initial, initial + 0.5, initial + random.normal(0, 1e-4, size))
    for given in checkpoints:
        scale = np.abs(given).mean()
        for step in (1e-3, 0.1, 1.0, 10.0):
            moves = (
                random.normal(0, step * scale, size),
                np.full(size, -step * scale),
                random.choice([-step * scale, step * scale], size),
                -min(step, 1.0) * given,
                (given.mean() - given) * min(step, 1.0),
                np.where(np.arange(size) % 11 == 0, step * scale * 10, 0.0),
            )
            for move in moves:
                assert share_back(initial, given, given + move, by) is None


@pytest.mark.parametrize("size", [16, 64, 4097])
def test_an_undone_load_is_found_under_steps_as_large_as_a_tenth(size: int) -> None:
    random = np.random.default_rng(size)
    initial, given = random.normal(0, 0.02, size), random.normal(0, 0.05, size)
    for step in (0.0, 1e-4, 0.01, 0.1):
        share = share_back(initial, given, initial + random.normal(0, 0.02 * step, size), "optimizer")
        assert share == pytest.approx(1, abs=0.2)


def test_nonfinite_values_and_other_sizes_are_not_tested() -> None:
    random = np.random.default_rng(0)
    initial, given = random.normal(size=64), random.normal(size=64)
    broken = initial.copy()
    broken[3] = np.nan
    assert share_back(initial, given, broken, "optimizer") is None
    assert share_back(initial, given, initial[:32], "optimizer") is None
