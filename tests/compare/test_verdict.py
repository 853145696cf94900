"""The verdict: it names the module where a wrong value was born, not one that it propagated to."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from made_runs import Seen, chain, rows, values, write
from trained_runs import KINDS, Change, Net, does, train

import tensortap as tt
from tensortap.compare import matching
from tensortap.core.causes import CAUSES, Cause
from tensortap.core.records import Comparison, Key, display_name
from tensortap.report.files import comparison_json, comparison_junit, comparison_markdown
from tensortap.report.html.data.pairs import PairsData

INTERNALS = re.compile(r"_|None|nan|Key\(|dtype|\b(pair|row|seq|kind|sketch|birth|container|call)\b")


class Louder(torch.autograd.Function):
    """Right forward, one percent too much backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.01


def one_nan(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[2, 1] = float("nan")
    return y


def slightly_more(y: torch.Tensor) -> torch.Tensor:
    return y * 1.001


def scaled(model: Net, step: int) -> None:
    model.blocks[1].scale = 1.001  # type: ignore[assignment]


def started_elsewhere(model: Net, step: int) -> None:
    if step == 0:
        with torch.no_grad():
            model.get_parameter("blocks.0.fc1.weight")[0, 0] += 0.5
            model.get_parameter("head.bias").add_(1)
            model.get_parameter("head.weight").mul_(1.01)


def gradient_of_one_weight(model: Net, step: int) -> None:
    if step == 0:
        model.get_parameter("blocks.1.fc2.weight").register_hook(lambda gradient: gradient * 1.01)


MISTAKES: dict[str, tuple[dict[str, Any], str, str, int, str]] = {
    # the change; the module, kind and step that must be named first, and words of the sentence
    "output": (
        {"change": does("blocks.1.fc1", slightly_more)},
        *("blocks.1.fc1", "output", 0),
        "The runs part in blocks.1.fc1 (Linear): in step 0, its output 0 is off by {about}1.0e-3 (relative L2), "
        "while its inputs match.",
    ),
    "later": (
        {"change": does("blocks.1.fc1", slightly_more, since=1)},
        *("blocks.1.fc1", "output", 1),
        "The runs part in blocks.1.fc1 (Linear): in step 1, its output 0 is off",
    ),
    "glue": (
        {"change": scaled},
        *("blocks.1", "input", 0),
        "The runs part in the own code of blocks.1: in step 0, what it passes to blocks.1.fc2 (input 0) is off by "
        "{about}1.0e-3 (relative L2), while all that it was made from matches.",
    ),
    "backward": (
        {"change": does("blocks.1.act", Louder.apply)},
        *("blocks.1.act", "grad_input", 0),
        "The forward pass agrees; the runs part in the backward of blocks.1.act (Tanh): in step 0, the gradient that "
        "it sends back to its input 0 is off by {about}0.01 (relative L2), while the gradient that it was given "
        "matches.",
    ),
    "parameter's gradient": (
        {"change": gradient_of_one_weight},
        *("blocks.1.fc2", "param_grad", 0),
        "The forward pass agrees; the runs part in the backward of blocks.1.fc2 (Linear): in step 0, the gradient of "
        "its weight is off by {about}0.01",
    ),
    "optimizer": (
        {"rate": 0.11},
        *("embed", "param", 0),
        "The runs part in the update of parameters: after step 0, embed.weight is off",
    ),
    "parameters": (
        {"change": started_elsewhere},
        *("blocks.0.fc1", "param", 0),
        "The parameters already differed before the first step: blocks.0.fc1.weight and 2 more; the first is off by",
    ),
    "data": (
        {"off": 0.01},
        *("", "input", 0),
        "The runs were not given the same input: in step 0, input 0 of (root)",
    ),
    "loss": (
        {"loss_scale": 1.01},
        *("", "grad_output", 0),
        "The forward pass agrees, but the gradient that enters the model at its output is off by {about}0.01 "
        "(relative L2) in step 0: check the loss",
    ),
    "nan": (
        {"change": does("blocks.1.fc1", one_nan)},
        *("blocks.1.fc1", "output", 0),
        "The runs part in blocks.1.fc1 (Linear): in step 0, its output 0 is not finite where the reference's is, while "
        "its inputs match.",
    ),
}


class Runs:
    """Each is trained once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, mistake: str, keep: str = "tensors") -> Path:
        path = self.folder / f"{mistake} {keep}"
        return path if path.exists() else train(path, keep=keep, **(MISTAKES[mistake][0] if mistake else {}))

    def compared(self, mistake: str, keep: str = "tensors", **options: Any) -> Comparison:
        return tt.compare(self("", keep), self(mistake, keep), **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    yield Runs(tmp_path_factory.mktemp("runs"))


# --- where ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_where_it_was_made(runs: Runs, mistake: str, keep: str) -> None:
    _, module, kind, step, said = MISTAKES[mistake]
    result = runs.compared(mistake, keep)
    first = result.first
    assert first is not None
    assert (result.verdict, first.module, first.key.kind, first.key.step) == ("diverged", module, kind, step)
    assert str(first).startswith(display_name(module))
    assert str(first.key) in str(first)
    assert said.format(about="about " if keep == "summary" else "") in str(result)
    assert result.births[0] is first


CAUSE_OF = {
    "output": Cause.OUTPUT,
    "later": Cause.OUTPUT,
    "glue": Cause.CONTAINER_CODE,
    "backward": Cause.SENT_GRADIENT,
    "parameter's gradient": Cause.PARAMETER_GRADIENT,
    "optimizer": Cause.OPTIMIZER,
    "parameters": Cause.PARAMETER_AT_START,
    "data": Cause.INPUT,
    "loss": Cause.LOSS,
    "nan": Cause.OUTPUT,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_finding_has_its_cause_and_its_row(runs: Runs, mistake: str) -> None:
    result = runs.compared(mistake)
    assert result.first is not None and result.first.row is not None
    assert result.first.cause is CAUSE_OF[mistake]
    row = result.table.slice(result.first.row, 1).to_pylist()[0]
    assert tuple(row[name] for name in Key._fields) == result.first.key
    assert (row["birth"], row["cause"], row["rank"]) == (True, CAUSE_OF[mistake].value, result.first.rank)
    without = [row for row in result.rows if row["cause"] is None]
    assert len(without) == len(result) - len(result.births)
    assert not any(row["birth"] for row in without)


def written(report: Any, result: Comparison) -> bytes:
    file = io.BytesIO()
    report.write(result, file)
    return file.getvalue()


def test_the_cause_is_in_every_report(runs: Runs) -> None:
    result = runs.compared("glue")
    assert json.loads(written(comparison_json, result))["first"]["cause"] == "container_code"
    properties = ElementTree.fromstring(written(comparison_junit, result)).iterfind(".//testcase/properties/property")
    assert [(each.get("name"), each.get("value")) for each in properties] == [("cause", "container_code")]
    assert "Cause: wrong value between modules" in comparison_markdown.text(result)
    assert PairsData(result).head().births[0]["cause"] == "container_code"
    assert PairsData(result).head().births[0]["text"].startswith("wrong value between modules; ")


def test_every_cause_has_its_wording() -> None:
    assert set(CAUSES) == set(Cause)
    assert len({wording.label for wording in CAUSES.values()}) == len(CAUSES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sentence_is_for_people(runs: Runs, mistake: str) -> None:
    said = str(runs.compared(mistake))
    assert said[0].isupper()
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 300
    assert not INTERNALS.search(said), said


@pytest.mark.parametrize("mistake", ["output", "later", "glue", "backward", "parameter's gradient", "nan", "loss"])
def test_a_propagated_error_is_not_a_birth(runs: Runs, mistake: str) -> None:
    result = runs.compared(mistake)
    wrong = sum(result.counts.get(name, 0) for name in ("diverged", "nonfinite"))
    assert wrong > 200, "it went far"
    assert len(result.births) == 1
    assert sum(row["birth"] for row in result.rows) == 1


def test_everything_before_the_first_is_right(runs: Runs) -> None:
    for mistake in MISTAKES.keys() - {
        "loss"
    }:  # that gradient is the root's, although it was seen before under another name
        result = runs.compared(mistake)
        for row in result.rows:
            if row["birth"]:
                break
            assert row["status"] in ("equal", "close"), (mistake, row)


def test_the_inputs_of_a_birth(runs: Runs) -> None:
    first = runs.compared("output").first
    assert first is not None
    assert (first.inputs_matched, first.inputs_rel_l2, first.container) == (True, 0.0, None)
    glue = runs.compared("glue").first
    assert glue is not None
    assert (glue.key.module, glue.container, glue.inputs_matched) == ("blocks.1.fc2", "blocks.1", True)
    data = runs.compared("data").first
    assert data is not None
    assert (data.container, data.inputs_matched) == (None, None)


def test_parameters_that_differed_are_all_births(runs: Runs) -> None:
    result = runs.compared("parameters")
    assert [f"{each.key.module}.{each.key.path}" for each in result.births] == [
        *("blocks.0.fc1.weight", "head.weight", "head.bias"),
    ]


def test_without_parameters_recorded_the_modules_that_hold_them_are_named(runs: Runs, tmp_path: Path) -> None:
    kinds = ("input", "output", "grad_output", "param_grad")
    ours = train(tmp_path / "a", kinds=kinds)
    theirs = train(tmp_path / "b", started_elsewhere, kinds=kinds)
    first = tt.compare(ours, theirs).first
    assert first is not None
    assert (first.module, first.key.kind) == ("blocks.0.fc1", "output")


def test_outputs_alone(tmp_path: Path) -> None:
    """Less is known, but the first that is wrong is still the first."""
    ours = train(tmp_path / "a", kinds=("output",))
    result = tt.compare(ours, train(tmp_path / "b", does("blocks.1.fc1", slightly_more), kinds=("output",)))
    assert result.first is not None
    assert (result.first.module, result.first.inputs_matched) == ("blocks.1.fc1", None)
    assert "and its inputs were not recorded" in str(result)


@pytest.mark.parametrize("gradient_lost", [False, True])
def test_a_nan_may_come_from_the_step_before_through_parameters_not_recorded(
    tmp_path: Path, gradient_lost: bool
) -> None:
    def run(path: Path, lost: set[tuple[str, int]]) -> Path:
        seen = []
        for step in (0, 1):
            for number, (module, kind) in enumerate((("fc1", "output"), ("fc2", "output"), ("fc2", "param_grad"))):
                array = values(10 * step + number)
                if (f"{module} {kind}", step) in lost:
                    array[1, 1] = np.nan
                seen.append(Seen(module, array, kind, step))
        return write(path, seen)

    lost = {("fc2 output", 0), ("fc1 output", 1)} | ({("fc2 param_grad", 0)} if gradient_lost else set())
    result = tt.compare(run(tmp_path / "a", set()), run(tmp_path / "b", lost))
    assert [
        birth.key.step for birth in result.births if birth.status == "nonfinite" and birth.key.kind == "output"
    ] == ([0] if gradient_lost else [0, 1])


def test_a_nan_that_both_have_is_not_the_candidates_fault(tmp_path: Path) -> None:
    broken = does("blocks.1.fc1", one_nan)
    result = tt.compare(train(tmp_path / "a", broken), train(tmp_path / "b", broken))
    assert result.verdict == "match"


def test_two_mistakes_are_two_births(tmp_path: Path) -> None:
    def both(model: Net, step: int) -> None:
        for change in (does("blocks.0.fc1", slightly_more), does("blocks.2.fc2", lambda y: y * 3.0)):
            change(model, step)

    result = tt.compare(train(tmp_path / "a", steps=1), train(tmp_path / "b", both, steps=1))
    assert result.first is not None
    assert result.first.module == "blocks.0.fc1"
    wrong = [row for row in result.rows if row["module"] == "blocks.2.fc2" and row["kind"] == "output"]
    assert wrong[0]["status"] == "diverged"


# --- several ranks -------------------------------------------------------------------------------------------------
def on_rank(path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, change: Change | None = None) -> Path:
    from tensortap.frameworks import framework_of

    framework = type(framework_of(torch.nn.Identity()))
    monkeypatch.setattr(framework, "rank", lambda self: rank)
    monkeypatch.setattr(framework, "world", lambda self: 2)
    return train(path, change) if change else train(path)


@pytest.mark.parametrize("until_first", [False, True])
def test_wrong_on_one_rank_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until_first: bool) -> None:
    monkeypatch.setattr(matching, "_FIRST_PART", 16)
    for rank in (0, 1):
        on_rank(tmp_path / "a", rank, monkeypatch)
        on_rank(tmp_path / "b", rank, monkeypatch, does("blocks.1.fc1", slightly_more) if rank else None)
    result = tt.compare(tmp_path / "a", tmp_path / "b", until_first=until_first)
    assert result.first is not None
    assert (result.first.rank, result.first.module, result.first.key.step) == (1, "blocks.1.fc1", 0)
    assert "step 0, rank 1," in str(result)


@pytest.mark.parametrize("until_first", [False, True])
def test_the_rank_that_parts_in_the_earlier_step_is_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until_first: bool
) -> None:
    monkeypatch.setattr(matching, "_FIRST_PART", 1)
    for rank, since in ((0, 2), (1, 1)):
        write(tmp_path / "a", chain(steps=range(4)), rank, 2)
        late = [s for step in range(4) for s in chain(steps=(step,), off={"fc2": 0.1 * (step >= since)})]
        write(tmp_path / "b", late, rank, 2)
    first = tt.compare(tmp_path / "a", tmp_path / "b", until_first=until_first).first
    assert first is not None
    assert (first.key.step, first.rank) == (1, 1)


# --- until_first ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 16, 256])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_until_first_finds_the_same(runs: Runs, monkeypatch: pytest.MonkeyPatch, mistake: str, size: int) -> None:
    monkeypatch.setattr(matching, "_FIRST_PART", size)
    whole, short = runs.compared(mistake), runs.compared(mistake, until_first=True)
    assert repr(short.first) == repr(whole.first)
    assert short.verdict == "diverged"
    assert len(short) == len(whole), "what was not measured is still there"


def test_until_first_measures_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_FIRST_PART", 2)
    names = [f"fc{n}" for n in range(20)]
    ours = write(tmp_path / "a", chain(names))
    theirs = write(tmp_path / "b", chain(names, off=dict.fromkeys(names[3:], 0.1)))
    result = tt.compare(ours, theirs, until_first=True)
    assert result.first is not None
    assert result.first.module == "fc3"
    assert 10 <= result.counts["unjudged"] < 17


@pytest.mark.parametrize("until_first", [False, True])
def test_until_first_of_runs_that_match(tmp_path: Path, until_first: bool) -> None:
    near = [Seen(s.module, s.array * np.float32(1 + 1e-7), s.kind) for s in chain()]
    result = tt.compare(write(tmp_path / "a", chain()), write(tmp_path / "b", near), until_first=until_first)
    assert (result.verdict, result.counts.get("unjudged", 0)) == ("match", 0)


# --- tolerances ----------------------------------------------------------------------------------------------------
def off_by(error: float) -> list[Seen]:
    return [Seen(s.module, s.array * np.float32(1 + error * (s.kind == "output")), s.kind) for s in chain()]


@pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])
def test_ones_own_tolerance(tmp_path: Path, keep: bool) -> None:
    kept = [[Seen(s.module, s.array, s.kind, keep=keep) for s in seen] for seen in (off_by(0), off_by(1e-3))]
    runs = write(tmp_path / "a", kept[0]), write(tmp_path / "b", kept[1])
    for options, verdict in (
        ({}, "diverged"),
        ({"rtol": 1e-2}, "match"),
        ({"rtol": 1e-4}, "diverged"),
        ({"atol": 0.1}, "match"),
        ({"atol": 1e-6}, "diverged"),
        ({"rtol": 0.0, "atol": 0.0}, "diverged"),
    ):
        result = tt.compare(*runs, **options)
        assert result.verdict == verdict, options
        judged = {row["rule"] for row in result.rows if row["status"] not in ("equal",)}
        assert judged == ({"rtol and atol as given"} if options else {"rounding of its dtype"})
        assert ("as given" in result.policy) == bool(options)
    assert tt.compare(*runs, rtol=1e-2).policy == "rtol 0.01, atol 0, as given; 32 times as much of a single row"


def test_a_tolerance_of_zero_lets_nothing_through(tmp_path: Path) -> None:
    runs = write(tmp_path / "a", off_by(0)), write(tmp_path / "b", off_by(2e-7))
    assert tt.compare(*runs).verdict == "match"
    strict = tt.compare(*runs, rtol=0, atol=0)
    assert (strict.verdict, strict.counts["diverged"]) == ("diverged", 3)


@pytest.mark.parametrize("until_first", [False, True])
def test_noise_is_tolerated_and_more_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until_first: bool) -> None:
    monkeypatch.setattr(matching, "_FIRST_PART", 1)
    ours, noisy = write(tmp_path / "a", off_by(0)), write(tmp_path / "a2", off_by(1e-3))
    options: dict[str, Any] = {"noise": [noisy], "until_first": until_first}
    within = tt.compare(ours, write(tmp_path / "b", off_by(-2e-3)), **options)
    assert (within.verdict, within.counts) == ("match", {"equal": 3, "close": 3})
    assert {row["rule"] for row in within.rows if row["status"] == "close"} == {"measured noise"}
    assert "measured noise" in within.policy
    beyond = tt.compare(ours, write(tmp_path / "c", off_by(2e-2)), **options)
    assert beyond.first is not None
    assert beyond.first.module == "fc1"


@pytest.mark.parametrize("until_first", [False, True])
def test_noise_is_measured_place_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until_first: bool) -> None:
    monkeypatch.setattr(matching, "_FIRST_PART", 1)
    ours = write(tmp_path / "a", chain())
    noisy = write(tmp_path / "a2", chain(off={"fc1": 0.1}))
    theirs = write(tmp_path / "b", chain(off={"fc1": 0.1, "fc3": 0.1}))
    result = tt.compare(ours, theirs, noise=[noisy], until_first=until_first)
    assert result.first is not None
    assert result.first.module == "fc3"
    assert rows(result)["fc1", "output", 0]["status"] == "close"


def test_the_worst_of_several_noises(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", chain())
    noises = [write(tmp_path / f"n{n}", chain(off={name: 0.1})) for n, name in enumerate(("fc1", "fc2"))]
    theirs = write(tmp_path / "b", chain(off={"fc1": 0.1, "fc2": 0.1}))
    assert tt.compare(ours, theirs, noise=noises).verdict == "match"
    assert tt.compare(ours, theirs, noise=noises[:1]).verdict == "diverged"


@pytest.mark.parametrize("form", [str, Path, tt.open, lambda path: [str(path)], lambda path: iter([path])])
def test_noise_is_one_source_or_several(tmp_path: Path, form: Callable[[Path], Any]) -> None:
    ours, noisy = write(tmp_path / "a", chain()), write(tmp_path / "a2", chain(off={"fc1": 0.1}))
    theirs = write(tmp_path / "b", chain(off={"fc1": 0.1}))
    assert tt.compare(ours, theirs).verdict == "diverged"
    assert tt.compare(ours, theirs, noise=form(noisy)).verdict == "match"


@pytest.mark.parametrize("noise", [3, [None], [b"runs/a2"], [["runs/a2"]]])
def test_noise_of_an_invalid_type_raises(tmp_path: Path, noise: Any) -> None:
    ours = write(tmp_path / "a", chain())
    with pytest.raises(tt.TensortapError, match="noise takes a path, an open run, or a sequence of these, not a"):
        tt.compare(ours, ours, noise=noise)


def test_noise_for_a_renamed_candidate(tmp_path: Path) -> None:
    ours, noisy = write(tmp_path / "a", chain()), write(tmp_path / "a2", chain(off={"fc1": 0.1}))
    theirs = write(tmp_path / "b", chain(("m.fc1", "m.fc2", "m.fc3"), off={"m.fc1": 0.1}))
    assert tt.compare(ours, theirs, rename=[r"^m\.="]).verdict == "diverged"
    assert tt.compare(ours, theirs, rename=[r"^m\.="], noise=[noisy]).verdict == "match"


def test_an_incoming_error_may_propagate(tmp_path: Path) -> None:
    """An input that is off within reason makes an output that is: the rule says so."""
    x, y = values(1), values(2)
    ours = [Seen("", x, "input"), Seen("", y, "output")]
    theirs = [Seen("", x * np.float32(1 + 1e-6), "input"), Seen("", y * np.float32(1 + 8e-6), "output")]
    result = tt.compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs))
    assert result.verdict == "match"
    assert rows(result)["", "input", 0]["rule"] == "rounding of its dtype"
    out = rows(result)["", "output", 0]
    assert out["rule"] == "error that came in"
    assert out["rel_l2"] <= out["tolerance"]


def test_without_inputs_a_record_may_be_as_far_off_as_the_outputs_before_it(tmp_path: Path) -> None:
    """As in runs of outputs alone, in which short and long dtypes take turns: the incoming error is not exact."""
    noisy = np.random.default_rng(1).normal(0, 1, (64, 64)).astype(np.float32)

    def run(name: str, half: float, norm: float, gradient: float) -> Path:
        records = [
            Seen("half", (noisy * (1 + half)).astype(np.float16)),
            Seen("norm", noisy * np.float32(1 + norm), cls="LayerNorm"),
            Seen("norm", noisy * np.float32(1 + gradient), "param_grad", path="weight", cls="LayerNorm"),
        ]
        return write(tmp_path / name, records)

    reference = run("a", 0.0, 0.0, 0.0)
    assert tt.compare(reference, run("right", 5e-4, 2e-3, 2e-3)).verdict == "match"
    wrong = tt.compare(reference, run("wrong", 5e-4, 0.05, 0.05))
    assert wrong.first is not None and wrong.first.module == "norm" and len(wrong.births) == 1
    assert "its inputs were not recorded" in wrong.sentence
    alone = tt.compare(reference, run("alone", 0.0, 2e-3, 2e-3))  # nothing before it is off
    assert alone.first is not None and alone.first.module == "norm"


def test_a_cancelled_bias_gradient_is_noise_without_recorded_terms(tmp_path: Path) -> None:
    """As before a BatchNorm or in the keys of an attention: next to the weight's gradient, nothing of it remains."""
    weight, noise = values(1, (32, 64)), values(2, (32,))

    def run(name: str, bias: np.ndarray[Any, Any]) -> Path:
        gradients = [("weight", weight), ("bias", bias.astype(np.float32))]
        return write(tmp_path / name, [Seen("conv", array, "param_grad", path=path) for path, array in gradients])

    cancelled = run("a", 1e-7 * noise)
    assert tt.compare(cancelled, run("b", 1e-7 * values(3, (32,)))).verdict == "match"
    assert tt.compare(cancelled, run("c", 1e-7 * noise + 1e-3)).verdict == "diverged"
    assert tt.compare(run("d", noise), run("e", 1.01 * noise)).verdict == "diverged"


def test_every_row_names_its_rule(runs: Runs) -> None:
    for row in runs.compared("output").rows:
        assert row["rule"]
        assert (row["rule"] == "bitwise") == (row["status"] == "equal")
        if row["status"] == "close":
            assert row["rel_l2"] <= row["tolerance"]
        if row["status"] == "diverged":
            assert row["rel_l2"] > row["tolerance"]


# --- the same, and the other way round -----------------------------------------------------------------------------
@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_the_same_again_is_the_same(tmp_path: Path, runs: Runs, keep: str) -> None:
    again = train(tmp_path / "again", keep=keep)
    result = tt.compare(runs("", keep), again)
    assert (result.verdict, result.first, result.births, result.unmatched) == ("match", None, [], [])
    assert result.counts == {"equal": len(result)}
    assert str(result) == f"The runs match: all {len(result)} pairs are equal bit for bit."
    assert {row["kind"] for row in result.rows} == set(KINDS) - {"buffer"}


@pytest.mark.parametrize("mistake", ["output", "glue", "backward", "parameter's gradient", "optimizer", "data", "nan"])
def test_the_other_way_round(runs: Runs, mistake: str) -> None:
    forth, back = runs.compared(mistake), tt.compare(runs(mistake), runs(""))
    assert (forth.verdict, len(forth), forth.unmatched) == (back.verdict, len(back), back.unmatched)
    assert forth.first is not None
    assert back.first is not None
    assert (forth.first.key, forth.first.module) == (back.first.key, back.first.module)
    differently = 0
    for one, other in zip(forth.rows, back.rows, strict=True):
        assert [one[name] for name in ("module", "kind", "step", "call", "path", "max_abs")] == [
            other[name] for name in ("module", "kind", "step", "call", "path", "max_abs")
        ]
        assert (one["status"] == "equal") == (other["status"] == "equal")
        differently += one["status"] != other["status"]
    assert differently <= len(forth) // 50


def test_a_module_is_not_blamed_for_steps_that_take_no_part(tmp_path: Path) -> None:
    """An earlier step that was not compared may have moved the parameters apart."""
    for name, off in (("a", {}), ("b", {"fc2": 0.5})):
        write(tmp_path / name, chain(steps=(0, 1), off=off))
    a, b = tmp_path / "a", tmp_path / "b"
    assert "parameters were not recorded" not in str(tt.compare(a, b))
    assert "Its parameters were not recorded" in str(tt.compare(a, b, steps=[1]))
