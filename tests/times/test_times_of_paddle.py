"""Real profiles of paddle, and how its graph nodes find their modules."""

from __future__ import annotations

import pytest

from tensortap.model.profile.annotate import annotate
from tensortap.model.profile.module_times import ModuleTimes, module_times
from tensortap.times.marks import SpanKind, SpanMeaning
from tensortap.times.paddle_backward import node_makers

paddle = pytest.importorskip("paddle")
profiler = pytest.importorskip("paddle.profiler")


class Attention(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (paddle.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return paddle.nn.functional.softmax(self.q(x) @ self.k(x).transpose([0, 2, 1]), axis=-1) @ self.v(x)


class Net(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = Attention(), Attention()

    def forward(self, x):
        from paddle.distributed.fleet.utils import recompute

        return recompute(self.again, self.first(x))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleTimes, ModuleTimes]:
    """Times from the live profiler, and from its exported trace."""
    model = Net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    path = tmp_path_factory.mktemp("paddle") / "trace.json"
    targets = [profiler.ProfilerTarget.CPU]
    with annotate(model), profiler.Profiler(targets=targets, on_trace_ready=lambda _: None) as prof:
        for _ in range(2):
            model(paddle.ones([2, 4, 8])).square().sum().backward()
            optimizer.step()
            optimizer.clear_grad()
            prof.step()
    prof.export(str(path), "json")
    return module_times(prof), module_times(path)


def test_own_times_sum_to_the_span_of_the_profile(both: tuple[ModuleTimes, ModuleTimes]) -> None:
    for times in both:
        assert times.ledger.framework == "paddle" and times.ledger.steps == 2
        assert sum(row.own for row in times.rows) == pytest.approx(times.ledger.span / 1000)


def test_live_and_exported_profiles_agree(both: tuple[ModuleTimes, ModuleTimes]) -> None:
    live, exported = ({(row.module, row.phase): row for row in times.table().rows} for times in both)
    assert set(live) == set(exported)
    for name, row in live.items():
        assert row.calls == exported[name].calls
        assert row.own == pytest.approx(exported[name].own, abs=1)


def test_every_phase_has_its_modules(both: tuple[ModuleTimes, ModuleTimes]) -> None:
    calls = {(row.module, row.phase): row.calls for row in both[0].table().rows}
    for part in ("q", "k", "v"):
        assert calls[f"first.{part}", "forward"] == calls[f"first.{part}", "backward"] == 2
        assert calls[f"again.{part}", "recompute"] == calls[f"again.{part}", "backward"] == 2
        assert (f"first.{part}", "recompute") not in calls
    assert calls["(optimizer)", "other"] == 2
    assert calls["(AccumulateGrad)", "backward"] > 0


def span(kind: SpanKind, module: str, start: int, end: int, phase: str = "backward") -> tuple[int, int, SpanMeaning]:
    return start, end, SpanMeaning(kind, phase, module, "Layer")


def test_a_node_belongs_to_the_innermost_module_that_still_has_one_of_its_kind() -> None:
    """The matrix product between the layers is of the container, although v has not ended when it runs."""
    spans = [
        span(SpanKind.MODULE, "(root)", 0, 100, "forward"),
        span(SpanKind.MODULE, "q", 10, 20, "forward"),
        span(SpanKind.CREATES, "matmul", 12, 13, "forward"),
        span(SpanKind.CREATES, "add", 14, 15, "forward"),
        span(SpanKind.MODULE, "v", 30, 40, "forward"),
        span(SpanKind.CREATES, "matmul", 32, 33, "forward"),
        span(SpanKind.CREATES, "add", 34, 35, "forward"),
        span(SpanKind.CREATES, "matmul", 50, 51, "forward"),
        span(SpanKind.NODE, "sum", 200, 210),  # the loss
        span(SpanKind.NODE, "matmul", 220, 230),
        span(SpanKind.BEGINS, "(root)", 221, 222),
        span(SpanKind.NODE, "add", 240, 250),
        span(SpanKind.BEGINS, "v", 241, 242),
        span(SpanKind.NODE, "add", 260, 270),
        span(SpanKind.BEGINS, "q", 261, 262),
        span(SpanKind.NODE, "matmul", 280, 290),  # v's: it began first
        span(SpanKind.NODE, "matmul", 300, 310),  # q's
        span(SpanKind.NODE, "matmul", 320, 330),  # nobody has one left: the last that began
        span(SpanKind.NODE, "other", 340, 350),
        span(SpanKind.ENDS, "q", 341, 342),
        span(SpanKind.ENDS, "v", 343, 344),
    ]
    makers = {spans[at][0]: [each.module for each in found] for at, found in node_makers(spans).items()}
    assert makers == {
        220: ["(root)"],
        240: ["(root)", "v"],
        260: ["(root)", "q"],
        280: ["(root)", "v"],
        300: ["(root)", "q"],
        320: ["(root)", "q"],
        340: ["(root)"],
    }
