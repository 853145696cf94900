"""Join the assets for a single page: styles one after the other, modules as one script.

No tool but Python is needed, because the modules use a small dialect (docs/report-data.md). Other syntax is refused
with its file and line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["Bundle", "bundle", "joined"]

_COMMON_STYLES = ("page.css", "views.css")
_IMPORT = re.compile(
    r'^import\s*\{(\s*[\w$]+(?:\s*,\s*[\w$]+)*\s*,?\s*)\}\s*from\s*"\./([\w-]+)\.js";?[ \t]*$', re.MULTILINE
)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function\*?|const|let|class) +([\w$]+))", re.MULTILINE)
_LEFT_OVER = re.compile(r"^\s*(?:import\b(?!\s*\()|export\b).*$", re.MULTILINE)
_ENDS_SCRIPT = re.compile(r"</script|<!--", re.IGNORECASE)


@dataclass(frozen=True)
class Bundle:
    """The contents of `<style>` and, in this order, of the `<script>` elements."""

    style: str
    scripts: tuple[str, ...]


@cache
def bundle(entry: str = "main") -> Bundle:
    """Return the assets of a page whose scripts start at `entry`.

    The style sheet of the same name follows the common ones. Only `main` needs the third-party code.
    """
    folder = files("tensortap.report.html") / "assets"
    vendor = _texts(folder / "vendor") if entry == "main" else {}
    own = _texts(folder)
    modules = {name.removesuffix(".js"): text for name, text in own.items() if name.endswith(".js")}
    styles = [text for name, text in vendor.items() if name.endswith(".css")]
    styles += [own[name] for name in (*_COMMON_STYLES, f"{entry}.css") if name in own]
    scripts = [text for name, text in vendor.items() if name.endswith(".js")]
    scripts.append(joined(modules, entry))
    for script in scripts:
        if found := _ENDS_SCRIPT.search(script):
            raise ValueError(f"a script contains {found[0]!r}, which would end it within the page")
    return Bundle("\n".join(styles), tuple(scripts))


def joined(modules: dict[str, str], entry: str = "main") -> str:
    """Join ES modules into one script, each as a function that returns its exports; dependencies first.

    >>> print(joined({"main": 'import { one } from "./a.js";\\nalert(one);', "a": "export const one = 1;"}))
    "use strict";
    const $a = (() => {
    const one = 1;
    return { one };
    })();
    const $main = (() => {
    const { one } = $a;
    alert(one);
    return {  };
    })();
    """
    done: dict[str, str] = {}

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in done:
            return
        if name in above:
            raise ValueError(f"modules import each other in a circle: {' → '.join((*above, name))}")
        if name not in modules:
            raise ValueError(f"{above[-1] if above else 'the page'} imports {name}.js, which does not exist")
        for found in _IMPORT.finditer(modules[name]):
            visit(found[2], (*above, name))
        done[name] = _as_function(name, modules[name])

    visit(entry, ())
    return "\n".join(['"use strict";', *done.values()])


def _as_function(name: str, source: str) -> str:
    exported = [found[1] for found in _EXPORT.finditer(source)]
    body = _EXPORT.sub("", _IMPORT.sub(lambda m: f"const {{{m[1]}}} = {_variable(m[2])};", source))
    if left := _LEFT_OVER.search(body):
        raise ValueError(f"{name}.js: {left[0].strip()!r} is not in the supported dialect")
    return f"const {_variable(name)} = (() => {{\n{body.strip()}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _variable(module: str) -> str:
    return "$" + module.replace("-", "_")


def _texts(folder: Traversable) -> dict[str, str]:
    return {
        entry.name: entry.read_text(encoding="utf-8").replace("\r\n", "\n")  # as browsers hash it
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith((".js", ".css"))
    }
