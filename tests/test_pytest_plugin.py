"""The assertion and the fixture of the pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tensortap
from support import comparisons
from tensortap.errors import RunExists
from tensortap.pytest_plugin import assert_runs_match, tensortap_capture  # noqa: F401 - works without the entry point


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(reference: str, candidate: str, **options: Any) -> Any:
        return getattr(comparisons, reference)()

    monkeypatch.setattr(tensortap, "compare", compare, raising=False)


@pytest.mark.usefixtures("answers")
def test_runs_that_match_give_their_comparison() -> None:
    assert assert_runs_match("matching", "b", rtol=1e-3).verdict == "match"


@pytest.mark.usefixtures("answers")
def test_a_divergence_fails_in_the_manner_of_assert_close() -> None:
    with pytest.raises(AssertionError) as failed:
        assert_runs_match("diverged", "b", rtol=1e-3, rename=["a b=c"], modules="layers.*", until_first=True)
    assert str(failed.value).splitlines() == [
        "The runs do not match!",
        "",
        comparisons.SENTENCE,
        "",
        "First divergence: layers.7.self_attn.core · output 0 · forward · step 3 · rank 0",
        "Mismatched elements: 129 / 2,048 (6.3%)",
        "Greatest absolute difference: 0.01230 at index (0, 3, 17) (1.262 instead of 1.25)",
        "Relative error: 4.1e-3 (up to 1.6e-5 allowed: float32, depth 9)",
        "Its inputs: matched",
        "",
        "Pairs that failed: 225 / 372 (60.5%)",
        f"Allowed: {comparisons.POLICY}",
        "Note: --noise runs/a2, a second run of the reference, measures what differs without any cause",
        "",
        "To see more: tensortap compare runs/a runs/b --rename 'a b=c' --module 'layers.*' --rtol 0.001 "
        "--until-first -v",
    ]


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(("rules", "told"), [("rules.toml", " --map rules.toml -v"), ({"version": 1}, "runs/b -v")])
def test_rules_from_a_file_appear_in_the_command(rules: object, told: str) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_runs_match("diverged", "b", mapping=rules)
    assert str(failed.value).endswith(told)


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize("noise", ["runs/a2", Path("runs/a2"), ["runs/a2"], (Path("runs/a2"),)])
def test_noise_appears_as_one_option(noise: object) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_runs_match("diverged", "b", noise=noise)
    assert str(failed.value).endswith("tensortap compare runs/a runs/b --noise runs/a2 -v")


@pytest.mark.usefixtures("answers")
@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("with_nan", "Not finite: in the code of layers.7.self_attn, between the modules it calls; candidate: 12 NaN"),
        ("from_sketches", "Relative error: ~4.1e-3 ±7% (up to 1.6e-5 allowed"),
        ("incomparable", "The runs cannot be compared!"),
        ("incomparable", "∅ candidate only: decoder.blocks.*.attention.query (24 tensors)"),
    ],
)
def test_other_failures(scene: str, words: str) -> None:
    with pytest.raises(AssertionError) as failed:
        assert_runs_match(scene, "b")
    assert words in str(failed.value)


def test_capture_closes_what_a_test_left_open(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    test = tmp_path / "test_left_open.py"
    test.write_text(
        "import torch\n"
        "from tensortap.pytest_plugin import tensortap_capture\n"
        "model = torch.nn.Linear(2, 2)\n"
        "def test_one(tensortap_capture):\n"
        "    tap = tensortap_capture(model, kinds=('output',))\n"
        "    model(torch.ones(1, 2))\n"
        "    tap.step()\n"
        "def test_two():\n"
        "    assert not model._forward_hooks\n"
    )
    folder = tmp_path / "base"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder), str(test)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout
    run = folder / "test_one0" / "run"
    assert tensortap.open(run).finished
    assert torch is not None


def test_a_golden_run_is_made_compared_and_missed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    test = tmp_path / "test_golden.py"
    test.write_text(
        "import os, torch\n"
        "def test_numbers(tensortap_golden):\n"
        "    torch.manual_seed(0)\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LeakyReLU(float(os.environ['SLOPE'])))\n"
        "    with tensortap_golden(model, kinds=('input', 'output')):\n"
        "        model(-torch.ones(1, 2))\n"
    )

    sessions = [["0.1"], ["0.1", "--tensortap-update"], ["0.1"], ["0.3"]]
    code = (  # one process for all of them: a new one imports torch again
        "import os, sys, pytest\n"
        f"for slope, *options in {sessions}:\n"
        "    os.environ['SLOPE'] = slope\n"
        f"    ended = pytest.main(['-q', '-p', 'no:cacheprovider', {str(test)!r}, *options])\n"
        "    print('ended with', int(ended))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    missing, made, same, other = said.split("ended with")[:-1]
    codes = [int(part.split()[0]) for part in said.split("ended with")[1:]]
    assert codes == [1, 0, 0, 1], said
    assert "--tensortap-update`, then commit the folder" in missing and "1 passed" in made and "1 passed" in same
    assert tensortap.open(tmp_path / "golden" / "test_numbers").finished
    assert "part in 1 (LeakyReLU)" in other


def test_a_golden_run_of_a_hundred_modules_is_small(tmp_path: Path) -> None:
    test = tmp_path / "test_size.py"
    test.write_text(
        "import pytest, torch\n"
        "from torch import nn\n"
        "@pytest.mark.parametrize('trains', [False, True])\n"
        "def test_size(tensortap_golden, trains):\n"
        "    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(25)))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 1e-2)\n"
        "    given = {'optimizer': optimizer} if trains else {}\n"
        "    with tensortap_golden(model, **given) as tap:\n"
        "        for _ in range(3):\n"
        "            model(torch.randn(4, 8)).square().mean().backward()\n"
        "            optimizer.step()\n"
        "            if not given:\n"
        "                tap.step()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), "--tensortap-update"]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    runs = list((tmp_path / "golden").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert 100_000 < sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) <= 500_000


def test_capture_into_the_tests_own_folder(tensortap_capture: Any, tmp_path: Path) -> None:  # noqa: F811
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    for name in ("a", "b"):
        with tensortap_capture(model, name, kinds=("output",)) as tap:
            model(torch.ones(1, 2))
            tap.step()
        assert tap.path == tmp_path / name
    with pytest.raises(RunExists):
        tensortap_capture(model, "a")


def test_captures_without_a_name_are_numbered(tensortap_capture: Any, tmp_path: Path) -> None:  # noqa: F811
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    paths = []
    for _ in range(3):
        with tensortap_capture(model, kinds=("output",)) as tap:
            model(torch.ones(1, 2))
        paths.append(tap.path)
    assert paths == [tmp_path / "run", tmp_path / "run-2", tmp_path / "run-3"]
    assert all(len(list(tensortap.open(path))) == 1 for path in paths) and not model._forward_hooks
    with tensortap_capture(model, overwrite=True) as tap:
        assert tap.path == tmp_path / "run"


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, tensortap.pytest_plugin\n"
        "heavy = {'torch', 'paddle', 'pyarrow', 'numba', 'safetensors', 'rich', 'typer'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.strip() == ""
