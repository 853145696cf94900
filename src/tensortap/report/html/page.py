"""The file itself: a policy that blocks all requests, the static parts, the data, and the scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tensortap.report.html.bundle import Bundle, bundle
from tensortap.report.html.data.blocks import DataBlock
from tensortap.report.html.markup import element, text

__all__ = ["Page"]

_APP = '<main id="app"><noscript>Plots and tables need scripts. The parts below do not.</noscript></main>'


@dataclass(frozen=True)
class Page:
    """The parts of a page."""

    kind: str
    """comparison | run | times"""
    title: str
    before: str
    """HTML above the part that scripts draw."""
    after: str
    """HTML below it."""
    head: DataBlock
    blocks: Sequence[DataBlock]
    """All others."""
    entry: str = "main"
    """The module that starts the scripts."""

    def parts(self, served: bool = False) -> Iterator[str]:
        """Yield the file in pieces. A served page contains only the head; scripts request the other blocks."""
        assets = bundle(self.entry)
        yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(assets, served)}">\n'
        yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        yield f'<meta name="color-scheme" content="light dark">\n{element("title", text(self.title))}\n'
        yield f"<style>{assets.style}</style>\n</head>\n"
        yield f'<body class="{self.kind}" data-page="{self.kind}"{" data-served" if served else ""}>\n'
        yield f"{self.before}\n"
        yield f"{_APP}\n"
        yield f"{self.after}\n{self.head.element()}\n"
        if not served:
            for block in self.blocks:
                yield f"{block.element()}\n"
        for script in assets.scripts:
            yield f"<script>{script}</script>\n"
        yield "</body>\n</html>\n"


def _policy(assets: Bundle, served: bool) -> str:
    """Allow only the scripts and styles of this page, by their hashes, and no request except to its own server."""
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(_hash(script) for script in assets.scripts) or "'none'",
        "style-src": _hash(assets.style),
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    if served:
        rules["connect-src"] = "'self'"
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
