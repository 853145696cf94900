"""An audit knows where every value came from, in both frameworks, and changes nothing by looking."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensortap.errors import UsageError
from tensortap.model.audit import audit

pytestmark = pytest.mark.filterwarnings("ignore:Skip loading", "ignore:When training, we now always track")


class Library:
    """The few words in which the two frameworks differ."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "torch":
            import torch
            from torch import nn

            self.base, self.lib = nn.Module, torch
            self.norm, self.mean = nn.BatchNorm1d, "norm.running_mean"
        else:
            import paddle
            from paddle import nn

            self.base, self.lib = nn.Layer, paddle
            self.norm, self.mean = nn.BatchNorm1D, "norm._mean"
        self.nn = nn

    def net(self, seed: int, classes: int = 3) -> Any:
        library = self
        (self.lib.manual_seed if self.name == "torch" else self.lib.seed)(seed)

        class Net(self.base):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                self.embed = library.nn.Linear(4, 8)
                self.norm = library.norm(8)
                self.head = library.nn.Linear(8, classes)

            def forward(self, x: Any) -> Any:
                return self.head(self.norm(self.embed(x)))

        return Net()

    def tensor(self, *shape: int) -> Any:
        values = np.linspace(-1, 2, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        return self.lib.tensor(values) if self.name == "torch" else self.lib.to_tensor(values)

    def checkpoint(self, seed: int = 7, classes: int = 3) -> dict[str, Any]:
        return {key: value.clone() for key, value in self.net(seed, classes).state_dict().items()}

    def load(self, module: Any, state: Any) -> Any:
        return module.load_state_dict(state, strict=False) if self.name == "torch" else module.set_state_dict(state)

    def loader(self, module: Any) -> Any:
        """To be called on a line of one's own."""
        return partial(module.load_state_dict, strict=False) if self.name == "torch" else module.set_state_dict

    def optimizer(self, model: Any) -> Any:
        if self.name == "torch":
            return self.lib.optim.SGD(model.parameters(), lr=0.1)
        return self.lib.optimizer.SGD(0.1, parameters=model.parameters())

    def train(self, model: Any, optimizer: Any, steps: int = 1) -> None:
        for _ in range(steps):
            (optimizer.zero_grad if self.name == "torch" else optimizer.clear_grad)()
            (model(self.tensor(6, 4)) * self.tensor(6, 3)).square().mean().backward()
            optimizer.step()

    def fill(self, tensor: Any, value: float) -> None:
        """Behind autograd's back, where no version counts it."""
        if self.name == "torch":
            tensor.data.fill_(value)
        else:
            tensor.set_value(self.lib.full(tensor.shape, value))

    def attributes(self, model: Any) -> list[set[str]]:
        parts = model.modules() if self.name == "torch" else model.sublayers(include_self=True)
        return [set(vars(part)) for part in parts]

    def hooks(self, model: Any) -> int:
        after = "_forward_hooks" if self.name == "torch" else "_forward_post_hooks"
        return len(model._forward_pre_hooks) + len(getattr(model, after))


@pytest.fixture(params=["torch", "paddle"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param)


def whats(found: Any, name: str) -> list[str]:
    return [event.what for event in found.timeline(name)]


def test_a_whole_load(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint())
    assert found.status("embed.weight") == found.status("head.weight") == "loaded"
    assert found.status(library.mean) == "identical"  # zeros in both
    event = found.timeline("embed.weight").events[-1]
    assert event.changed and 0.5 < event.rel_l2 < 3
    assert event.where.startswith(("test_audit.py:", "tests/model/test_audit.py:"))
    text = str(found)
    assert "loaded first at" in text and "missing" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_loading_what_is_there_already(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, {key: value.clone() for key, value in model.state_dict().items()})
    assert {found.status(name) for name in ("embed.weight", "embed.bias", "head.weight")} == {"identical"}
    assert found.facts().happenings[0].tensors == 0


def test_missing_unexpected_and_wrong_shapes(library: Library) -> None:
    state = library.checkpoint(classes=3)
    del state["embed.bias"]
    state["old.weight"] = library.tensor(2)
    model = library.net(0, classes=5)
    if library.name == "torch":
        with audit(model) as found, pytest.raises(RuntimeError, match="size mismatch"):
            library.load(model, state)
        assert any("raised RuntimeError" in note for note in found.facts().notes)
    else:
        with audit(model) as found:
            missing, unexpected = library.load(model, state)
        assert "embed.bias" in missing and "old.weight" in unexpected
    assert found.status("embed.bias") == "missing"
    assert found.status("head.weight") == found.status("head.bias") == "mismatch"
    assert found.status("embed.weight") == "loaded"
    assert set(found.facts().names["unexpected"]) == {("old.weight", "")}
    assert "3 in the checkpoint, 5 here" in found.timeline("head.bias").events[-1].detail


def test_the_return_value_is_the_frameworks_own(library: Library) -> None:
    state = library.checkpoint()
    del state["embed.bias"]
    state["old.weight"] = library.tensor(2)
    plain = library.load(library.net(0), state)
    model = library.net(0)
    with audit(model):
        watched = library.load(model, state)
    assert watched == plain and type(watched) is type(plain)


def test_a_load_into_a_submodule(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    part = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    with audit(model) as found:
        library.load(model.head, part)
    assert found.status("head.weight") == "loaded" and found.status("embed.weight") == "untouched"
    assert found.facts().happenings[0].what.endswith("of head")


def test_load_then_steps(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=3)
    assert found.status("head.weight") == "loaded"
    stepped = found.timeline("head.weight").events[-1]
    assert (stepped.what, stepped.times, stepped.step, stepped.last_step) == ("stepped", 3, 0, 2)
    assert whats(found, library.mean) == ["initialised", "loaded", "forward"]
    assert found.facts().steps == 3
    assert "optimizer step, 3 times" in str(found)


def test_training_without_a_load(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.train(model, optimizer)
    assert found.status("head.weight") == found.status(library.mean) == "trained"
    assert "No checkpoint was loaded" in str(found)


def test_overwritten_after_loading(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint())
        library.fill(model.head.weight, 0.5)
        assert found.check() == ["head.weight"]
        assert found.check() == []
    assert found.status("head.weight") == "overwritten"
    assert "noticed at" in str(found)


def test_one_element_changed_behind_the_back(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint())
        values = model.embed.weight.numpy(force=True) if library.name == "torch" else model.embed.weight.numpy()
        values = values.copy()
        values[1, 3] += 1e-3
        if library.name == "torch":
            model.embed.weight.data[1, 3] += 1e-3
        else:
            model.embed.weight.set_value(values)
    assert found.status("embed.weight") == "overwritten"
    assert found.timeline("embed.weight").events[-1].where == "the end"


def test_set_without_load_state_dict(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.fill(model.embed.bias, 0.25)
        model.eval()
        model(library.tensor(6, 4))
    assert found.status("embed.bias") == "set" and found.status("embed.weight") == "untouched"


def test_a_forward_before_the_load_is_told(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        model.eval()
        model(library.tensor(6, 4))
        library.load(model, library.checkpoint())
    assert any("a forward had run on the initial values" in note for note in found.facts().notes)


def test_nothing_is_left_and_nothing_changes(library: Library) -> None:
    def run(watched: bool) -> Any:
        model = library.net(0)
        optimizer = library.optimizer(model)
        before, own = library.attributes(model), set(vars(optimizer))
        found = audit(model, optimizer) if watched else None
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=2)
        if found is not None:
            found.check()
            found.close()
            found.close()
            assert library.attributes(model) == before and library.hooks(model) == 0
            assert set(vars(optimizer)) == own
            library.train(model, optimizer)
            assert found.facts().steps == 2
        else:
            library.train(model, optimizer)
        noise = library.lib.rand([3]) if library.name == "paddle" else library.lib.rand(3)
        return [value.numpy().copy() for value in model.state_dict().values()] + [noise.numpy()]

    for plain, watched in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_two_audits_leave_in_any_order(library: Library) -> None:
    model = library.net(0)
    before = library.attributes(model)
    first = audit(model)
    second = audit(model)
    library.load(model, library.checkpoint())
    first.close()
    library.fill(model.head.weight, 2.0)
    second.close()
    assert first.status("head.weight") == "loaded" and second.status("head.weight") == "overwritten"
    assert whats(first, "embed.weight") == whats(second, "embed.weight") == ["initialised", "loaded"]
    assert library.attributes(model) == before and library.hooks(model) == 0


def test_as_dict_is_json(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["tensors"]["embed.weight"]["status"] == "loaded"
    assert data["counts"]["loaded"] == len(found.facts().names["loaded"])
    with pytest.raises(UsageError, match="did you mean"):
        found.timeline("embed.weigth")
    with pytest.raises(UsageError, match="optimizer="):
        audit(model, object())
    assert library.hooks(model) == 0


def test_an_exception_inside_a_load_stays_what_it_was(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found, pytest.raises((TypeError, AttributeError)):
        library.load(model, None)
    assert found.status("embed.weight") == "untouched"
    assert "raised" in found.facts().happenings[0].what


def test_two_loads_are_both_in_the_timeline(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint(7))
        library.load(model, library.checkpoint(8))
    assert whats(found, "embed.weight") == ["initialised", "loaded", "loaded"]
    assert len(found.facts().happenings) == 2


def at(found: Any, nth: int) -> str:
    """The line of the nth load."""
    return str(found.facts().happenings[nth].where)


def test_the_first_load_is_the_first_that_gave_a_value(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    with audit(model) as found:
        library.loader(model)({f"module.{key}": value for key, value in state.items()})
        model.eval()
        model(library.tensor(6, 4))
        library.loader(model)(state)
    assert at(found, 0) != at(found, 1)
    assert f"loaded first at {at(found, 1)}" in " ".join(str(found).split())
    assert any("a forward had run" in note and at(found, 1) in note for note in found.facts().notes)


def test_a_proper_load_takes_the_place_of_one_that_failed(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    with audit(model) as found:
        library.loader(model)({f"module.{key}": value for key, value in state.items()})
        assert len(found.facts().names["unexpected"]) == len(state)
        library.load(
            model, {key: value for key, value in state.items() if key != "embed.bias"} | {"old": state["embed.bias"]}
        )
    where = at(found, 1)
    assert found.facts().names["unexpected"] == [("old", f"at {where}")]
    assert found.facts().names["missing"] == [("embed.bias", f"at {where}")]
    assert found.as_dict()["unexpected"] == {"old": where}
    assert not any("begin with" in note for note in found.facts().notes)


def test_a_load_of_a_part_leaves_what_the_whole_was_told(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    part = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    with audit(model) as found:
        library.loader(model)({f"module.{key}": value for key, value in state.items()})
        library.loader(model.head)(part)
    facts = found.facts()
    assert len(facts.names["unexpected"]) == len(state)
    assert ("embed.weight", f"at {at(found, 0)}") in facts.names["missing"]
    assert any(f"{len(state)} of {len(state)} unexpected keys at {at(found, 0)} begin with" in n for n in facts.notes)
    assert f"loaded first at {at(found, 1)}" in " ".join(str(found).split())


def test_a_load_that_gave_nothing(library: Library) -> None:
    model = library.net(0)
    state = {f"module.{key}": value for key, value in library.checkpoint().items()}
    with audit(model) as found:
        library.loader(model)(state)
        once = " ".join(str(found).split())
        library.loader(model)(state)
    total = len(state)
    assert f"None of {total} tensors comes from a checkpoint: the load at {at(found, 0)} gave none a value." in once
    assert f"{total} of {total} unexpected keys begin with 'module.'" in once
    assert f"none of 2 loads, the last at {at(found, 1)}, gave one a value." in " ".join(str(found).split())
