"""Check that tensortap works with the lowest versions that pyproject.toml allows: `make floors`.

Installs exactly those versions, without a framework, into a temporary virtual environment, writes two small runs, and
runs every verb that needs nothing more. Needs a package index and about two minutes, so it is no part of the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
VERBS = ("bench", "check-hooks", "compare", "demo", "export", "replay", "report", "show", "view")
RUNS = """
from pathlib import Path
from made_runs import chain, write
write(Path("a"), chain())
write(Path("b"), chain(off={"fc2": 0.5}))
"""


def pins() -> Iterator[str]:
    """Each dependency at its floor."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    for dependency in dependencies:
        floor = re.fullmatch(r"([\w-]+)>=([\w.]+)(;.*)?", dependency.replace(" ", ""))
        if floor is None:
            raise SystemExit(f"{dependency!r} in pyproject.toml is not of the form name>=version")
        yield f"{floor[1]}=={floor[2]}{floor[3] or ''}"


def commands() -> Iterator[tuple[int, list[str]]]:
    """Exit codes, and the commands that should end with them."""
    yield 0, ["--help"]
    yield from ((0, [verb, "--help"]) for verb in VERBS)
    yield 0, ["show", "a", "--module", "fc1", "--kind", "output"]
    yield 1, ["compare", "a", "b"]
    yield 0, ["compare", "a", "a", "--rtol", "0.1", "--kind", "output", "--kind", "input"]
    yield 2, ["compare", "a"]
    yield 2, ["compare", "a", "nowhere"]
    yield 1, ["report", "a", "b", "-o", "page.html"]
    for to, out in (("hdf5", "a.hdf5"), ("npz", "a.npz"), ("npy", "a-npy"), ("safetensors", "a-safetensors")):
        yield 0, ["export", "a", "--to", to, "--out", out]
        yield 0, ["compare", "a", out]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="tensortap-floors-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv/bin/python"
        wanted = list(pins())
        print("installing", *wanted)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--only-binary", ":all:", *wanted], check=True)
        subprocess.run([*pip, "--no-deps", ROOT], check=True)
        subprocess.run([python, "-c", RUNS], cwd=place, env={"PYTHONPATH": str(ROOT / "tests/compare")}, check=True)
        failed = 0
        for code, command in commands():
            done = subprocess.run([python, "-m", "tensortap", *command], cwd=place, capture_output=True, text=True)
            wrong = done.returncode != code or "Traceback" in done.stderr
            print("FAILED" if wrong else "ok    ", "tensortap", *command)
            if wrong:
                failed += 1
                print(f"  ended with {done.returncode} instead of {code}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
