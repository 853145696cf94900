"""`capture(..., operators=...)`: what operators compute is recorded, and training stays as it is."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import tensortap as tt  # noqa: E402
from tensortap.errors import UsageError  # noqa: E402

HERE = Path(__file__).name


class Doubled(torch.autograd.Function):
    """Several operators inside, and an intermediate result that its backward uses."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        half = x * 0.5
        ctx.save_for_backward(half)
        return half * 4

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


class Squared(torch.autograd.Function):
    """The newer form, whose forward gets no context."""

    @staticmethod
    def forward(x: Any) -> Any:
        return (x.abs() ** 2).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * gradient


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        scores = self.q(x) @ self.k(x).transpose(-2, -1) * 8**-0.5
        for _ in range(2):
            scores = Doubled.apply(scores)
        scores = Squared.apply(scores)
        weights = F.dropout(scores.softmax(-1), 0.1)
        kept = torch.empty_like(x)
        kept.copy_(weights @ x)
        kept[:, 0] += 1
        return kept


class Blocks(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x) + x
        return x


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self._reentrant = nn.Linear(8, 8), Attention(), reentrant

    def forward(self, x: Any) -> Any:
        return checkpoint(self.inner, self.first(x), use_reentrant=self._reentrant).sin()


class Zoo(nn.Module):
    """Operators with paths of their own: convolution, recurrence, fused attention, indexing, casts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.lstm, self.layer = nn.LSTM(8, 8, batch_first=True), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Any) -> Any:
        x = self.layer(self.lstm(F.relu(self.norm(self.conv(x)), inplace=True))[0])
        y = x.masked_fill(x > 1, 0.0).bfloat16().float()
        y[:, 0] = y[:, 1] * 2
        left, right = torch.cat([x, y], -1).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(left[:, None], right[:, None], left[:, None], is_causal=True)[:, 0]
        return torch.einsum("bij,bkj->bik", mixed, x).logsumexp(-1).cumsum(1)


def train(make: Callable[[], nn.Module], tapped: bool, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    tap = tt.capture(model, optimizer=optimizer, on_error="raise", **options) if tapped else contextlib.nullcontext()
    with tap as opened:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 4, 8)).square().mean().backward()
            optimizer.step()
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()], opened


def operators(tap: Any, step: int = 0, phase: str = "forward", module: str | None = None) -> list[str]:
    records = tap.run.records(step=step, kind="operator", phase=phase)
    return [each.key.path for each in records if module is None or each.key.module == module]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    "make",
    [Blocks, Zoo, lambda: Checkpointed(True), lambda: Checkpointed(False)],
    ids=["functions", "zoo", "reentrant checkpoint", "checkpoint"],
)
def test_training_is_the_same_bit_for_bit(make: Callable[[], nn.Module]) -> None:
    plain, _ = train(make, False)
    tapped, tap = train(make, True, operators="*")
    assert all(torch.equal(one, two) for one, two in zip(plain, tapped, strict=True))
    assert operators(tap) and operators(tap, phase="backward")
    assert _get_current_dispatch_mode() is None


def test_an_operator_has_its_line_and_count() -> None:
    _, tap = train(Blocks, True, operators="layers.1")
    scores, doubled = line_of("scores = self.q(x) @"), line_of("scores = Doubled.apply")
    found = operators(tap)
    assert found[:2] == [f"bmm@{HERE}:{scores}", f"mul@{HERE}:{scores}"]
    assert found[2:4] == [f"Doubled@{HERE}:{doubled}", f"Doubled@{HERE}:{doubled}#2"]
    assert found[4] == f"Squared@{HERE}:{doubled + 1}"
    assert not any(path.startswith(("empty", "view", "transpose")) for path in found)
    assert {each.key.module for each in tap.run.records(kind="operator")} == {"layers.1"}


def test_a_function_is_recorded_with_the_value_it_returns() -> None:
    _, tap = train(Blocks, True, operators="layers.1", keep="tensors")
    records = {each.key.path: each for each in tap.run.records(step=0, kind="operator", phase="forward")}
    before = tap.run.load(records[f"mul@{HERE}:{line_of('scores = self.q(x) @')}"])
    after = tap.run.load(records[f"Doubled@{HERE}:{line_of('scores = Doubled.apply')}"])
    assert (after == 2 * before).all()


def test_gradients_are_those_of_the_operators_backward() -> None:
    _, tap = train(Blocks, True, operators="layers.1", keep="tensors")
    gradients = tap.run.records(step=0, kind="operator", phase="backward")
    records = {each.key.path: tap.run.load(each) for each in gradients}
    doubled = f"grad Doubled@{HERE}:{line_of('scores = Doubled.apply')}"
    assert (records[doubled] == 2 * records[f"{doubled}#2"]).all()
    assert f"grad bmm@{HERE}:{line_of('scores = self.q(x) @')}[1]" in records


def test_a_custom_operator_is_one_operator() -> None:
    @torch.library.custom_op("tensortap_tests::thrice", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x + x + x

    thrice.register_autograd(lambda ctx, gradient: gradient * 3)

    class Custom(nn.Linear):
        def forward(self, x: Any) -> Any:
            return thrice(super().forward(x))

    _, tap = train(lambda: Custom(8, 8), True, operators="(root)")
    found = [path.partition("@")[0] for path in operators(tap)]
    assert found == ["addmm", "thrice"]
    assert operators(tap, phase="backward")[0].startswith("grad thrice@")


def test_a_triton_kernel_is_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Triton: a class whose `run` writes into a tensor without the dispatcher's knowledge."""

    class JITFunction:
        __name__ = "fill_kernel"

        def run(self, x: Any, out: Any) -> None:
            out.numpy()[:] = x.detach().numpy() * 2

    modules = {name: types.ModuleType(name) for name in ("triton", "triton.runtime", "triton.runtime.jit")}
    modules["triton.runtime.jit"].JITFunction = JITFunction  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    own = JITFunction.run

    class Kernel(nn.Linear):
        def forward(self, x: Any) -> Any:
            x = super().forward(x)
            out = torch.empty_like(x)
            JITFunction().run(x, out)  # the launch
            return x + out

    _, tap = train(lambda: Kernel(8, 8), True, operators="(root)", keep="tensors")
    launch = f"fill_kernel@{HERE}:{line_of('# the launch')}"
    assert launch in operators(tap) and f"{launch}[1]" in operators(tap)
    records = {each.key.path: tap.run.load(each) for each in tap.run.records(step=0, kind="operator", phase="forward")}
    assert (records[f"{launch}[1]"] == 2 * records[launch]).all()
    assert JITFunction.run is own


def test_submodules_that_are_not_chosen_are_left_out() -> None:
    _, tap = train(Blocks, True, operators="layers.*")
    assert "layers.0.q" in {each.key.module for each in tap.run.records(kind="operator")}
    _, tap = train(Blocks, True, operators="layers.?")
    assert {each.key.module for each in tap.run.records(kind="operator")} == {"layers.0", "layers.1"}


def test_only_chosen_steps_have_operators() -> None:
    _, tap = train(Blocks, True, operators="layers.1", steps=[1])
    assert not operators(tap, step=0) and operators(tap, step=1)


def test_a_recomputation_records_no_value_twice() -> None:
    once = train(Blocks, True, operators="*")[1]
    again = train(lambda: Checkpointed(False), True, operators="*")[1]
    inner = operators(again, module="inner")
    assert [path.partition("@")[0] for path in inner] == [
        path.partition("@")[0] for path in operators(once, module="layers.0")
    ]
    assert operators(again, phase="backward", module="inner")


def test_an_exception_in_the_forward_leaves_no_mode() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Any) -> Any:
            raise ValueError("as planned")

    model = nn.Sequential(nn.Linear(8, 8), Failing(8, 8))
    with tt.capture(model, operators="*") as tap:
        for _ in range(2):
            with pytest.raises(ValueError, match="as planned"):
                model(torch.randn(2, 8))
            assert _get_current_dispatch_mode() is None
        tap.step()


def test_an_interrupt_leaves_no_mode_after_the_step() -> None:
    class Interrupted(nn.Linear):
        def forward(self, x: Any) -> Any:
            raise KeyboardInterrupt

    model = Interrupted(8, 8)
    with tt.capture(model, operators="*") as tap:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(2, 8))
        tap.step()
        assert _get_current_dispatch_mode() is None


def test_a_pattern_without_a_module_is_an_error_with_a_hint() -> None:
    with pytest.raises(UsageError, match=r"operators: 'layer\.1' matches no tapped module; did you mean layers\.1"):
        tt.capture(Blocks(), operators=["layers.0", "layer.1"])


def test_operators_are_not_a_kind_to_choose() -> None:
    with pytest.raises(UsageError, match="pass operators="):
        tt.capture(Blocks(), kinds=("output", "operator"))
    with pytest.raises(UsageError, match="needs outputs"):
        tt.capture(Blocks(), kinds=("input",), operators="*")


def test_compiled_modules_say_that_their_operators_are_not_seen() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager"), nn.Tanh())
    with tt.capture(model, operators="*") as tap:
        model(torch.randn(2, 8)).sum().backward()
    reasons = {row.module: row.reason for row in tap.coverage}
    assert "its operators are not recorded" in reasons["0"] and 'compiled="eager"' in reasons["0"]
    assert [each.key.module for each in tap.run.records(kind="operator", phase="forward")] == ["1"]


def test_a_compiled_function_stays_compiled() -> None:
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)

    class Calls(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(compiled(x))

    train(lambda: Calls(8, 8), True, operators="(root)")
    assert graphs


def test_a_nonfinite_operator_alone_is_no_alarm() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Any) -> Any:
            x = super().forward(x)
            return torch.where(x > 0, (x * 0).log().abs() * 0 + x, x).nan_to_num()

    _, tap = train(lambda: Masked(8, 8), True, operators="(root)", on_nonfinite="stop", kinds=("output",))
    assert tap.run.records(kind="operator")


def test_the_first_operator_with_a_nan_is_named() -> None:
    class Rooted(nn.Linear):
        def forward(self, x: Any) -> Any:
            return (super().forward(x) - 100).sqrt() * 2

    with pytest.raises(tt.TensortapError, match=f"the first operator with it is sqrt in {HERE}"):
        train(lambda: Rooted(8, 8), True, operators="(root)", on_nonfinite="stop")


def test_paddle_says_that_it_has_no_operators() -> None:
    paddle = pytest.importorskip("paddle")
    with pytest.raises(UsageError, match="recording operators is not available for paddle"):
        tt.capture(paddle.nn.Linear(4, 4), operators="*")


def test_modules_on_other_threads_are_seen() -> None:
    class Threaded(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            made: list[Any] = []
            thread = threading.Thread(target=lambda: made.append(self.inner(x)))
            thread.start()
            thread.join()
            return super().forward(made[0]).tanh()

    _, tap = train(Threaded, True, operators="*")
    assert [path.partition("@")[0] for path in operators(tap, module="")] == ["addmm", "tanh"]
    assert [path.partition("@")[0] for path in operators(tap, module="inner")] == ["addmm"]


def test_a_mode_of_the_users_stays_as_it_is() -> None:
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    class Inside(nn.Linear):
        def forward(self, x: Any) -> Any:
            with Counting():
                return super().forward(x).tanh()

    train(lambda: Inside(8, 8), False)
    plain, Counting.count = Counting.count, 0
    _, tap = train(lambda: Inside(8, 8), True, operators="*")
    assert Counting.count == plain and len(operators(tap)) == 2
