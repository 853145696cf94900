"""The lines of a reproduction script that are written for paddle. Text only: nothing is imported."""

from __future__ import annotations

from tensortap.core.arguments import OpaqueValue

__all__ = ["PaddleDialect"]


class PaddleDialect:
    """Scripts for paddle. They have a reader of their own: that of safetensors knows bfloat16 only in new versions."""

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

    def opaque(self, value: OpaqueValue) -> str:
        if value.kind == "dtype":
            return f"paddle.{value.text}"
        kind, _, number = value.text.partition(":")
        if kind in ("gpu", "cuda"):
            return f"paddle.CUDAPlace({int(number) if number.isdecimal() else 0})"
        return "paddle.CPUPlace()" if kind == "cpu" else f"paddle.device._convert_to_place({value.text!r})"
