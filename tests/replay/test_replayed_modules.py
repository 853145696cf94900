"""Replay of modules on their recorded inputs: equal bit for bit, and wrong where a mistake was planted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.tapping import ALL_KINDS, hooks_on, tapped
from tensortap.cli.replay import parse_argument
from tensortap.core.records import Comparison
from tensortap.errors import UsageError
from tensortap.report.terminal.comparison import build, render

TOKENS = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(0))


def calls(run: Any) -> list[tuple[int, str, int]]:
    return sorted({(r.key.step, r.key.module, r.key.call) for r in run.records(kind="input")})


def statuses(result: Comparison) -> dict[str, str]:
    """Module, kind and path of each pair → its status."""
    return {f"{row['module']} {row['kind']} {row['path']}": row["status"] for row in result.rows}


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (zoo.InPlaceModule, ()),
        (zoo.InPlaceAfter, ()),
        (zoo.BehindAutograd, ()),
        (zoo.Views, ()),
        (zoo.Structured, ()),
        (zoo.Shared, ()),
        (zoo.PassThrough, ()),
        (zoo.Frozen, (TOKENS,)),
        (zoo.Statistics, ()),
        (zoo.Residual, ()),
    ],
)
def test_every_call_of_every_module_is_reproduced(
    model: type[nn.Module], inputs: tuple[Any, ...], run_path: Path
) -> None:
    torch.manual_seed(0)
    net = model()
    run, _ = tapped(net, run_path, *inputs, steps=2)
    other = model()  # its weights are others: the run's win
    for step, module, call in calls(run):
        result = tt.replay(run, module or "(root)", other, step=step, call=call)
        assert result.verdict == "match", (module, str(result))
        assert not result.unmatched, (module, result.unmatched)
        forward = [row for row in result.rows if row["phase"] == "forward"]
        assert {row["status"] for row in forward if row["module"] == module} == {"equal"}, module
        if module == "":
            compared = {r.key for r in run.records(step=step) if r.key.phase != "state" or r.key.call == 0}
            assert len(result) == len(compared), "all of the step but the parameters after it"


def test_gradients_are_replayed_too(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)
    result = tt.replay(run, "gated", zoo.Residual())
    found = statuses(result)
    assert found["gated grad_input 0"] == "equal"
    assert found["gated.up param_grad weight"] == "equal"
    assert found["gated.down grad_output 0"] == "equal"


def test_the_model_is_not_modified(run_path: Path) -> None:
    model = zoo.Statistics()
    run, _ = tapped(model, run_path)
    other = zoo.Statistics()
    before = copy.deepcopy(other.state_dict())
    tt.replay(run, "norm", other, dtype="float64", evaluate=True, implementation=lambda self, x: x)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert other.norm.training
    assert other.norm.weight.dtype == torch.float32
    assert "forward" not in vars(other.norm)
    assert hooks_on(other) == 0
    assert all(parameter.grad is None for parameter in other.parameters())


# --- in another way ------------------------------------------------------------------------------------------------
def test_another_dtype(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual().bfloat16(), run_path, zoo.batch().bfloat16())
    result = tt.replay(run, "gated", zoo.Residual(), dtype="float64")
    assert result.verdict == "match"
    row = next(row for row in result.rows if (row["module"], row["kind"]) == ("gated", "output"))
    assert 1e-4 < row["rel_l2"] < 1e-2, "bfloat16 rounds, and float64 does not"
    assert "in float64" in result.candidate
    with pytest.raises(UsageError, match="float64, float32"):
        tt.replay(run, "gated", zoo.Residual(), dtype="int8")


def test_another_implementation_is_judged(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)

    def right(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid()) + torch.sin(x)

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.gate(x).sigmoid()) + x

    assert tt.replay(run, "gated", zoo.Residual(), implementation=right).verdict == "match"
    result = tt.replay(run, "gated", zoo.Residual(), implementation=wrong)
    assert result.verdict == "diverged"
    assert result.first is not None
    assert (result.first.module, result.first.key.kind) == ("gated", "output")
    assert statuses(result)["gated.down output 0"] == "equal"


class Louder(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.01 * super().forward(x)


def test_a_mistake_inside_a_container_is_located(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)
    wrong = zoo.Residual()
    wrong.gated.up = Louder(4, 8)
    result = tt.replay(run, "gated", wrong)
    assert result.first is not None
    assert result.first.module == "gated.up"


# --- parameters ----------------------------------------------------------------------------------------------------
def noted(result: Comparison, words: str) -> bool:
    return any(words in note for note in result.notes)


def test_without_recorded_parameters_the_models_own_are_used(run_path: Path) -> None:
    model = zoo.Residual()
    run, _ = tapped(model, run_path, kinds=("input", "output"))
    result = tt.replay(run, "first", model)
    assert result.verdict == "match"
    assert noted(result, "not recorded by the run: first.weight, first.bias")
    assert tt.replay(run, "first", zoo.Residual()).verdict == "diverged"


def test_summaries_show_whether_the_parameters_are_equal(run_path: Path) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(x)

    model = Whole()
    run, _ = tapped(model, run_path, keep={"outer": "tensors", "*": "summary"})
    assert noted(tt.replay(run, "outer", model), "bit for bit equal to the run's: outer.0.weight, outer.0.bias")
    result = tt.replay(run, "outer", Whole())
    assert result.verdict == "diverged"
    assert noted(result, "NOT equal to the run's")


def test_a_parameter_of_another_shape_is_refused(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)
    other = zoo.Residual()
    other.first = nn.Linear(4, 5)
    with pytest.raises(UsageError, match=r"first.weight has the shape \(5, 4\) in the model and \(4, 4\) in the run"):
        tt.replay(run, "first", other)


def test_the_gradient_of_a_tied_parameter_is_not_compared(run_path: Path) -> None:
    run, _ = tapped(zoo.Frozen(), run_path, TOKENS)
    result = tt.replay(run, "embed", zoo.Frozen())
    assert result.verdict == "match"
    assert "embed param_grad weight" not in statuses(result)
    assert noted(result, "embed.weight")


def test_parameter_gradients_of_a_module_that_ran_twice_are_not_compared(run_path: Path) -> None:
    run, _ = tapped(zoo.Shared(), run_path)
    result = tt.replay(run, "norm", zoo.Shared(), call=1)
    assert result.verdict == "match"
    assert "norm param_grad weight" not in statuses(result)
    assert noted(result, "ran more than once")
    assert {row["call"] for row in result.rows if row["phase"] != "state"} == {1}


def test_active_dropout_is_noted(run_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    run, _ = tapped(model, run_path)
    assert noted(tt.replay(run, "1", model), "--eval")
    assert not noted(tt.replay(run, "1", model, evaluate=True), "--eval")


def test_the_note_on_dropout_is_first_and_always_shown(run_path: Path) -> None:
    """The verdict names the module with dropout, and only this note explains it."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)
    run, _ = tapped(model, run_path, torch.randn(5, 2, 8))
    result = tt.replay(run, "(root)", model)
    assert result.verdict == "diverged" and "--eval" in result.notes[0]
    for width in (40, 60, 80, 120):
        page = " ".join(line.plain.strip() for line in render(build(result), width))
        assert "draws other numbers" in " ".join(page.split())


def test_without_kept_gradients_there_is_no_backward(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path, kinds=("input", "output", "param", "param_grad"))
    result = tt.replay(run, "gated", zoo.Residual())
    assert result.verdict == "match"
    assert not result.unmatched
    assert noted(result, "no backward")


# --- which call ----------------------------------------------------------------------------------------------------
def test_step_and_micro_step_are_selected(run_path: Path) -> None:
    model = zoo.Residual()
    with tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS) as tap:
        for step in range(2):
            for micro in range(2):
                zoo.loss_of(model(zoo.batch(seed=2 * step + micro))).backward()
            tap.step()
    result = tt.replay(run_path, "gated", model, step=1, micro=1)
    assert result.verdict == "match"
    assert {(row["step"], row["micro"]) for row in result.rows if row["phase"] != "state"} == {(1, 1)}
    with pytest.raises(UsageError, match="no call of gated in step 7; it has step 0 micro 0 call 0"):
        tt.replay(run_path, "gated", model, step=7)
    with pytest.raises(UsageError, match="no rank 3; it has 0"):
        tt.replay(run_path, "gated", model, rank=3)


# --- what cannot be replayed ---------------------------------------------------------------------------------------
def test_unknown_names(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)
    with pytest.raises(UsageError, match=r"no records of gatd; did you mean gated"):
        tt.replay(run, "gatd", zoo.Residual())
    other = zoo.Residual()
    del other.gated
    other.gate = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"has no module gated; did you mean gate"):
        tt.replay(run, "gated", other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "summary"}, "only summaries of the inputs"),
        ({"kinds": ("output",)}, "no inputs"),
    ],
)
def test_inputs_that_were_not_kept(options: dict[str, Any], message: str, run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path, **options)
    with pytest.raises(UsageError, match=message) as error:
        tt.replay(run, "gated", zoo.Residual())
    assert 'keep={"gated": "tensors", "gated.*": "tensors", "*": "summary"}' in str(error.value)
    assert '"input"' in str(error.value)


def test_an_error_of_the_module_is_reported(run_path: Path) -> None:
    run, _ = tapped(zoo.Residual(), run_path)

    def failing(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    with pytest.raises(UsageError, match="gated failed on the recorded inputs: RuntimeError: no such kernel"):
        tt.replay(run, "gated", zoo.Residual(), implementation=failing)


# --- plain arguments ---------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    def forward(
        self, x: torch.Tensor, by: float, pair: Any = None, *, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = x * by if mask is None else x * by * mask
        return y if pair is None else y + pair[0]["k"]


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled = nn.Linear(4, 4), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.scaled(y, 0.5, ({"k": y + 1}, None), mask=torch.ones(4))


def without_arguments(path: Path) -> Any:
    """The run as an older version would have recorded it."""
    (path / "rank_0" / "calls.jsonl").unlink()
    return tt.open(path)


def test_plain_arguments_are_those_of_the_run(run_path: Path) -> None:
    run, _ = tapped(Caller(), run_path)
    result = tt.replay(run, "scaled", Caller())
    assert result.verdict == "match"
    assert noted(result, "call 0, called with 1=0.5")
    assert not noted(result, "did not keep")


def test_given_arguments_replace_kept_ones(run_path: Path) -> None:
    run, _ = tapped(Caller(), run_path)
    assert tt.replay(run, "scaled", Caller(), arguments={"by": 0.5}).verdict == "match"
    result = tt.replay(run, "scaled", Caller(), arguments={"by": 2.0})
    assert result.verdict == "diverged"
    assert str(result).endswith("It was called with 1=0.5 in the reference and 2.0 in the candidate.")
    with pytest.raises(UsageError, match="scaled takes no argument bye; it takes x, by, pair, mask"):
        tt.replay(run, "scaled", Caller(), arguments={"bye": 1})
    for name in ("x", "pair", "mask"):
        with pytest.raises(UsageError, match=f"argument {name} is a tensor that the run has"):
            tt.replay(run, "scaled", Caller(), arguments={name: 1})


def test_a_run_without_plain_arguments_needs_them_from_the_user(run_path: Path) -> None:
    tapped(Caller(), run_path)
    run = without_arguments(run_path)
    with pytest.raises(UsageError, match=r"scaled needs the argument by, which was not a tensor .* --arg by=VALUE"):
        tt.replay(run, "scaled", Caller())
    result = tt.replay(run, "scaled", Caller(), arguments={"by": 0.5})
    assert result.verdict == "match"
    assert tt.replay(run, "scaled", Caller(), arguments={"by": 2.0}).verdict == "diverged"
    with pytest.raises(UsageError, match="argument x is a tensor that the run has"):
        tt.replay(run, "scaled", Caller(), arguments={"by": 0.5, "x": 1})


def test_assumed_defaults_are_noted(run_path: Path) -> None:
    run, _ = tapped(zoo.Structured(), run_path)
    assert noted(tt.replay(run, "inner", zoo.Structured()), "called with mode='plain'")
    assert not noted(tt.replay(run, "inner", zoo.Structured()), "did not keep")
    run = without_arguments(run_path)
    assert noted(tt.replay(run, "inner", zoo.Structured()), "did not keep; used instead: mode = 'plain'")
    assert not noted(tt.replay(run, "inner", zoo.Structured(), arguments={"mode": "plain"}), "mode =")


class Cache:
    def __init__(self) -> None:
        self.shift = 1.0


class Particular(nn.Module):
    """Checks the values and types of its arguments."""

    def forward(
        self, x: torch.Tensor, sizes: list[int], cache: Cache | None = None, pair: Any = None, **options: Any
    ) -> torch.Tensor:
        assert type(sizes) is list
        y = x * sum(sizes) + (0 if cache is None else cache.shift)
        y = y if pair is None else y + pair[0] + (0 if pair[1] is None else pair[1].shift)
        y = y.to(options["dtype"]).to(x.dtype) if "dtype" in options else y
        y = y + torch.full((), options["fill"], device=options["device"]) if "device" in options else y
        return y.nan_to_num(nan=options.get("nan", 0.0)) * options.get("odd.name", 1)


class Particulars(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.first, self.inner, self.given = nn.Linear(4, 4), Particular(), (args, kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        args, kwargs = self.given
        y = self.first(x)
        return self.inner(y, *[(y, *each[1:]) if isinstance(each, tuple) else each for each in args], **kwargs)


WAYS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a list": (([1, 2],), {}),
    "by name": ((), {"sizes": [3]}),
    "dtype": (([1],), {"dtype": torch.float16}),
    "device": (([1],), {"device": torch.device("cpu"), "fill": 2}),
    "numbers": (([1],), {"nan": float("nan"), "odd.name": 3, "unused": {"k": (1, None)}}),
    "beside a tensor": (([1], None, (0, None)), {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_restored(way: str, run_path: Path) -> None:
    args, kwargs = WAYS[way]
    run, _ = tapped(Particulars(*args, **kwargs), run_path)
    result = tt.replay(run, "inner", Particulars())
    assert result.verdict == "match", str(result)
    assert not noted(result, "did not keep")
    assert not noted(result, "other plain arguments")


def test_arguments_that_were_not_kept_are_noted(run_path: Path) -> None:
    run, _ = tapped(Particulars([1], Cache()), run_path)
    result = tt.replay(run, "inner", Particulars())
    assert result.verdict == "diverged"
    assert noted(
        result, "did not keep; used instead: cache = None (it was a Cache object) (--arg NAME=VALUE sets another)"
    )
    assert tt.replay(run, "inner", Particulars(), arguments={"cache": Cache()}).verdict == "match"
    run, _ = tapped(Particulars([1], extra=Cache(), cache=Cache()), run_path, overwrite=True)
    result = tt.replay(run, "inner", Particulars(), arguments={"cache": Cache()})
    assert result.verdict == "match"
    assert noted(result, "used instead: no extra (it was a Cache object)")
    run, _ = tapped(Particulars([1], None, (0, Cache())), run_path, overwrite=True)
    result = tt.replay(run, "inner", Particulars())
    assert result.verdict == "diverged"
    assert noted(result, "used instead: 3.1 = None (it was a Cache object)")


def test_an_argument_that_is_needed_and_was_not_kept(run_path: Path) -> None:
    class Needs(nn.Module):
        def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
            return x + cache.shift

    model = Particulars(Cache())
    model.inner = Needs()  # type: ignore[assignment]
    run, _ = tapped(model, run_path)
    with pytest.raises(
        UsageError, match="needs the argument cache, which was a Cache object and was not kept: give it"
    ):
        tt.replay(run, "inner", model)
    assert tt.replay(run, "inner", model, arguments={"cache": Cache()}).verdict == "match"


def test_another_implementation_may_take_fewer_arguments(run_path: Path) -> None:
    run, _ = tapped(Particulars([2], None, unused=1), run_path)
    result = tt.replay(run, "inner", Particulars(), implementation=lambda self, x: x * 2)
    assert result.verdict == "match"
    assert noted(result, "dropped, because forward does not take them: 2=None, 1=[2], unused=1")

    def needy(self: Any, x: torch.Tensor, sizes: Any, cache: Any, more: int) -> torch.Tensor:
        return x * 2

    with pytest.raises(UsageError, match="needs the argument more, which the call in the run was not given"):
        tt.replay(run, "inner", Particulars(), implementation=needy)


def test_a_dtype_is_given_by_its_name(run_path: Path) -> None:
    run, _ = tapped(Particulars([1], dtype=torch.float16), run_path)
    result = tt.replay(run, "inner", Particulars(), arguments={"dtype": "float32"})
    assert "It was called with dtype=float16 in the reference and float32 in the candidate." in str(result)
    with pytest.raises(UsageError, match="torch has no dtype float3"):
        tt.replay(run, "inner", Particulars(), arguments={"dtype": "float3"})


def test_a_device_argument_follows_the_module(run_path: Path) -> None:
    tapped(Particulars([1], device=torch.device("cpu"), fill=1), run_path)
    file = run_path / "rank_0" / "calls.jsonl"
    file.write_text(file.read_text().replace('"cpu"', '"cuda:7"'))  # as if it had been recorded elsewhere
    assert tt.replay(run_path, "inner", Particulars(), device="cpu").verdict == "match"


def test_each_call_has_its_own_arguments(run_path: Path) -> None:
    class Twice(Particulars):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(self.first(x), [1]), [3])

    run, _ = tapped(Twice(), run_path, steps=2)
    for step, call, sizes in ((0, 0, "[1]"), (0, 1, "[3]"), (1, 0, "[1]"), (1, 1, "[3]")):
        result = tt.replay(run, "inner", Twice(), step=step, call=call)
        assert result.verdict == "match"
        assert noted(result, f"called with 1={sizes}")


@pytest.mark.parametrize(
    ("text", "value"),
    [("false", False), ("False", False), ("None", None), ("0.5", 0.5), ("(1, 2)", (1, 2)), ("mean", "mean")],
)
def test_an_argument_on_the_command_line_is_json_python_or_text(text: str, value: Any) -> None:
    assert parse_argument(f"flag={text}") == ("flag", value)
