"""A compiled forward saves the same values for backward with and without taps: recomputed ones may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import tensortap as tt
from support.compiling import checkpoint_layers, train, untapped_gradients
from tensortap.frameworks.torch.inside import saved as saved_values

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm, self.head = nn.ModuleList(Block() for _ in range(3)), Norm(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def step(model: Any) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 4 * 8 * 16).view(4, 8, 16)).square().mean()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_same_values_are_saved(checkpointed: bool) -> None:
    def saved(tapped: bool) -> list[tuple[int, ...]]:
        """Return the shapes of what forward saves beside its inputs. Module numbers have none, and tokens are empty."""
        shapes: list[tuple[int, ...]] = []

        def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
            found = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
            (output,) = (node for node in found[0].graph.nodes if node.op == "output")
            kept = [node.meta["val"] for node in output.args[0][num_fwd_outputs:] if node.op != "placeholder"]
            shapes.extend(tuple(value.shape) for value in kept if value.numel())
            return found

        torch.manual_seed(0)
        torch._dynamo.reset()
        model = checkpoint_layers(Net()) if checkpointed else Net()
        backend = aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=partition)
        compiled = torch.compile(model, backend=backend)
        if tapped:
            train(compiled, step, steps=1, compiled="inside")
        else:
            untapped_gradients(compiled, step)
        return shapes

    plain = saved(tapped=False)
    assert plain and saved(tapped=True) == plain


def _as_it_is(graph: Any, inputs: Any) -> Any:
    return make_boxed_func(graph.forward)


def test_a_compiler_of_another_form_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any) -> None:
        raise AttributeError("no such field")

    monkeypatch.setattr(saved_values, "_Untapped", unknown)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=min_cut_rematerialization_partition
    )
    tap = train(torch.compile(Net(), backend=backend), step, steps=2, compiled="inside")
    assert any("no such field" in notice for notice in tap.notices)
    assert "no such field" in caplog.text and {row.key.step for row in tap.run} == {0, 1}


def test_the_compiler_is_as_before_when_the_tap_is_closed() -> None:
    from torch._dynamo import utils
    from torch._dynamo.side_effects import SideEffects
    from torch._functorch import partitioners
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    owners: list[Any] = [partitioners, utils, SideEffects, PythonWrapperCodegen, PythonWrapperCodegen]
    names = "choose_saved_values_set", "nnmodule_has_hooks", "track_object_new", "can_reuse", "codegen_free"

    def functions() -> list[Any]:
        return [getattr(owner, name) for owner, name in zip(owners, names, strict=True)]

    before = functions()
    with tt.capture(torch.compile(Net(), backend="aot_eager"), None, compiled="inside"):
        assert all(function is not old for function, old in zip(functions(), before, strict=True))
    assert functions() == before
