"""The values that a peek keeps: the tensors that flowed, as NumPy arrays, within a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
import torch
from torch import nn

import tensortap as tt
from support import mirror, zoo
from support.libraries import Library
from tensortap.errors import UsageError
from tensortap.model.peek.handle import Peek
from tensortap.report.terminal.histogram import bars

pytestmark = pytest.mark.filterwarnings("ignore:When training, we now always track")


@pytest.fixture(params=["torch", "paddle"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(request.param)


def quiet_peek(model: Any, modules: Any, **options: Any) -> Peek:
    return tt.peek(model, modules, quiet=True, **options)


def test_the_values_of_the_last_call_and_of_every_call(library: Library) -> None:
    model = library.model()
    with quiet_peek(model, ["blocks.0.fc1", "shared"]) as p:
        library.train(model, steps=2)
    with tt.capture(library.model(), keep="tensors", kinds=("input", "output", "grad_input", "grad_output")) as tap:
        library.train(tap._tree.sites[0].module, tap.step, steps=2)
    run, found = tap.run, p["blocks.0.fc1"]
    for kind in ("input", "output", "grad_input", "grad_output"):
        for number, step in enumerate((0, 1)):
            (record,) = run.records(module="blocks.0.fc1", kind=kind, step=step)
            assert np.array_equal(found.calls[number].tensors(kind)["0"], run.load(record)), (kind, step)
        assert np.array_equal(getattr(found, kind), run.load(record))
    assert len(found.calls) == 2 and found.calls[0].number == 1
    assert not np.array_equal(found.calls[0].output["0"], found.output)
    shared = p["shared"].calls  # twice in each forward
    assert len(shared) == 3 and np.array_equal(shared[0].output["0"], shared[1].input["0"])


def test_quiet_prints_nothing_and_changes_nothing(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    plain, peeked = library.model(), library.model()
    losses = library.train(plain, steps=3)
    with quiet_peek(peeked, "*", times=2) as p:
        assert library.train(peeked, steps=3) == losses
    for ours, theirs in zip(library.parameters(plain), library.parameters(peeked), strict=True):
        assert np.array_equal(ours, theirs)
    assert capsys.readouterr() == ("", "") and library.hooks_on(peeked) == 0
    assert any(notice.startswith("unused: never ran") for notice in p.notices)
    printed = tt.peek(library.model(), "shared")
    printed.close()
    assert "shared: never ran" in capsys.readouterr().out and printed.notices


def test_printing_keeps_the_values_too(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    model = library.model()
    with tt.peek(model, "norm", times=1) as p:
        library.train(model, steps=1)
    assert "norm · BatchNorm" in capsys.readouterr().out
    assert p["norm"].output.shape == (3, 8, 5)


def test_structured_arguments_by_path(library: Library) -> None:
    model = library.model()
    with quiet_peek(model, "blocks.1") as p:
        library.train(model, steps=1)
    call = p["blocks.1"].calls[0]
    assert list(call.input) == ["0", "scale"] and call.input["scale"].tolist() == [0.5]
    assert list(call.output) == ["hidden", "pair.0", "pair.1"]
    assert np.allclose(call.output["pair.1"], call.input["0"] * 3)
    assert list(call.grad_output) == ["hidden", "pair.1"]
    with pytest.raises(UsageError, match=r"blocks.1, call 1 has no output 'pair.7'; it has 'hidden', 'pair.0', 'pair"):
        call.output["pair.7"]
    assert "pair.7" not in call.output and call.output.get("pair.7") is None


def test_bfloat16(library: Library) -> None:
    layer = nn.Module if library.name == "torch" else paddle.nn.Layer

    class Doubled(layer):  # type: ignore[misc,valid-type]
        def forward(self, x: Any) -> Any:
            return x * 2

    class Half(layer):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.doubled = Doubled()

        def forward(self, x: Any) -> Any:
            low = x.to(torch.bfloat16) if library.name == "torch" else x.astype("bfloat16")
            out = self.doubled(low)
            return out.float() if library.name == "torch" else out.astype("float32")

    model, given = Half(), library.tensor(np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4))
    given.stop_gradient = False  # paddle's word
    given.requires_grad = True
    with quiet_peek(model, "doubled", times=1) as p:
        out = model(given)
        (out * out).sum().backward()
    for kind in ("input", "output", "grad_input", "grad_output"):
        assert getattr(p["doubled"], kind).dtype == ml_dtypes.bfloat16
    assert np.array_equal(p["doubled"].output.astype(np.float32), out.detach().numpy())
    counts, _ = p.histogram("doubled", "output")
    assert counts.sum() == 8 and "bf16 2×4" in str(p.histogram("doubled", "output"))


def test_kept_values_do_not_change_with_the_tensor() -> None:
    model = zoo.InPlaceAfter()
    p = quiet_peek(model, "*")
    x = zoo.batch()
    model(x)
    before = {name: p[name].input.copy() for name in p if p[name].calls}
    x.zero_()
    assert before and all(np.array_equal(p[name].input, array) for name, array in before.items())
    p.close()


def test_gradients_are_in_the_order_of_their_tensors() -> None:
    class Two(nn.Module):
        def forward(self, tokens: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a * b.exp().sin()).sum() + tokens.sum()

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two, self.fc = Two(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(torch.arange(3), self.fc(x), self.fc(2 * x))

    model = Root()
    with quiet_peek(model, "two") as p:
        model(torch.randn(2, 3)).backward()
    call = p["two"].calls[0]
    assert list(call.grad_input) == ["1", "2"]
    assert np.array_equal(p["two"].grad_input, call.grad_input["1"])


def test_a_second_backward_gets_a_new_path() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with quiet_peek(model, "1") as p:
        out = model(torch.ones(1, 3))
        out.sum().backward(retain_graph=True)
        (2 * out).sum().backward()
    call = p["1"].calls[0]
    assert list(call.grad_output) == ["0", "0~2"]
    assert np.array_equal(2 * call.grad_output["0"], call.grad_output["0~2"])


# --- errors ----------------------------------------------------------------------------------------------------------
def test_unknown_names(library: Library) -> None:
    p = quiet_peek(library.model(), ["blocks.0.fc1", "shared"])
    for name, said in (
        ("block.0.fc1", "has no module 'block.0.fc1'; did you mean blocks.0.fc1"),
        ("zzz", "has no module 'zzz'; this peek has blocks.0.fc1, shared"),
        ("blocks.1.fc1", "blocks.1.fc1 was not chosen for this peek; it has blocks.0.fc1, shared"),
        ("(root)", r"\(root\) was not chosen"),
    ):
        assert name not in p
        with pytest.raises(UsageError, match=said):
            p[name]
    assert list(p) == ["blocks.0.fc1", "shared"] and "shared" in p
    p.close()
    with pytest.raises(UsageError, match="did you mean shared"):
        quiet_peek(library.model(), "share")


def test_nothing_seen_yet(library: Library) -> None:
    model = library.model()
    p = quiet_peek(model, ["shared", "unused"], kinds=("output", "grad_output"))
    with pytest.raises(UsageError, match="shared has not run yet: run the model, then read its values"):
        _ = p["shared"].output
    loss = model(library.tensor(mirror.tokens())).mean()
    with pytest.raises(UsageError, match="shared, call 2 has no grad_output: backward has not reached it yet"):
        _ = p["shared"].grad_output
    loss.backward()
    assert p["shared"].grad_output.shape == p["shared"].output.shape
    with pytest.raises(UsageError, match="does not include input; its kinds are output, grad_output"):
        _ = p["shared"].input
    p.close()
    with pytest.raises(UsageError, match="unused never ran: unused, called through"):
        _ = p["unused"].output
    with pytest.raises(UsageError, match="shared has 2 calls, and none at index 5"):
        p.histogram("shared", call=5)
    with pytest.raises(UsageError, match="'param' does not flow through a module"):
        p.histogram("shared", "param")
    for bins in (0, 2.5):
        with pytest.raises(UsageError, match="is not a number of bins"):
            p.histogram("shared", bins=bins)  # type: ignore[arg-type]


def test_another_rank() -> None:
    p = quiet_peek(Library("torch").model(), "shared", rank=3)
    with pytest.raises(UsageError, match="this is rank 0, and the peek is on rank 3"):
        p["shared"]
    assert p.done and "0 modules" in repr(p)


def test_long_names_of_tensors_stay_in_one_column() -> None:
    class Rnn(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"last_hidden_state": x * 2, "h": x}

    model = Rnn()
    handle = tt.peek(model, "(root)", quiet=True)
    model(torch.ones(1, 2, requires_grad=True))["last_hidden_state"].sum().backward()
    shown = [line for line in repr(handle["(root)"]).splitlines() if "f32" in line]
    assert len(shown) == 5 and len({line.index("f32") for line in shown}) == 1
    handle.close()


def test_the_root_and_shared_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model = Tied()
    with quiet_peek(model, ["(root)", "second"]) as p:
        model(torch.ones(1, 2))
    assert np.array_equal(p["(root)"].output, p["second"].output) and p["first"] is p["second"]
    assert "second" in p and list(p) == ["(root)", "first"]


# --- the bound -------------------------------------------------------------------------------------------------------
class Chain(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + 1
        return x


def test_the_oldest_values_are_dropped_first() -> None:
    model = Chain(1)
    p = quiet_peek(model, "layers.0", kinds="output", times=100, max_memory=1000)
    for number in range(10):
        model(torch.full((50,), float(number)))
    found = p["layers.0"]
    assert [call.dropped for call in found.calls] == [True] * 5 + [False] * 5
    assert found.output[0] == 9 and found.calls[5].output["0"][0] == 5
    with pytest.raises(UsageError, match=r"layers.0, call 1: its values were dropped .* within max_memory=1000; raise"):
        _ = found.calls[0].output
    assert "1.00 kB of values; older values were dropped" in repr(p) and repr(found.calls[0]).endswith("values dropped")
    p.close()


def test_the_latest_call_of_a_module_is_dropped_last() -> None:
    model = Chain(2)
    p = quiet_peek(model, ["layers.0", "layers.1"], kinds="output", times=2, max_memory=600)
    for _ in range(2):
        model(torch.zeros(50))
    assert [[call.dropped for call in p[name].calls] for name in p] == [[True, False], [False, False]]
    p.close()


def test_a_tensor_that_is_too_large_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2))
    p = quiet_peek(model, "1", kinds=("input", "output"), max_memory=100)
    model(torch.ones(1, 4))
    assert p["1"].output.shape == (1, 2)
    with pytest.raises(UsageError, match="1, call 1: input 0 has 400 B and does not fit into max_memory=100"):
        _ = p["1"].input
    with pytest.raises(UsageError, match="max_memory"):
        quiet_peek(model, "1", max_memory=-1)
    p.close()
    p = quiet_peek(model, "1", max_memory=0)
    model(torch.ones(1, 4))
    with pytest.raises(UsageError, match="does not fit into max_memory=0"):
        _ = p["1"].output
    p.close()


# --- histograms ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda rng: rng.standard_normal((5, 40)),
        lambda rng: rng.integers(0, 10, (300,)),
        lambda rng: rng.standard_cauchy(1000) * 100,
        lambda rng: np.full(7, 3.0),
        lambda rng: np.array([True, False, True]),
        lambda rng: np.array([np.nan, 1.0, np.inf, 2.0, -np.inf, 2.0]),
    ],
)
@pytest.mark.parametrize("bins", [1, 7, 64])
def test_a_histogram_equals_numpys_over_its_edges(make: Callable[[Any], Any], bins: int) -> None:
    values = make(np.random.default_rng(0))
    model = Chain(1)
    p = quiet_peek(model, "layers.0", kinds="input")
    model(torch.from_numpy(values))
    p.close()
    found = p.histogram("layers.0", "input", bins=bins)
    counts, edges = found
    finite = values[np.isfinite(values)].astype(np.float64)
    assert counts.dtype == np.int64 and edges.dtype == np.float64 and len(edges) == bins + 1
    assert np.array_equal(counts, np.histogram(finite, edges)[0]) and counts.sum() == finite.size
    assert ("1 NaN · 1 +Inf · 1 -Inf" in str(found)) == bool(values.dtype == float and np.isnan(values).any())
    assert str(found) == repr(found) and str(found).startswith("layers.0 · input 0 · call 1 · ")


def test_a_histogram_of_another_call_and_path(library: Library) -> None:
    model = library.model()
    with quiet_peek(model, "blocks.0") as p:
        library.train(model, steps=2)
    found = p.histogram("blocks.0", "output", path="pair.0", call=0, bins=4)
    expected = p["blocks.0"].calls[0].output["pair.0"]
    assert np.array_equal(found.counts, np.histogram(expected.astype(np.float64), found.edges)[0])
    assert "output pair.0 · call 1" in found.title
    with pytest.raises(UsageError, match="has no output 'nowhere'"):
        p.histogram("blocks.0", "output", path="nowhere")


def test_a_histogram_of_nothing() -> None:
    model = Chain(1)
    with quiet_peek(model, "layers.0", kinds="input") as p:
        model(torch.zeros(0, 3))
    found = p.histogram("layers.0", "input")
    assert not found.counts.any() and "no finite element" in str(found)


def test_bars() -> None:
    assert bars(np.array([1, 0, 4]), np.array([-1.0, 0.0, 1.0, 2.0]), 40) == [
        "-1.000 …      0 │█████▎ 1",
        "     0 …  1.000 │ 0",
        " 1.000 …  2.000 │█████████████████████ 4",
    ]
    many = bars(np.arange(64), np.linspace(0, 64, 65), 60)
    assert len(many) == 16 and many[-1].endswith(f" {60 + 61 + 62 + 63}") and max(map(len, many)) <= 60
    tiny = bars(np.array([1, 10**9]), np.array([0.0, 1.0, 2.0]), 60)
    assert "│▏ 1" in tiny[0]  # existing values are shown
