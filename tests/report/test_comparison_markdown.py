"""Markdown that no module name can change, within GitHub's size limit."""

from __future__ import annotations

import re

import pytest

from support import comparisons
from support.comparisons import BORN, comparison, row, wrong
from tensortap.core.records import Key, Unmatched
from tensortap.report.files.comparison_markdown import LIMIT, code, plain, text

HOSTILE = [
    "a|b",
    "`x`",
    "<script>alert(1)</script>",
    "a\n\n# b",
    "![x](http://y)",
    "</details>",
    "__init__",
    "$x$",
    "*a*",
]


def test_the_page() -> None:
    page = text(comparisons.diverged())
    assert page.startswith(f"### ❌ {BORN} (CoreAttention) is the first to diverge")
    assert "**372 pairs**: = 60 equal · ≈ 87 close · ✖ 225 diverged" in page
    line = f"| 3 | `{BORN}` | `output 0` | 4.1e-3 | 1.6e-5 | 0.012 | 0,3,17 | **✖ born here ◀** |"
    assert line in page.splitlines()
    assert "<summary>1 other place where a wrong value was born</summary>" in page
    assert "<summary>225 pairs that failed</summary>" in page
    assert "and 125 more" in page
    assert page.count("<details>") == page.count("</details>") == 2


def test_verdicts_have_their_signs() -> None:
    assert text(comparisons.matching()).startswith("### ✅ The runs match")
    assert text(comparisons.incomparable()).startswith("### ⚠️ Too little in common")
    assert "144 records without a counterpart" in text(comparisons.incomparable())
    assert "&#126;4.1e-3 ±7%" in text(comparisons.from_sketches())


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_never_markup(name: str) -> None:
    key = Key(3, 0, "forward", name, 0, "output", name)
    result = comparison(
        [row(name, path=name), wrong(name, birth=True, container=name), wrong("x", birth=True, container=name)],
        sentence=name,
        notes=[name],
        policy=name,
        candidate=name,
        unmatched=[Unmatched("candidate", key, 0, name)],
    )
    page = text(result)
    # Without the tags and spans that the page itself writes, nothing is left that could be markup.
    ours = re.sub(r"</?(details|summary|code|sub)>|\*\*|^#+ |`[\w.\-/ ,:+=()*…≠×~±%]+`|&#\d+;", "", page, flags=re.M)
    assert not re.search(r"[<>`\[\]$\\]", ours)
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.count("|") == 9
    assert page.count("</details>") == page.count("<details>")


def test_plain_names_stay_readable() -> None:
    assert code("layers.0.self_attn") == "`layers.0.self_attn`"
    assert code("a`b") == "<code>a&#96;b</code>"
    assert plain("self_attn of _x_") == "self_attn of &#95;x&#95;"
    assert len(code("x" * 10_000)) < 200


def test_it_stays_below_the_limit() -> None:
    names = [f"{'<|>' * 60}{n}" for n in range(2000)]
    rows = [wrong(name, path=name, birth=True) for name in names]
    unmatched = [
        Unmatched("candidate", Key(3, 0, "forward", f"u{n}.{n}x", 0, "output", "0"), 0, "") for n in range(3000)
    ]
    result = comparison(rows, unmatched=unmatched, notes=["x" * 1000] * 2000)
    page = text(result)
    assert len(page.encode()) < LIMIT
    assert "More was left out" in page
    assert len(text(comparisons.large(20_000)).encode()) < 40_000


def test_little_room_leaves_the_sentence_and_none_leaves_nothing() -> None:
    short = text(comparisons.diverged(), 400)
    assert short.startswith("### ❌")
    assert len(short.encode()) < 400
    assert text(comparisons.diverged(), 20) == ""
    assert text(comparisons.diverged(), -5) == ""
