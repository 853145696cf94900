"""Hooks on modules that are removed for a while, in steps that are not recorded."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.capture.watching.module_hooks import HookedModule, ModuleHooks
from tensortap.frameworks.torch.framework import Torch

TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def tables(module: nn.Module) -> list[dict[int, Any]]:
    return [dict(getattr(module, name)) for name in TABLES]


@pytest.fixture
def seen() -> list[str]:
    return []


@pytest.fixture
def hooks(seen: list[str]) -> tuple[nn.Linear, ModuleHooks]:
    module, hooks = nn.Linear(2, 2), ModuleHooks(Torch())
    hooks.update([HookedModule("part", module, lambda *_: seen.append("before"), lambda _: seen.append("after"))])
    return module, hooks


def test_hooks_return_to_their_tables(hooks: tuple[nn.Linear, ModuleHooks], seen: list[str]) -> None:
    module, placed = hooks
    first = tables(module)
    assert all(len(table) == 1 for table in first)
    for _ in range(3):
        placed.detach(with_root=True)
        module(torch.zeros(1, 2))
        assert not any(tables(module)) and not seen
        placed.attach()
        assert tables(module) == first
        module(torch.zeros(1, 2))
        assert seen == ["before", "after"]
        seen.clear()
    placed.remove()
    assert not any(tables(module))
    placed.detach(with_root=True)
    placed.attach()
    assert not any(tables(module)), "what was removed for good stays away"


def test_a_call_that_raises_is_seen_after_hooks_returned(hooks: tuple[nn.Linear, ModuleHooks], seen: list[str]) -> None:
    module, placed = hooks
    placed.detach(with_root=True)
    placed.attach()
    with pytest.raises(RuntimeError):
        module(torch.zeros(1, 3))
    assert seen == ["before", "after"]


def test_replaced_tables_get_new_hooks(hooks: tuple[nn.Linear, ModuleHooks], seen: list[str]) -> None:
    module, placed = hooks
    placed.detach(with_root=True)
    module._forward_hooks = OrderedDict()  # as some libraries do, to drop all hooks
    placed.attach()
    module(torch.zeros(1, 2))
    assert seen == ["before", "after"]


def test_steps_that_are_left_out_have_no_hooks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with tt.capture(model, tmp_path / "run", steps=range(0, 9, 3)) as tap:
        for step in range(9):
            model(torch.ones(3, 2)).sum().backward()
            assert any(tables(model[1])) == (step % 3 == 0)
            tap.step()
    assert sorted({record.key.step for record in tap.run}) == [0, 3, 6]
    assert len([record for record in tap.run if record.key.module == "1"]) == 3 * 3
    assert not any(tables(model[1]))


@pytest.mark.parametrize("compiles", [False, True])
def test_steps_before_the_first_recorded_one_have_no_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    """Code that was compiled with the hooks would be compiled again without them, so there they stay."""
    monkeypatch.setattr(Torch, "uses_compiler", lambda _: compiles)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    hooked = []
    with tt.capture(model, tmp_path / "run", steps=[3]) as tap:
        for _ in range(5):
            hooked.append(any(any(tables(module)) for module in model.modules()))
            model(torch.zeros(1, 2)).sum().backward()
            tap.step()
    assert hooked == ([True] * 4 + [False] if compiles else [True, False, False, True, False])
    assert {row.key.step for row in tt.open(tmp_path / "run")} == {3}
    assert len([row for row in tt.open(tmp_path / "run") if row.key.kind == "output"]) == 3


def test_only_what_was_compiled_counts_as_using_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.optim.AdamW(nn.Linear(2, 2).parameters())  # loads the compiler
    from torch._dynamo import eval_frame

    monkeypatch.setattr(eval_frame, "cached_backends", {0: None})
    assert not Torch().uses_compiler()
    eval_frame.cached_backends[1] = torch.compile
    assert Torch().uses_compiler()
