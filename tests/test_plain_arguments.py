"""Plain values are kept as JSON of bounded size, without calling code of the value."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from enum import Enum, Flag, IntEnum
from typing import Any

import numpy as np
import pytest

from tensortap.core.arguments import LEFT_OUT, OpaqueValue, all_in_words, as_json, in_words, read, written


def again(value: Any) -> Any:
    """Through a file and back."""
    text = json.dumps(written([("x", value)], lambda _: None), allow_nan=False)
    assert text.isascii()
    assert "\n" not in text
    return read(json.loads(text))["x"]


class Mode(IntEnum):
    FULL = 1
    CAUSAL = 2


class Colour(str, Enum):
    RED = "red"


class Bits(Flag):
    A = 1
    B = 2


class Hostile:
    """Raises on every access."""

    def _fail(self, *_: Any) -> Any:
        raise AssertionError("nobody may call this")

    __repr__ = __str__ = __eq__ = __hash__ = __len__ = __iter__ = __bool__ = __float__ = __index__ = _fail  # type: ignore[assignment]
    __getattr__ = __getattribute__ = __reduce_ex__ = __call__ = __format__ = _fail  # type: ignore[assignment]


class HostileList(list):  # type: ignore[type-arg]
    __len__ = __iter__ = __repr__ = __getitem__ = Hostile._fail  # type: ignore[assignment]


class HostileInt(int):
    __repr__ = __str__ = __int__ = bit_length = Hostile._fail  # type: ignore[assignment]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**200,
        0.1,
        1e-300,
        -0.0,
        math.inf,
        -math.inf,
        "",
        "mean",
        "a\nb\r\u2028\x00\x1b[2J",
        "lone \udc80 surrogate",
        "层",
        [],
        (),
        {},
        [1, [2.5, (None, "x")]],
        {"a": 1, 2: None, None: (True,), 0.5: [], (1, "k"): "v"},
        (((1,),),),
    ],
    ids=repr,
)
def test_values_survive_a_round_trip(value: Any) -> None:
    assert repr(again(value)) == repr(value), "also of the same types"


def test_nan_comes_back() -> None:
    assert math.isnan(again(math.nan))
    assert repr(again([math.nan, (math.nan,)])) == "[nan, (nan,)]"


def test_true_is_not_one() -> None:
    written_values = [json.dumps(as_json(value)) for value in (True, 1, 1.0, np.float64(1), Mode.FULL)]
    assert len(set(written_values)) == 5


@pytest.mark.parametrize("kind", ["bool", "int8", "int64", "uint64", "float16", "float32", "float64"])
def test_scalars_of_numpy_come_back(kind: str) -> None:
    value = np.dtype(kind).type(1)
    assert again(value) == value
    assert type(again(value)) is type(value)
    assert again([value])[0].dtype == kind


def test_numpys_own_nan() -> None:
    assert np.isnan(again(np.float32("nan")))


# Not as parameters of a test: pytest asks each what it is, and some would answer.
TOLD = {
    "Mode.CAUSAL": Mode.CAUSAL,
    "Colour.RED": Colour.RED,
    "Bits.A": Bits.A,
    "a slice object": slice(1, 2),
    "an ellipsis object": ...,
    "a range object": range(3),
    "a bytes object": b"bytes",
    "a complex object": 1 + 2j,
    "a type object": int,
    "a builtin_function_or_method object": len,
    "a ndarray object": np.zeros(3),
    "a set object": {1, 2},
    "a Config object": namedtuple("Config", "a b")(1, 2),
    "a Hostile object": Hostile(),
    "[a Hostile object]": [Hostile()],
    "{'k': a Hostile object}": {"k": Hostile()},
    "[1]": HostileList([1]),
    "a HostileInt object": HostileInt(3),
    "{'a': 1}": OrderedDict(a=1),
    "an int object": 10**100,
}


@pytest.mark.parametrize("words", TOLD)
def test_a_value_that_cannot_be_kept_is_named_by_its_type(words: str) -> None:
    assert repr(again(TOLD[words])) == words


def test_a_members_name_is_read_past_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Colour, "__getattribute__", Hostile._fail)
        found = again(Colour.RED)
    assert found == OpaqueValue("enum", "Colour.RED")


def test_an_object_of_a_dataclass_is_its_type() -> None:
    @dataclass
    class Config:
        width: int = 3

    assert "Config object" in repr(again(Config()))


def test_long_texts_and_many_items_are_cut_with_a_note() -> None:
    text = again("x" * 100_000)
    assert (text.kind, text.text) == ("object", "str")
    assert text.note.startswith("100000 characters: 'xxx")
    assert repr(again(list(range(1000)))) == "a list object (1000 items)"
    assert repr(again(dict.fromkeys(range(1000)))) == "a dict object (1000 items)"
    assert repr(again((((((1,),),),),))) == "((((a tuple object (1 items),),),),)"
    nested: list[Any] = []
    nested.append(nested)
    assert "a list object" in repr(again(nested))
    assert len(json.dumps(written([("x", "\udc80\n" * 10**6)], lambda _: None))) < 5000


def test_the_arguments_of_a_call_take_bounded_room() -> None:
    block = [["y" * 200] * 64] * 64
    found = written([(f"p{at}", block) for at in range(100)] + [("q" * 1000, 1)], lambda _: None)
    assert len(json.dumps(found)) < 200_000
    assert read(found)[LEFT_OUT].text.endswith(" more")
    found = written([(f"p{at}", at) for at in range(1000)], lambda _: None)
    assert len(found) <= 300
    assert all_in_words(read(found)).endswith("…=744 more")


def test_the_first_of_two_values_with_one_path_is_kept() -> None:
    assert written([("1", 3), ("1", 4)], lambda _: None) == {"1": 3, LEFT_OUT: {"left_out": "1 more"}}


def test_words_are_short_and_printable() -> None:
    assert in_words((7, OpaqueValue("object", "Cache"))) == "(7, a Cache object)"
    assert len(in_words("x" * 150)) == 60
    odd = OpaqueValue("object", "A\n\x1b[2J\udc80")
    assert repr(odd).isprintable()
    assert in_words("\n\udc80").isprintable()


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"tuple": 3},
        {"dict": [1]},
        {"dict": [[[1], 2]]},
        {"float": "much"},
        {"float": None},
        {"numpy": ["float32"]},
        {"numpy": ["object", 1]},
        {"numpy": ["int8", 1000]},
        {"numpy": {}},
        {"object": None},
        {"soon": [1, 2]},
        {"dtype": ["x"]},
    ],
    ids=str,
)
def test_unknown_json_is_read(part: Any) -> None:
    value = read({"x": part})["x"]
    assert isinstance(repr(value), str)
    json.dumps(as_json(value))
