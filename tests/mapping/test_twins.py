"""The same architecture in torch and paddle: after a transfer all mapped pairs agree, and a mistake is located."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("paddle")
import paddle

import tensortap as tt
from support import twins
from support.twins import batch, compared, models, train

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track global mean:UserWarning")

CANCELS = {
    ("Cnn", "features.4.bias"),  # a bias before a BatchNorm
    ("Decoder", "layers.0.attention.k.bias"),  # a key's bias moves all scores alike
    ("Decoder", "layers.1.attention.k.bias"),
    ("AutoEncoder", "norm.weight"),  # a scale before an InstanceNorm
}
"""Gradients that are zero but for rounding; relative to themselves they are nothing but noise."""


@pytest.mark.parametrize("name", twins.NAMES)
def test_every_mapped_pair_agrees(name: str, tmp_path: Path) -> None:
    result = compared(name, tmp_path)
    assert result.verdict == "match", str(result)
    kinds = {row["kind"] for row in result.rows}
    assert {"input", "output", "grad_output", "param", "param_grad"} <= kinds
    for row in result.rows:
        if row["path"] == "running_var" and row["call"] == 1:
            assert row["rule"] == "torch divides a variance by n - 1, paddle by n"
        elif (name, f"{row['module']}.{row['path']}") not in CANCELS or row["kind"] != "param_grad":
            assert row["exact"] and row["rel_l2"] <= 1e-5, row


@pytest.mark.parametrize("name", twins.NAMES)
def test_the_other_direction(name: str, tmp_path: Path) -> None:
    result = compared(name, tmp_path, back=True)
    assert result.verdict == "match", str(result)
    assert (result.info["reference"]["framework"], result.info["candidate"]["framework"]) == ("paddle", "torch")


@pytest.mark.parametrize("name", twins.NAMES)
def test_unmatched_records_are_explained(name: str, tmp_path: Path) -> None:
    result = compared(name, tmp_path)
    assert all(each.why for each in result.unmatched)
    parameters = [each for each in result.unmatched if each.key.kind in ("param", "param_grad", "buffer")]
    assert {each.why for each in parameters} <= {"the reference ties it to embed.weight"}


@pytest.mark.parametrize("name", ["ResNet", "Encoder", "Packed"])
def test_comparison_of_summaries(name: str, tmp_path: Path) -> None:
    ours, theirs = models(name)
    tt.transfer(ours, theirs)
    runs = [train(m, batch(name), tmp_path / str(at), keep="summary") for at, m in enumerate((ours, theirs))]
    result = tt.compare(*runs)
    assert result.verdict == "match", str(result)
    unjudged = [row for row in result.rows if row["status"] == "unjudged"]
    assert unjudged and all(row["layout"] is not None for row in unjudged)
    assert any('capture with keep="tensors"' in note for note in result.notes)


def test_norms_alone_find_a_weight_of_another_size(tmp_path: Path) -> None:
    ours, theirs = models("Mlp")
    tt.transfer(ours, theirs)
    theirs.net[2].weight.set_value(theirs.net[2].weight * 1.01)
    runs = [train(m, batch("Mlp"), tmp_path / str(at), keep="summary") for at, m in enumerate((ours, theirs))]
    result = tt.compare(*runs)
    assert result.first is not None and result.first.key.module == "fc2"
    assert "fc2.weight (net.2 in paddle); it is off by at least 0.01" in str(result)


# --- mistakes ------------------------------------------------------------------------------------------------------
def _set(path: str, **values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layer = model.get_sublayer(path) if hasattr(model, "get_sublayer") else dict(model.named_sublayers())[path]
        for name, value in values.items():
            assert hasattr(layer, name), f"{type(layer).__name__} has no {name}"
            setattr(layer, name, value)

    return change


def _forward(path: str, forward: Callable[..., Any]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layer = dict(model.named_sublayers())[path]
        layer.forward = MethodType(forward, layer)

    return change


def _unscaled(self: Any, hidden: Any, attn_mask: Any = None) -> Any:
    q, k, v = (
        part(hidden).reshape([0, 0, 4, 4]).transpose([0, 2, 1, 3]) for part in (self.query, self.key, self.value)
    )
    scores = paddle.matmul(q, k, transpose_y=True)  # not divided by the root of the width
    scores = scores if attn_mask is None else scores + attn_mask
    return self.proj(paddle.matmul(paddle.nn.functional.softmax(scores, -1), v).transpose([0, 2, 1, 3]).flatten(2))


def _residual_of_the_norm(self: Any, x: Any, mask: Any) -> Any:
    x = self.input_norm(x)
    x = x + self.self_attn(x, attn_mask=mask)
    return x + self.mlp(self.post_norm(x))


def _no_shortcut(self: Any, x: Any) -> Any:
    return paddle.nn.functional.relu(self.second(self.first(x)))


def _not_transposed(model: Any) -> None:
    weight = model.net[2].weight
    weight.set_value(weight.t())


def _without_bias(model: Any) -> None:
    model.net[2].bias = None


MISTAKES: dict[str, tuple[str, Callable[[Any], None], str, str | None]] = {
    "norm epsilon": ("Mlp", _set("net.3", _epsilon=1e-3), "norm", "net.3"),
    "gelu by tanh": ("Mlp", _set("net.1", _approximate=True), "act", "net.1"),
    "weight not transposed": ("Mlp", _not_transposed, "fc2", "net.2"),
    "no bias": ("Mlp", _without_bias, "fc2", "net.2"),
    "attention not scaled": ("Decoder", _forward("blocks.1.self_attn", _unscaled), "layers.1.attention", None),
    "residual of the norm": ("Decoder", _forward("blocks.0", _residual_of_the_norm), "layers.0", "blocks.0"),
    "no shortcut": ("ResNet", _forward("stages.0.blocks.1", _no_shortcut), "layer1.1", "stages.0.blocks.1"),
    "stride": ("Cnn", _set("features.4", _stride=[1, 1]), "features.4", None),
    "padding": ("Cnn", _set("features.0", _updated_padding=[0, 0]), "features.0", None),
    "norm momentum": ("ResNet", _set("stages.0.blocks.0.first.norm", _momentum=0.1), "layer1.0.bn1", None),
    "norm statistics": ("ResNet", _set("stem.norm", _use_global_stats=True), "bn1", "stem.norm"),
    "groups of a norm": ("AutoEncoder", _set("norm", _num_groups=4), "norm", None),
    "dropout left on": ("Cnn", _set("features.9", p=0.5), "features.9", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("back", [False, True], ids=["torch first", "paddle first"])
def test_a_mistake_is_located(mistake: str, back: bool, tmp_path: Path) -> None:
    name, change, ours, theirs = MISTAKES[mistake]
    result = compared(name, tmp_path, change, back)
    assert (result.verdict, result.first is not None) == ("diverged", True), str(result)
    found, other = (result.first.module, result.first.counterpart)
    assert (other or found if back else found) == ours, str(result)
    if theirs is not None:
        assert (found if back else other) == theirs
        assert f"{other} in {'torch' if back else 'paddle'}" in str(result)


def test_a_gradient_that_cancels_out_in_a_norm_is_not_reported(tmp_path: Path) -> None:
    """The sum of squares of a LayerNorm's output does not depend on its input."""
    ours = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.LayerNorm(16))
    theirs = paddle.nn.Sequential(paddle.nn.Linear(6, 16), paddle.nn.LayerNorm(16))
    tt.transfer(ours, theirs)
    x = batch("Mlp")
    for model, given in ((ours, torch.from_numpy(x)), (theirs, paddle.to_tensor(x))):
        with tt.capture(model, tmp_path / ("torch" if model is ours else "paddle"), keep="tensors") as tap:
            model(given).square().sum().backward()
            tap.step()
    result = tt.compare(tmp_path / "torch", tmp_path / "paddle")
    assert result.verdict == "match", str(result)
    row = next(row for row in result.rows if (row["module"], row["kind"]) == ("0", "grad_output"))
    assert row["rule"] == "rounding of what cancels out in it"


def test_training_agrees_over_steps(tmp_path: Path) -> None:
    ours, theirs = models("ResNet")
    tt.transfer(ours, theirs)
    optimizers = (
        torch.optim.AdamW(ours.parameters(), lr=1e-3),
        paddle.optimizer.AdamW(1e-3, parameters=theirs.parameters()),
    )
    for model, optimizer, name in zip((ours, theirs), optimizers, ("torch", "paddle"), strict=True):
        given = torch.from_numpy(batch("ResNet")) if model is ours else paddle.to_tensor(batch("ResNet"))
        with tt.capture(model, tmp_path / name, keep="tensors", kinds=twins.KINDS, optimizer=optimizer):
            for _ in range(3):
                model(given).square().mean().backward()
                optimizer.step()
                (optimizer.zero_grad if model is ours else optimizer.clear_grad)()
    result = tt.compare(tmp_path / "torch", tmp_path / "paddle")
    assert result.verdict == "match", str(result)
    assert {row["step"] for row in result.rows} == {0, 1, 2}


def test_dropout_is_mentioned(tmp_path: Path) -> None:
    result = compared("Cnn", tmp_path, _set("features.9", p=0.5))
    assert result.notes[0] == "dropout draws other numbers in each framework: set its rate to 0 on both sides"


def test_gradients_follow_their_parameters(tmp_path: Path) -> None:
    result = compared("Encoder", tmp_path)
    rows = {(row["module"], row["path"]): row for row in result.rows if row["kind"] == "param_grad"}
    joined = rows["encoder.layers.0.self_attn", "in_proj_weight"]
    assert (joined["layout"], joined["path_candidate"]) == ("joined (3 along axis 0), transposed", "weight")
    turned = rows["encoder.layers.0.linear1", "weight"]
    assert (turned["layout"], turned["shape_reference"], turned["shape_candidate"]) == (
        "transposed",
        [32, 16],
        [16, 32],
    )


def test_patterns_match_the_references_names(tmp_path: Path) -> None:
    result = compared("ResNet", tmp_path, modules="layer1.*", kinds=("output", "param"))
    assert result.verdict == "match"
    assert {row["module"].partition(".")[0] for row in result.rows} == {"layer1"}


def test_values_in_another_layout_are_converted(tmp_path: Path) -> None:
    """torch's recurrent modules take the sequence first, paddle's the batch."""
    result = compared("SequenceFirst", tmp_path)
    row = next(row for row in result.rows if (row["module"], row["kind"]) == ("rnn", "input"))
    assert (row["layout"], row["shape_reference"], row["shape_candidate"]) == ("axes 1,0,2", [5, 3, 6], [3, 5, 6])
    assert row["status"] == "equal" and np.isclose(row["rel_l2"], 0)
