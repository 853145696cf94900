"""Interprets the instructions of a pickle as data. Unlike the `pickle` module, it imports nothing and calls nothing.

Names resolve through `pickle_values`. Instructions that create an instance of a class, or load an extension or a
persistent object, are refused. Long strings and bytes stay views of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tensortap.store.formats.pickles.values import (
    Payload,
    PickledArray,
    PickledDtype,
    PickledName,
    PickleRefused,
    find_name,
    is_plain_key,
)

__all__ = ["read_pickle"]

_HIGHEST_PROTOCOL = 5
_MOST_INSTRUCTIONS = 20_000_000
_LONGEST_TEXT = 4096
"""A longer text is not a name: it holds an array's bytes, and stays in the file."""
_LONGEST_NUMBER = 64
_LONGEST_LINE = 512

_REFUSED = {
    0x81: "NEWOBJ",
    0x82: "EXT1",
    0x83: "EXT2",
    0x84: "EXT4",
    0x92: "NEWOBJ_EX",
    0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
    ord("P"): "PERSID",
    ord("Q"): "BINPERSID",
    ord("i"): "INST",
    ord("o"): "OBJ",
}


def read_pickle(data: memoryview) -> tuple[Any, int]:
    """Return the value of a pickle, and how many bytes it takes. Raise PickleRefused if it is not plain data.

    >>> read_pickle(memoryview(b"\\x80\\x02}U\\x01aK\\x03s."))
    ({'a': 3}, 11)
    """
    return _Machine(data).run()


class _Machine:
    """The stack machine that pickle defines. Arguments of an instruction follow it in the file."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stack below each mark."""
        self._memo: dict[int, Any] = {}

    def run(self) -> tuple[Any, int]:
        if bytes(self._data[:1]) != b"\x80":
            raise PickleRefused("it does not begin as a pickle of protocol 2 to 5")
        actions, count = _ACTIONS, 0
        while (code := self._take(1)[0]) != _STOP:
            count += 1
            if count > _MOST_INSTRUCTIONS:
                raise PickleRefused(f"it has more than {_MOST_INSTRUCTIONS:,} instructions")
            if (action := actions.get(code)) is None:
                word = _REFUSED.get(code, "")
                raise PickleRefused(
                    f"instruction {word or hex(code)} at byte {self._at - 1:,} "
                    + ("creates objects, which is not done from a file" if word else "does not exist")
                )
            action(self)
        if len(self._stack) != 1 or self._below:
            raise PickleRefused("it ends before it is complete")
        return self._stack[0], self._at

    # --- reading ---------------------------------------------------------------------------------------------------
    def _take(self, size: int) -> memoryview:
        end = self._at + size
        if end > len(self._data):
            raise PickleRefused(f"it is cut off: byte {self._at:,} announces {size:,} more than the file has")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        found = bytes(self._data[self._at : self._at + _LONGEST_LINE])
        text, newline, _ = found.partition(b"\n")
        if not newline:
            raise PickleRefused("a line of text does not end")
        self._at += len(text) + 1
        return _decoded(text, "utf-8")

    # --- the stack -------------------------------------------------------------------------------------------------
    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        if not self._stack:
            raise PickleRefused("it takes a value from an empty stack")
        return self._stack.pop()

    def top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise PickleRefused(f"it adds to something that is not a {kind.__name__}")
        return self._stack[-1]

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_to_mark(self) -> list[Any]:
        if not self._below:
            raise PickleRefused("it goes back to a mark that it never set")
        found, self._stack = self._stack, self._below.pop()
        return found

    def drop_to_mark(self) -> None:
        self.pop_to_mark()

    def pop_or_unmark(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.pop_to_mark()

    def duplicate(self) -> None:
        value = self.pop()
        self._stack += [value, value]

    def remember(self, number: int | None = None) -> None:
        value = self.pop()
        self._memo[len(self._memo) if number is None else number] = value
        self.push(value)

    def recall(self, number: int) -> None:
        if number not in self._memo:
            raise PickleRefused(f"it refers to value {number:,}, which it never stored")
        self.push(self._memo[number])

    # --- values ----------------------------------------------------------------------------------------------------
    def protocol(self) -> None:
        if (version := self._number(1)) > _HIGHEST_PROTOCOL:
            raise PickleRefused(f"it is a pickle of protocol {version}; tensortap reads up to {_HIGHEST_PROTOCOL}")

    def frame(self) -> None:
        if (size := self._number(8)) > len(self._data) - self._at:
            raise PickleRefused(f"it is cut off: a frame announces {size:,} bytes, more than the file has")

    def integer(self, size: int, signed: bool = False) -> None:
        self.push(int.from_bytes(self._take(size), "little", signed=signed))

    def long(self, prefix: int) -> None:
        if (size := self._number(prefix)) > _LONGEST_NUMBER:
            raise PickleRefused(f"it holds an integer of {size:,} bytes")
        self.integer(size, signed=True)

    def decimal(self) -> None:
        line = self._line()
        if line in ("00", "01"):  # how protocol 0 writes booleans
            self.push(line == "01")
        elif len(line) <= 20 and line.lstrip("-").isdecimal():
            self.push(int(line))
        else:
            raise PickleRefused("it holds text in place of a number")

    def real(self) -> None:
        self.push(struct.unpack(">d", self._take(8))[0])

    def text(self, prefix: int, encoding: str = "utf-8") -> None:
        data = self._take(self._number(prefix))
        if len(data) > _LONGEST_TEXT:
            self.push(Payload(data, utf8=encoding == "utf-8"))
        else:
            self.push(_decoded(bytes(data), encoding))

    def payload(self, prefix: int) -> None:
        self.push(Payload(self._take(self._number(prefix))))

    # --- containers ------------------------------------------------------------------------------------------------
    def tuple_of(self, size: int) -> None:
        found = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(found)))

    def collect(self, kind: Callable[[list[Any]], Any]) -> None:
        found = self.pop_to_mark()
        self.push(kind(found))

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        found = self.pop_to_mark()
        self.top(list).extend(found)

    def add(self) -> None:
        found = self.pop_to_mark()
        self.top(set).update(_keys(found))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.top(dict).update(_items([key, value]))

    def set_items(self) -> None:
        found = self.pop_to_mark()
        self.top(dict).update(_items(found))

    # --- names and calls -------------------------------------------------------------------------------------------
    def named(self) -> None:
        module = self._line()
        self.push(find_name(module, self._line()))

    def named_on_stack(self) -> None:
        name = self.pop()
        self.push(find_name(self.pop(), name))

    def call(self) -> None:
        arguments, name = self.pop(), self.pop()
        if not isinstance(name, PickledName) or type(arguments) is not tuple:
            raise PickleRefused("it calls something that is not a function")
        self.push(name.call(arguments))

    def build(self) -> None:
        state = self.pop()
        target = self.pop()
        if isinstance(target, (PickledArray, PickledDtype)):
            target.build(state)
        elif type(target) is not dict or type(state) is not dict:  # attributes of an OrderedDict are dropped
            raise PickleRefused("it sets the state of something that is not an array")
        self.push(target)


def _decoded(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeError as error:
        raise PickleRefused("it holds text that cannot be decoded") from error


def _keys(found: list[Any]) -> list[Any]:
    if not all(map(is_plain_key, found)):
        raise PickleRefused("a set or a dict holds a key that is neither text nor a number")
    return found


def _items(found: list[Any]) -> dict[Any, Any]:
    if len(found) % 2:
        raise PickleRefused("a dict holds a key without a value")
    return dict(zip(_keys(found[::2]), found[1::2], strict=True))


_STOP = ord(".")
_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("("): _Machine.mark,
    ord("0"): _Machine.pop_or_unmark,
    ord("1"): _Machine.drop_to_mark,
    ord("2"): _Machine.duplicate,
    # the memo
    ord("q"): lambda machine: machine.remember(machine._number(1)),
    ord("r"): lambda machine: machine.remember(machine._number(4)),
    0x94: _Machine.remember,
    ord("h"): lambda machine: machine.recall(machine._number(1)),
    ord("j"): lambda machine: machine.recall(machine._number(4)),
    # numbers
    ord("N"): lambda machine: machine.push(None),
    0x88: lambda machine: machine.push(True),
    0x89: lambda machine: machine.push(False),
    ord("K"): lambda machine: machine.integer(1),
    ord("M"): lambda machine: machine.integer(2),
    ord("J"): lambda machine: machine.integer(4, signed=True),
    ord("I"): _Machine.decimal,
    0x8A: lambda machine: machine.long(1),
    0x8B: lambda machine: machine.long(4),
    ord("G"): _Machine.real,
    # text and bytes
    ord("X"): lambda machine: machine.text(4),
    0x8C: lambda machine: machine.text(1),
    0x8D: lambda machine: machine.text(8),
    ord("T"): lambda machine: machine.text(4, "latin-1"),
    ord("U"): lambda machine: machine.text(1, "latin-1"),
    ord("B"): lambda machine: machine.payload(4),
    ord("C"): lambda machine: machine.payload(1),
    0x8E: lambda machine: machine.payload(8),
    0x96: lambda machine: machine.payload(8),
    # containers
    ord(")"): lambda machine: machine.push(()),
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("t"): lambda machine: machine.collect(tuple),
    ord("]"): lambda machine: machine.push([]),
    ord("l"): lambda machine: machine.collect(list),
    ord("a"): _Machine.append,
    ord("e"): _Machine.extend,
    ord("}"): lambda machine: machine.push({}),
    ord("d"): lambda machine: machine.collect(_items),
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    0x8F: lambda machine: machine.push(set()),
    0x90: _Machine.add,
    0x91: lambda machine: machine.collect(lambda found: frozenset(_keys(found))),
    # names
    ord("c"): _Machine.named,
    0x93: _Machine.named_on_stack,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
}
