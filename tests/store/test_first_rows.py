"""Which rows of the index are the first of their tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tensortap.store.writer.index import _Seen


@pytest.mark.parametrize("seed", range(40))
def test_a_number_is_first_once(seed: int) -> None:
    choose = random.Random(seed)
    arrays, lists, known, following = _Seen(), _Seen(), set[int](), 0
    for _ in range(8):
        numbers = []
        for _ in range(choose.randint(0, 12)):
            if following and choose.random() < 0.5:
                numbers.append(choose.randrange(-1 if choose.random() < 0.1 else 0, following))
            else:
                following += choose.random() < 0.05  # a gap, which a later row may fill
                numbers.append(following)
                following += 1
        if choose.random() < 0.2:
            choose.shuffle(numbers)
        expected = [number not in known and number not in numbers[:place] for place, number in enumerate(numbers)]
        known.update(numbers)
        assert list(arrays.first(np.array(numbers, np.int64))) == expected
        assert list(lists.first(numbers)) == expected


def test_numbers_without_gaps_take_no_memory() -> None:
    seen = _Seen()
    seen.first(range(5, 10))
    assert len(seen._others) == 5
    seen.first(range(5))
    assert (seen._below, len(seen._others)) == (10, 0)
