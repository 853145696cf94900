"""A check around a user's step: its findings, what it must not change, and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from support import zoo
from support.read_page import ReadPage
from support.tapping import ALL_KINDS, hooks_on
from tensortap.core.causes import Cause


class Uses(nn.Module):
    """Uses all results of an LSTM, and its output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(4, 6, 2, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.inner(x)
        return self.head(out) + h.sum() + c.mean()


class OfItself(nn.Module):
    """Passes one tensor three times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Notebook(nn.Module):
    """Returns results through a list argument, and changes its input in place."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, pages: list[torch.Tensor]) -> None:
            pages[0] = pages[0] + 1
            pages.append(self.fc(x.clone()))
            x.mul_(2)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.writer, self.last = nn.Linear(4, 4), Notebook.Writer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, pages = self.first(x), [x.sin()]
        z = y + 0
        self.writer(z, pages)
        return self.last(pages[0] * pages[1] + z)


TOKENS = torch.tensor([[1, 5, 2], [0, 3, 3]])
X = zoo.batch()
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "in-place": (zoo.InPlaceModule, X),
    "in-place after": (zoo.InPlaceAfter, X),
    "behind autograd": (zoo.BehindAutograd, X),
    "views": (zoo.Views, X),
    "structured": (zoo.Structured, X),
    "shared": (zoo.Shared, X),
    "pass-through": (zoo.PassThrough, X),
    "frozen": (zoo.Frozen, TOKENS),
    "statistics": (zoo.Statistics, X),
    "residual": (zoo.Residual, X),
    "checkpointed": (lambda: zoo.Checkpointed("non-reentrant"), X.clone().requires_grad_()),
    "reentrant": (lambda: zoo.Checkpointed("reentrant"), X.clone().requires_grad_()),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True), X),
    "lstm": (Uses, X),
    "attention": (OfItself, X),
    "notebook": (Notebook, X),
}


def built(name: str = "residual") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]()


def step(model: nn.Module, name: str = "residual") -> torch.Tensor:
    torch.manual_seed(1)
    loss = zoo.loss_of(model(MODELS[name][1]))
    loss.backward()
    return loss


def captured(path: Path, name: str = "residual", **options: Any) -> Path:
    model = built(name)
    with tt.capture(model, path, **({"keep": "tensors", "kinds": ALL_KINDS} | options)):
        step(model, name)
    return path


def checked(model: nn.Module, reference: Path, name: str = "residual", **options: Any) -> Any:
    with tt.check(model, reference, **options) as check:
        step(model, name)
    return check.result


def named(result: Any) -> list[str]:
    return [birth.module for birth in result.births]


def scaled(model: nn.Module, module: str, factor: float = 1.01) -> nn.Module:
    """Scale a module's output slightly."""
    target = model.get_submodule(module)
    inner = target.forward
    target.forward = lambda *args: inner(*args) * factor
    return model


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_agrees_with_itself(name: str, isolate: bool, run_path: Path) -> None:
    result = checked(built(name), captured(run_path, name), name, isolate=isolate)
    assert result.verdict == "match", result.sentence
    assert result.isolated == isolate
    assert not result.unmatched, result.unmatched[:5]
    assert max(row["rel_l2"] for row in result.rows) < 1e-6
    assert {row["kind"] for row in result.rows} >= {"input", "output", "grad_output", "param", "param_grad"}


def test_without_isolation_it_agrees_with_comparing_two_runs(run_path: Path, tmp_path: Path) -> None:
    reference = captured(run_path)
    model = scaled(built(), "gated.up")
    with tt.capture(model, tmp_path / "candidate", keep="tensors", kinds=ALL_KINDS):
        step(model)
    stored = tt.compare(reference, tmp_path / "candidate")
    live = checked(scaled(built(), "gated.up"), reference, isolate=False)
    assert live.sentence == stored.sentence
    assert live.counts == stored.counts
    assert live.table.drop_columns(["seq"]) == stored.table.drop_columns(["seq"])


def test_without_isolation_summaries_are_enough(run_path: Path) -> None:
    result = checked(scaled(built(), "gated.up"), captured(run_path, keep="summary"), isolate=False)
    assert named(result)[0] == "gated.up"


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_two_mistakes_are_two_births(run_path: Path) -> None:
    reference = captured(run_path)
    model = scaled(scaled(built(), "first"), "gated.down", 1.001)
    result = checked(model, reference)
    assert named(result) == ["first", "gated.down"]
    assert result.sentence.startswith("2 modules are wrong on the reference's own inputs: first, gated.down. In first")
    free = checked(scaled(scaled(built(), "first"), "gated.down", 1.001), reference, isolate=False)
    assert named(free) == ["first"]


def test_code_between_modules_is_attributed_to_the_container(run_path: Path) -> None:
    reference, model = captured(run_path), built()
    model.gated.forward = lambda x: model.gated.down(torch.tanh(model.gated.gate(x)) * model.gated.up(x)) + x.sin()
    result = checked(model, reference)
    assert named(result) == ["gated"]
    assert "the own code of gated passes to gated.down (input 0)" in result.sentence


def test_a_wrong_input_is_attributed_to_the_caller_not_the_owner(run_path: Path) -> None:
    """A block calls a module of the root, and computes its input."""

    class Block(nn.Module):
        def __init__(self, table: nn.Module) -> None:
            super().__init__()
            self.fc, self.tables, self.shift = nn.Linear(4, 4), [table], 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) + self.tables[0](x + self.shift)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Linear(4, 4)
            self.blocks = nn.ModuleList([Block(self.table), Block(self.table)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model = Model()
    with tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS):
        zoo.loss_of(model(X)).backward()
    model.blocks[1].shift = 0.1
    with tt.check(model, run_path) as check:
        zoo.loss_of(model(X)).backward()
    assert named(check.result) == ["blocks.1"]


def test_a_wrong_backward_is_attributed_to_its_module(run_path: Path) -> None:
    reference, model = captured(run_path), built()
    inner = model.gated.up.forward
    model.gated.up.forward = lambda x: inner(zoo.Doubled.apply(x))
    result = checked(model, reference)
    assert named(result) == ["gated.up"]
    assert result.first.key.kind == "grad_input"


def test_a_missing_gradient_is_attributed_to_where_it_ends(run_path: Path, tmp_path: Path) -> None:
    """All records that exist are equal."""
    reference, cut = captured(run_path), built()
    cut.forward = lambda x: cut.last((lambda y: y + cut.gated(y))(cut.first(x)).detach())
    result = checked(cut, reference)
    assert result.verdict == "diverged"
    assert named(result) == [""]
    assert "the gradient of last's input 0 never comes" in result.sentence
    frozen = built()
    frozen.gated.gate.weight.requires_grad_(False)
    assert named(checked(frozen, reference)) == ["gated.gate"]
    inner = built()
    sigmoid_detached = inner.gated
    sigmoid_detached.forward = lambda x: (
        sigmoid_detached.down(torch.sigmoid(sigmoid_detached.gate(x)).detach() * sigmoid_detached.up(x)) + x.sin()
    )
    assert named(checked(inner, reference)) == ["gated"]


def test_a_parameter_that_differs_is_named_once(run_path: Path) -> None:
    reference, model = captured(run_path), built()
    with torch.no_grad():
        model.gated.gate.weight[2] *= 1.5
    result = checked(model, reference)
    assert named(result) == ["gated.gate"]
    assert result.first.key.kind == "param"


def test_an_input_changed_in_place_reaches_the_caller(run_path: Path) -> None:
    """The module is correct; its caller's tensor is wrong afterwards."""
    reference, model = captured(run_path), built()
    inner = model.gated.forward

    def overwriting(x: torch.Tensor) -> torch.Tensor:
        out = inner(x.clone())
        x.zero_()
        return out

    model.gated.forward = overwriting
    assert named(checked(model, reference)) == [""]


def test_one_wrong_row_is_found_in_bfloat16(run_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(400, 32), nn.Linear(32, 32)).bfloat16()

    tokens = torch.arange(400)
    with tt.capture(wholly := model(), run_path, keep="tensors"):
        wholly(tokens).float().square().mean().backward()
    ported = model()
    inner = ported[1].forward
    ported[1].forward = lambda x: torch.cat([inner(x)[:7], inner(x)[7:8] * 1.1, inner(x)[8:]])
    with tt.check(ported, run_path) as check:
        ported(tokens).float().square().mean().backward()
    assert named(check.result) == ["1"]
    assert check.result.first.only_a_row
    assert "in its row [7]" in check.result.sentence


def test_tensors_of_other_shapes_are_not_replaced(run_path: Path) -> None:
    """A module that cannot be fed must not break the step."""
    reference, model = captured(run_path), built()
    inner = model.gated.gate
    model.gated.forward = lambda x: model.gated.down(
        (torch.sigmoid(inner(x[:2])) * model.gated.up(x[:2])).repeat(2, 1, 1)[:3]
    )
    result = checked(model, reference)
    assert named(result) == ["gated"]
    assert result.first.status == "shape"


def test_a_missing_in_place_change_is_found(run_path: Path) -> None:
    """The output is the caller's own tensor, whose gradient is not the module's."""
    reference, model = captured(run_path, "encoder layer"), built("encoder layer")
    model.dropout1.forward = lambda x: (nn.functional.dropout(x, 0.2), x)[1]  # takes its random numbers all the same
    assert named(checked(model, reference, "encoder layer")) == ["dropout1"]


def test_nan_is_reported_at_its_birth(run_path: Path) -> None:
    reference, model = captured(run_path), scaled(built(), "gated.gate", math.nan)
    result = checked(model, reference)
    assert named(result) == ["gated.gate"]
    assert result.first.status == "nonfinite"


# --- precision, steps, parts of a model -------------------------------------------------------------------------------


def test_a_reference_in_float32_feeds_a_model_in_bfloat16(run_path: Path) -> None:
    reference = captured(run_path, "encoder layer")

    def ported() -> nn.Module:
        return built("encoder layer").bfloat16()

    def run(model: nn.Module) -> Any:
        torch.manual_seed(1)
        with tt.check(model, reference) as check:
            model(X.bfloat16()).float().square().mean().backward()
        return check.result

    assert not [b for b in run(ported()).births if b.key.phase == "forward"]
    model = ported()
    model.norm2.eps = 1.0
    assert named(run(model))[0] == "norm2"


def test_evaluation_without_gradients(run_path: Path) -> None:
    reference, model = captured(run_path), scaled(built(), "gated.up").eval()
    with tt.check(model, reference) as check, torch.no_grad():
        out = model(X)
    assert not out.requires_grad
    assert named(check.result) == ["gated.up"]
    assert any("no backward ran" in note for note in check.result.notes)
    assert not check.result.unmatched


def test_steps_and_micro_steps(run_path: Path) -> None:
    def train(model: nn.Module, watching: Any, optimizer: torch.optim.Optimizer) -> None:
        with watching:
            for number in range(4):
                for micro in range(2):
                    zoo.loss_of(model(zoo.batch(seed=10 * number + micro))).backward()
                optimizer.step()
                optimizer.zero_grad()

    def trained(model: nn.Module, watch: Callable[[Any], Any]) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        watching = watch(optimizer)
        train(model, watching, optimizer)
        return watching

    model = built()
    trained(
        model,
        lambda o: tt.capture(model, run_path, keep="tensors", kinds=ALL_KINDS, steps=range(1, 4, 2), optimizer=o),
    )
    again = built()
    check = trained(again, lambda o: tt.check(again, run_path, optimizer=o))
    assert check.result.verdict == "match"
    assert not check.result.unmatched
    rows = [(row["step"], row["micro"]) for row in check.result.rows if row["kind"] == "output" and not row["module"]]
    assert rows == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_modules_of_one_side_only(run_path: Path) -> None:
    reference = captured(run_path, modules=["first", "gated*", "(root)"])
    model = scaled(scaled(built(), "last"), "gated.up")
    model.extra = nn.Linear(2, 2)
    result = checked(model, reference)
    assert named(result) == ["gated.up", ""]  # what `last` does wrong shows in the root, which holds it
    only = checked(scaled(scaled(built(), "first"), "gated.up"), reference, modules="gated*")
    assert named(only) == ["", "gated.up"]  # `first` is not looked at: what reaches `gated` was made outside of it
    assert {row["module"] for row in only.rows} == {"gated", "gated.gate", "gated.up", "gated.down"}
    assert not only.unmatched


def test_renamed_modules(run_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = scaled(built(), "gated.up")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.backbone(x)

    reference = captured(run_path, modules=["first", "gated*", "last"])
    with pytest.raises(tt.TensortapError, match="only 0 of the 6 modules"):
        tt.check(Wrapper(), reference)
    assert named(checked(Wrapper(), reference, rename=["^backbone\\.="])) == ["gated.up"]


def test_another_model_is_refused(run_path: Path) -> None:
    deep = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    with tt.capture(deep, run_path, keep="tensors"):
        deep(torch.ones(1, 8)).sum().backward()
    with pytest.raises(tt.TensortapError, match=r"it calls them \(root\), 0, 1, 10, \.\.\."):
        tt.check(nn.Linear(8, 8), run_path)


# --- it leaves nothing, it changes nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["in-place", "structured", "checkpointed", "statistics", "notebook"])
def test_no_hook_remains(name: str, run_path: Path) -> None:
    model = built(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    reference = captured(run_path, name)
    result = checked(model, reference, name)
    assert result.verdict == "match"
    expected = built(name)
    step(expected, name)
    assert hooks_on(model) == 0
    assert [module.training for module in model.modules()] == modes
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    for key, value in model.state_dict().items():
        moved = key.startswith("norm.") and name == "statistics" and "weight" not in key and "bias" not in key
        assert moved or torch.equal(value, before[key]), key
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_the_random_state_is_as_without_a_check(run_path: Path) -> None:
    reference = captured(run_path, "encoder layer")
    checked(built("encoder layer"), reference, "encoder layer")
    after = torch.get_rng_state()
    step(built("encoder layer"), "encoder layer")
    assert torch.equal(after, torch.get_rng_state())


def test_training_continues_unchanged_after_a_check(run_path: Path) -> None:
    reference, model, other = captured(run_path), built(), built()
    checked(model, reference)
    model.zero_grad()
    assert torch.equal(step(model), step(other))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_a_users_error_propagates_and_no_hook_remains(run_path: Path) -> None:
    reference, model = captured(run_path), built()
    with pytest.raises(ZeroDivisionError), tt.check(model, reference) as check:
        model(X)
        raise ZeroDivisionError
    assert hooks_on(model) == 0
    assert any("stopped early" in note for note in check.result.notes)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_a_reference_without_tensors_names_the_capture_options(run_path: Path) -> None:
    reference = captured(run_path, keep="summary")
    with pytest.raises(tt.TensortapError, match=r'capture the reference with .*keep="tensors"'):
        tt.check(built(), reference)


def test_a_reference_of_other_kinds_names_the_missing_ones(run_path: Path) -> None:
    reference = captured(run_path, kinds=("output", "param_grad"))
    with pytest.raises(tt.TensortapError, match="has no input tensors"):
        tt.check(built(), reference)


def test_no_result_before_the_end(run_path: Path) -> None:
    with tt.check(built(), captured(run_path)) as check, pytest.raises(tt.TensortapError, match="not over"):
        _ = check.result


def test_a_rank_that_the_reference_lacks_is_refused(run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = captured(run_path)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(tt.TensortapError, match="this is rank 3"):
        tt.check(built(), reference)


def test_every_report_accepts_the_result(run_path: Path, tmp_path: Path) -> None:
    import io
    import json

    from tensortap.report.files import (
        comparison_csv,
        comparison_json,
        comparison_junit,
        comparison_markdown,
        comparison_parquet,
    )
    from tensortap.report.html import comparison as comparison_html
    from tensortap.report.terminal import comparison as comparison_page

    result = checked(scaled(built(), "gated.up"), captured(run_path))
    for writer in (comparison_csv, comparison_json, comparison_junit, comparison_markdown, comparison_parquet):
        file = io.BytesIO()
        writer.write(result, file)
        assert file.getvalue()
        if writer is comparison_json:
            document = json.loads(file.getvalue())
            assert document["isolated"] is True
            assert document["first"]["module"] == "gated.up"
    cut = built()
    cut.forward = lambda x: cut.last((lambda y: y + cut.gated(y))(cut.first(x)).detach())
    for report in (comparison_csv, comparison_json, comparison_junit, comparison_markdown, comparison_parquet):
        file = io.BytesIO()
        report.write(checked(cut, run_path), file)
        assert report is not comparison_junit or b'errors="1"' in file.getvalue()
    file = io.BytesIO()
    comparison_html.write(result, file)
    shown = ReadPage(file.getvalue().decode())
    assert [(birth["place"], birth["command"]) for birth in shown.head["births"]] == [("gated.up", "")]
    file = io.BytesIO()
    comparison_html.write(checked(cut, run_path), file)
    shown = ReadPage(file.getvalue().decode())
    assert (shown.head["verdict"], shown.head["first"], shown.head["births"]) == ("diverged", None, [])
    assert "last · grad_input 0" in shown.parsed.text and "never comes" in shown.parsed.text
    page = "\n".join(str(line) for line in comparison_page.render(comparison_page.build(result), 100))
    assert "gated.up (Linear) is wrong on the reference's own inputs" in page


def test_no_gradient_outlives_its_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))

    def train(tap: Any) -> None:
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 8)).square().sum().backward()
            model.zero_grad()
            tap.step()
            assert not getattr(tap._watcher, "_arrived", None)

    kinds = ("input", "output", "grad_input", "grad_output", "param_grad")
    with tt.capture(model, tmp_path / "a", keep="tensors", kinds=kinds) as tap:
        train(tap)
    with tt.check(model, tmp_path / "a") as check:
        train(check)
        assert hasattr(check._watcher, "_arrived")


@pytest.mark.parametrize(
    ("changes", "cause", "said"),
    [
        ({}, None, "Every module agrees"),
        ({"clip": 0.05}, Cause.STEP_GRADIENT, "Backward is right, but what the optimizer gets is not: in step 0,"),
        ({"betas": (0.5, 0.999)}, Cause.OPTIMIZER, "The loops differ: beta1 is 0.9 in the reference and 0.5"),
    ],
)
def test_a_check_sees_what_the_optimizer_gets_and_its_settings(
    tmp_path: Path, changes: dict[str, Any], cause: Cause | None, said: str
) -> None:
    def train(watch: Callable[[Any, Any], Any], clip: float = 0.1, betas: tuple[float, float] = (0.9, 0.999)) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=betas)
        with watch(model, optimizer) as watching:
            for step in range(2):
                optimizer.zero_grad()
                model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        return watching

    path = tmp_path / "a"
    train(lambda model, optimizer: tt.capture(model, path, keep="tensors", optimizer=optimizer))
    result = train(lambda model, optimizer: tt.check(model, path, optimizer=optimizer), **changes).result
    assert said in result.sentence
    assert [birth.cause for birth in result.births] == ([] if cause is None else [cause])
