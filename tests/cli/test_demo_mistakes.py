"""The demo's mistakes: each is named where it is, and takes nothing else with it. And the curves above the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensortap
from tensortap.demo.curves import apart, draw
from tensortap.demo.mistakes import MISTAKES

torch = pytest.importorskip("torch")
STEPS = 2


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tensortap.demo.model import train

    path = tmp_path_factory.mktemp("demo") / "reference"
    train(path, steps=STEPS)
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_where_it_is(name: str, reference: Path, tmp_path: Path) -> None:
    from tensortap.demo.model import train

    mistake = MISTAKES[name]
    train(tmp_path / "candidate", steps=STEPS, plant=mistake.plant)
    result = tensortap.compare(reference, tmp_path / "candidate")
    assert result.verdict == "diverged"
    assert result.first is not None
    assert result.first.module == mistake.where, result.sentence


@pytest.mark.parametrize("name", MISTAKES)
def test_planting_takes_no_random_number_and_keeps_names_and_classes(name: str) -> None:
    from tensortap.demo.model import ALPHABET, Decoder, optimizer_of

    model = Decoder(len(ALPHABET))
    modules = [(name, type(module)) for name, module in model.named_modules()]
    before = torch.get_rng_state()
    MISTAKES[name].plant(model, optimizer_of(model))
    assert torch.equal(torch.get_rng_state(), before)
    assert [(name, type(module)) for name, module in model.named_modules()] == modules


def test_there_are_many() -> None:
    assert len(MISTAKES) >= 10
    assert all(mistake.what and len(name) + len(mistake.what) < 78 for name, mistake in MISTAKES.items())


# --- the curves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("steps", [1, 2, 32, 1000])
def test_curves_fit(width: int, steps: int) -> None:
    losses = [4 - 3 * step / steps for step in range(steps)]
    lines = [line.plain for line in draw(losses, losses, width)]
    assert len({len(lines), len(draw([1.0], [1.0], 80))}) == 1
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["loss", "reference", "candidate"]
    assert lines[-1].split() == ["last", *[f"{losses[-1]:.5f}"] * 2]


def test_a_curve_falls_from_the_top_to_the_bottom() -> None:
    lines = [line.plain[8:40].rstrip() for line in draw([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], 80)[1:-1]]
    lengths = [len(line) for line in lines]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (3, 9)
    assert lines[0] == "███"


def test_a_step_without_a_loss_is_a_cross() -> None:
    nan = float("nan")
    lines = [line.plain for line in draw([2.0, 1.0], [nan, nan], 80)]
    assert lines[-2].count("×") == 6
    assert draw([nan], [nan], 80)
    assert apart([2.0, 1.0], [2.0, nan]).startswith("The candidate's loss is not finite from step 1 on")


def test_how_far_losses_are_apart() -> None:
    assert apart([2.0], [2.0]) == "The losses are equal to the last bit."
    assert "agree to 4 digits" in apart([2.0, 1.0], [2.0, 1.00005])
    assert "differ by 1.0 % at most: they alone" in apart([2.0, 1.0], [2.0, 1.01])
    assert "differ by 10.0 % at most: something is wrong" in apart([2.0, 1.0], [2.2, 1.0])
