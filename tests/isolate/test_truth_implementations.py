"""With a truth: another implementation of attention is told from a mistake, and free runs say what they cannot show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

import tensortap as tt
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison

WIDTH, HEADS, TOKENS = 64, 4, 40
KINDS = ("input", "output", "grad_input", "grad_output", "param_grad")
Core = Callable[[Tensor, Tensor, Tensor], Tensor]
Change = Callable[[nn.Module], None]


def _mask() -> Tensor:
    return torch.full((TOKENS, TOKENS), float("-inf")).triu(1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * 0.25 + _mask().to(q.dtype)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _scores(q, k).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)


def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of keys, one after the other: shares are rounded before they are normalised, sums are in float32."""
    most, total, result = torch.full((*q.shape[:-1], 1), -1e30), torch.zeros(1), torch.zeros(q.shape)
    for keys, values, mask in zip(k.split(8, -2), v.split(8, -2), _mask().split(8, -1), strict=True):
        scores = (q @ keys.transpose(-1, -2)).float() * 0.25 + mask
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        shares, before = (scores - larger).exp(), (most - larger).exp()
        total = total * before + shares.sum(-1, keepdim=True)
        result, most = result * before + (shares.to(q.dtype) @ values).float(), larger
    return (result / total).to(q.dtype)


def not_upcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    return (shares / shares.sum(-1, keepdim=True)) @ v


class Attention(nn.Module):
    core: Core = staticmethod(eager)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for projection in (self.q, self.k):
            projection.weight.data.mul_(2.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(self.core(q, k, v).transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(97, WIDTH),
            nn.Sequential(*(Layer() for _ in range(3))),
            nn.Linear(WIDTH, 97),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def build(*changes: Change, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    model = Net().bfloat16().to(dtype)
    for change in changes:
        change(model)
    return model


def step(model: nn.Module) -> None:
    tokens = torch.randint(0, 97, (4, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()).backward()


def attends(core: Core, *layers: int) -> Change:
    def change(model: nn.Module) -> None:
        for number in layers or range(3):
            model.get_submodule(f"layers.{number}.attention").core = core

    return change


def gelu_in_short(model: nn.Module) -> None:
    act = model.get_submodule("layers.1.act")
    act.forward = lambda x: x * 0.5 * (1 + torch.erf(x * 0.5**0.5))


def capture(model: nn.Module, path: Path, keep: str = "tensors") -> Path:
    with tt.capture(model, path, keep=keep, kinds=KINDS, overwrite=True):
        step(model)
    return path


Free = Callable[..., Comparison]


@pytest.fixture
def free(tmp_path: Path) -> Free:
    """Return a comparison of two free runs with a truth: changes of the reference, changes of the candidate."""

    def compare(reference: list[Change], candidate: list[Change], keep: str = "tensors") -> Comparison:
        runs = [capture(build(*changes), tmp_path / str(at), keep) for at, changes in enumerate((reference, candidate))]
        truth = capture(build(dtype=torch.float32), tmp_path / "truth", keep)
        return tt.compare(*runs, truth=truth)

    return compare


def checked(tmp_path: Path, reference: list[Change], candidate: list[Change]) -> Comparison:
    capture(build(*reference), tmp_path / "reference")
    model = build(*candidate)
    with tt.check(model, tmp_path / "reference", truth="float64") as check:
        step(model)
    return check.result


@pytest.mark.parametrize(
    ("place", "change"), [("layers.1.attention", attends(not_upcast, 1)), ("layers.1.act", gelu_in_short)]
)
def test_a_rounding_more_shows_in_free_runs_that_were_equal_so_far(place: str, change: Change, free: Free) -> None:
    result = free([], [change])
    assert result.verdict == "imprecise"
    assert [(birth.module, birth.cause) for birth in result.births] == [(place, Cause.LESS_EXACT)]
    assert result.first is not None and result.first.truth is not None and result.first.truth.ratio < 1.1
    assert free([change], []).verdict == "match"  # the other way round it is more exact


def test_free_runs_cannot_tell_another_implementation_from_a_mistake(free: Free) -> None:
    right, wrong = free([attends(fused)], [attends(eager)]), free([], [attends(not_upcast)])
    for result in (right, wrong):
        assert result.verdict == "incomparable" and not result.births
        assert result.sentence.startswith("Cannot tell a mistake from another implementation. The own code of layers.0")
        assert 'tensortap.check(model, reference, truth="float64")' in result.sentence
    assert free([], [attends(in_blocks)]).verdict == "match"


def test_free_runs_of_summaries_say_that_a_rounding_would_not_show(free: Free) -> None:
    result = free([], [gelu_in_short], "summary")
    assert result.verdict == "match"
    assert (
        "Whether layers.1.act" in result.sentence and "once more than the reference would not show" in result.sentence
    )
    assert "would not show: the errors" not in free([], [], "summary").sentence


@pytest.mark.parametrize(("ours", "theirs"), [(fused, eager), (fused, in_blocks), (eager, in_blocks)])
def test_a_check_tells_another_implementation_by_its_gradients(ours: Core, theirs: Core, tmp_path: Path) -> None:
    result = checked(tmp_path, [attends(ours)], [attends(theirs)])
    assert result.verdict == "match" and not result.births
    assert any("as another implementation may be" in note for note in result.notes)


@pytest.mark.parametrize("layers", [(), (0,), (2,)])
def test_a_check_names_a_softmax_that_is_not_upcast(layers: tuple[int, ...], tmp_path: Path) -> None:
    result = checked(tmp_path, [], [attends(not_upcast, *layers)])
    assert result.verdict == "imprecise"
    assert {birth.module for birth in result.births} == {f"layers.{each}.attention" for each in layers or range(3)}


def test_one_module_alone_is_no_other_implementation(tmp_path: Path) -> None:
    result = checked(tmp_path, [attends(fused)], [attends(fused), attends(eager, 1)])
    assert [birth.module for birth in result.births] == ["layers.1.attention"] and result.verdict == "imprecise"


def test_without_gradients_a_check_cannot_tell(tmp_path: Path) -> None:
    for name, core in (("reference", fused), ("candidate", eager)):
        model = build(attends(core))
        forward = partial(model, torch.arange(4 * TOKENS).view(4, TOKENS) * 7 % 97)
        if name == "reference":
            with tt.capture(model, tmp_path / name, keep="tensors"), torch.no_grad():
                forward()
        else:
            with tt.check(model, tmp_path / "reference", truth="float64") as check, torch.no_grad():
                forward()
    assert check.result.verdict == "incomparable"
    assert "Cannot tell a mistake from another implementation" in check.result.sentence
    assert "capture the reference with `grad_output`" in check.result.sentence


def test_a_mistake_is_named_alone_beside_a_module_that_rounds_more(tmp_path: Path) -> None:
    def mistake(model: nn.Module) -> None:
        model.get_submodule("layers.2.norm").eps = 0.5

    result = checked(tmp_path, [], [gelu_in_short, mistake])
    assert result.verdict == "diverged" and [birth.module for birth in result.births] == ["layers.2.norm"]
    assert any("layers.1.act (GELU) rounds" in note for note in result.notes)
