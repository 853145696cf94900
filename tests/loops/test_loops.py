"""Ten training programs that know nothing of tensortap: each is recorded unchanged, repeats, and shows its mistake."""

from __future__ import annotations

import importlib
import runpy
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

import tensortap
from tensortap.launch.settings import LaunchSettings
from tensortap.launch.startup import watching

PROGRAMS = Path(__file__).parent / "programs"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Loop:
    """A program, and what a recording of it must show."""

    program: str
    model: str
    """The class of the model that is trained, or called."""
    steps: int
    micros: int
    sentence: str
    """Part of the verdict about the mistake."""
    package: str
    needs: str = ""


LOOPS = [
    Loop(
        "trainer",
        "GPT2LMHeadModel",
        4,
        2,
        "part in transformer.h.1.ln_2 (LayerNorm): in step 0",
        "torch",
        "transformers",
    ),
    Loop("lightning_loop", "AutoEncoder", 8, 2, "part in decoder.1 (LeakyReLU): in step 0", "torch", "lightning"),
    Loop("accelerate_loop", "Sequential", 8, 2, "part in 1 (GELU): in step 0", "torch", "accelerate"),
    Loop("nanogpt", "GPT", 3, 2, "part in (root) (GPT): in step 0, its output 0", "torch"),
    Loop("gan", "Models", 4, 2, "part in critic.1 (LeakyReLU): in step 0", "torch"),
    Loop("distillation", "Sequential", 4, 1, "check the loss and its scaling", "torch"),
    Loop("growing", "Growing", 5, 1, "in step 2", "torch"),
    Loop("hapi", "Sequential", 8, 1, "part in 1 (LayerNorm): in step 0", "paddle"),
    Loop("generate", "LlamaForCausalLM", 1, 4, "the own code of model.layers.1.self_attn", "torch", "transformers"),
]


def execute(loop: Loop, folder: Path, name: str, mistake: bool = False) -> bytes:
    """Run a program in this process, recorded unless it is named "plain", and return what it wrote."""
    result = folder / f"{name}.result"
    arguments = [str(PROGRAMS / f"{loop.program}.py"), str(result), *(["mistake"] if mistake else [])]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", arguments)
        patch.setenv("BACKEND", "aot_eager")  # compiles faster than inductor, through the same front end
        if name == "plain":
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            with watching(LaunchSettings(str(folder / name)), loop.package):
                runpy.run_path(arguments[0], run_name="__main__")
    return result.read_bytes()


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.program)
def test_an_unchanged_program_is_recorded(loop: Loop, tmp_path: Path) -> None:
    for package in (loop.package, loop.needs):
        if package:
            pytest.importorskip(package)
    importlib.import_module(loop.package)
    plain = execute(loop, tmp_path, "plain")
    assert execute(loop, tmp_path, "a") == plain, "the recording changed the training"
    assert execute(loop, tmp_path, "b") == plain
    execute(loop, tmp_path, "wrong", mistake=True)

    run = tensortap.open(tmp_path / "a")
    assert run.info["model"] == loop.model and run.finished
    assert run.steps == list(range(loop.steps))
    assert {record.key.micro for record in run.records()} == set(range(loop.micros))
    repeated = tensortap.compare(tmp_path / "a", tmp_path / "b")
    assert repeated.verdict == "match" and "bit for bit" in repeated.sentence
    wrong = tensortap.compare(tmp_path / "a", tmp_path / "wrong")
    assert wrong.verdict == "diverged" and loop.sentence in wrong.sentence
    assert {each.name for each in tmp_path.iterdir() if each.is_dir()} == {"a", "b", "wrong"}


def test_nothing_remains_in_the_framework(tmp_path: Path) -> None:
    import torch

    before = (
        [vars(torch.nn.Module)[name] for name in ("_call_impl", "compile")],
        vars(torch.optim.Optimizer)["__init__"],
    )
    execute(LOOPS[-1], tmp_path, "a")
    after = [vars(torch.nn.Module)[name] for name in ("_call_impl", "compile")], vars(torch.optim.Optimizer)["__init__"]
    assert before == after


def test_ranks_under_torchrun(tmp_path: Path) -> None:
    """Both ways to start: the launcher under `tensortap run`, and `tensortap run` under the launcher."""
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    program = str(PROGRAMS / "ddp.py")
    run = [sys.executable, "-m", "tensortap", "run", "--out"]
    outputs = {
        "plain": _call_ranks([*torchrun, program, "plain.result"], tmp_path),
        "a": _call_ranks([*run, "a", *torchrun, program, "a.result"], tmp_path, "a"),
        "b": _call_ranks([*torchrun, "-m", "tensortap", "run", "--out", "b", program, "b.result"], tmp_path, "b"),
        "wrong": _call_ranks([*run, "wrong", *torchrun, program, "wrong.result", "mistake"], tmp_path, "wrong"),
    }
    for rank in ("0", "1"):
        plain, first, second = ((tmp_path / f"{name}.result.{rank}").read_bytes() for name in ("plain", "a", "b"))
        assert plain == first == second
    assert outputs["a"].count("tensortap: ") == 1, outputs["a"]
    run_a = tensortap.open(tmp_path / "a")
    assert run_a.ranks == [0, 1] and run_a.steps == [0, 1, 2] and run_a.info["model"] == "Sequential"
    assert tensortap.compare(tmp_path / "a", tmp_path / "b").verdict == "match"
    wrong = tensortap.compare(tmp_path / "a", tmp_path / "wrong")
    assert "part in 1 (Softplus): in step 0" in wrong.sentence and "rank 1" in wrong.sentence


def _call_ranks(command: list[str], folder: Path, out: str = "") -> str:
    """Call a program of several ranks, again if gloo itself aborts, as it does now and then."""
    for _ in range(3):
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if "terminate called without an active exception" not in ended.stderr:
            break
        if out:
            shutil.rmtree(folder / out, ignore_errors=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr
