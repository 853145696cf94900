"""The cause of a finding, for runs of a few records that are made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import Seen, values, write

import tensortap as tt
from tensortap.core.causes import CAUSES, Cause

WEIGHT = {"kind": "param", "path": "weight"}
MEAN = {"kind": "buffer", "path": "mean"}


def state(name: dict[str, str], step: int, call: int) -> Seen:
    return Seen("fc", values(7), step=step, call=call, kind=name["kind"], path=name["path"])


def gradient(module: str, kind: str, path: str = "0", number: int = 9) -> Seen:
    return Seen(module, values(number), kind, path=path)


FORWARD = [Seen("", values(1), "input"), Seen("fc", values(2), "input"), Seen("fc", values(3)), Seen("", values(4))]
# For each cause: the records of both runs; the last of them is wrong in the candidate.
CASES: dict[Cause, list[Seen]] = {
    Cause.OUTPUT: FORWARD[:3],
    Cause.OUTPUT_ON_UNKNOWN_INPUTS: [Seen("fc", values(3))],
    Cause.INPUT: [Seen("", values(1), "input")],
    Cause.UNRECORDED_INPUT: [Seen("fc", values(2), "input")],
    Cause.BUFFER: [*FORWARD[:3], state(MEAN, 0, 1)],
    Cause.PARAMETER_AT_START: [state(WEIGHT, 0, 0)],
    Cause.PARAMETER_CHANGED: [state(WEIGHT, 0, 0), state(WEIGHT, 0, 1), state(WEIGHT, 1, 0)],
    Cause.BUFFER_AT_START: [state(MEAN, 0, 0)],
    Cause.BUFFER_CHANGED: [state(MEAN, 0, 0), state(MEAN, 0, 1), state(MEAN, 1, 0)],
    Cause.OPTIMIZER: [state(WEIGHT, 0, 0), gradient("fc", "param_grad", "weight"), state(WEIGHT, 0, 1)],
    Cause.LOSS: [*FORWARD, gradient("", "grad_output")],
    Cause.UNRECORDED_GRADIENT: [gradient("", "grad_output")],
    Cause.PARAMETER_GRADIENT: [
        *FORWARD,
        *(gradient("", "grad_output"), gradient("fc", "grad_output"), gradient("fc", "param_grad", "weight", 8)),
    ],
    Cause.SENT_GRADIENT: [
        *FORWARD,
        *(gradient("", "grad_output"), gradient("fc", "grad_output"), gradient("fc", "grad_input", "0", 8)),
    ],
}


@pytest.mark.parametrize("cause", CASES, ids=lambda cause: cause.value)
def test_the_cause_of_a_wrong_record(tmp_path: Path, cause: Cause) -> None:
    seen = CASES[cause]
    wrong = replace(seen[-1], array=seen[-1].array + np.float32(0.5))
    reference, candidate = write(tmp_path / "a", seen), write(tmp_path / "b", [*seen[:-1], wrong])
    result = tt.compare(reference, candidate)
    assert result.first is not None
    assert f"{result.first.cause}" == str(result.first.cause) == cause.value
    assert (result.first.cause, result.first.row, result.first.key) == (cause, len(seen) - 1, wrong.key)
    assert [row["cause"] for row in result.rows] == [None] * (len(seen) - 1) + [cause.value]
    start = CAUSES[cause].sentence.partition("{")[0]
    assert str(result).startswith(start)


def test_a_checkpoint_has_a_cause_of_its_own(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    for name, off in (("a", 0.0), ("b", 0.5)):
        save_file({"fc.weight": values(1), "fc.bias": values(2) + np.float32(off)}, tmp_path / f"{name}.safetensors")
    result = tt.compare(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert [birth.cause for birth in result.births] == [Cause.CHECKPOINT]
    assert str(result).startswith("The checkpoints differ in fc.bias; it is off by")


def test_gradients_of_one_side_have_no_row(tmp_path: Path) -> None:
    grads = [gradient("fc", "param_grad", name, number) for number, name in enumerate(("weight", "bias"), 8)]
    seen = [*FORWARD, gradient("", "grad_output"), gradient("fc", "grad_output")]
    whole, lacking = write(tmp_path / "a", [*seen, *grads]), write(tmp_path / "b", [*seen, grads[0]])
    for sides, cause in (((whole, lacking), Cause.MISSING_GRADIENT), ((lacking, whole), Cause.EXTRA_GRADIENT)):
        (birth,) = tt.compare(*sides).births
        assert (birth.cause, birth.row, birth.key.path) == (cause, None, "bias")


def test_every_report_has_the_cause_of_a_gradient_of_one_side(tmp_path: Path) -> None:
    grads = [gradient("fc", "param_grad", name, number) for number, name in enumerate(("weight", "bias"), 8)]
    seen = [*FORWARD, gradient("", "grad_output"), gradient("fc", "grad_output")]
    # A module whose own value is wrong later: the gradient that is missing before comes first.
    later = [Seen("fc", values(2), "input", step=1), Seen("fc", values(3), step=1)]
    wrong = replace(later[1], array=later[1].array + np.float32(0.5))
    whole = write(tmp_path / "a", [*seen, *grads, *later])
    lacking = write(tmp_path / "b", [*seen, grads[0], later[0], wrong])
    result = tt.compare(whole, lacking)
    assert [birth.cause for birth in result.births] == [Cause.MISSING_GRADIENT, Cause.OUTPUT]
    for suffix in ("xml", "md", "html"):
        result.save(tmp_path / f"result.{suffix}")
    case = ElementTree.parse(tmp_path / "result.xml").find(".//testcase[@name='fc']")
    assert case is not None
    assert [each.attrib for each in case.iter("property")] == [{"name": "cause", "value": "missing_gradient"}]
    (failure,) = case.iter("failure")
    assert failure.attrib == {"message": "fc: missing gradient, born here", "type": "missing"}
    assert "\nCause: missing gradient\n" in (tmp_path / "result.md").read_text()
    assert "missing gradient: never comes; inspect fc" in (tmp_path / "result.html").read_text()
