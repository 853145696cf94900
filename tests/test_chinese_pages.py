"""The Chinese pages stay in step with the package: their code runs, their commands end as they say."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from support.doc_pages import DOCS, blocks
from tensortap.cli import main
from tensortap.mapping.rules_file import read_rules

ROOT = DOCS.parent
PAGES = [ROOT / "README.zh-CN.md", *sorted((DOCS / "zh-CN").glob("*.md"))]
INSTALLING = "pip install"
EXIT_CODE = re.compile(r"退出码 (\d)")


def pages() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages()
@pytest.mark.filterwarnings("ignore")  # the blocks are scripts, for which a warning is no error
def test_the_code_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ""
    for at, (language, code) in enumerate(blocks(page)):
        if language == "python":
            (tmp_path / f"block_{at}.py").write_text(code)
            capsys.readouterr()
            runpy.run_path(f"block_{at}.py", run_name="__main__")
            printed = capsys.readouterr().out
        elif language == "text":
            assert printed == code
        elif language == "toml":
            (tmp_path / "rules.toml").write_text(code)
            assert read_rules(tmp_path / "rules.toml").modules
        else:
            assert language == "bash", f"{page.name} has a block of {language!r} that nothing checks"
            for line in filter(None, code.splitlines()):
                _run_command(line, monkeypatch)


@pages()
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert links and all((page.parent / link).exists() for link in links if "://" not in link)


@pages()
def test_each_page_and_its_english_one_link_to_each_other(page: Path) -> None:
    english = ROOT / "README.md" if page.parent == ROOT else DOCS / page.name
    for here, there in ((page, english), (english, page)):
        head = "\n".join(here.read_text().splitlines()[:5])
        links = re.findall(r"\]\(([^)]+)\)", head)
        assert there.resolve() in [(here.parent / link).resolve() for link in links]


def _run_command(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one line of a shell block, which ends with 0 unless its comment says otherwise."""
    words = shlex.split(line, comments=True)
    if line.startswith(INSTALLING):
        return
    assert words[0] == "tensortap"
    said = EXIT_CODE.search(line.partition("#")[2])
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == int(said[1] if said else 0), line
