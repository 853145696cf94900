"""The file itself: a policy that lets nothing in or out, what is there at once, the data, and the scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tensortap.report.html.bundle import Bundle, bundle
from tensortap.report.html.data.blocks import Block
from tensortap.report.html.markup import element, text

__all__ = ["Page"]

_APP = '<main id="app"><noscript>Without scripts, only what is below can be shown.</noscript></main>'


@dataclass(frozen=True)
class Page:
    """A page before it is written."""

    kind: str
    """comparison | run | times"""
    title: str
    before: str
    """HTML above what scripts draw."""
    after: str
    """HTML below it."""
    head: Block
    blocks: Sequence[Block]
    """All others."""
    entry: str = "main"
    """The module that scripts start at."""

    def parts(self, served: bool = False) -> Iterator[str]:
        """The file, piece by piece. A served page leaves all blocks but the head to be asked for."""
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
    """Only the scripts and styles of this very page, by their hashes; no request to anywhere but its own server."""
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
