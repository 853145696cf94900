"""Sentences that must be true: what they name, what they leave open, and what they advise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.compare.say.open_verdicts import ways_to_tell
from tensortap.core.records import Comparison
from tensortap.errors import UsageError

KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def batch(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.linspace(-1, 1, 24).view(6, 4)


def capture(path: Path, model: nn.Module | None = None, kinds: tuple[str, ...] = KINDS, **options: Any) -> Path:
    model = model or build()
    with tt.capture(model, path, keep="tensors", kinds=kinds):
        model(options.get("given", batch())).pow(2).sum().backward()
    return path


def check(reference: Path, model: nn.Module, given: torch.Tensor, scale: float = 1.0) -> Comparison:
    with tt.check(model, reference) as checked:
        (scale * model(given).pow(2).sum()).backward()
    return checked.result


def test_another_input_is_no_fault_of_a_module(tmp_path: Path) -> None:
    result = check(capture(tmp_path / "a"), build(), batch(1.1))
    assert result.sentence.startswith("The model was not given what the reference was: in step 0, input 0 of (root)")
    assert "wrong on the reference's own inputs" not in result.sentence


def test_another_loss_is_no_fault_of_a_module(tmp_path: Path) -> None:
    result = check(capture(tmp_path / "a"), build(), batch(), scale=2.0)
    assert result.sentence.startswith("The model agrees, but not what came back from outside: in step 0, the gradient")
    assert "wrong on the reference's own inputs" not in result.sentence


def test_another_buffer_is_no_fault_of_a_module(tmp_path: Path) -> None:
    model = build()
    model[1].running_mean += 1
    result = check(capture(tmp_path / "a", kinds=(*KINDS, "buffer")), model, batch())
    assert result.sentence.startswith("A buffer already differed: before step 0, 1.running_mean is")


def test_other_initial_weights_are_not_only_the_modules_fault(tmp_path: Path) -> None:
    reference, other = capture(tmp_path / "a"), capture(tmp_path / "b", build(1))
    result = tt.compare(reference, other)
    assert "The runs part in 0 (Linear)" in result.sentence
    assert 'Its parameters were not recorded, and may differ already: capture kinds=(..., "param").' in result.sentence
    recorded = [capture(tmp_path / name, build(seed), (*KINDS, "param")) for seed, name in enumerate("cd")]
    assert tt.compare(*recorded).sentence.startswith("The parameters already differed")


def test_what_a_filter_leaves_out_may_be_recorded(tmp_path: Path) -> None:
    reference, other = capture(tmp_path / "a"), capture(tmp_path / "b", build(1))
    result = tt.compare(reference, other, kinds="output")
    assert "its inputs were not selected" in result.sentence and "recorded" not in result.sentence


def test_a_misspelt_module_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    path = capture(tmp_path / "a", Net())
    with pytest.raises(UsageError, match=r"no module of either run is called 'layer\.\*'; did you mean layers"):
        tt.compare(path, path, modules="layer.*")
    with pytest.raises(UsageError, match=r"is called 'Layres\.2'; did you mean layers\.2, "):
        tt.compare(path, path, modules="Layres.2")
    with pytest.raises(UsageError, match=r"is called 'xyz' or 'uvw'; there are \(root\), layers"):
        tt.compare(path, path, modules=["xyz", "uvw"])
    for known in ("layers.*", "(root)", "", ["layers.0", "nothing"]):
        assert tt.compare(path, path, modules=known).verdict == "match"


def test_two_models_are_not_judged_by_their_roots(tmp_path: Path) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    result = tt.compare(capture(tmp_path / "a"), capture(tmp_path / "b", Other()))
    assert result.verdict == "incomparable" and result.first is None
    assert "the reference is a Sequential and the candidate a Other" in result.sentence


def test_a_gradient_of_rounding_alone_does_not_pass_for_a_close_one(tmp_path: Path) -> None:
    """The bias before a norm has a gradient of zero in theory."""
    given = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    runs = []
    for name in "ab":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        if name == "b":
            model[0].forward = lambda x, fc=model[0]: (
                x[:, :32] @ fc.weight.T[:32] + x[:, 32:] @ fc.weight.T[32:] + fc.bias
            )
        runs.append(capture(tmp_path / name, model, given=given))
    result = tt.compare(*runs)
    assert result.verdict == "match"
    worst = max(row["rel_l2"] for row in result.rows if row["status"] == "close")
    assert worst > 0.1, "the bias should be noise"
    assert "one more cancels out and consists of rounding alone on both sides, 0 · param_grad bias" in result.sentence
    assert "differs by" not in result.sentence, "its relative error means nothing"


def test_reports_in_other_formats_belong_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from tensortap.cli import app

    path = str(capture(tmp_path / "a"))
    result = CliRunner().invoke(app, ["report", path, path, "-o", str(tmp_path / "x.json")])
    assert result.exit_code == 2 and not (tmp_path / "x.json").exists()


def test_a_full_disk_is_said_in_one_line() -> None:
    from tensortap.store.exports.export import _reason

    text = (
        "Can't synchronously write data (file write failed: time = Mon\n, errno = 28, error message = 'No space left')"
    )
    assert _reason(OSError(text)) == "No space left on device"
    assert _reason(OSError(13, "Permission denied")) == "Permission denied"


@pytest.mark.parametrize(
    ("checked", "several", "short", "advice"),
    [
        (
            False,
            True,
            False,
            "check the candidate on the reference's own inputs (tensortap.check), or compare fewer steps",
        ),
        (True, False, True, "compare in float32"),
        (True, False, False, "measure the noise of the reference (tensortap.noise)"),
    ],
)
def test_an_open_verdict_advises_only_what_is_left(checked: bool, several: bool, short: bool, advice: str) -> None:
    assert ways_to_tell(checked, several, short) == advice


class _Sampling(nn.Module):
    """Returns variances that it uses, as a variational autoencoder does."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.variance, self.last, self.detached = nn.Linear(4, 4), nn.Linear(4, 4), detached

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance = self.variance(x)
        used = variance.detach() if self.detached else variance
        return self.last(x + used.exp()), variance


def test_a_gradient_of_two_uses_is_not_blamed_on_the_loss_alone(tmp_path: Path) -> None:
    def step(model: nn.Module) -> None:
        made, variance = model(batch())
        (made.square().mean() + variance.square().mean()).backward()

    for detached in (False, True):
        torch.manual_seed(0)
        model = _Sampling(detached)
        with tt.capture(model, tmp_path / str(detached), keep="tensors", kinds=KINDS):
            step(model)
    result = tt.compare(tmp_path / "False", tmp_path / "True")
    assert result.first is not None and result.first.cause == "loss"
    assert "what variance returns, too: the model's own code may have sent a part of it" in result.sentence
    with tt.check(model, tmp_path / "False") as check:
        step(model)
    assert check.result.first is not None and check.result.first.module == "", check.result.sentence
