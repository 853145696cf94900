"""The digest notices what a checksum of norms, an XOR or a plain sum would not."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tensortap.core import dtypes
from tensortap.kernels.summary import reference

Array = npt.NDArray[Any]
RNG = np.random.default_rng(7)


def digest(array: Array) -> int:
    return reference.summarize(array).digest


def gaussian(*shape: int) -> npt.NDArray[np.float32]:
    return RNG.normal(0, 1, shape).astype(np.float32)


def test_weights_are_odd_and_differ_in_their_low_bits() -> None:
    weights = [int(w) for w in reference.digest_weights()]
    assert len(set(weights)) == 256
    assert all(w % 2 == 1 and 2**31 < w < 2**32 for w in weights)
    for a, b in itertools.combinations(weights, 2):
        assert (a - b) % 2**11 != 0, "a swap of words that differ in their high bits only could pass"


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "complex64"])
def test_every_flipped_bit_gives_another_digest(name: str) -> None:
    dtype = dtypes.numpy_dtype(name)
    array = RNG.integers(0, 256, 37 * dtype.itemsize, dtype=np.uint8)
    seen = {digest(array.view(dtype))}
    for byte, bit in itertools.product(range(array.size), range(8)):
        array[byte] ^= 1 << bit
        seen.add(digest(array.view(dtype)))
        array[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * array.size


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
def test_every_swap_is_seen(dtype: Any) -> None:
    array = np.arange(60).astype(dtype)  # small integers: their float32 bits end in a long run of zeros
    right = digest(array)
    for i, k in itertools.combinations(range(array.size), 2):
        array[[i, k]] = array[[k, i]]
        assert digest(array) != right, (i, k)
        array[[i, k]] = array[[k, i]]


def test_permutations_are_seen() -> None:
    array = gaussian(2000)
    assert len({digest(RNG.permutation(array)) for _ in range(300)}) == 300


@pytest.mark.parametrize("shape", [(4, 256), (6, 1024), (10, 100), (3, 7)])
def test_rearrangements_are_seen(shape: tuple[int, int]) -> None:
    array = gaussian(*shape)
    first, second = np.array_split(array, 2)
    swapped = array.copy()
    swapped[[0, -1]] = swapped[[-1, 0]]
    variants = {
        "as it is": array,
        "rows reversed": array[::-1],
        "columns reversed": array[:, ::-1],
        "all reversed": array[::-1, ::-1],
        "rolled": np.roll(array, 1),
        "rows rolled": np.roll(array, 1, axis=0),
        "two rows swapped": swapped,
        "halves swapped": np.concatenate([second, first]),
        "first half twice": np.concatenate([first, first[: len(second)]]),
        "second half twice": np.concatenate([second, second])[-len(array) :],
        "transposed": array.T.reshape(shape),
        "negated": -array,
    }
    different = {variant.tobytes() for variant in variants.values()}  # of three rows, some come out the same
    assert len({digest(variant) for variant in variants.values()}) == len(different) >= 10


def test_a_lone_value_has_a_digest_of_its_own_at_every_place() -> None:
    """Zeros add nothing, so this is the weight of every word, in many rows."""
    seen = set()
    array = np.zeros(5000, np.float32)
    for i in range(array.size):
        array[i] = 1
        seen.add(digest(array[: i + 1]))
        array[i] = 0
    assert len(seen) == array.size


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_two_flipped_signs_do_not_cancel(dtype: Any) -> None:
    """Modulo 2**32 they would, anywhere."""
    array = gaussian(700).astype(dtype)
    seen = {digest(array)}
    places = [0, 1, 2, 127, 128, 255, 256, 257, 511, 512, 699]
    pairs = list(itertools.combinations(places, 2))
    for i, k in pairs:
        array[[i, k]] *= -1
        seen.add(digest(array))
        array[[i, k]] *= -1
    assert len(seen) == len(pairs) + 1


def test_a_column_of_flipped_signs_is_seen() -> None:
    array = gaussian(64, 512)
    seen = {digest(array)}
    for column in range(100):
        array[:, column] *= -1
        seen.add(digest(array))
        array[:, column] *= -1
    assert len(seen) == 101


def test_minus_zero_is_not_zero() -> None:
    assert digest(np.array([0.0, -0.0], np.float32)) != digest(np.array([0.0, 0.0], np.float32))


def test_strides_do_not_matter() -> None:
    array = gaussian(30, 20)
    assert digest(array.T) == digest(array.T.copy())
    assert digest(array[::-2, ::3]) == digest(array[::-2, ::3].copy())
    assert digest(array.astype(">f4")) == digest(array)


def test_adding_one_to_the_bits_anywhere_is_seen() -> None:
    """Steps of one unit in the last place, up and down, in two and three words."""
    bits = RNG.integers(0, 2**32, 40, dtype=np.uint32)
    seen, cases = {digest(bits)}, 1
    for places in itertools.chain(*(itertools.combinations(range(12), n) for n in (1, 2, 3))):
        for steps in itertools.product((1, 2**32 - 1), repeat=len(places)):
            changed = bits.copy()
            changed[list(places)] += np.array(steps, np.uint32)
            seen.add(digest(changed))
            cases += 1
    assert len(seen) == cases
