"""The inspection of a model's tensors: trained, saved, moved, shared or forgotten."""

from __future__ import annotations

import json
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tensortap.errors import UsageError
from tensortap.model.inspect import Inspection, inspect

paddle = pytest.importorskip("paddle")


class Model(nn.Module):
    """One tensor of each kind."""

    def __init__(self) -> None:
        super().__init__()
        layers = OrderedDict([("conv", nn.Conv2d(1, 1, 3, bias=False)), ("fc", nn.Linear(1, 2, bias=False))])
        self.param_nn = nn.Sequential(layers)
        self.register_buffer("param_buf", torch.randn(1, 2))
        self.register_parameter("param_reg", nn.Parameter(torch.randn(1, 2)))
        self.param_attr = torch.randn(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def by_name(seen: Inspection) -> dict:
    return {entry.name: entry for entry in seen.tensors}


def codes(seen: Inspection) -> list[str]:
    return [warning.code for warning in seen.warnings]


def test_each_kind_is_named_and_only_what_is_registered_is_saved_and_moved() -> None:
    model = Model()
    seen = inspect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    facts = by_name(seen)
    assert {name: (f.kind, f.groups, bool(f.saved_as), f.moved) for name, f in facts.items()} == {
        "param_reg": ("parameter", (0,), True, True),
        "param_buf": ("buffer", (), True, True),
        "param_attr": ("attribute", (), False, False),
        "param_nn.conv.weight": ("parameter", (0,), True, True),
        "param_nn.fc.weight": ("parameter", (0,), True, True),
    }
    assert codes(seen) == ["plain-attribute"]
    assert seen.warnings[0].names == ("param_attr",)
    assert seen.totals()["parameters"] == {"tensors": 3, "elements": 13, "nbytes": 52}
    assert json.loads(json.dumps(seen.as_dict()))["model"] == "Model"


def test_moved_flag_matches_what_to_does() -> None:
    model = Model()
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    facts = by_name(inspect(model))
    model.to(torch.float64)
    for name, fact in facts.items():
        tensor = model.get_submodule(fact.module).__getattr__(fact.own) if fact.moved else model.param_attr
        assert (tensor.dtype == torch.float64) == fact.moved, name
    assert set(model.state_dict()) == {key for fact in facts.values() for key in fact.saved_as}


def test_gradient_states_after_clearing() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert {f.gradient for f in inspect(model).tensors} == {"none"}
    model(torch.ones(1, 2)).sum().backward()
    entries = [t for m in inspect(model, optimizer).as_dict()["modules"] for t in m["tensors"]]
    assert [t["gradient"] for t in entries] == ["set", "set"]
    assert [t["after_clearing"] for t in entries] == [
        {"model": "none", "optimizer": "none"},
        {"model": "none", "optimizer": "set"},
    ]
    optimizer.zero_grad(set_to_none=False)
    assert [f.gradient for f in inspect(model, optimizer).tensors] == ["zero", "set"]
    assert "1 gradient would stay" in str(inspect(model, optimizer))


def test_mistakes_with_groups() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c", "d")})
    model["c"].requires_grad_(False)
    optimizer = torch.optim.SGD([{"params": [model["a"].weight]}, {"params": [model["c"].weight]}], lr=0.1)
    optimizer.param_groups[1]["params"].append(model["a"].weight)
    optimizer.param_groups[1]["params"].append(torch.zeros(2, requires_grad=True))
    seen = inspect(model, optimizer)
    assert {w.code: w.names for w in seen.warnings} == {
        "in-no-group": ("b.weight", "d.weight"),
        "in-two-groups": ("a.weight",),
        "frozen-in-optimizer": ("c.weight",),
        "not-in-model": (),
    }
    assert by_name(seen)["a.weight"].groups == (0, 1)


class Hider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
        self.named = {"head": nn.Linear(2, 1)}
        self.scales = [nn.Parameter(torch.ones(2))]
        self.seen_too = nn.ModuleList([nn.Linear(2, 2)])
        self.order = [self.seen_too[0]]  # only a second handle
        self.rnn = nn.GRU(2, 2)  # keeps its weights in a plain list as well


def test_modules_and_parameters_in_plain_containers_are_found() -> None:
    model = Hider()
    seen = inspect(model)
    assert codes(seen) == ["plain-parameter", "hidden-modules", "hidden-modules"]
    blocks, named = seen.warnings[1:]
    assert "blocks is a plain list with 2 modules (12 parameters)" in blocks.text and "ModuleList" in blocks.text
    assert "named is a plain dict with 1 module (3 parameters)" in named.text and "ModuleDict" in named.text
    assert set(blocks.names) == {f"blocks[{i}].{w}" for i in (0, 1) for w in ("weight", "bias")}
    assert seen.totals()["parameters"]["elements"] == sum(p.numel() for p in model.parameters())


def test_tied_tensors_are_one_entry_with_all_their_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    seen = inspect(model)
    (entry,) = seen.tensors
    assert entry.shared_with == ("head.weight",) and entry.saved_as == ("embed.weight", "head.weight")
    assert codes(seen) == ["saved-twice"]
    assert "weight = embed.weight" in str(seen)


def test_a_lazy_parameter_has_no_shape_yet() -> None:
    seen = inspect(nn.Sequential(nn.LazyLinear(3)))
    assert codes(seen) == ["uninitialised"]
    assert "not yet" in str(seen) and seen.totals()["parameters"]["elements"] == 0


@pytest.mark.parametrize("given", [list, tuple, lambda both: dict(zip("ab", both, strict=True))])
def test_several_optimizers_are_inspected_together(given) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    both = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters())]
    seen = inspect(model, given(both))
    assert codes(seen) == [] and {tensor.groups for tensor in seen.tensors} == {(0,), (1,)}
    assert str(seen).startswith("Sequential · torch · SGD, AdamW, 2 groups\n")
    assert seen.totals()["trained"]["tensors"] == 3
    with pytest.raises(UsageError, match="follows one optimizer, and there are 2"):
        seen.watch()
    assert "in-two-groups" in codes(inspect(model, [both[0], both[0]]))


def test_a_tensor_on_the_meta_device_has_no_values() -> None:
    seen = inspect(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False, device="meta")))
    assert codes(seen) == ["no-values"]
    assert "1.weight is on the meta device" in str(seen)


def test_the_number_of_names_in_the_state_dict_is_shown() -> None:
    first = nn.Linear(2, 2, bias=False)
    assert re.search(r"weight .* twice ", str(inspect(nn.Sequential(first, first))))
    assert re.search(r"weight .* 3 times ", str(inspect(nn.Sequential(first, first, first))))


def test_a_custom_state_dict_decides_what_is_saved() -> None:
    class Private(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            del destination[prefix + "bias"]

    seen = inspect(nn.Sequential(Private(2, 2)))
    assert {f.own: bool(f.saved_as) for f in seen.tensors} == {"weight": True, "bias": False}
    assert codes(seen) == ["not-saved"]


def test_a_state_dict_that_raises_is_reported_and_inferred() -> None:
    class Broken(nn.Linear):
        def state_dict(self, *args: object, **kwargs: object) -> dict:
            raise RuntimeError("not now")

    seen = inspect(Broken(2, 2))
    assert codes(seen) == ["no-state-dict"] and all(f.saved_as for f in seen.tensors)


def test_a_sharded_model_is_not_asked_for_a_state_dict_that_needs_all_ranks() -> None:
    class FullyShardedDataParallel(nn.Linear):
        def state_dict(self, *args: object, **kwargs: object) -> dict:
            raise AssertionError("asked")

    (warning,) = inspect(FullyShardedDataParallel(2, 2)).warnings
    assert "all ranks" in warning.text and "asked)" not in warning.text


def test_an_attribute_that_shares_a_buffers_memory_has_its_own_warning() -> None:
    model = nn.BatchNorm1d(4)
    model.mean, model.first = model.running_mean, model.running_mean[:2]
    seen = inspect(model)
    assert [(w.code, w.names) for w in seen.warnings] == [("attribute-shares", ("mean", "first"))]
    assert set(by_name(seen)["running_mean"].shared_with) == {"mean", "first"}
    assert "shared with" in str(seen) and "attributes" not in seen.totals()  # no memory of their own


def test_only_identical_repeated_layers_are_folded() -> None:
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(32)])
    assert "0 … 31 Linear, 32 alike" in str(inspect(model))
    model[7].bias.requires_grad_(False)
    text = str(inspect(model))
    assert "0 … 6 Linear, 7 alike" in text and "8 … 31 Linear, 24 alike, like 0" in text
    assert len(text.splitlines()) < 20


def test_the_page_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    model = nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2))
    model.a_rather_long_name_of_a_plain_tensor = torch.zeros(123, 456)
    assert max(map(len, str(inspect(model, torch.optim.Adam(model.parameters()))).splitlines())) <= 80


def test_inspecting_changes_nothing() -> None:
    model = Model()
    model(torch.ones(1)).sum()
    before = {name: list(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    str(inspect(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: list(vars(module)) for name, module in model.named_modules()} == {
        n: list(v) for n, v in before.items()
    }


def test_wrong_arguments_name_the_accepted_ones() -> None:
    with pytest.raises(UsageError, match=r"torch\.optim\.Optimizer"):
        inspect(nn.Linear(1, 1), "adam")
    with pytest.raises(UsageError, match="optimizer too"):
        inspect(nn.Linear(1, 1)).watch()


@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")
def test_paddle_layers() -> None:
    class Net(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = paddle.nn.Linear(2, 3), paddle.nn.BatchNorm1D(3)
            self.register_buffer("kept", paddle.zeros([2]))
            self.register_buffer("scratch", paddle.zeros([2]), persistable=False)
            self.table = [paddle.ones([2])]
            self.extra = [paddle.nn.Linear(2, 2)]

        def forward(self, x):
            return self.norm(self.fc(x))

    net = Net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    seen = inspect(net, optimizer)
    facts = by_name(seen)
    assert facts["fc.weight"].groups == (0,) and facts["fc.weight"].saved_as == ("fc.weight",)
    assert facts["norm._mean"].kind == "parameter" and facts["norm._mean"].statistics
    assert "statistics" in str(seen) and "6 running statistics (the role of buffers)" in str(seen)
    assert facts["kept"].kind == "buffer" and facts["kept"].saved_as == ("kept",)
    assert facts["scratch"].kind == "non-persistent buffer" and not facts["scratch"].saved_as
    assert facts["table[0]"].kind == "attribute" and not facts["table[0]"].moved
    assert codes(seen) == ["plain-attribute", "hidden-modules"]
    net(paddle.ones([4, 2])).sum().backward()
    assert by_name(inspect(net))["norm.bias"].gradient == "set"
    optimizer.clear_grad()
    assert by_name(inspect(net))["norm.bias"].gradient == "zero"
    assert "clear_grad() leaves zeros" in str(inspect(net))


def test_paddle_groups() -> None:
    net = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=[{"params": [net.weight]}, {"params": [net.bias]}])
    assert {f.own: f.groups for f in inspect(net, optimizer).tensors} == {"weight": (0,), "bias": (1,)}


def test_a_users_paddle_parameter_called_mean_is_trained() -> None:
    class Gaussian(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self._mean, self._variance = self.create_parameter([2]), self.create_parameter([2])

    seen = inspect(Gaussian())
    assert [(f.kind, f.statistics, f.requires_grad) for f in seen.tensors] == [("parameter", False, True)] * 2
    assert seen.totals()["trained"]["elements"] == 4


def test_paddle_statistics_stay_statistics_when_everything_is_unfrozen() -> None:
    norm = paddle.nn.BatchNorm1D(3)
    for parameter in norm.parameters():
        parameter.stop_gradient = False
    assert {f.own for f in inspect(norm).tensors if f.statistics} == {"_mean", "_variance"}
