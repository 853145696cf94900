"""Records hold the tensors that flowed: every trap of torch's hooks, checked against direct computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, coverage, everything, tapped, values


def same(array: object, tensor: torch.Tensor) -> bool:
    return np.array_equal(array, tensor.detach().numpy())


def gradients_by_hand(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    zoo.loss_of(model(x)).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_in_place_module_shows_its_input_before_and_its_output_after(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.InPlaceModule(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    before = model.first(x)
    after = before.relu()
    assert same(values(run, "output")["first", 0, "0"], before)
    assert same(values(run, "input")["act", 0, "0"], before)
    assert same(values(run, "output")["act", 0, "0"], after)


def test_in_place_module_on_a_view_has_all_its_gradients(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.InPlaceModule(), zoo.batch()  # 3-d: the Linear's output is a view of its product
    run, _ = tapped(model, run_path, x)
    before = model.first(x).detach().requires_grad_()
    after = before.relu()
    after.retain_grad()
    zoo.loss_of(model.second(after)).backward()
    assert same(values(run, "grad_output")["act", 0, "0"], after.grad)
    assert same(values(run, "grad_input")["act", 0, "0"], before.grad)
    assert same(values(run, "grad_output")["first", 0, "0"], before.grad)


def test_in_place_change_after_a_module(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.InPlaceAfter(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    y = model.first(x).detach().requires_grad_()
    zoo.loss_of(model.second((y + 1) * 2)).backward()
    assert same(values(run, "output")["first", 0, "0"], y)
    assert same(values(run, "input")["second", 0, "0"], (y + 1) * 2)
    assert same(values(run, "grad_output")["first", 0, "0"], y.grad)


def test_a_change_that_no_version_counts_is_seen(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.BehindAutograd(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    assert same(values(run, "output")["first", 0, "0"], model.first(x))
    assert same(values(run, "input")["second", 0, "0"], model.first(x) * 2)


def test_views_come_out_as_they_are(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.Views(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    left, right = model.first(x).chunk(2, -1)
    assert same(values(run, "output")["split", 0, "0"], left)
    assert same(values(run, "output")["split", 0, "1"], right)
    assert ("split", 0, "1") in values(run, "grad_output")


def test_nested_outputs_and_keyword_arguments_have_paths(run_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.Structured()
    run, _ = tapped(model, run_path)
    outputs, inputs = values(run, "output"), values(run, "input")
    inner = {path for module, _, path in outputs if module == "inner"}
    assert inner == {"hidden", "extra.pair.left", "extra.pair.right", "extra.list.0", r"extra.a\.b"}
    assert {path for module, _, path in inputs if module == "inner"} == {"0", "scale"}
    assert {path for module, _, path in outputs if module == ""} == {"logits", "pair.left", "pair.right", "loss"}
    gradients = {path for module, _, path in values(run, "grad_output") if module == "inner"}
    # `hidden` is what the others are made of; the list's tensor is used by nobody.
    assert gradients == {"hidden", "extra.pair.left", "extra.pair.right", r"extra.a\.b"}


def test_model_output_of_a_transformers_kind(run_path: Path) -> None:
    """An ordered dict that is also a dataclass and omits None, like transformers' ModelOutput."""
    import dataclasses
    from collections import OrderedDict

    @dataclasses.dataclass
    class ModelOutput(OrderedDict):  # type: ignore[type-arg]
        logits: object = None
        past: object = None

        def __post_init__(self) -> None:
            for field in dataclasses.fields(self):
                if (value := getattr(self, field.name)) is not None:
                    self[field.name] = value

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            y = super().forward(x)
            return ModelOutput(logits=y, past=((y * 2, y * 3),))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            return out.logits + out["past"][0][1]

    run, _ = tapped(Model(), run_path)
    assert {p for m, _, p in values(run, "output") if m == "inner"} == {"logits", "past.0.0", "past.0.1"}
    assert {p for m, _, p in values(run, "grad_output") if m == "inner"} == {"logits", "past.0.1"}


def test_values_that_cannot_be_opened_are_reported(run_path: Path) -> None:
    class Box:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    class Opaque(nn.Linear):
        def forward(self, x: torch.Tensor) -> Box:
            return Box(super().forward(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Opaque(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).tensor

    _, tap = tapped(Model(), run_path)
    assert "output of type" in coverage(tap)["inner"][1] and "Box" in coverage(tap)["inner"][1]


def test_shared_module_counts_its_calls_and_its_second_name_is_an_alias(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.Shared(), zoo.batch()
    run, tap = tapped(model, run_path, x)
    outputs, gradients = values(run, "output"), values(run, "grad_output")
    assert [k for k in outputs if k[0] == "layer"] == [("layer", n, "0") for n in range(3)]
    assert {k for k in gradients if k[0] == "layer"} == {("layer", n, "0") for n in range(3)}
    assert not [k for k in outputs if k[0] == "again"]
    assert coverage(tap)["again"][0] == "alias" and "layer" in coverage(tap)["again"][1]
    first = model.layer(model.norm(x))
    assert same(outputs["layer", 0, "0"], first)
    assert same(outputs["layer", 1, "0"], model.layer(model.norm(first.tanh())))


def test_gradients_of_shared_calls_belong_to_the_right_call(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.Shared(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    kept = []
    y = x
    for _ in range(2):
        y = model.layer(model.norm(y))
        y.retain_grad()
        kept.append(y)
        y = y.tanh()
    y = model.again(y)
    y.retain_grad()
    zoo.loss_of(y).backward()
    for call, tensor in enumerate([*kept, y]):
        assert same(values(run, "grad_output")["layer", call, "0"], tensor.grad)


def test_identity_is_an_alias_and_gets_no_gradient_that_is_not_its_own(run_path: Path) -> None:
    run, tap = tapped(zoo.PassThrough(), run_path)
    gradients = {module for module, _, _ in values(run, "grad_output")}
    assert gradients == {"", "first"}
    assert coverage(tap)["identity"][0] == coverage(tap)["drop"][0] == "alias"
    numbers = {r.key.module: r.tensor for r in run.records(kind="output")}
    assert numbers["first"] == numbers["identity"] == numbers["drop"]


def test_modules_without_parameters_have_no_gradient_to_miss(run_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    _, tap = tapped(model, run_path, torch.ones(1, 2), kinds=("output", "param_grad"))
    assert {module: status for module, (status, _) in coverage(tap).items()} == {"": "seen", "0": "seen", "1": "seen"}
    with tt.capture(model, run_path.with_name("without"), kinds=("output", "grad_output")) as tap:
        model(torch.ones(1, 2))
    assert {status for status, _ in coverage(tap).values()} == {"no gradient"}


def test_frozen_unused_integer_and_tied(run_path: Path) -> None:
    model = zoo.Frozen()
    run, tap = tapped(model, run_path, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    said = coverage(tap)
    assert said["frozen"] == ("no gradient", "all its parameters are frozen")
    assert said["unused"][0] == "never called"
    assert said["both.right"] == ("no gradient", "backward did not reach it")
    assert "tied to embed.weight" in said["head"][1]
    parameters = {(m, p) for m, _, p in values(run, "param_grad")}
    assert ("embed", "weight") in parameters and ("head", "weight") not in parameters
    assert not {m for m, _ in parameters} & {"frozen", "unused"}
    tokens = values(run, "input")["embed", 0, "0"]
    assert tokens.dtype == np.int64 and tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert "grad_input" not in {r.key.kind for r in run if r.key.module == "embed"}


def test_parameter_gradients_are_each_backwards_own(run_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    batches = [zoo.batch(seed=s) for s in range(3)]
    with tt.capture(model, run_path, keep="tensors") as tap:
        for x in batches:
            zoo.loss_of(model(x)).backward()  # accumulates: three micro steps in one step
        tap.step()
    run = tt.open(run_path)
    for micro, x in enumerate(batches):
        alone = gradients_by_hand(model, x)
        recorded = {r.key.path: run.load(r) for r in run.records(kind="param_grad") if r.key.micro == micro}
        assert set(recorded) == {"weight", "bias"}
        assert all(same(recorded[name], alone[name]) for name in recorded)
    assert {r.key.micro for r in run.records(kind="output")} == {0, 1, 2}
    assert {r.key.call for r in run.records(kind="output")} == {0}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_grad_input_is_the_modules_own_share_and_torchs_own_hook_agrees(run_path: Path) -> None:
    torch.manual_seed(0)
    model, x = zoo.Residual(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    by_torch: dict[str, torch.Tensor] = {}
    handles = [
        module.register_full_backward_hook(
            lambda m, gi, go, name=name: by_torch.__setitem__(name, gi[0]) if gi[0] is not None else None
        )
        for name, module in model.named_modules()
        if name
    ]
    zoo.loss_of(model(x)).backward()
    for handle in handles:
        handle.remove()
    ours = {module: array for (module, _, _), array in values(run, "grad_input").items()}
    assert set(ours) == set(by_torch) and "gated" in ours
    for name, array in ours.items():
        assert np.allclose(array, by_torch[name].numpy(), rtol=1e-6, atol=1e-9), name


def test_one_tensor_given_twice_has_one_grad_input_and_a_remark(run_path: Path) -> None:
    class Mix(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a * 2 + b * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.mix = nn.Linear(4, 4), Mix()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            return self.mix(y, y)

    run, tap = tapped(Model(), run_path)
    assert {p for m, _, p in values(run, "grad_input") if m == "mix"} == {"0"}
    assert "one tensor" in coverage(tap)["mix"][1]


def test_buffers_and_parameters_before_and_after_the_step(run_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.Statistics()
    mean = model.norm.running_mean.clone()
    weight = model.conv.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tt.capture(model, run_path, keep="tensors", kinds=("param", "buffer"), optimizer=optimizer):
        zoo.loss_of(model(zoo.batch())).backward()
        optimizer.step()
    run = tt.open(run_path)
    assert same(values(run, "buffer")["norm", 0, "running_mean"], mean)
    assert same(values(run, "buffer")["norm", 1, "running_mean"], model.norm.running_mean)
    assert same(values(run, "param")["conv", 0, "weight"], weight)
    assert same(values(run, "param")["conv", 1, "weight"], model.conv.weight)
    assert not same(values(run, "param")["conv", 1, "weight"], weight)
    assert values(run, "buffer")["norm", 1, "num_batches_tracked"] == 1


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_without_autograd(run_path: Path, mode: str) -> None:
    model = zoo.InPlaceAfter()
    with tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS) as tap, getattr(torch, mode)():
        model(zoo.batch())
        tap.step()
    run = tt.open(run_path)
    assert coverage(tap)["first"] == ("no gradient", "ran with autograd off")
    first, second = values(run, "output")["first", 0, "0"], values(run, "input")["second", 0, "0"]
    assert np.array_equal((first + 1) * 2, second)  # the same memory, changed in place where nobody counts


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_checkpointing_gives_the_same_keys_and_bits(tmp_path: Path, mode: str) -> None:
    runs = {}
    for name in (None, mode):
        torch.manual_seed(0)
        x = zoo.batch().requires_grad_()
        runs[name], _ = tapped(zoo.Checkpointed(name), tmp_path / str(name), x)
    plain, checkpointed = everything(runs[None]), everything(runs[mode])
    assert plain.keys() == checkpointed.keys()
    assert plain == checkpointed


def test_checkpointed_calls_are_not_counted_twice(run_path: Path) -> None:
    _, tap = tapped(zoo.Checkpointed("non-reentrant"), run_path, zoo.batch().requires_grad_())
    calls = {row.module: row.calls for row in tap.coverage}
    assert calls["blocks.0.fc"] == 1 and calls["blocks.0.shared"] == 3


def test_a_second_backward_through_one_graph_is_kept_apart(run_path: Path) -> None:
    model = nn.Linear(4, 4)
    with tt.capture(model, run_path) as tap:
        loss = zoo.loss_of(model(zoo.batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        tap.step()
    paths = {r.key.path for r in tt.open(run_path).records(kind="grad_output")}
    assert paths == {"0", "0~2"}


def test_a_tensor_seen_twice_is_summarised_and_stored_once(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensortap.capture.recording import recorder

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    looks = []
    true = recorder.summarize
    monkeypatch.setattr(recorder, "summarize", lambda *given, **named: looks.append(1) or true(*given, **named))
    run, _ = tapped(model, run_path, kinds=("input", "output"))
    assert len(run) == 10 and len(looks) == 4  # x, and the outputs of three leaves
    locations = {r.tensor: r.location for r in run}
    assert len(locations) == len(set(locations.values())) == 4
    stored = sum(location.nbytes for location in set(locations.values()))
    assert stored == 4 * 3 * 5 * 4 * 4


def test_sketches_of_repeated_records_are_filled_in(run_path: Path) -> None:
    run, _ = tapped(nn.Sequential(nn.Linear(4, 4)), run_path, kinds=("output",))
    inner, outer = list(run)
    assert inner.tensor == outer.tensor and np.array_equal(inner.summary.sketch, outer.summary.sketch)


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_other_dtypes_round_trip(run_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4).to(dtype)
    x = zoo.batch().to(dtype)
    with tt.capture(model, run_path, keep="tensors") as tap:
        model(x).abs().float().sum().backward()
        tap.step()
    run = tt.open(run_path)
    record = next(iter(run.records(kind="input")))
    assert record.dtype == str(dtype).removeprefix("torch.")
    assert torch.equal(run.torch(record), x)
    gradients = {r.key.path: run.torch(r) for r in run.records(kind="param_grad")}
    assert torch.equal(gradients["weight"], model.weight.grad) and torch.equal(gradients["bias"], model.bias.grad)


def test_sparse_gradients_are_recorded_dense(run_path: Path) -> None:
    model = nn.Embedding(7, 4, sparse=True)
    with tt.capture(model, run_path, keep="tensors") as tap:
        model(torch.tensor([1, 1, 3])).sum().backward()
        tap.step()
    run = tt.open(run_path)
    assert same(values(run, "param_grad")["", 0, "weight"], model.weight.grad.to_dense())


def test_unreadable_tensors_are_reported(run_path: Path) -> None:
    model = nn.Linear(4, 4)
    with tt.capture(model, run_path, kinds=("input", "output")) as tap:
        torch.func.vmap(model)(zoo.batch())
        tap.step()
    assert "torch.func" in coverage(tap)[""][1]
    assert len(tt.open(run_path)) == 0


def test_modules_that_are_read_instead_of_called(run_path: Path) -> None:
    model = nn.MultiheadAttention(4, 2, batch_first=True)

    with tt.capture(model, run_path) as tap:
        x = zoo.batch()
        model(x, x, x)[0].sum().backward()
        tap.step()
    assert coverage(tap)["out_proj"][0] == "never called"
    assert ("out_proj", "weight") in {(r.key.module, r.key.path) for r in tt.open(run_path).records(kind="param_grad")}


def test_fused_inference_path_is_named(run_path: Path) -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    with tt.capture(model, run_path) as tap, torch.no_grad():
        model(zoo.batch())
        tap.step()
    assert "fused inference path" in coverage(tap)[""][1]
    assert coverage(tap)["linear1"][0] != "never called"


def test_fused_inference_path_is_named_when_the_mode_changes_within_a_step(run_path: Path) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    with tt.capture(model, run_path) as tap:
        model(zoo.batch()).sum().backward()
        assert "fused inference path" not in coverage(tap)["0"][1]
        model.eval()
        with torch.no_grad():
            model(zoo.batch())
        assert "fused inference path" in coverage(tap)["0"][1]


def test_pipelined_micro_steps_keep_their_numbers(run_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with tt.capture(model, run_path, keep="tensors") as tap:
        losses = [zoo.loss_of(model(zoo.batch(seed=s))) for s in range(2)]
        for loss in losses:
            loss.backward()
        tap.step()
    run = tt.open(run_path)
    alone = gradients_by_hand(model, zoo.batch(seed=0))
    first = next(r for r in run.records(kind="param_grad") if r.key.micro == 0 and r.key.path == "weight")
    assert same(run.load(first), alone["weight"])


def test_outputs_of_one_operation_send_one_share_back(run_path: Path) -> None:
    """A split has one node for all its outputs, and its gradient counts once."""
    model, x = zoo.Views(), zoo.batch()
    run, _ = tapped(model, run_path, x)
    first = values(run, "grad_output")["first", 0, "0"]
    assert np.array_equal(values(run, "grad_input")["split", 0, "0"], first)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_an_encoder_do_not_stop_the_recording(run_path: Path) -> None:
    """With autograd off and a padding mask, torch's encoder passes nested tensors to its layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad(), tt.capture(model, run_path) as tap:
        model(torch.randn(2, 3, 8), src_key_padding_mask=mask)
        tap.step()
    run = tt.open(run_path)
    assert run.finished and len(run)
    remarks = [row.reason for row in tap.coverage]
    assert any("a nested tensor has no single shape" in reason for reason in remarks)


def test_memory_that_was_given_back_is_not_read(run_path: Path) -> None:
    """Parameters that are freed between uses have a shape but no elements."""
    model = nn.Linear(4, 4)
    with tt.capture(model, run_path, kinds=("param",)) as tap:
        zoo.loss_of(model(zoo.batch()))
        model.weight.untyped_storage().resize_(0)
        tap.step()
    assert [(r.key.path, r.key.call) for r in tt.open(run_path)] == [("weight", 0), ("bias", 0), ("bias", 1)]
    assert coverage(tap)[""][1] == "param weight is not recorded: its memory has been freed"
