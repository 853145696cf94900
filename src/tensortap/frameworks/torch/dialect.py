"""The lines of a reproduction script that are written for torch. Text only: nothing is imported."""

from __future__ import annotations

from tensortap.core.arguments import OpaqueValue

__all__ = ["TorchDialect"]


class TorchDialect:
    """Scripts for torch."""

    name: str = "torch"
    imports: str = "import torch\nfrom safetensors.torch import load_file"
    helpers: str = '''\
recorded = load_file(Path(__file__).with_name("{tensors}"))


def show(what, ours, theirs):
    """How far a result is from the recorded one."""
    if ours is None or ours.shape != theirs.shape:
        print(f"{{what:32}} is {{None if ours is None else tuple(ours.shape)}}, recorded {{tuple(theirs.shape)}}")
        return
    ours, theirs = ours.detach().double().cpu(), theirs.double()
    error = (ours - theirs).norm() / theirs.norm().clamp_min(1e-300)
    print(f"{{what:32}} relative error {{error:.3e}}, greatest difference {{(ours - theirs).abs().max():.3e}}")
'''
    restore: str = """\
for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
    if f"state.{name}" in recorded:
        tensor.data = recorded[f"state.{name}"].to(tensor.device)"""

    def submodule(self, model: str, name: str) -> str:
        return f"{model}.get_submodule({name})"

    def moved_module(self, device: str | None, dtype: str | None) -> str:
        return self.moved("module", device, dtype) if device or dtype else ""

    def moved(self, tensor: str, device: str | None, dtype: str | None) -> str:
        where = [f'"{device}"'] if device else []
        where += [f"torch.{dtype}"] if dtype else []
        return f"{tensor}.to({', '.join(where)})" if where else tensor

    def leaf(self, variable: str, tensor: str) -> str:
        return f"{variable} = {tensor}.requires_grad_()"

    def backward(self, outputs: list[str], gradients: list[str]) -> str:
        sent = [f"{gradient}.to({output})" for output, gradient in zip(outputs, gradients, strict=True)]
        return f"torch.autograd.backward([{', '.join(outputs)}], [{', '.join(sent)}])"

    def parameter(self, name: str) -> str:
        return f"module.get_parameter({name})"

    def norm(self, tensor: str) -> str:
        return f"{tensor}.double().norm().item()"

    def opaque(self, value: OpaqueValue) -> str:
        return f"torch.{value.text}" if value.kind == "dtype" else f"torch.device({value.text!r})"
