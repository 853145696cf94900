"""A comparison as GitHub-flavoured Markdown, for a step summary or a comment: the sentence, a small table, and the rest
folded. GitHub drops a summary above 1 MiB as a whole, so parts that do not fit are left out, with a line about it.

Names come from other people's models. Characters in them that could be markup become character references, which
Markdown never takes for structure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from tensortap.core.causes import CAUSES
from tensortap.core.records import Comparison, Finding, display_name
from tensortap.report import pairs, unmatched
from tensortap.report.files.output import encoded
from tensortap.report.wording import born_in, clean, count, middle, plural, rough

__all__ = ["LIMIT", "code", "plain", "text", "write"]

LIMIT = 1 << 20
_ROWS_AROUND = 4
_MANY = 100
_NAME = 160  # characters of a name; a longer one is cut in the middle
_VERDICTS = {"match": "✅", "imprecise": "⚠️", "diverged": "❌", "incomparable": "⚠️"}
_HARMLESS = re.compile(r"[\w.\-/ ,:+=()*…≠×~±%]+")
_MARKUP = re.compile(r"[&<>\\`*\[\]|~$#@!^{}\"']|(?<!\w)_|_(?!\w)")


def write(comparison: Comparison, file: BinaryIO) -> None:
    file.writelines(encoded([text(comparison)]))


def text(comparison: Comparison, limit: int = LIMIT) -> str:
    """Return the page in `limit` bytes, with a line if parts are left out. Empty if the sentence does not fit."""
    cut = "\n*More was left out: the page would be too long.*\n"
    room = limit - len(cut.encode()) - 1
    parts: list[str] = []
    for part in _parts(comparison):
        room -= len(part.encode("utf-8", "backslashreplace"))
        if room < 0:
            parts.append(cut if parts else "")
            break
        parts.append(part)
    return "".join(parts)


def plain(words: object) -> str:
    """Return text that Markdown shows literally."""
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", clean(words))


def code(name: object) -> str:
    """Return a name as code: a plain span if nothing in it could be markup."""
    short = middle(clean(name), _NAME)
    return f"`{short}`" if _HARMLESS.fullmatch(short) and short == short.strip() else f"<code>{plain(short)}</code>"


# --- the parts, the most important first ---------------------------------------------------------------------------
def _parts(comparison: Comparison) -> list[str]:
    tally = " · ".join(words for _, words in pairs.tally(comparison.counts))
    runs = f"reference {code(comparison.reference)}, candidate {code(comparison.candidate)}"
    return [
        f"### {_VERDICTS.get(comparison.verdict, '❔')} {plain(comparison.sentence)}\n",
        f"\n**{plural(len(comparison), 'pair')}**: {plain(tally) or 'none'}\n\n{runs}\n",
        _first(comparison),
        _notes(comparison),
        _births(comparison),
        _unmatched(comparison),
        _failed(comparison),
        f"\n<sub>Allowed: {plain(comparison.policy)}</sub>\n",
    ]


def _first(comparison: Comparison) -> str:
    first = comparison.first
    cause = f"\nCause: {CAUSES[first.cause].label}\n" if first is not None else ""
    at = pairs.place(comparison, first)
    if at is None:
        return cause
    rows = pairs.rows_of(comparison, pairs.around(comparison, at, _ROWS_AROUND, _ROWS_AROUND))
    row = pairs.row_at(comparison, at)
    detail = pairs.detail(row)
    return "\n" + _table(rows) + cause + (f"\nThere: {plain(detail)}\n" if detail else "")


def _notes(comparison: Comparison) -> str:
    return "".join(["\n", *(f"- {plain(note)}\n" for note in comparison.notes)]) if comparison.notes else ""


def _births(comparison: Comparison) -> str:
    others = [birth for birth in comparison.births if birth != comparison.first]
    lines = [f"- {_birth(birth)}" for birth in others[:_MANY]]
    return _folded(f"{plural(len(others), 'other place')} where a wrong value was born", lines, len(others))


def _birth(birth: Finding) -> str:
    key, cause = birth.key, CAUSES[birth.cause].label
    where = f"{code(display_name(key.module))} {code(f'{key.kind} {key.path}')} {key.phase}, step {key.step}"
    if birth.container is not None:
        where += f", {plain(born_in(birth.cause, birth.container))}"
    if birth.difference is None or birth.status != "diverged":
        return f"{where}: {cause}, {plain(birth.status)}"
    return f"{where}: {cause}, relative error {'' if birth.difference.exact else 'about '}{rough(birth.rel_l2)}"


def _unmatched(comparison: Comparison) -> str:
    groups = unmatched.groups(comparison)
    lines = [f"- {plain(unmatched.words(group))}" for group in groups[:_MANY]]
    if unlisted := unmatched.unlisted(comparison):
        lines.append(f"- {unlisted}")
    total = comparison.counts.get("unmatched", 0)
    return _folded(f"{plural(total, 'record')} without a counterpart", lines, len(groups) + bool(unlisted))


def _failed(comparison: Comparison) -> str:
    """Return the first rows that failed, including those in the table above."""
    places = pairs.bad_rows(comparison)
    rows = pairs.rows_of(comparison, places[:_MANY]) if places else []
    return _folded(f"{plural(len(places), 'pair')} that failed", [_table(rows)] if rows else [], len(places), len(rows))


def _folded(title: str, lines: Sequence[str], total: int, shown_now: int | None = None) -> str:
    if not lines:
        return ""
    hidden = total - (len(lines) if shown_now is None else shown_now)
    more = f"\n\nand {count(hidden)} more" if hidden > 0 else ""
    body = "\n".join(lines)
    return f"\n<details><summary>{title}</summary>\n\n{body}{more}\n\n</details>\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| step | module | tensor | rel. error | allowed | max abs | at index | status |"]
    lines.append("|---:|---|---|---:|---:|---:|---|---|")
    for row in rows:
        names = (code(display_name(row["module"])), code(f"{row['kind']} {row['path']}"))
        numbers = (pairs.error(row), rough(pairs.value(row, "tolerance")), pairs.greatest(row), pairs.index(row))
        status = f"**{plain(pairs.status_text(row))}**" if row["birth"] else plain(pairs.status_text(row))
        lines.append(f"| {row['step']} | {' | '.join((*names, *map(plain, numbers), status))} |")
    return "\n".join(lines) + "\n"
