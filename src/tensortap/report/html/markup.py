"""Text as HTML. Everything except the tags written here passes through `text`; names from models are hostile."""

from __future__ import annotations

import html
from collections.abc import Iterable

from tensortap.report.wording import clean

__all__ = ["element", "join", "text"]


def text(words: object) -> str:
    """Return escaped text without control characters; it is safe in an attribute as well."""
    return html.escape(clean(words), quote=True)


def element(tag: str, *inside: str, **attributes: object) -> str:
    """Return an element around HTML. An attribute that is None or False is left out, one that is True has no value.
    In the name of an attribute, a trailing underscore is dropped and others become dashes: `class_`, `data_row`.

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
