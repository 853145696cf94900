"""Reads a report's page back, as its scripts do: docs/report-data.md in Python."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np

TYPES = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f32": "<f4", "f64": "<f8"}
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Parsed(HTMLParser):
    """Tags, attributes and texts, as a browser would see them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self._inside: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._inside[-1] if self._inside else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif inside == "style":
            self.styles[-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def element(self, id: str) -> dict[str, str | None]:
        return next(attributes for _, attributes in self.tags if attributes.get("id") == id)

    @property
    def policy(self) -> dict[str, list[str]]:
        told = next(a["content"] for tag, a in self.tags if tag == "meta" and "http-equiv" in a)
        rules = [rule.split() for rule in str(told).split(";")]
        return {name: values for name, *values in rules}


class ReadPage:
    """A page and its data."""

    def __init__(self, page: str) -> None:
        self.html = page
        self.parsed = Parsed(page)
        self.blocks = {
            str(attributes["id"]): base64.b64decode(text, validate=True)
            for attributes, text in self.parsed.scripts
            if attributes.get("type") == "application/gzip;base64"
        }
        self.head = self.json("head")

    def json(self, block: str) -> Any:
        return json.loads(gzip.decompress(self.blocks[block]))

    def column(self, name: str) -> Any:
        return column(self.head, {key: gzip.decompress(data) for key, data in self.blocks.items()}, name)

    def words(self, name: str) -> list[str]:
        """A column of codes in words."""
        entry = next(entry for entry in self.head["columns"] if entry["name"] == name)
        known = self.head["modules"]["name"] if name == "module" else self.head["words"][entry["words"]]
        return [known[code] for code in self.column(name).tolist()]


def column(head: Any, raw: dict[str, bytes], name: str) -> Any:
    """Undo shuffle, delta and XOR, in this order."""
    entry = next(entry for entry in head["columns"] if entry["name"] == name)
    kind = np.dtype(TYPES[entry["type"]])
    data = np.frombuffer(raw[f"column-{name}"], np.uint8)
    assert data.size == head["rows"] * kind.itemsize
    if entry["shuffled"]:
        data = np.ascontiguousarray(data.reshape(kind.itemsize, head["rows"]).T).reshape(-1)
    word = np.dtype(f"<u{kind.itemsize}")
    bits = data.view(word)
    if entry["delta"]:
        bits = np.cumsum(bits, dtype=word)
    if entry["xor"] is not None:
        bits = bits ^ column(head, raw, entry["xor"]).view(word)
    return bits.view(kind)


def number(value: Any) -> float:
    """A number of a JSON document, as `Number(...)` reads it."""
    return _WORDS[value] if isinstance(value, str) else float(value)


def hashed(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


def outside(page: str) -> list[str]:
    """Attributes that would make a browser leave the file."""
    return re.findall(r"<[^>]*\s(?:src|href|action|data|poster|srcset)\s*=", page)
