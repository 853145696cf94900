"""Text into HTML. Everything that is not a tag written here goes through `text`; names from models are hostile."""

from __future__ import annotations

import html
from collections.abc import Iterable

from tensortap.report.wording import clean

__all__ = ["element", "join", "text"]


def text(words: object) -> str:
    """Words as they are shown: no markup in them, nothing invisible, safe in an attribute, too."""
    return html.escape(clean(words), quote=True)


def element(tag: str, *inside: str, **attributes: object) -> str:
    """An element around what is HTML already. An attribute that is None or False is left out, one that is True has no
    value; a trailing underscore is dropped, and others are dashes: `class_`, `data_row`.

    >>> element("li", text("a < b"), data_row=3)
    '<li data-row="3">a &lt; b</li>'
    """
    parts = [tag]
    for name, value in attributes.items():
        known = name.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(known)
        elif value is not None and value is not False:
            parts.append(f'{known}="{text(value)}"')
    return f"<{' '.join(parts)}>{''.join(inside)}</{tag}>"


def join(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)
