"""Two runs with different plain arguments: the difference is reported and never judged."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.cli import main
from tensortap.compare.say.arguments import describe_other_arguments
from tensortap.core.arguments import ABSENT, TENSOR, ArgumentDifference
from tensortap.core.records import Comparison
from tensortap.report.files import comparison_json, comparison_junit, comparison_markdown
from tensortap.report.html import comparison as comparison_html

KINDS = ("input", "output", "grad_output", "param_grad")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, **options: Any) -> Tensor:
        y = self.mix(x) * options.get("scale", 1.0)
        y = y if mask is None else y * mask
        return y.cumsum(1) if is_causal else y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = Attention(), nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: float = 1.0, **options: Any) -> Tensor:
        return self.out(self.attention(x, **options) * factor)


class Net(nn.Module):
    def __init__(self, ways: Mapping[int, Mapping[str, Any]]) -> None:
        super().__init__()
        self.blocks, self.ways = nn.ModuleList([Block(), Block()]), ways

    def forward(self, x: Tensor) -> Tensor:
        for at, block in enumerate(self.blocks):
            x = block(x, **self.ways.get(at, {}))
        return x


def ran(path: Path, ways: Mapping[int, Mapping[str, Any]], steps: int = 1, **options: Any) -> Path:
    """Each block's keyword arguments are given by its number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net(ways)
        x = torch.randn(2, 3, 8)
    with tt.capture(model, path, **({"keep": "tensors", "kinds": KINDS} | options)) as tap:
        for _ in range(steps):
            model(x).square().mean().backward()
            tap.step()
    return path


def compared(tmp_path: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any], **options: Any) -> Comparison:
    """Two runs whose first block was called so."""
    return tt.compare(ran(tmp_path / "a", {0: ours}), ran(tmp_path / "b", {0: theirs}), **options)


def remarks(result: Comparison) -> list[str]:
    return [note for note in result.notes if note.startswith("other plain arguments")]


def test_the_verdict_reports_other_arguments_of_the_module(tmp_path: Path) -> None:
    result = compared(tmp_path, {"is_causal": True}, {"is_causal": False})
    assert result.first is not None
    assert result.first.module == "blocks.0.attention"
    assert str(result).endswith(
        "while its inputs match. It was called with is_causal=True in the reference and False in the candidate."
    )
    assert result.first.arguments == (ArgumentDifference("is_causal", True, False),)
    assert remarks(result) == [
        "other plain arguments: blocks.0 was called with is_causal=True in the reference and False in the candidate "
        "(step 0)"
    ], "the caller was; of the module itself it is said already"


def test_the_containers_own_code(tmp_path: Path) -> None:
    result = compared(tmp_path, {"factor": 1.0}, {"factor": 0.5})
    assert result.first is not None
    assert (result.first.module, result.first.key.module) == ("blocks.0", "blocks.0.out")
    assert "It was called with factor=1.0 in the reference and 0.5 in the candidate." in str(result)


def test_numbers_that_a_caller_replaces_by_none(tmp_path: Path) -> None:
    """The attention does as it was told; so does the block around it, which was given None as well."""
    a = ran(tmp_path / "a", {0: {"mask": torch.linspace(0.5, 2.0, 8)}})
    b = ran(tmp_path / "b", {0: {"mask": None}})
    lost, extra = tt.compare(a, b), tt.compare(b, a)
    assert lost.first is not None and (lost.first.module, lost.first.cause) == ("", "lost_input")
    assert "it passes None to blocks.0 (input mask), and the reference passes a tensor" in lost.sentence
    assert extra.first is not None and (extra.first.module, extra.first.cause) == ("", "extra_input")
    assert "it passes a tensor to blocks.0 (input mask), and the reference passes None" in extra.sentence


class Shifted(nn.Module):
    """A model that passes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x, shift=shift)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        return self.fc(x if shift is None else x + shift)


def test_the_sentence_says_that_the_model_itself_was_given_an_input(tmp_path: Path) -> None:
    for name, given in (("a", {}), ("b", {"shift": torch.linspace(0, 1, 8)})):
        torch.manual_seed(0)
        model = Shifted()
        with tt.capture(model, tmp_path / name):
            model(torch.ones(2, 8), **given).sum().backward()
    for sides, side in (("ab", "candidate"), ("ba", "reference")):
        result = tt.compare(*(tmp_path / name for name in sides))
        assert result.sentence.endswith(f" The model itself was given shift in the {side} alone."), result.sentence


def test_equal_calls_are_not_mentioned(tmp_path: Path) -> None:
    """The second block is called differently, but the first one is wrong on its own."""
    a = ran(tmp_path / "a", {1: {"is_causal": True}})
    wrong = {0: {"scale": 2.0}}
    b = ran(tmp_path / "b", wrong)
    result = tt.compare(a, b)
    assert result.first is not None
    assert result.first.module == "blocks.0.attention"
    assert "It was called with scale=2.0 in the candidate alone." in str(result)
    assert "is_causal" not in str(result)
    assert any(
        "blocks.1, blocks.1.attention were called with is_causal=True in the reference alone" in n
        for n in remarks(result)
    )


def test_an_argument_that_changes_no_tensor_gives_only_a_note(tmp_path: Path) -> None:
    result = compared(tmp_path, {"name": "a"}, {"name": "b"})
    assert result.verdict == "match"
    assert str(result).startswith("The runs match: all ")
    assert remarks(result) == [
        "other plain arguments: blocks.0, blocks.0.attention were called with name='a' in the reference and 'b' in the "
        "candidate (step 0)"
    ]
    with pytest.raises(SystemExit) as end:
        main_with("compare", tmp_path / "a", tmp_path / "b")
    assert not end.value.code


def main_with(*words: object) -> None:
    import sys

    before, sys.argv = sys.argv, ["tensortap", *map(str, words)]
    try:
        main()
    finally:
        sys.argv = before


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"name": None}, {}),
        ({"name": float("nan")}, {"name": float("nan")}),
        ({"device": torch.device("cpu")}, {"device": torch.device("cuda:0")}),
        ({"name": object()}, {"name": object()}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"name": [1, (2,)]}, {"name": [1, (2,)]}),
    ],
    ids=["nothing", "None", "nan", "devices", "objects", "order", "lists"],
)
def test_equal_arguments_are_not_mentioned(ours: Mapping[str, Any], theirs: Mapping[str, Any], tmp_path: Path) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        result = compared(tmp_path / str(one is ours), one, other)
        assert (result.verdict, remarks(result)) == ("match", [])


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ({"n": True}, {"n": 1}, "n=True in the reference and 1 in the candidate"),
        ({"n": 1}, {"n": 1.0}, "n=1 in the reference and 1.0 in the candidate"),
        ({"n": np.float32(1)}, {"n": "1"}, "in the reference and '1' in the candidate"),
        ({"n": (1, 2)}, {"n": [1, 2]}, "n=(1, 2) in the reference and [1, 2] in the candidate"),
        ({"n": torch.float16}, {"n": torch.bfloat16}, "n=float16 in the reference and bfloat16 in the candidate"),
        ({"n": 3}, {}, "n=3 in the reference alone"),
        ({"n": object()}, {"n": None}, "n=an object object in the reference and None in the candidate"),
        ({"n": "a\n\udc80"}, {"n": ""}, r"n='a\n\udc80' in the reference and '' in the candidate"),
        ({"n": "x" * 1000}, {"n": "x" * 999}, "a str object (1000 characters"),
    ],
    ids=["bool", "int", "scalar", "tuple", "dtype", "absent", "object", "surrogate", "long"],
)
def test_differing_arguments_are_named(ours: Any, theirs: Any, words: str, tmp_path: Path) -> None:
    assert any(words in note for note in remarks(compared(tmp_path, ours, theirs)))


def test_by_position_or_by_name_is_the_same(tmp_path: Path) -> None:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            for at, block in enumerate(self.blocks):
                x = block(x, 0.5) if at == 0 else block(x)
            return x

    a = ran(tmp_path / "a", {0: {"factor": 0.5}})
    torch.manual_seed(0)
    model, x = Other({}), torch.randn(2, 3, 8)
    with tt.capture(model, tmp_path / "b", keep="tensors", kinds=KINDS) as tap:
        model(x).square().mean().backward()
        tap.step()
    result = tt.compare(a, tmp_path / "b")
    assert (result.verdict, remarks(result)) == ("match", [])


def test_a_change_in_a_later_step_is_dated(tmp_path: Path) -> None:
    class Later(dict):  # type: ignore[type-arg]
        calls = 0

        def get(self, at: Any, default: Any = None) -> Any:
            Later.calls += at == 0
            return {"n": Later.calls > 2} if at == 0 else {}

    a = ran(tmp_path / "a", {0: {"n": False}}, steps=4)
    b = ran(tmp_path / "b", Later(), steps=4)
    result = tt.compare(a, b)
    assert result.verdict == "match"
    assert remarks(result)[0].endswith("n=False in the reference and True in the candidate (step 2)")
    assert remarks(tt.compare(a, b, steps=[0, 1])) == [], "only what takes part"
    assert remarks(tt.compare(a, b, modules="blocks.1*")) == []
    assert remarks(tt.compare(a, b, steps={0: 2}))[0].endswith("True in the candidate (step 0)")


def test_many_differences_are_counted(tmp_path: Path) -> None:
    ours, theirs = ({f"n{at}": at + more for at in range(5)} for more in (0, 1))
    assert remarks(compared(tmp_path, ours, theirs))[0].endswith("n1=1 and 2, n2=2 and 3 and 2 more (step 0)")
    words = describe_other_arguments(
        [ArgumentDifference("a", ABSENT, 1), ArgumentDifference("b", 2, TENSOR), ArgumentDifference("c", 1, ABSENT)]
    )
    assert words == "a=1 in the candidate alone, b=2 and a tensor, c=1 in the reference alone"


def test_a_run_without_plain_arguments_is_compared_as_usual(tmp_path: Path) -> None:
    a, b = ran(tmp_path / "a", {0: {"is_causal": True}}), ran(tmp_path / "b", {})
    (b / "rank_0" / "calls.jsonl").unlink()  # as an older version leaves it
    for one, other in ((a, b), (b, a)):
        result = tt.compare(one, other)
        assert result.verdict == "diverged"
        assert "called with" not in str(result)
        assert remarks(result) == []


def test_renamed_modules_are_looked_up_by_their_own_names(tmp_path: Path) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net({0: {"is_causal": False}})

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    a = ran(tmp_path / "a", {0: {"is_causal": True}})
    torch.manual_seed(0)
    model, x = Renamed(), torch.randn(2, 3, 8)
    with tt.capture(model, tmp_path / "b", keep="tensors", kinds=KINDS, modules="net*") as tap:
        model(x).square().mean().backward()
        tap.step()
    result = tt.compare(a, tmp_path / "b", rename=[r"^net\.?="])
    assert "It was called with is_causal=True in the reference and False in the candidate." in str(result)


def test_each_rank_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("a", "b"):
        for rank in range(2):
            monkeypatch.setenv("RANK", str(rank))
            ran(tmp_path / name, {0: {"is_causal": name == "b" and rank == 1}})
    result = tt.compare(tmp_path / "a", tmp_path / "b")
    assert result.first is not None
    assert result.first.rank == 1
    assert "It was called with is_causal=False in the reference and True in the candidate." in str(result)


def test_reports_name_other_arguments(tmp_path: Path) -> None:
    result = compared(tmp_path, {"is_causal": True, "past": object()}, {"is_causal": False, "past": 1})
    words = "is_causal=True in the reference and False in the candidate"
    for report in (comparison_html, comparison_json, comparison_junit, comparison_markdown):
        file = io.BytesIO()
        report.write(result, file)
        assert words in file.getvalue().decode(), report.__name__
    file = io.BytesIO()
    comparison_json.write(result, file)
    assert json.loads(file.getvalue())["first"]["arguments"] == [
        {"path": "is_causal", "reference": True, "candidate": False},
        {"path": "past", "reference": {"object": "object"}, "candidate": 1},
    ]


def test_names_from_a_run_stay_harmless_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\n\x1b[2J<script>\udc80"
    result = compared(tmp_path, {hostile: 1}, {hostile: 2})
    for report in (comparison_html, comparison_json, comparison_junit, comparison_markdown):
        file = io.BytesIO()
        report.write(result, file)
        assert b"\x1b" not in file.getvalue(), report.__name__
    with pytest.raises(SystemExit):
        main_with("compare", tmp_path / "a", tmp_path / "b", "-v")
    assert "\x1b[2J" not in capsys.readouterr().out


def test_a_check_reports_other_arguments(tmp_path: Path) -> None:
    reference = ran(tmp_path / "a", {0: {"is_causal": True}}, kinds=(*KINDS, "grad_input"))
    for isolate in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model, x = Net({0: {"is_causal": False}}), torch.randn(2, 3, 8)
        with tt.check(model, reference, isolate=isolate) as check:
            model(x).square().mean().backward()
        assert "It was called with is_causal=True in the reference and False in the candidate." in str(check.result)


def test_between_frameworks_only_common_arguments_are_compared(tmp_path: Path) -> None:
    """Names of arguments may differ there by design."""
    paddle = pytest.importorskip("paddle")

    def two(framework: Any, base: Any, **options: Any) -> Any:
        class Scale(base):  # type: ignore[misc]
            def forward(self, x: Any, factor: float, **_: Any) -> Any:
                return x * factor

        class Two(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.fc, self.scale = framework.nn.Linear(4, 4), Scale()

            def forward(self, x: Any) -> Any:
                return self.scale(self.fc(x), **options)

        return Two()

    ours = two(torch, nn.Module, factor=2.0, dtype=torch.float32, inplace=True)
    theirs = two(paddle, paddle.nn.Layer, factor=3.0, dtype=paddle.float32, name="x")
    tt.transfer(ours, theirs)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    for model, given, path in ((ours, torch.tensor(x), "torch"), (theirs, paddle.to_tensor(x), "paddle")):
        with tt.capture(model, tmp_path / path, keep="tensors", kinds=KINDS) as tap:
            model(given).sum().backward()
            tap.step()
    result = tt.compare(tmp_path / "torch", tmp_path / "paddle")
    assert str(result).endswith(" It was called with factor=2.0 in the reference and 3.0 in the candidate.")
    assert remarks(result) == []
