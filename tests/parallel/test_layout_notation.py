"""The user's layout: what it says, and the errors of texts that say nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.capture.placement.global_names import GlobalNames
from tensortap.capture.placement.layout import read_layout
from tensortap.core.layouts import parse_layout
from tensortap.core.placement import Mesh
from tensortap.errors import UsageError
from tensortap.frameworks.parallel_layers import activation_placement, group_of_layer, parameter_placement
from tensortap.frameworks.torch.placements.megatron import sharded_state
from tensortap.frameworks.torch.placements.stages import global_layer_names

MESH = Mesh(("dp", "tp"), (2, 2), (1, 0))


def test_axes_that_are_not_mentioned_are_replicas() -> None:
    placement = parse_layout("v[tp]%7 h", MESH.names).place((4, 3), MESH)
    assert placement.shape == (7, 3) and placement.axes == {"dp": "replica", "tp": "shard"}
    assert placement.boxes == (((0, 0, 4), (0, 0, 3)),)


def test_two_axes_divide_one_dimension_from_the_outermost_on() -> None:
    placement = parse_layout("b[dp,tp]", MESH.names).place((3,), MESH)
    assert placement.boxes == (((0, 6, 3),),)


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("b[xy] s", (2, 2), "'xy' is not an axis of the mesh, which has dp, tp"),
        ("b[tp:snake]", (2,), "'snake' is not a mode"),
        ("(g: q k)[tp] h", (4, 4), "how many groups"),
        ("(a b) h", (4, 4), "two sizes open"),
        ("b (", (2, 2), "is not a dimension"),
        ("b h -> h", (2, 2), "give all of them"),
        ("b s h", (2, 2), "it has 3 dimensions"),
        ("v[tp]%99 h", (4, 4), "99 elements without padding do not fit in 8"),
        ("(g=8: q*2 k)[tp] h", (13, 4), "cannot be divided into 4 x 3"),
        ("s[tp:zigzag]", (3,), "cannot be divided into 4 equal parts"),
    ],
)
def test_a_wrong_text_is_an_error_in_words(text: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as found:
        parse_layout(text, MESH.names).place(shape, MESH)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"mesh": {"tp": 0}}, "[mesh] tp = 0"),
        ({"meshes": {}}, "no table [meshes]"),
        ({"x:outputs": "b"}, "'outputs' is not a kind"),
        ({"x": 3}, "is not a layout"),
        ("missing.toml", "cannot be read"),
    ],
)
def test_a_wrong_file_is_a_usage_error(layout: Any, words: str) -> None:
    with pytest.raises(UsageError) as found:
        read_layout(layout)
    assert words in str(found.value)


def test_a_layout_is_checked_against_the_model_at_once(tmp_path: Path) -> None:
    file = tmp_path / "layout.toml"
    file.write_text('[mesh]\nmicro = 2\n[layout]\n"weight" = "a b c"\n')
    with pytest.raises(UsageError, match="weight = 'a b c': it has 3 dimensions"):
        tt.capture(nn.Linear(2, 3), tmp_path / "run", layout=file)
    assert not (tmp_path / "run").exists()
    file.write_text("[mesh]\ntp = 4\n")
    with pytest.raises(UsageError, match=r"\[mesh\] has 4 processes \(tp 4\), and there are 1"):
        tt.capture(nn.Linear(2, 3), tmp_path / "run", layout=file)


def test_a_micro_step_is_a_part_of_the_batch() -> None:
    """Two halves of a batch, in micro steps of one process, have the digest of the whole batch."""
    model, words = nn.Linear(4, 3), torch.randn(6, 4)
    with tt.capture(model, kinds=("output",)) as whole:
        model(words)
    with tt.capture(
        model, kinds=("output",), layout={"mesh": {"micro": 2}, "layout": {"*:output": "b[micro] h"}}
    ) as tap:
        for part in words.chunk(2):
            model(part)
    parts = list(tap.run)
    assert [part.placement.boxes[0][0] for part in parts if part.placement] == [(0, 0, 3), (0, 3, 3)]
    digest = sum(part.summary.digest for part in parts) % 2**64
    assert [digest] == [record.summary.digest for record in whole.run]


def test_a_text_that_does_not_fit_a_value_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with tt.capture(nn.Linear(4, 3), layout={"mesh": {"micro": 1}, "layout": {"*:output": "b s h"}}) as tap:
        tap._model(torch.zeros(2, 4))
    assert [each.placement for each in tap.run.records(kind="output")] == [None]
    assert "it has 3 dimensions, and the tensor has shape (2, 3)" in capfd.readouterr().err
    assert any("it has 3 dimensions" in text for text in tap.run.notices)


def test_names_are_those_of_the_whole_model() -> None:
    layout = read_layout({"names": {"layers.{i}": "layers.{i+pp*2}", "experts.{i}": "experts.{i+ep*4}"}})
    names = GlobalNames(None, layout, Mesh(("pp", "ep"), (2, 2), (1, 1)))
    found = names([(name, None) for name in ("", "layers.0", "layers.1.moe.experts.3.w", "head")])
    assert list(found.values()) == ["", "layers.2", "layers.3.moe.experts.7.w", "head"]
    assert {"pp", "ep"} <= set(names.axes["layers.3.moe.experts.7.w"]) and "head" not in names.axes


@pytest.mark.parametrize("target", ["layers.{i+nothing}", "layers.{i//0}", "layers.{i.x}", "layers.{1+}"])
def test_a_wrong_name_is_a_usage_error(target: str) -> None:
    with pytest.raises(UsageError, match=r"\[names\]"):
        GlobalNames(None, read_layout({"names": {"layers.{i}": target}}), None)([("layers.0", None)])


def test_layers_that_know_their_numbers_get_global_names() -> None:
    layers = [SimpleNamespace(layer_number=at + 3) for at in range(2)]
    assert global_layer_names([(f"layers.{at}", layer) for at, layer in enumerate(layers)]) == {
        "layers.0": "layers.2",
        "layers.1": "layers.3",
    }
    assert global_layer_names([("layers.0", SimpleNamespace())]) == {}


class ColumnParallelLinear:
    gather_output, tp_size, tp_rank = False, 2, 1


class RowSequenceParallelLinear:
    input_is_parallel, world_size, rank = True, 2, 0


def test_parallel_layers_by_their_attributes() -> None:
    megatron = SimpleNamespace(tensor_model_parallel=True, partition_dim=0, partition_stride=2)
    found = parameter_placement(megatron, (8, 3), (2, 1), "tp", "param")
    assert found is not None and found.boxes == (((0, 4, 4), (0, 0, 3)), ((4, 12, 4), (0, 0, 3)))
    fleet = parameter_placement(SimpleNamespace(is_distributed=True, split_axis=1), (3, 4), (2, 1), "mp", "param")
    assert fleet is not None and fleet.boxes == (((0, 0, 3), (0, 4, 4)),)
    norm = parameter_placement(SimpleNamespace(sequence_parallel=True), (4,), (2, 0), "tp", "param_grad")
    assert norm is not None and norm.axes == {"tp": "partial:sum"}
    column, row = ColumnParallelLinear(), RowSequenceParallelLinear()
    assert group_of_layer(column, lambda _: None) == (2, 1)
    output = activation_placement(column, "output", (5, 2, 4), (2, 1), "tp")
    assert output is not None and output.shape == (5, 2, 8) and output.boxes[0][2] == (0, 4, 4)
    scattered = activation_placement(row, "output", (5, 2, 4), (2, 0), "tp")
    assert scattered is not None and scattered.shape == (10, 2, 4)


def test_a_sharded_state_dict_leaves_out_padding() -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 2))

        def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
            return {"weight": SimpleNamespace(global_shape=(4, 10, 2), global_offset=(1, 6, 0), prepend_axis_num=1)}

    placement = sharded_state(Embedding(), "tp")["weight"]
    assert placement.shape == (10, 2) and placement.boxes == (((0, 6, 4), (0, 0, 2)),)
