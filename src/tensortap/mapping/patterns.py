"""Translates names of one side to names of the other, by patterns with wildcards or by regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

__all__ = ["matches", "translator", "wildcards"]

_WILD = re.compile(r"\*\*|\*")


def wildcards(pattern: str) -> list[str]:
    """Return the wildcards of a pattern in order: `*` matches within one part of a name, `**` across parts."""
    return _WILD.findall(pattern)


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name. `a.**` matches a and everything below it.

    >>> matches("layers.*.fc", "layers.3.fc"), matches("layers.*", "layers.3.fc"), matches("layers.**", "layers.3.fc")
    (True, False, True)
    """
    if pattern.endswith(".**") and name == pattern[:-3]:
        return True
    return _regex(pattern).fullmatch(name) is not None


def translator(pattern: str, other: str, regex: bool = False) -> Callable[[str], str | None]:
    """Return a function from names that match `pattern` to names in the form of `other`; None for other names.

    >>> translator("stages.*.conv", "layer*.conv1")("stages.2.conv")
    'layer2.conv1'
    >>> translator(r"stages\\.(\\d+)", r"layer\\1", regex=True)("stages.2")
    'layer2'
    """
    found = re.compile(pattern) if regex else _regex(pattern)

    def translate(name: str) -> str | None:
        match = found.fullmatch(name)
        if match is None:
            return None
        if regex:
            return match.expand(other)
        groups = iter(match.groups())
        return _WILD.sub(lambda _: next(groups), other)

    return translate


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    pieces, at = [], 0
    for wild in _WILD.finditer(pattern):
        pieces += [re.escape(pattern[at : wild.start()]), "(.*)" if wild[0] == "**" else r"([^.]*)"]
        at = wild.end()
    return re.compile("".join([*pieces, re.escape(pattern[at:])]))
