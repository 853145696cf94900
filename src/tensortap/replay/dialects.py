"""How the script of a reproduction is written for torch, and how for paddle. Text only: no framework is imported."""

from __future__ import annotations

from typing import Protocol

from tensortap.core.arguments import OpaqueValue

__all__ = ["PADDLE", "TORCH", "Dialect", "dialect_of"]


class Dialect(Protocol):
    """The lines in which scripts of the frameworks differ. Arguments and results are expressions."""

    name: str
    imports: str
    """Import statements for what `helpers` and the other lines use."""
    helpers: str
    """Statements that define `recorded`, the tensors of the file, and `show(what, ours, theirs)`."""
    restore: str
    """Statements that put what is `recorded` into the state of `module`."""

    def submodule(self, model: str, name: str) -> str:
        """A part of a model, by its name."""

    def moved_module(self, device: str | None, dtype: str | None) -> str:
        """A statement that moves `module`; empty if there is nothing to do."""

    def moved(self, tensor: str, device: str | None, dtype: str | None) -> str:
        """A tensor on another device or in another dtype."""

    def leaf(self, variable: str, tensor: str) -> str:
        """Statements that make a variable to which gradients come."""

    def backward(self, outputs: list[str], gradients: list[str]) -> str:
        """A statement that sends gradients back from outputs, in the outputs' own dtype."""

    def parameter(self, name: str) -> str:
        """A parameter of `module`."""

    def norm(self, tensor: str) -> str:
        """The L2 norm of a tensor as a float."""

    def told(self, value: OpaqueValue) -> str:
        """A dtype or a device."""


class _Torch:
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

    def told(self, value: OpaqueValue) -> str:
        return f"torch.{value.text}" if value.kind == "dtype" else f"torch.device({value.text!r})"


class _Paddle:
    """The reader for paddle in safetensors knows bfloat16 in recent versions alone, so the script has its own."""

    name: str = "paddle"
    imports: str = "import numpy as np\nimport paddle\nfrom safetensors import deserialize"
    helpers: str = '''\
DTYPES = dict(F64="float64", F32="float32", F16="float16", I64="int64", I32="int32", I16="int16", I8="int8", U8="uint8")
DTYPES.update(BOOL="bool", C64="complex64")
SHORT = dict(BF16=("int16", "bfloat16"), F8_E4M3=("int8", "float8_e4m3fn"), F8_E5M2=("int8", "float8_e5m2"))


def load(file):
    """The tensors of a safetensors file. NumPy knows bfloat16 and float8 by their bits alone."""
    found = {{}}
    for name, entry in deserialize(file.read_bytes()):
        bits, dtype = SHORT.get(entry["dtype"]) or (DTYPES[entry["dtype"]], None)
        values = paddle.to_tensor(np.frombuffer(bytes(entry["data"]), bits).reshape(entry["shape"]))
        found[name] = values.view(dtype) if dtype else values
    return found


def show(what, ours, theirs):
    """How far a result is from the recorded one."""
    if ours is None or list(ours.shape) != list(theirs.shape):
        print(f"{{what:32}} is {{None if ours is None else tuple(ours.shape)}}, recorded {{tuple(theirs.shape)}}")
        return
    ours, theirs = (tensor.detach().astype("float64").numpy() for tensor in (ours, theirs))
    error, greatest = np.linalg.norm(ours - theirs), np.abs(ours - theirs).max(initial=0)
    error /= max(np.linalg.norm(theirs), 1e-300)
    print(f"{{what:32}} relative error {{error:.3e}}, greatest difference {{greatest:.3e}}")


recorded = load(Path(__file__).with_name("{tensors}"))
'''
    restore: str = """\
for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
    if f"state.{name}" in recorded:
        tensor.set_value(recorded[f"state.{name}"].astype(tensor.dtype))"""

    def submodule(self, model: str, name: str) -> str:
        return f"dict({model}.named_sublayers())[{name}]"

    def moved_module(self, device: str | None, dtype: str | None) -> str:
        return self.moved("module", device, dtype) if device or dtype else ""

    def moved(self, tensor: str, device: str | None, dtype: str | None) -> str:
        where = [f'device="{device}"'] if device else []
        where += [f'dtype="{dtype}"'] if dtype else []
        return f"{tensor}.to({', '.join(where)})" if where else tensor

    def leaf(self, variable: str, tensor: str) -> str:
        return f"{variable} = {tensor}\n{variable}.stop_gradient = False"

    def backward(self, outputs: list[str], gradients: list[str]) -> str:
        sent = [f"{gradient}.astype({output}.dtype)" for output, gradient in zip(outputs, gradients, strict=True)]
        return f"paddle.autograd.backward([{', '.join(outputs)}], [{', '.join(sent)}])"

    def parameter(self, name: str) -> str:
        return f"dict(module.named_parameters())[{name}]"

    def norm(self, tensor: str) -> str:
        return f'float(np.linalg.norm({tensor}.astype("float64").numpy()))'

    def told(self, value: OpaqueValue) -> str:
        if value.kind == "dtype":
            return f"paddle.{value.text}"
        kind, _, number = value.text.partition(":")
        if kind in ("gpu", "cuda"):
            return f"paddle.CUDAPlace({int(number) if number.isdecimal() else 0})"
        return "paddle.CPUPlace()" if kind == "cpu" else f"paddle.device._convert_to_place({value.text!r})"


TORCH: Dialect = _Torch()
PADDLE: Dialect = _Paddle()


def dialect_of(framework: str) -> Dialect:
    """The one that a framework's users read."""
    return PADDLE if framework == "paddle" else TORCH
