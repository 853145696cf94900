"""Which rows of the index are the first of their tensor: the quick way says what the general one says."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tensortap.store.writer.index import _Seen


@pytest.mark.parametrize("seed", range(40))
def test_arrays_and_lists_agree(seed: int) -> None:
    choose = random.Random(seed)
    arrays, lists, following = _Seen(), _Seen(), 0
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
        assert list(arrays.first(np.array(numbers, np.int64))) == list(lists.first(numbers))
        assert (arrays._below, arrays._others) == (lists._below, lists._others)
