"""The parts of a page that need no script: header, verdict, notes, births, environment and definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensortap.core.records import Coverage, display_name
from tensortap.report.html.data.environment import Setting
from tensortap.report.html.markup import element, join, text
from tensortap.report.wording import count, plural

__all__ = ["banner", "births", "calls", "coverage", "definitions", "environment", "glyph", "header", "notes"]

_MOST_BIRTHS = 100
_MOST_COVERAGE = 500
_MOST_CALLS = 500

Birth = Mapping[str, Any]


def glyph(status: str, sign: str, words: str) -> str:
    """Return a sign with its word, so that nothing depends on colour alone."""
    return element("span", text(sign), class_=f"glyph {status}", aria_hidden="true") + f" {text(words)}"


def header(title: str, runs: Sequence[tuple[str, str, str]], counts: Sequence[str], policy: str) -> str:
    """Return the header. `runs` are (side, path, facts); `counts` are HTML."""
    sides = join(
        element("dt", text(side), class_=side) + element("dd", element("code", text(path)), f" {text(facts)}")
        for side, path, facts in runs
    )
    items = "".join(element("li", words) for words in counts)
    return element(
        "header",
        element("h1", text(title)),
        element("dl", sides, class_="runs"),
        element("ul", items, class_="counts"),
        element("p", text(policy), class_="policy"),
        id="header",
    )


def banner(verdict: str, sign: str, sentence: str, first: Birth | None, nonfinite: Birth | None) -> str:
    """Return the verdict. `nonfinite` is the birth of a NaN or Inf, shown in its own line."""
    parts = [element("p", glyph(verdict, sign, sentence), class_="sentence")]
    if first is not None:
        command = first["command"]
        copyable = [
            element("code", text(command), class_="command"),
            element("button", "copy", id="copy-command", type="button", hidden=True, data_command=command),
        ]
        further = element("button", "next birth ▸", id="next-birth", type="button", hidden=True)
        parts += [
            element("p", element("code", text(first["title"])), f" {text(first['text'])}", class_="facts"),
            element("p", *(copyable if command else ()), further),
        ]
    if nonfinite is not None:
        born = f"rank {nonfinite['rank']}: {nonfinite['text']}"
        said = (
            glyph("nonfinite", "✖", "The first NaN or Inf: ")
            + element("code", text(nonfinite["title"]))
            + f" {text(born)}"
        )
        parts.append(element("p", said, class_="nonfinite", data_row=nonfinite["row"]))
    return element("section", *parts, id="banner", data_verdict=verdict)


def notes(lines: Sequence[str]) -> str:
    return element("ul", *(element("li", text(line)) for line in lines), id="notes") if lines else ""


def births(title: str, found: Sequence[Birth], none: str) -> str:
    items = "".join(
        element("li", element("code", text(birth["title"])), f" {text(birth['text'])}", data_row=birth["row"])
        for birth in found[:_MOST_BIRTHS]
    )
    rest = len(found) - _MOST_BIRTHS
    more = element("p", f"and {count(rest)} more") if rest > 0 else ""
    body = element("ol", items) + more if found else element("p", text(none))
    return element("section", element("h2", text(title)), body, id="births")


def environment(settings: Sequence[Setting]) -> str:
    """Return a table with differing settings first."""
    if not settings:
        return ""
    single = settings[0].candidate is None
    names = ("", "", "run") if single else ("", "", "reference", "candidate")
    head = element("thead", element("tr", *(element("th", text(name), scope="col") for name in names)))
    rows = [
        element(
            "tr",
            element("td", text(each.group)),
            element("th", text(each.name), scope="row"),
            element("td", text(each.reference)),
            "" if each.candidate is None else element("td", ("≠ " if each.differs else "") + text(each.candidate)),
            class_="differs" if each.differs else None,
        )
        for each in settings
    ]
    differing = sum(each.differs for each in settings)
    said = "" if single else f": {plural(differing, 'difference')}" if differing else ": no difference"
    table = element("table", head, element("tbody", *rows))
    return element("section", element("h2", f"Environment{said}"), table, id="environment")


def definitions(terms: Mapping[str, str]) -> str:
    items = "".join(element("dt", text(term)) + element("dd", text(words)) for term, words in terms.items())
    return element("section", element("h2", "Meaning of each number"), element("dl", items), id="definitions")


def coverage(rows: Sequence[tuple[int, Coverage]]) -> str:
    """Return a table of modules that were not fully seen, with their rank."""
    if not rows:
        return ""
    names = ("rank", "module", "class", "status", "reason")
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    body = [
        element(
            "tr", *(element("td", text(cell)) for cell in (rank, display_name(c.module), c.cls, c.status, c.reason))
        )
        for rank, c in rows[:_MOST_COVERAGE]
    ]
    rest = len(rows) - _MOST_COVERAGE
    more = element("p", f"and {count(rest)} more") if rest > 0 else ""
    table = element("table", head, element("tbody", *body))
    return element("section", element("h2", "Modules that were not fully seen"), table, more, id="coverage")


def calls(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of modules that were called with plain arguments."""
    if not rows:
        return ""
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in ("module", "called with"))))
    body = [
        element("tr", element("td", text(display_name(module))), element("td", element("code", text(words))))
        for module, words in rows[:_MOST_CALLS]
    ]
    rest = len(rows) - _MOST_CALLS
    more = element("p", f"and {count(rest)} more") if rest > 0 else ""
    table = element("table", head, element("tbody", *body))
    return element("section", element("h2", "Plain arguments"), table, more, id="calls")
