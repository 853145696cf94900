"""Weights from one model into another: across frameworks, names and layouts, bit for bit, with a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import twins
from tensortap.errors import UsageError

paddle = pytest.importorskip("paddle")


def state(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", twins.NAMES)
def test_a_transfer_and_its_inverse_restore_the_weights(name: str) -> None:
    ours, theirs = twins.models(name)
    before = state(ours)
    there = tt.transfer(ours, theirs)
    assert there.complete, str(there)
    with torch.no_grad():
        for tensor in (*ours.parameters(), *ours.buffers()):
            tensor.zero_()
    back = tt.transfer(theirs, ours)
    assert back.complete, str(back)
    for key, array in state(ours).items():
        if not key.endswith("num_batches_tracked"):
            assert np.array_equal(array, before[key]), key


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_dtypes_are_copied_bit_for_bit(dtype: str) -> None:
    ours = nn.Linear(5, 3).to(getattr(torch, dtype))
    theirs = paddle.nn.Linear(5, 3)
    theirs.to(dtype=dtype)
    report = tt.transfer(ours, theirs)
    assert {each.dtype for each in report.copied} == {dtype} and not any(each.cast_from for each in report.copied)
    assert str(theirs.weight.dtype).endswith(dtype)
    same = theirs.weight.astype("float64").numpy(), ours.weight.detach().double().numpy().T
    assert np.array_equal(*same)
    again = nn.Linear(5, 3).to(getattr(torch, dtype))
    tt.transfer(theirs, again)
    assert torch.equal(again.weight, ours.weight) and torch.equal(again.bias, ours.bias)


def test_a_cast_is_reported() -> None:
    ours, theirs = nn.Linear(5, 3).bfloat16(), paddle.nn.Linear(5, 3)
    report = tt.transfer(ours, theirs)
    assert {each.cast_from for each in report.copied} == {"bfloat16"}
    assert "2 of them cast from bfloat16 to float32" in str(report)
    assert np.array_equal(theirs.weight.numpy(), ours.weight.detach().float().numpy().T)


def test_buffers_are_copied_and_missing_counterparts_are_reported() -> None:
    ours, theirs = nn.BatchNorm2d(4), paddle.nn.BatchNorm2D(4)
    ours.running_mean.copy_(torch.arange(4.0))
    report = tt.transfer(ours, theirs)
    assert np.array_equal(theirs._mean.numpy(), np.arange(4.0, dtype=np.float32))
    assert [(each.side, each.name) for each in report.ignored] == [("source", "num_batches_tracked")]
    assert report.complete and len(report.copied) == 4


def test_a_shape_mismatch_is_reported_with_both_shapes() -> None:
    ours, theirs = nn.Linear(5, 3), paddle.nn.Linear(5, 4)
    before = theirs.weight.numpy()
    report = tt.transfer(ours, theirs)
    assert not report.complete and not report.copied
    assert ("target", "weight", "its shape 5×4 does not fit 3×5 of weight") in [
        (left.side, left.name, left.why) for left in report.left
    ]
    assert "! target weight: its shape 5×4 does not fit 3×5 of weight" in str(report)
    assert np.array_equal(theirs.weight.numpy(), before)


def test_strict_copies_all_or_nothing() -> None:
    ours = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    theirs = paddle.nn.Sequential(paddle.nn.Linear(5, 3), paddle.nn.Linear(3, 7))
    before = theirs[0].weight.numpy()
    with pytest.raises(UsageError, match=r"nothing was copied: target 1.weight: its shape 3×7 does not fit 2×3"):
        tt.transfer(ours, theirs, strict=True)
    assert np.array_equal(theirs[0].weight.numpy(), before)
    assert len(tt.transfer(ours, theirs).copied) == 2


def test_a_tied_tensor_of_the_target_gets_one_value() -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    tied, apart = Tied(True), Tied(False)
    report = tt.transfer(tied, apart)
    assert report.complete and torch.equal(apart.head.weight, tied.embed.weight)
    report = tt.transfer(apart, Tied(True))
    assert report.complete, "both have the same value now"
    with torch.no_grad():
        apart.head.weight.add_(1)
    report = tt.transfer(apart, tied)
    assert [(left.side, left.name, left.why) for left in report.left] == [
        ("source", "head.weight", "the target ties head.weight to embed.weight")
    ]
    assert torch.equal(tied.embed.weight, apart.embed.weight)


def test_within_one_framework() -> None:
    ours = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.norm, self.conv = nn.Linear(16, 2), nn.BatchNorm2d(4), nn.Conv2d(3, 4, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.conv(x)).flatten(1))

    theirs = Other()
    ours(torch.randn(5, 3, 4, 4))  # statistics of its own
    report = tt.transfer(ours, theirs)
    assert report.complete and not any(each.change for each in report.copied)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def test_rules(tmp_path: Path) -> None:
    ours = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    theirs = paddle.nn.LayerDict({"x": paddle.nn.Linear(4, 4), "y": paddle.nn.Linear(4, 4)})
    (tmp_path / "rules.toml").write_text('[[module]]\nreference = "a"\ncandidate = "y"\n')
    tt.transfer(ours, theirs, tmp_path / "rules.toml")
    assert np.array_equal(theirs["y"].bias.numpy(), ours["a"].bias.detach().numpy())
    assert np.array_equal(theirs["x"].bias.numpy(), ours["b"].bias.detach().numpy())


def test_a_class_is_recognised_by_its_base(tmp_path: Path) -> None:
    class Projection(nn.Linear):
        pass

    class Dense(paddle.nn.Linear):
        pass

    ours, theirs = nn.Sequential(Projection(4, 4)), paddle.nn.Sequential(Dense(4, 4))
    assert [each.change for each in tt.transfer(ours, theirs).copied] == ["transposed", ""]
    x = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)
    result = tt.compare(twins.train(ours, x, tmp_path / "a"), twins.train(theirs, x, tmp_path / "b"))
    assert result.verdict == "match", str(result)


def test_trainable_parameters_stay_trainable() -> None:
    ours, theirs = nn.Linear(4, 3), paddle.nn.Linear(4, 3)
    theirs.bias.stop_gradient = True
    ours.weight.requires_grad_(False)
    tt.transfer(ours, theirs)
    assert (theirs.weight.stop_gradient, theirs.bias.stop_gradient) == (False, True)
    tt.transfer(theirs, ours)
    assert (ours.weight.requires_grad, ours.bias.requires_grad) == (False, True)


def test_tensors_without_elements_are_reported_with_the_reason() -> None:
    ours = nn.Linear(4, 3, device="meta")
    report = tt.transfer(ours, nn.Linear(4, 3))
    assert {left.why for left in report.left} == {"a meta tensor has no elements"}


def test_the_report_is_json_serialisable() -> None:
    report = tt.transfer(*twins.models("Encoder"))
    said = json.loads(json.dumps(report.as_dict()))
    assert said["complete"] and len(said["copied"]) == 35
    first = next(each for each in said["copied"] if each["target"] == "body.layers.0.self_attn.k_proj.weight")
    assert first["source"] == ["encoder.layers.0.self_attn.in_proj_weight"]
    assert (first["change"], first["shape"]) == ("split (16 to 32 of axis 0), transposed", [16, 16])
    assert repr(report) == "<Transfer Encoder (torch) → Encoder (paddle): 35 copied, 0 left>"
    assert all(len(line) <= 80 for line in str(report).splitlines())


def test_only_models_are_accepted() -> None:
    with pytest.raises(UsageError, match=r"a builtins\.dict is not a model"):
        tt.transfer(nn.Linear(2, 2), {"weight": 1})
