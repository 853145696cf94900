"""The line of a planted mistake is named; other ways to write the same are not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoom import held_out
from zoom.planted import MISTAKES, RIGHT, SOURCES, Mistake, Source, build, changed_lines

import tensortap as tt
from tensortap.errors import UsageError


def zoomed(mistake: Mistake, folder: Path, sources: Mapping[str, Source] = SOURCES) -> tuple[Any, list[int]]:
    source = sources[mistake.source]
    text = source.text()
    reference = build(folder, "reference", text)
    for old, new in mistake.more.items():
        text, _ = changed_lines(text, old, new)
    wrong, lines = changed_lines(text, mistake.old, mistake.new)
    candidate = build(folder, "candidate", wrong)
    theirs = source.make(reference, mistake.dtype)
    ours = source.make(candidate, mistake.dtype)
    ours.load_state_dict(theirs.state_dict())
    args, keywords = source.inputs(reference, mistake.dtype)
    return tt.zoom(theirs, ours, args, keywords), lines


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_the_line_of_a_mistake_is_named(mistake: Mistake, tmp_path: Path) -> None:
    result, lines = zoomed(mistake, tmp_path)
    assert result.verdict == ("imprecise" if "upcast" in mistake.name else "diverged"), result
    named = result.first.reference_line if mistake.or_reference else result.line
    assert named is not None and named.line in lines, (str(result), lines)
    assert f"{result.line}" in str(result)


def rewritten(source: Source, changes: Mapping[str, str], folder: Path) -> Any:
    text = source.text()
    for old, new in changes.items():
        text, _ = changed_lines(text, old, new)
    reference, candidate = build(folder, "reference", source.text()), build(folder, "candidate", text)
    theirs, ours = source.make(reference, torch.float32), source.make(candidate, torch.float32)
    return tt.zoom(theirs, ours, *source.inputs(reference, torch.float32))


@pytest.mark.parametrize("name", RIGHT)
def test_other_ways_to_write_the_same_have_no_line(name: str, tmp_path: Path) -> None:
    result = rewritten(SOURCES["block"], RIGHT[name], tmp_path)
    assert (result.verdict, result.line) == ("match", None), str(result)


@pytest.mark.parametrize(
    "name",
    [
        "gemma norm not upcast",  # the line that calls a function which both sides have
        "scale of the head",  # an argument on a line of its own
        "one direction",  # code that the reference has and does not run
        "state cut off",  # a constant with the values of a gradient's operand
        "weight with a gradient",  # beside a detach that both sides have
        "quality with a gradient",  # a detach that only the reference has
    ],
)
def test_a_line_that_leads_to_another_is_named(name: str, tmp_path: Path) -> None:
    mistake = next(each for each in held_out.MISTAKES if each.name == name)
    result, lines = zoomed(mistake, tmp_path, held_out.SOURCES)
    assert result.line is not None and result.line.line in lines, (str(result), lines)


@pytest.mark.parametrize("name", ["rotary on both at once", "rotation in real numbers", "cross entropy"])
def test_other_ways_of_a_library_have_no_line(name: str, tmp_path: Path) -> None:
    source, changes = held_out.RIGHT[name]
    result = rewritten(held_out.SOURCES[source], changes, tmp_path)
    assert (result.verdict, result.line) == ("match", None), str(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_and_fused_attention_of_a_library_match(dtype: torch.dtype, tmp_path: Path) -> None:
    from zoom.planted import _llama_config

    source = SOURCES["llama"]
    module = build(tmp_path, "llama", source.text())
    theirs = source.make(module, dtype)
    torch.manual_seed(0)
    ours = module.LlamaDecoderLayer(_llama_config("sdpa"), 0).to(dtype)
    result = tt.zoom(theirs, ours, *source.inputs(module, dtype))
    assert result.verdict == "match", str(result)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class HalfBackward(Doubled):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 0.5


class WithFunction(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.linear(x)).relu()


def test_an_autograd_function_is_one_operator_on_the_line_that_calls_it() -> None:
    torch.manual_seed(0)
    theirs = WithFunction(Doubled)
    ours = WithFunction(HalfBackward)
    ours.load_state_dict(theirs.state_dict())
    result = tt.zoom(theirs, ours, torch.randn(3, 4))
    names = [
        row.candidate.name for row in result.rows if row.candidate is not None and row.candidate.phase == "forward"
    ]
    assert names == ["addmm", "Doubled", "relu"]
    assert result.verdict == "diverged"
    assert result.first is not None and result.first.phase == "backward"
    assert "gradient * 0.5" in str(result)


def test_other_parameters_are_named() -> None:
    theirs, ours = nn.Linear(4, 4), nn.Linear(4, 4)
    result = tt.zoom(theirs, ours, torch.randn(3, 4))
    assert result.verdict == "diverged"
    assert "has other values than in the reference" in str(result)


def test_modules_stay_as_they_were() -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    x = torch.randn(3, 2, 5, requires_grad=True)
    state = torch.get_rng_state()
    result = tt.zoom(theirs, theirs, x)
    assert result.verdict == "match"
    assert all(torch.equal(before[name], tensor) for name, tensor in theirs.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert x.grad is None and all(parameter.grad is None for parameter in theirs.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in theirs.modules())


def test_a_module_that_fails_is_reported() -> None:
    with pytest.raises(UsageError, match="the candidate failed on these inputs"):
        tt.zoom(nn.Linear(4, 4), nn.Linear(5, 4), torch.randn(3, 4))


def test_the_result_is_plain_data() -> None:
    facts = tt.zoom(nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)).as_dict()
    assert json.loads(json.dumps(facts))["verdict"] == "diverged"
