"""What a tap does when a NaN is born, the loss jumps or an exception leaves the block."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from support import fake_gpu
from support.libraries import Library
from tensortap.capture.incidents.alarm import NonfiniteRecord, birth_among, may_be_scaling, parse_loss
from tensortap.capture.incidents.spikes import LossSpikes
from tensortap.core.records import Key
from tensortap.errors import NonfiniteError, TensortapError, UsageError


class Net(nn.Module):
    """`between` may change what the second layer receives; `after` the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
        self.criterion = nn.MSELoss()
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.between(self.act(self.first(x))))
        return self.criterion(y, torch.zeros_like(y))


def train(
    path: Path | None,
    steps: int = 10,
    each: Callable[[int, Net, Any], Any] = lambda step, model, tap: None,
    **options: Any,
) -> Any:
    """Train, and call `each` before every step; return the closed tap. It may return a batch."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tt.capture(model, path, optimizer=optimizer, **options) as tap:
        for step in range(steps):
            batch = each(step, model, tap)
            model(torch.randn(4, 8) if batch is None else batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return tap


def nan_in(step_of_nan: int) -> Callable[[int, Net, Any], None]:
    def each(step: int, model: Net, tap: Any) -> None:
        model.between = (lambda x: x * math.nan) if step == step_of_nan else (lambda x: x)

    return each


def give_loss(model: Net, tap: Any, value: float) -> None:
    """Give the tap a loss in the next forward."""
    model.between = lambda x: (tap.loss(value), x)[1]


def kept_steps(run: Any) -> list[int]:
    return sorted({record.key.step for record in run.records(kept=True)})


def test_a_birth_stops_the_training_after_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NonfiniteError, match="born in code that runs before second: input 0 of second") as raised:
        train(tmp_path / "run", each=nan_in(6), on_nonfinite="stop")
    assert isinstance(raised.value, ArithmeticError) and isinstance(raised.value, TensortapError)
    assert "NaN or Inf is born" in capsys.readouterr().err
    run = tt.open(tmp_path / "run")
    assert run.steps == list(range(7)) and "NonfiniteError" in run.failure
    assert tt.health(run).births[0].key == next(r.key for r in run.records(nonfinite=True))


@pytest.mark.filterwarnings("ignore::UserWarning:paddle", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_a_module_that_makes_a_nan_is_named_in_either_framework(name: str) -> None:
    library = Library(name)
    model = library.model()
    parameter = next(iter(model.parameters()))  # of the first module, whose output is the first wrong record
    optimizer = library.optimizer(model)
    with pytest.raises(NonfiniteError) as error, tt.capture(model, optimizer=optimizer, on_nonfinite="stop") as tap:
        library.train(model, lambda: library.scale(parameter, math.inf), steps=3, optimizer=optimizer)
    first = next(record for record in tap.run.records(nonfinite=True))
    assert first.key.kind == "output" and first.key.step == 1
    assert f"born in output {first.key.path} of {first.key.module} ({first.cls}) in step 1" in str(error.value)


def test_a_gradient_that_becomes_nan_is_a_birth_too() -> None:
    def each(step: int, model: Net, tap: Any) -> None:
        if step == 2:
            model.between = lambda x: torch.sqrt(x * 0) + x * 0  # finite, with an infinite derivative

    with pytest.raises(NonfiniteError, match="born in grad_output 0 of act"):
        train(None, each=each, on_nonfinite="stop")


def test_masks_and_inputs_that_were_nan_before_are_no_births() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.soft = nn.Linear(8, 8), nn.Softmax(-1)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.soft(self.scores(torch.nan_to_num(x)) + mask)

    model = Masked()
    mask = torch.zeros(8).masked_fill(torch.arange(8) > 3, -math.inf)
    with tt.capture(model, on_nonfinite="stop") as tap:
        for x in (torch.randn(4, 8), torch.full((4, 8), math.nan), torch.randn(4, 8)):
            model(x, mask).square().sum().backward()
            tap.step()
    assert not any("born" in text for text in tap.notices)
    assert len(list(tap.run.records(nonfinite=True))) > 3


def test_float16_gradients_may_be_an_overflow_of_loss_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(kind: str, seq: int, dtype: str = "float16", phase: str = "backward", call: int = 0) -> NonfiniteRecord:
        return NonfiniteRecord(Key(3, 0, phase, "fc", call, kind, "0"), seq, "Linear", dtype, 0, 2, 0, 8)

    gradients = [bad("grad_output", 5), bad("param_grad", 6, "float32")]
    birth = birth_among(gradients)
    assert birth is gradients[0] and may_be_scaling(gradients, birth)
    single = [bad("param_grad", 6, "float32")]
    assert not may_be_scaling(single, single[0])
    forward = [bad("grad_output", 5), bad("output", 2, phase="forward")]
    assert birth_among(forward) is forward[1] and not may_be_scaling(forward, forward[1])
    assert birth_among([*forward, bad("param", 0, phase="state")]) is None  # the parameters were wrong before
    assert birth_among([bad("param", 9, phase="state", call=1)]) is not None


def test_a_skipped_overflow_does_not_stop_but_broken_parameters_do() -> None:
    def overflow(step: bool) -> Any:
        model = nn.Linear(4, 4).half()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with tt.capture(model, on_nonfinite="stop") as tap:
            (model(torch.ones(2, 4).half()) * 6e4).sum().mul(4).backward()
            if step:
                optimizer.step()
            tap.step()
        return tap

    assert list(overflow(step=False).run.records(nonfinite=True))
    with pytest.raises(NonfiniteError, match="grad"):
        overflow(step=True)


@pytest.mark.parametrize("in_memory", [False, True])
def test_the_ring_keeps_the_steps_before_a_nan(tmp_path: Path, in_memory: bool) -> None:
    path = None if in_memory else tmp_path / "run"
    tap = train(path, each=nan_in(6), on_nonfinite="keep", ring=2)
    run = tap.run
    assert run.finished and run.steps == [4, 5, 6, 8, 9]  # those that were kept, and the last two
    assert kept_steps(run) == [4, 5, 6]
    assert run.verify().ok and run.verify().tensors > 20
    assert sum("tensors of steps 4 to 6 are kept" in text for text in run.notices) == 1
    nan = next(record for record in run.records(nonfinite=True))
    assert np.isnan(run.load(nan)).all()
    assert all(len(list(run.records(step=step, kind="output"))) == 5 for step in run.steps)
    assert sum("5 recorded steps have left the ring, the last is step 7" in text for text in run.notices) == 1


def test_on_nonfinite_keep_alone_keeps_the_step_itself() -> None:
    assert kept_steps(train(None, each=nan_in(6), on_nonfinite="keep").run) == [6]


def test_news_of_a_device_comes_a_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu.install(monkeypatch)()
    tap = train(tmp_path / "kept", each=nan_in(6), on_nonfinite="keep", ring=2)
    assert kept_steps(tap.run) == [4, 5, 6] and tap.run.verify().ok
    with pytest.raises(NonfiniteError, match="in step 6"):
        train(tmp_path / "stopped", each=nan_in(6), on_nonfinite="stop")
    assert tt.open(tmp_path / "stopped").steps == list(range(8))
    last = train(tmp_path / "last", steps=7, each=nan_in(6), on_nonfinite="keep", ring=1)
    assert kept_steps(last.run) == [5, 6]  # it is noticed at the end


def test_an_exception_and_keep_write_the_ring_out_and_a_clean_end_does_not(tmp_path: Path) -> None:
    def oops(step: int, model: Net, tap: Any) -> None:
        if step == 5:
            raise RuntimeError("oops")

    with pytest.raises(RuntimeError, match="oops"):
        train(tmp_path / "raised", each=oops, ring=2)
    assert kept_steps(tt.open(tmp_path / "raised")) == [3, 4]  # step 5 had not begun

    kept = train(tmp_path / "kept", each=lambda step, model, tap: tap.keep() if step == 5 else None, ring=2)
    assert kept_steps(kept.run) == [3, 4, 5]
    assert any("tap.keep() was called" in text for text in kept.run.notices)
    clean = train(tmp_path / "clean", ring=2)
    assert kept_steps(clean.run) == [] and not list((tmp_path / "clean").rglob("*.safetensors*"))
    with pytest.raises(UsageError, match="keep\\(\\) needs a ring"):
        train(None, each=lambda step, model, tap: tap.keep())


@pytest.mark.parametrize("named", [True, False])
def test_a_spike_of_the_loss_writes_the_ring_out(named: bool) -> None:
    def each(step: int, model: Net, tap: Any) -> Any:
        batch = torch.ones(4, 8) * (100 if step == 30 else 1)
        if not named:
            give_loss(model, tap, 7.0 if step == 30 else 1 + 0.01 * (step % 5))
        return batch

    run = train(None, steps=40, each=each, ring=1, **({"loss": "criterion"} if named else {})).run
    assert kept_steps(run) == [29, 30]
    assert any("in step 30 the loss is" in text for text in run.notices)
    facts = run.loop(0)
    output = next(r for r in run.records(module="criterion", kind="output", step=30))
    assert facts.value("loss", 30)["value"] == pytest.approx(output.summary.mean if named else 7.0)


def test_ordinary_losses_are_no_spikes() -> None:
    random = np.random.default_rng(0)
    falling = [4 * math.exp(-step / 300) + 1 + 0.1 * random.standard_normal() for step in range(2000)]
    spikes = LossSpikes()
    assert not any(spikes.add(loss) for loss in falling)
    assert spikes.add(2.5) and not spikes.add(2.6)  # once for each spike
    assert not spikes.add(1.0) and spikes.add(math.nan)
    constant = LossSpikes()
    assert not any(constant.add(loss) for loss in [1.0] * 50 + [1.1])


def test_patterns_choose_what_the_ring_holds(tmp_path: Path) -> None:
    keep = {"first": "ring", "act": "tensors", "*": "summary"}
    run = train(tmp_path / "run", each=nan_in(6), keep=keep, on_nonfinite="keep", ring=1).run
    kept = {module: sorted({r.key.step for r in run.records(kept=True, module=module)}) for module in ("first", "act")}
    assert kept == {"first": [5, 6], "act": list(range(10))}
    assert not list(run.records(kept=True, module="second"))
    assert run.verify().ok
    with pytest.raises(UsageError, match='keep= has "ring" but there is no ring'):
        tt.capture(Net(), keep=keep)


def test_a_ring_grows_neither_on_disk_nor_in_memory(tmp_path: Path) -> None:
    sizes, files = [], []

    def each(step: int, model: Net, tap: Any) -> None:
        if step % 20 == 0:
            tap.flush()
            # The index may just now be replaced by a shorter one, which is beside it until it is whole.
            finished = [file for file in tap.path.rglob("*.*") if file.suffix != ".partial"]
            found = [file.stat().st_size for file in finished]
            files.append(len(found))
            sizes.append(sum(found))

    train(tmp_path / "run", steps=400, each=each, ring=4)
    assert max(files[3:]) <= 6 + 7 and max(sizes[3:]) < 1.5 * max(sizes[:4])
    assert tt.open(tmp_path / "run").steps == [396, 397, 398, 399]

    held: list[int] = []
    train(None, steps=400, each=lambda step, model, tap: held.append(_held(tap)), ring=4, loss="criterion")
    assert max(held[300:]) < 1.3 * max(held[20:100])  # a step more or less, while the thread lags


def _held(tap: Any) -> int:
    """Bytes that the writer counts against its bound; the index's thread may lag behind."""
    tap.flush()
    return int(tap.stats()["peak_buffer_bytes"])


def test_loop_facts_and_arguments_of_the_steps_that_remain_are_kept(tmp_path: Path) -> None:
    def each(step: int, model: Net, tap: Any) -> None:
        if step in (50, 150):  # the second layer's own setting changes twice
            model.second.scale = float(step)
        if step == 100:
            tap.keep()
        give_loss(model, tap, float(step))

    run = train(tmp_path / "run", steps=200, each=each, ring=2).run
    assert run.steps == [98, 99, 100, 198, 199]
    facts = run.loop(0)
    assert [facts.value("loss", step)["value"] for step in run.steps] == [98.0, 99.0, 100.0, 198.0, 199.0]
    assert facts.value("attributes", 99, "second")["scale"] == 50.0
    assert facts.value("attributes", 199, "second")["scale"] == 150.0
    assert len(facts.changes("loss")) == len(run.steps)
    assert len(facts.changes("random", "torch.cpu")) == len(run.steps)


def test_a_killed_run_has_its_ring(tmp_path: Path) -> None:
    """A copy of the folder is what a kill leaves: every write has reached the operating system."""

    def each(step: int, model: Net, tap: Any) -> None:
        if step == 8:
            tap.flush()
            shutil.copytree(tmp_path / "run", tmp_path / "killed")

    train(tmp_path / "run", each=each, ring=2)
    run = tt.open(tmp_path / "killed")
    assert not run.finished and run.steps[-3:] == [5, 6, 7]
    assert kept_steps(run)[-3:] == [5, 6, 7] and len(kept_steps(run)) <= 4
    assert run.verify().ok


def test_training_is_unchanged_and_a_kept_run_compares(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = train(tmp_path / "plain", keep="tensors")
    ringed = train(
        tmp_path / "ring", ring=2, on_nonfinite="stop", each=lambda s, m, tap: tap.keep() if s == 9 else None
    )
    result = tt.compare(plain.run, ringed.run)
    last = len(list(plain.run.records(step=(7, 8, 9))))
    assert result.verdict == "match" and result.counts["equal"] == last
    whole = train(tmp_path / "whole", ring=2, keep="summary")
    result = tt.compare(plain.run, whole.run)
    assert result.verdict == "match" and result.counts["equal"] == len(plain.run)


def test_wrong_options_are_named() -> None:
    for options, message in (
        ({"on_nonfinite": "raise"}, "on_nonfinite: 'raise' is neither"),
        ({"ring": 0}, "ring: 0 is not a number of steps"),
        ({"ring": True}, "ring: True is not"),
        ({"loss": 3}, "loss: 3 is not the output of a module"),
    ):
        with pytest.raises(UsageError, match=message):
            tt.capture(nn.Linear(2, 2), **options)  # type: ignore[arg-type]
    assert parse_loss("(root):loss") == ("", "loss")


def test_a_loss_between_two_steps_is_that_of_the_step_that_has_ended() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tt.capture(model, optimizer=optimizer, steps=[0, 2, 3]) as tap:
        for step in range(4):
            model(torch.randn(4, 8)).backward()
            optimizer.step()
            tap.loss(float(step))
    assert [(each.step, each.value["value"]) for each in tap.run.loop().changes("loss")] == [
        (0, 0.0),
        (2, 2.0),
        (3, 3.0),
    ]
    assert tap.run.steps == [0, 2, 3]
