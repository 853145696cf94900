"""Install tensortap into a clean environment without a framework, and run every verb that needs nothing more.

    python tests/support/clean_install.py floors   the lowest versions that pyproject.toml allows
    python tests/support/clean_install.py wheel    the built wheel with the newest versions

`make floors` and `make wheel` call this. It needs a package index and about two minutes, so it is no part of pytest.
"""

from __future__ import annotations

import os
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
VERBS = (
    *("bench", "check-hooks", "compare", "demo", "export", "health", "replay", "report", "run", "show"),
    *("times", "upload", "view", "watch"),
)
RUNS = """
from pathlib import Path
from made_runs import chain, write
write(Path("a"), chain())
write(Path("b"), chain(off={"fc2": 0.5}))
"""


def pins() -> Iterator[str]:
    """Yield each dependency of pyproject.toml at its lowest version."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    for dependency in dependencies:
        floor = re.fullmatch(r"([\w-]+)>=([\w.]+)(;.*)?", dependency.replace(" ", ""))
        if floor is None:
            raise SystemExit(f"{dependency!r} in pyproject.toml is not of the form name>=version")
        yield f"{floor[1]}=={floor[2]}{floor[3] or ''}"


def commands() -> Iterator[tuple[int, list[str]]]:
    """Yield commands with the exit codes they should end with."""
    yield 0, ["--help"]
    yield from ((0, [verb, "--help"]) for verb in VERBS)
    yield 0, ["show", "a", "--module", "fc1", "--kind", "output"]
    yield 0, ["health", "a"]
    yield 1, ["compare", "a", "b"]
    yield 0, ["compare", "a", "a", "--rtol", "0.1", "--kind", "output", "--kind", "input"]
    yield 2, ["compare", "a"]
    yield 2, ["compare", "a", "nowhere"]
    yield 1, ["report", "a", "b", "-o", "page.html"]
    yield 0, ["report", "a", "-o", "run.html"]
    for to, out in (("hdf5", "a.hdf5"), ("npz", "a.npz"), ("npy", "a-npy"), ("safetensors", "a-safetensors")):
        yield 0, ["export", "a", "--to", to, "--out", out]
        yield 0, ["compare", "a", out]


def install_floors(python: Path, place: Path) -> None:
    wanted = list(pins())
    print("installing", *wanted)
    _pip(python, "--only-binary", ":all:", *wanted)
    _pip(python, "--no-deps", str(ROOT))


def install_wheel(python: Path, place: Path) -> None:
    command = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "-w", place, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = place.glob("tensortap-*.whl")
    print("installing", wheel.name)
    _pip(python, str(wheel))


def _pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


INSTALL = {"floors": install_floors, "wheel": install_wheel}


def main(how: str) -> int:
    with tempfile.TemporaryDirectory(prefix=f"tensortap-{how}-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv/bin/python"
        INSTALL[how](python, place)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        writer = {**environment, "PYTHONPATH": str(ROOT / "tests/compare")}
        subprocess.run([python, "-c", RUNS], cwd=place, env=writer, check=True)
        failed = 0
        for code, command in commands():
            done = subprocess.run(
                [python.with_name("tensortap"), *command], cwd=place, env=environment, capture_output=True, text=True
            )
            wrong = done.returncode != code or "Traceback" in done.stderr
            print("FAILED" if wrong else "ok    ", "tensortap", *command)
            if wrong:
                failed += 1
                print(f"  ended with {done.returncode} instead of {code}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([name] for name in INSTALL):
        raise SystemExit(f"usage: clean_install.py {' | '.join(INSTALL)}")
    sys.exit(main(sys.argv[1]))
