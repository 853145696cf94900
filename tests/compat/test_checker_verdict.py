"""The checker ends as `tensortap compare` does: the same exit code, the same sentence."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.saving import CLASSES, SavingKit, kit_of
from tensortap.cli import main as tensortap_main
from tensortap.compat.hook_result_checker import main
from tensortap.compat.saving_hook import register_saving_hook, remove_saving_hook

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(params=["torch", "paddle"])
def kit(request: pytest.FixtureRequest) -> SavingKit:
    return kit_of(request.param)


def save(kit: SavingKit, path: Path, wrong: bool = False, **options: Any) -> Path:
    model = kit.net(**options)
    if wrong:
        model.fc2.weight.data[:, 1] *= 1.05
    register_saving_hook(model, path, CLASSES, -1, -1)
    kit.train(model, 2)
    remove_saving_hook(model)
    return path


def run(capsys: Capsys, monkeypatch: pytest.MonkeyPatch, verb: str, a: Path, b: Path) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tensortap", verb, str(a), str(b)])
    monkeypatch.delenv("COLUMNS", raising=False)
    with pytest.raises(SystemExit) as ended:
        tensortap_main()
    return int(ended.value.code or 0), capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sidecar", [True, False])
@pytest.mark.parametrize(("wrong", "code"), [(False, 0), (True, 1)])
def test_the_verdict_is_that_of_compare(
    kit: SavingKit,
    tmp_path: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    sidecar: bool,
    wrong: bool,
    code: int,
) -> None:
    """The candidate sums in another order, which in bfloat16 moves single elements by a whole epsilon."""
    a, b = save(kit, tmp_path / "a", dtype=dtype), save(kit, tmp_path / "b", wrong, dtype=dtype, split=True)
    if not sidecar:
        for tree in (a, b):
            shutil.rmtree(tree / "tensortap")
    arrays = [np.load(next((tree / "tensors/rank_0").glob("*idx_0*"))) for tree in (a, b)]
    assert not np.array_equal(*arrays)
    checked = run(capsys, monkeypatch, "check-hooks", a, b)
    compared = run(capsys, monkeypatch, "compare", a, b)
    assert checked[0] == compared[0] == code
    assert checked[1].splitlines()[-1] == compared[1].splitlines()[0]
    assert checked[1].splitlines()[-1].startswith("✖ The runs part in" if wrong else "✔ The runs match")
    assert main(["--pathA", str(a), "--pathB", str(b)]) == code
    assert capsys.readouterr().out == checked[1]


def test_too_few_common_files_are_reported_although_there_is_a_table(tmp_path: Path, capsys: Capsys) -> None:
    for root, layers in (
        (tmp_path / "a", ["x", *(f"a{n}" for n in range(20))]),
        (tmp_path / "b", ["x", *"bcdefghijklmno"]),
    ):
        folder = root / "tensors/rank_0"
        folder.mkdir(parents=True)
        for index, layer in enumerate(layers):
            np.save(folder / f"tensor_idx_{index}_layer_class_L_layer_name_{layer}_micro_step_0.npy", np.ones(3))
    assert main(["--pathA", str(tmp_path / "a"), "--pathB", str(tmp_path / "b")]) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("tensors rank_0: 1 compared") and said[-1].startswith("∅")


def test_a_bfloat16_tree_against_a_float32_tree_is_noted(tmp_path: Path) -> None:
    """On disk both are float32."""
    kit = kit_of("torch")
    a, b = save(kit, tmp_path / "a", dtype="bfloat16"), save(kit, tmp_path / "b")
    assert main(["--pathA", str(a), "--pathB", str(b)]) == 0
    notes = (a / "tensors/compare_rst/rank_0_notes.csv").read_text().splitlines()
    assert len(notes) == 5 and all(line.endswith(",dtype,bfloat16,float32") for line in notes[1:])
