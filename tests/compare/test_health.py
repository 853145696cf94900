"""The health of a single run: suspicious records, their births, and records that are fine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import Seen, values, write

import tensortap as tt
from tensortap.compare.details import records as record_details
from tensortap.core.records import HealthReport


def run(path: Path, seen: list[Seen], **options: Any) -> HealthReport:
    return tt.health(write(path, seen), **options)


def statuses(found: HealthReport) -> list[str]:
    words: list[str] = found.table.column("status").to_pylist()
    return words


def with_nan(number: int) -> Any:
    found = values(number)
    found[1, 2] = np.nan
    return found


def test_a_plain_run_is_healthy(tmp_path: Path) -> None:
    found = run(tmp_path / "run", [Seen(f"fc{n}", values(n), step=step) for step in range(5) for n in range(4)])
    assert (found.verdict, found.births, found.counts) == ("healthy", [], {"ok": 20})
    assert "Nothing is suspicious" in str(found)
    assert len(found) == 20


def test_a_nan_is_born_where_all_it_was_made_from_is_finite(tmp_path: Path) -> None:
    seen = [
        Seen("fc1", values(1), "input"),
        Seen("fc1", values(2)),
        Seen("fc2", values(2), "input"),
        Seen("fc2", with_nan(3)),
        Seen("fc3", with_nan(3), "input"),
        Seen("fc3", with_nan(4)),
        Seen("fc3", with_nan(4), "grad_output"),
        Seen("fc1", with_nan(5), step=1),
    ]
    seen = [Seen(**{**vars(each), "tensor": [0, 1, 1, 2, 2, 3, 4, 5][at]}) for at, each in enumerate(seen)]
    found = run(tmp_path / "run", seen)
    assert [(birth.row, birth.status) for birth in found.births] == [(3, "nonfinite")]
    assert found.counts["nonfinite"] == 5
    assert found.sentence.startswith("NaN or Inf is born in output 0 of fc2 (Linear) in step 0")
    assert found.births[0].text == "has 1 NaN and 0 Inf among 24 elements"
    assert found.table.column("birth").to_pylist() == [at == 3 for at in range(8)]


def test_after_a_clean_step_a_nan_is_born_anew(tmp_path: Path) -> None:
    arrays = [with_nan(1), values(1), with_nan(1)]
    found = run(tmp_path / "run", [Seen("fc", array, step=step) for step, array in enumerate(arrays)])
    assert [birth.key.step for birth in found.births] == [0, 2]


def test_minus_infinity_is_suspicious_only_in_a_gradient(tmp_path: Path) -> None:
    mask = values(1)
    mask[0] = -np.inf
    found = run(tmp_path / "run", [Seen("attention", mask, "input"), Seen("attention", mask, "grad_output")])
    assert statuses(found) == ["ok", "nonfinite"]


def test_a_layer_that_is_always_zero_is_dead(tmp_path: Path) -> None:
    zero = np.zeros((4, 6), np.float32)
    seen = []
    for step in range(3):
        seen += [
            Seen("relu", zero, step=step),
            Seen("sometimes", zero if step else values(1), step=step),
            Seen("masked", zero, "input", step=step),
            Seen("fc", zero, "param", step=step, path="bias"),
            Seen("fc", zero, "param_grad", step=step, path="weight"),
            Seen("fc", zero[0], "param_grad", step=step, path="bias"),
        ]
    found = run(tmp_path / "run", seen)
    assert statuses(found) == ["dead", "ok", "ok", "ok", "dead", "ok"] * 3
    assert [(birth.key.module, birth.row) for birth in found.births] == [("relu", 0), ("fc", 4)]
    assert "A layer is dead: output 0 of relu" in found.sentence
    assert "So it is in 2 modules." in found.sentence


def test_exploding_layers(tmp_path: Path) -> None:
    usual = [Seen(f"fc{n}", values(n)) for n in range(9)]
    seen = [
        *usual,
        Seen("far", values(20) * np.float32(1e6)),
        Seen("half", np.full((4, 6), 40_000, np.float16)),
        Seen("index", np.full((4, 6), 10**12, np.int64)),
    ]
    assert statuses(run(tmp_path / "run", seen))[9:] == ["exploding", "exploding", "ok"]


def test_growing_a_hundredfold_over_the_steps_is_exploding(tmp_path: Path) -> None:
    sizes = (1, 2, 1, 1, 150, 1)
    seen = [Seen("fc", values(1) * np.float32(size), step=step) for step, size in enumerate(sizes)]
    seen += [Seen("calm", values(1), step=step) for step in range(6)]
    found = run(tmp_path / "run", sorted(seen, key=lambda each: each.step))
    assert [(b.key.module, b.key.step, b.status) for b in found.births] == [("fc", 4, "exploding")]


def test_gradients_vanish_and_explode_on_their_way_back(tmp_path: Path) -> None:
    sizes = {"loss": 1e-3, "deep": 1e-5, "deeper": 1e-8, "odd": 20.0}
    seen = [Seen(name, values(1) * np.float32(size), "grad_output") for name, size in sizes.items()]
    seen += [Seen("deep", values(1) * np.float32(1e-9))]
    found = run(tmp_path / "run", seen)
    assert statuses(found) == ["ok", "ok", "vanishing", "exploding", "ok"]


def test_a_vanishing_gradient_is_named_once(tmp_path: Path) -> None:
    sizes = [1e-3, *[1e-9] * 5]
    seen = [Seen(f"fc{n}", values(n) * np.float32(size), "grad_output") for n, size in enumerate(sizes)]
    found = run(tmp_path / "run", seen)
    assert [(birth.key.module, birth.status) for birth in found.births] == [("fc1", "vanishing")]
    assert found.counts["vanishing"] == 5
    assert "So it is in 5 modules." in found.sentence


def test_parameter_gradients_are_judged_by_each_other(tmp_path: Path) -> None:
    seen = [Seen(f"fc{n}", values(n), "param_grad", path="weight") for n in range(9)]
    seen += [Seen("deep", values(1) * np.float32(1e-6), "param_grad", path="weight")]
    seen += [Seen("deep", values(1)[0] * np.float32(1e-6), "param_grad", path="bias")]
    assert statuses(run(tmp_path / "run", seen))[9:] == ["vanishing", "ok"]


def test_only_selected_records_are_examined(tmp_path: Path) -> None:
    path = write(tmp_path / "run", [Seen(n, values(1), step=s) for s in (0, 1) for n in ("a.x", "a.y", "b")])
    assert len(tt.health(path, modules="a.*", steps=[1])) == 2
    assert len(tt.health(path, kinds="param")) == 0
    nothing = tt.health(path, kinds="param", details=4)
    assert nothing.verdict == "empty"
    assert nothing.sentence.startswith("There is nothing to examine")


def test_details_have_a_histogram_where_bytes_were_kept(tmp_path: Path) -> None:
    found = run(tmp_path / "run", [Seen("a", with_nan(1)), Seen("b", values(2), keep=False)], details=5)
    assert [detail.row for detail in found.details] == [0, 1]
    first, second = found.details
    assert first.histogram is not None
    assert first.histogram.reference.sum() == 23
    assert first.candidate is None
    assert second.histogram is None
    assert second.reference.l2 == pytest.approx(float(np.linalg.norm(values(2))), rel=1e-6)


def test_a_tensor_that_cannot_be_read_is_described_by_its_summary(tmp_path: Path) -> None:
    path = write(tmp_path / "run", [Seen("a", values(1)), Seen("b", values(2), step=1)])
    lost = sorted(path.rglob("*.safetensors"))[0]
    lost.unlink()
    found = tt.health(path, details=5)
    assert [(detail.whole, detail.damaged) for detail in found.details] == [(False, True), (True, False)]
    assert len(found.notes) == 1
    assert lost.name in found.notes[0]


def test_the_first_detail_is_exempt_from_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_details, "MOST_ELEMENTS", 30)
    found = run(tmp_path / "run", [Seen("a", values(1, (8, 8))), Seen("b", values(2, (8, 8)))], details=5)
    assert [detail.whole for detail in found.details] == [True, False]
    assert "too large" in found.details[1].why


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_additive_mask_does_not_explode(tmp_path: Path, dtype: Any) -> None:
    mask = np.triu(np.full((6, 6), np.finfo(dtype).min, dtype), 1)
    seen = [Seen(f"fc{n}", array, kind) for n in range(4) for array, kind in ((mask, "input"), (values(n), "output"))]
    seen.append(Seen("scores", mask + values(7, (6, 6), dtype)))
    assert run(tmp_path / "run", seen).verdict == "healthy"
    wrong = run(tmp_path / "other", [*seen, Seen("late", -mask)])
    assert [(birth.key.module, birth.status) for birth in wrong.births] == [("late", "exploding")]
