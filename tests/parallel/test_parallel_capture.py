"""Real processes in every layout: the tap changes nothing, and parts merge into the records of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from parallel_models import LAYOUTS, reference

import tensortap as tt
from tensortap.core.placement import Mesh
from tensortap.core.records import Key, Record, Summary
from tensortap.frameworks.torch.placements.stages import global_expert_names
from tensortap.kernels.summary.reference import merge
from tensortap.store.run import Run

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

ALL = [name for layouts in LAYOUTS.values() for name in layouts]


def joined(run: Run) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for record in run:
        found.setdefault(record.key, []).append(record)
    return found


def whole(records: Sequence[Record]) -> Summary:
    """The parts of a record, each once, as one summary."""
    parts = {record.placement.boxes: record.summary for record in records if record.placement is not None}
    return merge(parts.values())


@pytest.mark.parametrize("name", ALL)
def test_the_tap_changes_no_bit(runs: Path, name: str) -> None:
    assert {file.read_text() for file in runs.glob(f"{name}.*")} == {"same"}


@pytest.mark.parametrize("name", [name for name in ALL if not name.endswith("_swapped")])
def test_parameters_merge_into_those_of_one_process(runs: Path, name: str) -> None:
    found = joined(tt.open(runs / name))
    checked = 0
    for record in tt.open(runs / reference(name)).records(step=0, kind="param", call=0):
        parts = found[record.key]
        assert all(part.placement is not None and part.placement.shape == record.shape for part in parts), record.key
        assert whole(parts).digest == record.summary.digest, record.key
        checked += 1
    assert checked == {"one": 12, "mixture": 10, "llama": 21}[reference(name)]


@pytest.mark.parametrize("name", ["ddp", "fsdp1", "fsdp2", "cp"])
def test_forwards_merge_into_those_of_one_process(runs: Path, name: str) -> None:
    found = joined(tt.open(runs / name))
    records = list(tt.open(runs / "one").records(step=0, phase="forward"))
    assert len(records) == 24
    for record in records:
        assert whole(found[record.key]).digest == record.summary.digest, record.key
        assert whole(found[record.key]).elements == record.summary.elements


@pytest.mark.parametrize("name", ["tp", "tp_sp", "megatron", "fsdp2_tp"])
def test_divided_layers_have_the_shape_of_the_whole(runs: Path, name: str) -> None:
    found = joined(tt.open(runs / name))
    for record in tt.open(runs / "one").records(step=0, phase="forward", module=["layers.0.w1", "layers.1.w2"]):
        parts = found[record.key]
        assert {part.placement.shape for part in parts if part.placement} == {record.shape}, record.key
        assert whole(parts).elements == record.summary.elements, record.key
        assert whole(parts).l2 == pytest.approx(record.summary.l2, rel=1e-5)


def test_gradients_say_what_is_still_to_be_reduced(runs: Path) -> None:
    roles = {}
    for name in ("ddp", "fsdp2", "tp_sp"):
        records = tt.open(runs / name).records(rank=0, step=0, kind=["param_grad", "step_grad"], module="norm")
        roles[name] = {(each.key.kind, each.key.path): dict(each.placement.axes) for each in records if each.placement}
    assert roles["ddp"] == {
        ("param_grad", "weight"): {"dp": "partial:mean"},
        ("param_grad", "bias"): {"dp": "partial:mean"},
        ("step_grad", "weight"): {"dp": "replica"},
        ("step_grad", "bias"): {"dp": "replica"},
    }
    assert roles["fsdp2"]["param_grad", "weight"] == {"dp": "partial:mean"}  # of the root, which is gathered
    assert roles["fsdp2"]["step_grad", "weight"] == {"dp": "shard"}
    assert roles["tp_sp"]["param_grad", "weight"] == {"tp": "partial:sum"}


def test_a_stage_has_global_names_and_its_own_root(runs: Path) -> None:
    run = tt.open(runs / "pp")
    assert run.renames(1)["layers.0.w1"] == "layers.1.w1"
    assert run.mesh(1) == Mesh(("pp",), (2,), (1,))
    modules = {each.key.module for each in run.records(rank=1, kind=["input", "output"])}
    assert {"layers.1", "(stage 1)", "", "head"} <= modules and "layers.0" not in modules
    roots = list(run.records(module=["", "(stage 0)", "(stage 1)"], kind=["input", "output"], step=0, micro=0))
    assert {(each.rank, each.key.module, each.key.kind) for each in roots} == {
        (0, "", "input"), (0, "(stage 0)", "output"), (1, "(stage 1)", "input"), (1, "", "output")
    }  # fmt: skip
    assert {each.key.micro for each in run.records(step=0, phase="forward")} == {0, 1}
    assert not any(each.summary.nonfinite for each in run)


def test_experts_know_their_numbers_in_the_whole(runs: Path) -> None:
    for name in ("ep", "ep_named"):
        run = tt.open(runs / name)
        assert run.renames(0) == {} and run.renames(1) == {
            "moe.experts.0": "moe.experts.2",
            "moe.experts.1": "moe.experts.3",
        }
        mine = {each.key.module for each in run.records(rank=1) if "experts." in each.key.module}
        assert mine == {"moe.experts.2", "moe.experts.3"}
        assert all("ep" not in each.placement.axes for each in run.records(module=mine) if each.placement)


def test_numbers_of_experts_and_layers_together() -> None:
    class Around:
        local_expert_indices = (4, 5)

    modules = [("layers.0", object()), ("layers.0.mlp", Around())]
    modules += [(f"layers.0.mlp.experts.local_experts.{n}", object()) for n in range(2)]
    modules += [(f"layers.0.mlp.router.parts.{n}", object()) for n in range(3)]
    assert global_expert_names(modules) == {
        "layers.0.mlp.experts.local_experts.0": "layers.0.mlp.experts.local_experts.4",
        "layers.0.mlp.experts.local_experts.1": "layers.0.mlp.experts.local_experts.5",
    }
    Around.local_expert_indices = (4, 4)
    assert global_expert_names(modules) == {}


def test_flat_parameters_have_gradients_of_their_own(runs: Path) -> None:
    found = joined(tt.open(runs / "fsdp1"))
    for record in tt.open(runs / "one").records(kind="param_grad"):
        assert [part.placement.axes for part in found[record.key] if part.placement] == [{"dp": "partial:mean"}] * 2


def test_guesses_say_so(runs: Path) -> None:
    run = tt.open(runs / "ddp")
    assert {each.placement.source for each in run.records(phase="forward") if each.placement} == {"guess"}
    assert {each.placement.source for each in run.records(kind="param") if each.placement} == {"ddp"}
