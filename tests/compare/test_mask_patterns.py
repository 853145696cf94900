"""Masks are compared by what they hide, whatever their convention; real differences are found in any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from made_runs import Seen, values, write

import tensortap as tt
from tensortap.compare.measure.hidden import HiddenPositions
from tensortap.compare.measure.mask_conventions import NONE, SUM, mask_of
from tensortap.compare.measure.masks import in_convention_of
from tensortap.core.records import Comparison
from tensortap.kernels import summarize

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
KEEP = pytest.mark.parametrize("keep", [True, False], ids=["tensors", "summaries"])


def lowest(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).min)


def causal(size: int = 24, window: int = 8, padding: int = 3) -> Array:
    """What a mask of a batch of two hides: the future, what is before the window, and padding of the second row."""
    at = np.arange(size)
    hidden = (at[None, :] > at[:, None]) | (at[None, :] <= at[:, None] - window)
    both = np.stack([hidden, hidden])
    if padding:
        both[1, :, :padding] = True
    return both[:, None]


def additive(dtype: Any, value: float | None = None) -> Any:
    return lambda hidden: np.where(hidden, lowest(dtype) if value is None else value, 0.0).astype(dtype)


CONVENTIONS: dict[str, Any] = {
    "boolean": lambda hidden: ~hidden,
    "int64": lambda hidden: (~hidden).astype(np.int64),
    "float32": additive(np.float32),
    "bfloat16": additive(BF16),
    "float16": additive(np.float16),
    "float64": additive(np.float64),
    "bfloat16's lowest in float32": additive(np.float32, lowest(BF16)),
    "-inf": additive(np.float32, -np.inf),
    "-1e9": additive(np.float32, -1e9),
    "-1e4": additive(np.float16, -1e4),
    "-100": additive(np.float32, -100.0),
}
PAIRS = [(ours, theirs) for ours in ("boolean", "float32", "-inf", "-1e4") for theirs in CONVENTIONS if ours != theirs]


def attention(mask: Array | None, keep: bool, off: float = 0.0) -> list[Seen]:
    """A block that hands a mask to its attention; `off` is a mistake in the attention."""
    x, y = values(1, (2, 24, 16)), values(2, (2, 24, 16))
    seen = [Seen("block", x, "input", keep=keep, tensor=100)]
    seen += [Seen("block.attn", x, "input", keep=keep, tensor=100)]
    seen += [] if mask is None else [Seen("block.attn", mask, "input", path="mask", keep=keep)]
    return [*seen, Seen("block.attn", y + np.float32(off), keep=keep), Seen("block", y + np.float32(off), keep=keep)]


def compared(tmp_path: Path, ours: Array | None, theirs: Array | None, keep: bool, off: float = 0.0) -> Comparison:
    count = len(list(tmp_path.iterdir()))
    a = write(tmp_path / f"{count} a", attention(ours, keep))
    return tt.compare(a, write(tmp_path / f"{count} b", attention(theirs, keep, off)))


@KEEP
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_one_pattern_in_two_conventions(tmp_path: Path, ours: str, theirs: str, keep: bool) -> None:
    hidden = causal()
    result = compared(tmp_path, CONVENTIONS[ours](hidden), CONVENTIONS[theirs](hidden), keep)
    assert result.verdict == "match" and not result.counts.get("unjudged"), result.sentence


@KEEP
@pytest.mark.parametrize(("ours", "theirs"), [*PAIRS, ("boolean", "boolean"), ("float32", "float32"), ("-inf", "-inf")])
@pytest.mark.parametrize("wrong", [{"window": 7}, {"window": 9}, {"padding": 0}, {"padding": 4}], ids=str)
def test_another_pattern_is_named_as_the_mask(
    tmp_path: Path, ours: str, theirs: str, wrong: dict[str, int], keep: bool
) -> None:
    """The attention follows its mask: it is wrong as well, and not to blame."""
    mask = CONVENTIONS[theirs](causal(**wrong))
    result = compared(tmp_path, CONVENTIONS[ours](causal()), mask, keep, off=0.5)
    assert result.first is not None and result.first.key.path == "mask", result.sentence
    assert result.first.module == "block" and "hides other elements than the reference's (" in result.sentence
    differing = int((causal() != causal(**wrong)).sum())
    said = int(result.sentence.partition("(")[2].partition("mask) ")[2].partition(" of ")[0].split()[-1].lstrip("("))
    assert said == differing if keep else abs(said - differing) <= 0.5 * differing


@KEEP
def test_a_mistake_of_the_attention_beside_another_convention(tmp_path: Path, keep: bool) -> None:
    hidden = causal()
    result = compared(tmp_path, CONVENTIONS["float32"](hidden), CONVENTIONS["boolean"](hidden), keep, off=0.5)
    assert result.first is not None and result.first.module == "block.attn"
    assert "while its inputs match." in result.sentence
    assert any("additive in the reference and boolean in the candidate" in note for note in result.notes)


@KEEP
@pytest.mark.parametrize("convention", ["float32", "-inf", "-1e9"])
def test_true_may_mean_hidden(tmp_path: Path, convention: str, keep: bool) -> None:
    """Which it means only the attention knows: if its output agrees nothing is wrong, else the mask is."""
    additive, inverted = CONVENTIONS[convention](causal()), causal()
    agrees = compared(tmp_path, additive, inverted, keep)
    assert agrees.verdict == "match" and agrees.counts["unjudged"] == 1
    assert agrees.sentence.startswith("Everything that could be judged matches")
    differs = compared(tmp_path, additive, inverted, keep, off=0.5)
    assert differs.first is not None and (differs.first.module, differs.first.key.path) == ("block", "mask")


@KEEP
def test_no_mask_at_all(tmp_path: Path, keep: bool) -> None:
    """None means a causal mask to an attention that is causal; it never means padding."""
    future = CONVENTIONS["float32"](causal(window=99, padding=0))
    assert compared(tmp_path, future, None, keep).verdict == "match"
    own = compared(tmp_path, future, None, keep, off=0.5)
    assert own.first is not None and own.first.module == "block.attn"
    for mask, other, cause in ((0, None, "lost_mask"), (None, 0, "extra_mask")):
        padded = [CONVENTIONS["float32"](causal(window=99)) if each == 0 else None for each in (mask, other)]
        lost = compared(tmp_path, padded[0], padded[1], keep, off=0.5)
        assert lost.first is not None and (lost.first.module, lost.first.cause) == ("block", cause), lost.sentence
        assert "mask to block.attn (input mask)" in lost.sentence


def summed(hidden: Array, ours: float, theirs: float) -> Array:
    """A causal mask of one number plus a mask of padding of another, which hide `hidden` together."""
    future = np.triu(np.ones(hidden.shape[-2:], bool), 1)
    padding = hidden.all(axis=-2, keepdims=True)
    parts = np.where(future, ours, 0), np.where(padding, theirs, 0), np.where(hidden & ~future & ~padding, ours, 0)
    return sum(parts).astype(np.float32)


SUMS = {"-1e9": (-1e9, -1e9), "-1e4": (-1e4, -1e4), "-inf and -1e9": (-np.inf, -1e9)}


@KEEP
@pytest.mark.parametrize("theirs", [*SUMS, "boolean", "float32", "-inf", "-1e4 alone"])
@pytest.mark.parametrize("ours", SUMS)
def test_a_sum_of_masks_hides_what_either_hides(tmp_path: Path, ours: str, theirs: str, keep: bool) -> None:
    def mask(convention: str, hidden: Array) -> Array:
        if convention in SUMS:
            return summed(hidden, *SUMS[convention])
        return np.asarray(CONVENTIONS[convention.removesuffix(" alone")](hidden))

    hidden, more = causal(), causal(padding=4)
    result = compared(tmp_path, mask(ours, hidden), mask(theirs, hidden), keep)
    assert result.verdict == "match", result.sentence
    assert bool(result.counts.get("unjudged")) <= (not keep), "a summary does not show which elements a sum hides"
    result = compared(tmp_path, mask(ours, hidden), mask(theirs, more), keep, off=0.1)
    assert result.first is not None and result.first.key.path == "mask", result.sentence
    shifted = np.roll(hidden, 1, axis=-1)  # as many elements
    result = compared(tmp_path, mask(ours, hidden), mask(theirs, shifted), keep, off=0.1)
    assert result.verdict == "diverged"
    assert not keep or (result.first is not None and result.first.key.path == "mask"), result.sentence


def test_large_numbers_are_not_a_sum_of_masks() -> None:
    numbers = -np.abs(values(3, (4, 24))) * 1e5
    numbers[0, :4] = 0
    assert mask_of(numbers) == NONE
    mask = summed(causal(), -1e9, -1e9)
    assert mask_of(mask) == SUM
    mask[0, 0, 3, 3] = -1.0
    assert mask_of(mask) == NONE, "it lets something of an element through"


@KEEP
def test_two_tensors_of_large_numbers_are_compared_as_numbers(tmp_path: Path, keep: bool) -> None:
    numbers = -np.abs(values(3, (2, 1, 24, 24))) * 1e4 - 2e4
    numbers[0, 0, 0, :4] = 0
    other = numbers.copy()
    other[1, 0, 2:8] *= 1.01
    assert compared(tmp_path, numbers, numbers * np.float32(1 + 1e-7), keep).verdict == "match"
    result = compared(tmp_path, numbers, other, keep)
    assert result.first is not None and result.first.key.path == "mask" and "is off by" in result.sentence


def two_attentions(mask: Array | None, off: tuple[float, float]) -> list[Seen]:
    """A model that hands one mask to two attentions; `off` are their mistakes."""
    x, seen = values(1, (2, 24, 16)), []
    for number, each in enumerate(off):
        name = f"layers.{number}"
        seen += [Seen(name, x, "input", tensor=100 + number)]
        seen += [] if mask is None else [Seen(name, mask, "input", path="mask", tensor=99)]
        x = values(2 + number, (2, 24, 16)) + np.float32(each)
        seen += [Seen(name, x, tensor=101 + number)]
    return [Seen("", values(1, (2, 24, 16)), "input", tensor=100), *seen, Seen("", x, tensor=102)]


@pytest.mark.parametrize(("off", "cause"), [((0.0, 0.5), "output"), ((0.5, 0.5), "lost_mask")])
def test_a_lost_mask_is_not_blamed_where_another_does_without(
    tmp_path: Path, off: tuple[float, float], cause: str
) -> None:
    padded = CONVENTIONS["float32"](causal(window=99))
    ours = write(tmp_path / "a", two_attentions(padded, (0.0, 0.0)))
    result = tt.compare(ours, write(tmp_path / "b", two_attentions(None, off)))
    assert result.first is not None and result.first.cause == cause, result.sentence


@KEEP
def test_numbers_beside_a_mask_are_compared(tmp_path: Path, keep: bool) -> None:
    """A bias with a mask in it: the numbers at the edge of the range do not drown the others."""
    bias, hidden = values(3, (2, 1, 24, 24)), causal()
    ours = np.where(hidden, lowest(np.float32), bias).astype(np.float32)
    near = np.where(hidden, -np.inf, bias * np.float32(1 + 2**-23)).astype(np.float32)
    assert compared(tmp_path, ours, near, keep).verdict == "match"
    for wrong in (np.where(hidden, -np.inf, bias * 1.01), np.where(causal(window=9), lowest(np.float32), bias)):
        result = compared(tmp_path, ours, wrong.astype(np.float32), keep)
        assert result.first is not None and result.first.key.path == "mask", result.sentence


@KEEP
def test_ones_and_zeros_are_not_two_masks_that_hide_nothing(tmp_path: Path, keep: bool) -> None:
    ones, zeros = np.ones((8, 16), np.float32), np.zeros((8, 16), np.float32)
    assert compared(tmp_path, ones, zeros, keep).verdict == "diverged"
    assert compared(tmp_path, zeros, np.full((8, 16), -100.0, np.float32), keep).verdict == "diverged"


def test_a_mask_in_the_convention_of_another() -> None:
    hidden, other = causal(), causal(window=9)
    for own in CONVENTIONS.values():
        for values_ in CONVENTIONS.values():
            found = in_convention_of(own(other), values_(hidden))
            if own(other).dtype != values_(hidden).dtype:
                assert np.array_equal(found.astype(np.float64), own(hidden).astype(np.float64))
    boolean = CONVENTIONS["boolean"](hidden)
    assert in_convention_of(boolean, CONVENTIONS["float32"](hidden)) is boolean


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BF16])
def test_the_edge_is_counted_apart(dtype: Any) -> None:
    hidden = causal()
    found = summarize(additive(dtype)(hidden))
    assert found.edge == int(hidden.sum()) and found.zeros == hidden.size - found.edge
    assert (found.min, found.max, found.mean, found.l2) == (lowest(dtype), 0.0, 0.0, 0.0)
    assert np.array_equal(found.sketch, -summarize(hidden).sketch)


@KEEP
def test_rows_that_a_mask_hides_entirely_and_nothing_reads(tmp_path: Path, keep: bool) -> None:
    """Attention makes zeros of padding under a boolean mask, and the mean of everything under an additive one."""
    hidden = causal()
    hidden[1, :, :3] = True

    def run(name: str, mask: Array, off: float, gradient: float = 0.0) -> Path:
        seen = attention(mask, keep)
        y = values(2, (2, 24, 16))
        y[1, :3] += np.float32(off)
        seen[-2:] = [Seen("block.attn", y, keep=keep, tensor=7), Seen("block", y, keep=keep, tensor=7)]
        for number in range(8):
            weight = values(10 + number, (16, 16)) + np.float32(gradient * (number == 3))
            seen.append(Seen("block.attn", weight, "param_grad", path=f"w{number}", keep=keep))
        return write(tmp_path / name, seen)

    reference = run("a", CONVENTIONS["float32"](hidden), 0.0)
    result = tt.compare(reference, run("b", CONVENTIONS["boolean"](hidden), 0.5))
    assert result.verdict == "match" and result.counts["unjudged"] == 2, result.sentence
    why = "at positions that a mask hides" if keep else "no gradient of a parameter depends on it"
    assert any(why in note for note in result.notes), result.notes
    result = tt.compare(reference, run("c", CONVENTIONS["boolean"](hidden), 0.5, gradient=0.01))
    assert result.first is not None and result.first.module == "block.attn"
    result = tt.compare(reference, run("d", CONVENTIONS["float32"](hidden), 0.5))  # the same mask, another kernel
    if keep:
        assert result.verdict == "match" and result.counts["unjudged"] == 2, result.sentence
    else:  # nothing shows that there is padding
        assert result.first is not None and result.first.module == "block.attn"
    seen = attention(CONVENTIONS["boolean"](hidden), keep)
    angles = [
        Seen("block.attn", values(3, (24, 8)) + np.float32(off), "input", path="cos", keep=keep) for off in (0, 1)
    ]
    weights = [Seen("block.attn", values(9, (16, 16)), "param_grad", path=f"w{n}", keep=keep) for n in range(8)]
    ours = [*attention(CONVENTIONS["float32"](hidden), keep), *weights]
    a, b = write(tmp_path / "e", [ours[0], angles[0], *ours[1:]]), [seen[0], angles[1], *seen[1:], *weights]
    result = tt.compare(a, write(tmp_path / "f", b))
    assert result.first is not None and result.first.key.path == "cos"  # made by code that knows no mask


def padded(off_hidden: float = 0.0, off_later: float = 0.0, mask: Array | None = None, keep: bool = True) -> list[Seen]:
    """An attention and a module after it. The last five of 24 positions of the second text are padding."""
    attended, later = values(2, (2, 24, 16)), values(3, (2, 24, 16))
    attended[1, 19:] += np.float32(off_hidden)
    later[1, 19:] += np.float32(off_hidden)
    later += np.float32(off_later)
    x = values(1, (2, 24, 16))
    return [
        Seen("block.attn", x, "input", path="x", keep=keep, tensor=1),
        Seen("block.attn", mask if mask is not None else padding_pairs_mask(), "input", path="mask", keep=keep),
        Seen("block.attn", attended, keep=keep, tensor=2),
        Seen("block.mlp", attended, "input", keep=keep, tensor=2),
        Seen("block.mlp", later, keep=keep, tensor=3),
        *(Seen("block.mlp", values(9 + n, (16, 16)), "param_grad", path=f"w{n}", keep=keep) for n in range(8)),
    ]


def padding_pairs_mask() -> Array:
    hidden = np.triu(np.ones((2, 1, 24, 24), bool), 1)
    hidden[1, :, :, 19:] = True
    return CONVENTIONS["float32"](hidden)


@KEEP
def test_a_mask_of_padding_alone_hides_the_same_keys(tmp_path: Path, keep: bool) -> None:
    """Kernels without padding take such a mask, and return zeros at padding, which nothing reads."""
    kept = np.ones((2, 24), bool)
    kept[1, 19:] = False
    reference = write(tmp_path / "a", padded(keep=keep))
    same = tt.compare(reference, write(tmp_path / "b", padded(0.5, mask=kept, keep=keep)))
    assert same.verdict == "match" and same.first is None, same.sentence
    if keep:
        assert any("padding alone in the candidate" in note for note in same.notes), same.notes
        kept[0, 23] = False
        other = tt.compare(reference, write(tmp_path / "c", padded(mask=kept)))
        assert other.first is not None and other.first.key.path == "mask", other.sentence


def test_positions_that_a_mask_hides_do_not_cover_a_later_mistake(tmp_path: Path) -> None:
    kept = np.ones((2, 24), bool)
    kept[1, 19:] = False
    reference = write(tmp_path / "a", padded())
    result = tt.compare(reference, write(tmp_path / "b", padded(0.5, off_later=0.01, mask=kept)))
    assert result.first is not None and result.first.module == "block.mlp", result.sentence


def test_positions_are_found_on_the_axes_of_batch_and_sequence() -> None:
    hidden = HiddenPositions()
    positions = np.zeros((2, 5), bool)
    positions[1, 3:] = True
    hidden.add(positions)
    for shape, spot in (
        ((2, 5, 4), (1, 4, 0)),
        ((2, 3, 5, 4), (1, 2, 4, 0)),
        ((5, 2, 4), (4, 1, 0)),
        ((10, 4), (9, 0)),
    ):
        ours = np.ones(shape, np.float32)
        theirs = ours.copy()
        theirs[spot] += 1
        measured = hidden.measure_shown(ours, theirs)
        assert measured is not None and measured.difference.rel_l2 == 0, shape
        theirs[(0,) * len(shape)] += 1
        assert hidden.measure_shown(ours, theirs).difference.rel_l2 > 0, shape  # type: ignore[union-attr]
    assert hidden.measure_shown(np.ones((7, 4), np.float32), np.ones((7, 4), np.float32)) is None


def test_positions_are_found_in_copies_for_each_expert() -> None:
    """Only once they have explained a difference: tokens may be in the order of experts, too."""
    hidden = HiddenPositions()
    hidden.add(np.arange(10).reshape(2, 5) > 7)
    ours = np.ones((20, 4), np.float32)
    at_shown, at_hidden = ours.copy(), ours.copy()
    at_shown[3], at_hidden[18:] = 2, 2
    assert hidden.measure_shown(ours, at_shown) is None
    measured = hidden.measure_shown(ours, at_hidden)
    assert measured is not None and measured.difference.rel_l2 == 0
    measured = hidden.measure_shown(ours, at_shown)
    assert measured is not None and measured.difference.rel_l2 > 0


@pytest.mark.parametrize("moved", [False, True])
def test_a_list_of_tokens_may_have_them_in_another_order_than_positions(moved: bool) -> None:
    """Sorted by expert, a hidden token is elsewhere; if it chose another one, all tokens between have moved, too."""
    hidden = HiddenPositions()
    hidden.add(np.arange(10).reshape(2, 5) == 9)
    ours = values(5, (10, 4))
    order = [3, 9, 0, 5, 1, 2, 8, 4, 7, 6]
    other = [3, 0, 5, 1, 2, 8, 4, 9, 7, 6] if moved else order
    at_hidden, wrong = ours.copy(), 1.5 * ours
    at_hidden[9] += 1
    assert hidden.may_be_sorted(ours[order], at_hidden[other])
    assert not hidden.may_be_sorted(ours[order], wrong[order]), "all tokens differ"
    assert not hidden.may_be_sorted(ours, at_hidden), "it differs where the hidden token is"


@pytest.mark.parametrize("shape", [(2, 3, 24, 24), (1, 1, 24, 24), (24, 24)])
def test_a_mask_that_is_broadcast_hides_the_same(tmp_path: Path, shape: tuple[int, ...]) -> None:
    future = np.broadcast_to(np.triu(np.ones((24, 24), bool), 1), (2, 1, 24, 24))
    ours = CONVENTIONS["float32"](future)
    theirs = np.broadcast_to(ours if len(shape) == 4 else ours[0, 0], shape) if shape[0] != 1 else ours[:1]
    assert compared(tmp_path, ours, np.ascontiguousarray(theirs), True).verdict == "match"
    other = np.array(theirs)
    other[..., 5, 9] = 0
    wrong = compared(tmp_path, ours, other, True)
    assert wrong.first is not None and wrong.first.key.path == "mask", wrong.sentence
