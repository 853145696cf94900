"""Ports with other names and nesting: weights are mapped if tensors leave no doubt; the rest is listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("paddle")
import paddle

import tensortap as tt
from support import ports_paddle, ports_torch, twins

NAMES = ("GPT2", "BertForMaskedLM", "ConvNext", "Swin")


def batch(name: str, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    if name == "ConvNext":
        return rng.standard_normal((2, 3, 16, 16)).astype(np.float32)
    if name == "Swin":
        return rng.standard_normal((2, 4, 8)).astype(np.float32)
    return rng.integers(0, 20, (2, 7))


def models(name: str, seed: int = 0) -> tuple[Any, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ours = getattr(ports_torch, name)()
        for parameter in ours.parameters():  # nothing is all zeros or ones
            parameter.data += 0.1 * torch.randn_like(parameter)
    paddle.seed(seed + 1)
    return ours, getattr(ports_paddle, name)()


def compared(
    name: str, folder: Path, seed: int = 0, change: Callable[[Any], None] | None = None, back: bool = False
) -> Any:
    ours, theirs = models(name, seed)
    assert tt.transfer(ours, theirs).complete
    if change is not None:
        change(theirs)
    data = batch(name, seed)
    runs = twins.train(ours, data, folder / "torch"), twins.train(theirs, data, folder / "paddle")
    return tt.compare(*(runs[::-1] if back else runs))


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_mapped(name: str) -> None:
    """A transfer there and back restores all values."""
    ours, theirs = models(name)
    there = tt.transfer(ours, theirs)
    assert there.complete, str(there)
    before = {key: tensor.clone() for key, tensor in ours.state_dict().items()}
    for parameter in ours.parameters():
        parameter.data.zero_()
    back = tt.transfer(theirs, ours)
    assert back.complete, str(back)
    after = ours.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
@pytest.mark.parametrize("name", NAMES)
def test_a_correct_port_matches(name: str, back: bool, seed: int, tmp_path: Path) -> None:
    result = compared(name, tmp_path, seed, back=back)
    assert result.verdict == "match", str(result)


def test_the_report_shows_how_names_were_mapped() -> None:
    ours, theirs = models("GPT2")
    report = tt.transfer(ours, theirs)
    found = {each.target: each for each in report.copied}
    query = found["decoder.0.self_attn.q_proj.weight"]
    assert (query.source, query.change) == (("h.0.attn.c_attn.weight",), "split (0 to 8 of axis 1)")
    assert found["decoder.1.linear1.weight"].change == ""  # a Conv1D of transformers has the layout of paddle's Linear
    head = {each.target: each for each in tt.transfer(*models("BertForMaskedLM")).copied}["cls.decoder_bias"]
    assert (head.source, head.how) == (("cls.predictions.bias",), "shape")


def test_buffers_that_are_not_saved_need_no_counterpart() -> None:
    report = tt.transfer(*models("BertForMaskedLM"), strict=True)
    assert [(each.side, each.name, each.why) for each in report.ignored] == [
        ("source", "bert.position_ids", "not saved with the model")
    ]


# --- mistakes ------------------------------------------------------------------------------------------------------
def _swap_query_and_key(model: Any) -> None:
    attention = model.decoder[1].self_attn
    attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj


def _other_epsilon(model: Any) -> None:
    model.downsample.norm._epsilon = 1e-3


def _other_activation(model: Any) -> None:
    model.stages[1][0].act._approximate = True


def _scaled_bias(model: Any) -> None:
    model.cls.decoder_bias.set_value(model.cls.decoder_bias * 1.01)


MISTAKES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "query and key swapped": ("GPT2", _swap_query_and_key, "h.1.attn.c_attn"),
    "epsilon of the downsampling": ("Swin", _other_epsilon, "layers.0.downsample.norm"),
    "activation of a block": ("ConvNext", _other_activation, "stages.1.layers.0.act"),
    "bias of the tied decoder": ("BertForMaskedLM", _scaled_bias, "cls.predictions"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_port_is_located(mistake: str, tmp_path: Path) -> None:
    name, change, module = MISTAKES[mistake]
    result = compared(name, tmp_path, change=change)
    assert (result.verdict, result.first.module) == ("diverged", module), str(result)


# --- what is not certain ---------------------------------------------------------------------------------------------
def named(**modules: Any) -> nn.Module:
    return nn.ModuleDict(modules)


class Layers(paddle.nn.Layer):  # type: ignore[misc]  # paddle is untyped to us
    def __init__(self, **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_sublayer(name, layer)


def linears(framework: Any, names: str, *sizes: int) -> dict[str, Any]:
    return {name: framework.nn.Linear(*sizes) for name in names.split()}


def test_interleaved_heads_are_not_split() -> None:
    """Names and shapes do not show whether query, key and value are concatenated or interleaved by head."""
    ours = named(attn=named(query_key_value=nn.Linear(8, 24), dense=nn.Linear(8, 8)))
    theirs = Layers(attn=Layers(**linears(paddle, "q_proj k_proj v_proj out_proj", 8, 8)))
    report = tt.transfer(ours, theirs)
    assert {each.name for each in report.left if each.side == "source"} >= {
        "attn.query_key_value.weight",
        "attn.query_key_value.bias",
    }
    assert not any("query_key_value" in part for each in report.copied for part in each.source)


def test_two_of_one_shape_are_not_mapped_by_shape() -> None:
    """Tensors are matched by shape only if each side has exactly one left."""
    ours = named(a=named(norm=nn.LayerNorm(4), x=nn.Linear(4, 6), y=nn.Linear(4, 6)), b=named(z=nn.Linear(6, 3)))
    theirs = Layers(
        c=Layers(first=paddle.nn.Linear(6, 3)),
        d=Layers(p=paddle.nn.LayerNorm(4)),
        e=Layers(q=paddle.nn.Linear(4, 6), r=paddle.nn.Conv2D(1, 1, 3)),
    )
    report = tt.transfer(ours, theirs)
    copied = {each.target: each.source[0] for each in report.copied}
    assert copied["c.first.weight"] == "b.z.weight"
    assert copied["d.p.weight"] == "a.norm.weight"
    assert {"x", "y"} & {each.name.split(".")[1] for each in report.left if each.side == "source"}
