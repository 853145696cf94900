"""Loading in torch only: strict errors, assign=True, ties, lazy and meta tensors, pickling."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tensortap.model.audit import audit
from tensortap.model.audit.loads import LoadOutcome, describe_renamed_keys


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.fc(self.embed(x)))


def test_a_strict_error_is_raised_and_noted() -> None:
    torch.manual_seed(0)
    state = nn.Linear(3, 3).state_dict()
    del state["bias"]
    model = nn.Linear(3, 3)
    with audit(model) as found, pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    assert found.status("weight") == "loaded"  # torch copies what fits, and raises then
    assert found.status("bias") == "missing"
    assert "load_state_dict() raised RuntimeError" in str(found)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ("module.", "", "2 of 2 unexpected keys begin with 'module.', and without it are the missing ones"),
        ("", "net.", "2 of 2 unexpected keys are missing ones without 'net.' at the beginning"),
        ("old.", "net.", "2 of 2 unexpected keys begin with 'old.' where missing ones begin with 'net.'"),
    ],
)
def test_a_prefix_on_either_side_is_named(theirs: str, ours: str, expected: str) -> None:
    model: nn.Module = nn.Linear(2, 2)
    state = {f"{theirs}{name}": value for name, value in model.state_dict().items()}
    if ours:
        model = nn.Sequential(OrderedDict([(ours.removesuffix("."), model)]))
    with audit(model) as found:
        model.load_state_dict(state, strict=False)
    assert expected in found.facts().notes


def test_the_steps_of_several_optimizers_are_told_apart() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    first, second = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters())
    with audit(model, {"first": first, "second": second}) as found:
        for step in range(3):
            model(torch.ones(2, 3)).sum().backward()
            first.step()
            if step != 1:
                second.step()
    facts = found.facts()
    assert facts.steps == 3 and facts.notes == []
    stepped = {name: found.timeline(name).events[-1] for name in ("0.bias", "1.bias")}
    spans = {name: (each.step, each.last_step, each.times) for name, each in stepped.items()}
    assert spans == {"0.bias": (0, 2, 3), "1.bias": (0, 2, 2)}
    assert "step of SGD, 3 times" in str(found) and "step of AdamW, 2 times" in str(found)


def test_a_common_last_name_is_no_prefix() -> None:
    model = nn.Sequential(OrderedDict([("net", nn.Linear(2, 2))]))
    with audit(model) as found:
        model.load_state_dict({"old.weight": torch.ones(2, 2)}, strict=False)
    assert found.facts().notes == []


def test_thousands_of_keys_with_another_prefix_are_one_note() -> None:
    keys = [f"layers.{layer}.experts.{expert}.weight" for layer in range(100) for expert in range(100)]
    load = LoadOutcome(
        "train.py:1",
        "",
        {f"_orig_mod.{key}": key for key in keys},
        dict.fromkeys(keys, ("missing", "")),
        tuple(f"module.{key}" for key in keys),
    )
    (note,) = describe_renamed_keys(load, "")  # comparing all pairs would take a minute
    assert note == "10000 of 10000 unexpected keys begin with 'module.' where missing ones begin with '_orig_mod.'"


def test_a_note_on_an_error_names_a_few_of_many_keys() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    with audit(model) as found, pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    raised, prefix = found.facts().notes
    assert 'Missing key(s) in state_dict: "0.weight", "0.bias", ' in raised
    assert 'Unexpected key(s) in state_dict: "module.0.weight", ' in raised
    assert len(raised) < 500 and raised.endswith("…")
    assert "begin with 'module.'" in prefix


def test_assign_leaves_the_optimizer_with_the_old_tensors() -> None:
    torch.manual_seed(0)
    model, state = nn.Linear(3, 3), nn.Linear(3, 3).state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit(model, optimizer) as found:
        model.load_state_dict(state, assign=True)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert found.status("weight") == "loaded"
    assert [event.what for event in found.timeline("weight")] == ["initialised", "loaded"]
    assert any(
        "2 of the 2 tensors that the optimizer holds are not in the model" in note for note in found.facts().notes
    )
    assert any("optimizer step" in h.what and h.tensors == 0 for h in found.facts().happenings)
    assert "assign=True" in found.facts().happenings[0].what


def test_tied_parameters() -> None:
    torch.manual_seed(0)
    model, state = Tied(), Tied().state_dict()
    del state["out.weight"]
    with audit(model) as found:
        model.load_state_dict(state, strict=False)
    assert found.status("embed.weight") == found.status("out.weight") == "loaded"
    assert "through embed.weight" in found.timeline("out.weight").events[-1].detail


def test_assign_unties() -> None:
    torch.manual_seed(0)
    model = Tied()
    state = {key: value.clone() for key, value in Tied().state_dict().items()}
    with audit(model) as found:
        model.load_state_dict(state, assign=True)
    assert any("embed.weight and out.weight were one tensor" in note for note in found.facts().notes)


def test_nested_loads() -> None:
    class Composed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            self.left.load_state_dict(state_dict["left"])
            self.right.load_state_dict(state_dict["right"])
            return "done"

    torch.manual_seed(0)
    model = Composed()
    with audit(model) as found:
        state = {"left": nn.Linear(2, 2).state_dict(), "right": nn.Linear(2, 2).state_dict()}
        assert model.load_state_dict(state) == "done"
    for name in ("left.weight", "right.bias"):
        assert [event.what for event in found.timeline(name)] == ["initialised", "loaded"]
        assert found.status(name) == "loaded"


def test_direct_assignment_and_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with audit(model) as found:
        model[0].weight = nn.Parameter(torch.ones(2, 2))
        with torch.no_grad():
            model[1].weight.copy_(torch.ones(2, 2))
        model(torch.ones(1, 2))
        model[2].bias.data = torch.full((2,), 3.0)
    assert {found.status(name) for name in ("0.weight", "1.weight", "2.bias")} == {"set"}
    assert found.status("0.bias") == "untouched"


def test_meta_and_lazy_tensors() -> None:
    state = nn.Linear(3, 3).state_dict()
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with audit(model) as found:
        model.load_state_dict(state, assign=True)
    assert found.status("weight") == "loaded"
    lazy = nn.Sequential(nn.LazyLinear(2))
    with audit(lazy) as found:
        lazy(torch.ones(1, 3))
    assert found.status("0.weight") == "untouched"
    assert [event.what for event in found.timeline("0.weight")] == ["initialised", "initialised"]


def test_a_non_persistent_buffer() -> None:
    model = nn.Module()
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    model.register_buffer("kept", torch.zeros(3))
    with audit(model) as found:
        model.load_state_dict({"kept": torch.ones(3)})
    assert found.status("cache") == "untouched" and found.status("kept") == "loaded"


def test_copies_and_pickles_are_plain() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with audit(model) as found:
        other = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        third = torch.load(buffer, weights_only=False)
        for twin in (other, third):
            twin.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
            assert not torch.equal(twin[0].weight, model[0].weight)
    assert found.status("0.weight") == "untouched"
    assert not found.facts().happenings


def test_a_wrapper_around_the_model() -> None:
    torch.manual_seed(0)
    model = nn.DataParallel(nn.Linear(2, 2))
    state = nn.DataParallel(nn.Linear(2, 2)).state_dict()
    with audit(model) as found:
        model.load_state_dict(state)
    assert found.status("weight") == found.status("bias") == "loaded"


def test_a_compiled_model() -> None:
    torch.manual_seed(0)
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    before = set(vars(model))
    with audit(model) as found:
        model.load_state_dict(model.state_dict() | {"_orig_mod.weight": torch.ones(2, 2)})
    assert found.status("weight") == "loaded" and found.status("bias") == "identical"
    assert set(vars(model)) == before


def test_a_wrong_prefix_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    state = {f"module.{key}": value for key, value in nn.Sequential(nn.Linear(2, 2)).state_dict().items()}
    with audit(model) as found:
        model.load_state_dict(state, strict=False)
    assert any("2 of 2 unexpected keys begin with 'module.'" in note for note in found.facts().notes)


def test_an_error_in_the_audit_does_not_stop_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with audit(model) as found:
        monkeypatch.setattr("tensortap.model.audit.watch.read_call", lambda *_: 1 / 0)
        assert not model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}).missing_keys
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert any("missed something" in note and "ZeroDivisionError" in note for note in found.facts().notes)


def test_master_weights_of_a_half_precision_model() -> None:
    class FP16Optimizer(torch.optim.SGD):
        """A minimal mixed-precision optimizer: it steps on float32 copies, and rounds them into the model."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr, momentum=0.9)
            self.halves = list(self.param_groups[0]["params"])
            self.masters = [half.detach().float().clone() for half in self.halves]
            self.param_groups[0]["params"] = self.masters

        def step(self, closure: Any = None) -> None:
            for half, master in zip(self.halves, self.masters, strict=True):
                master.grad = half.grad.float()
            super().step()
            for half, master in zip(self.halves, self.masters, strict=True):
                half.data.copy_(master)

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()

    model = net(0)
    optimizer = FP16Optimizer(model.parameters(), lr=0.05)
    with audit(model, optimizer) as found:
        model.load_state_dict(net(1).state_dict())
        for _ in range(3):
            model(torch.ones(5, 8, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    assert {found.status(name) for name in ("0.weight", "0.bias", "2.weight")} == {"undone"}
    (facts,) = found.facts().undone
    assert (facts.by, facts.step) == ("optimizer", 0)


def test_a_loop_that_copies_the_optimizers_tensors_is_noted() -> None:
    torch.manual_seed(0)
    model, state = nn.Linear(6, 6), nn.Linear(6, 6).state_dict()
    masters = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=1e-2)
    with audit(model, optimizer) as found:
        model.load_state_dict(state)
        for _ in range(2):
            model(torch.randn(4, 6)).square().mean().backward()
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad, param.grad = param.grad, None
            optimizer.step()
            for master, param in zip(masters, model.parameters(), strict=True):
                param.data.copy_(master)
    assert found.status("weight") == "undone" and found.facts().undone[0].by == "something else"
    assert any("copies of tensors that the optimizer holds" in note for note in found.facts().notes)


def test_a_wrapper_that_copies_master_weights_back_is_the_optimizer() -> None:
    class Wrapper:
        """As apex and others wrap an optimizer: it steps on masters, then copies them into the model."""

        def __init__(self, params: Any) -> None:
            self.halves = list(params)
            self.masters = [half.detach().float().clone() for half in self.halves]
            self.optimizer = torch.optim.Adam(self.masters, lr=1e-3)
            self.param_groups = self.optimizer.param_groups

        def step(self) -> None:
            for half, master in zip(self.halves, self.masters, strict=True):
                master.grad = half.grad.float()
            self.optimizer.step()
            for half, master in zip(self.halves, self.masters, strict=True):
                half.data.copy_(master)

    torch.manual_seed(0)
    model, state = nn.Linear(6, 6), nn.Linear(6, 6).state_dict()
    optimizer = Wrapper(model.parameters())
    with audit(model, optimizer) as found:
        model.load_state_dict(state)
        for _ in range(2):
            model.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    assert found.status("weight") == "undone" and found.facts().steps == 2
    (facts,) = found.facts().undone
    assert (facts.by, facts.step) == ("optimizer", 0)
