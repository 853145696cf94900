"""Assets joined into one script: their order, their rules, and refused syntax."""

from __future__ import annotations

import re

import pytest

from tensortap.report.html.bundle import bundle, joined


def test_dependencies_come_first_and_once() -> None:
    modules = {
        "main": 'import { b } from "./b.js";\nimport {\n  c,\n} from "./c-d.js";\nb(c);\n',
        "b": 'import { c } from "./c-d.js";\nexport function b() { return c; }\n',
        "c-d": "const secret = 1;\nexport const c = secret;\nexport class D {}\nexport async function e() {}\n",
    }
    script = joined(modules)
    assert [found[1] for found in re.finditer(r"^const \$(\w+) = ", script, re.MULTILINE)] == ["c_d", "b", "main"]
    assert "return { c, D, e };" in script
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)


def test_a_dynamic_import_within_a_line_is_left_to_fail_in_the_browser() -> None:
    assert "import(" in joined({"main": "const x = () => import('y');"})


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ({"main": 'import { a } from "./gone.js";'}, "gone.js, which does not exist"),
        ({"main": 'import { a } from "./a.js";', "a": 'import { m } from "./main.js";'}, "circle"),
        ({"main": 'import x from "./a.js";', "a": ""}, "import x from"),
        ({"main": 'import "./a.js";', "a": ""}, 'import "./a.js"'),
        ({"main": 'import { a as b } from "./a.js";', "a": "export const a = 1;"}, "a as b"),
        ({"main": "export default 3;"}, "export default"),
        ({"main": "const a = 1;\nexport { a };"}, "export { a }"),
    ],
)
def test_modules_that_cannot_be_joined_are_refused(modules: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        joined(modules)


def test_the_assets_that_come_with_the_package_can_be_joined() -> None:
    found = bundle()
    assert found.style
    assert any("uPlot" in script for script in found.scripts)
    assert found.scripts[-1].startswith('"use strict";')
    for script in found.scripts:
        assert "</script" not in script.lower()
