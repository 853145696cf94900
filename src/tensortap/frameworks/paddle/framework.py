"""PaddlePaddle behind the contracts of `frameworks.base` and `frameworks.capabilities`."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import paddle

from tensortap.core import dtypes
from tensortap.core.arguments import OpaqueValue
from tensortap.frameworks.base import AfterCall, BeforeCall, GradientCallback, Identity, Remove
from tensortap.frameworks.capabilities import Consumer, Edge
from tensortap.frameworks.copies import plain_copies
from tensortap.frameworks.frames import inside_function
from tensortap.frameworks.framework_base import FrameworkBase
from tensortap.frameworks.libraries import loaded_openmp
from tensortap.frameworks.paddle.calls import on_call
from tensortap.frameworks.paddle.exact import PaddleExactExecution
from tensortap.frameworks.paddle.graph import UseCounts, can_hook, consumers, in_order, inside_backward
from tensortap.frameworks.paddle.optimizers import PaddleOptimizers
from tensortap.frameworks.paddle.random_states import random_states
from tensortap.frameworks.paddle.replacing import PaddleSubstitution
from tensortap.frameworks.paddle.static import is_compiled, run_eagerly, uncompiled
from tensortap.frameworks.registered import TensorRegistration, list_registered

if TYPE_CHECKING:
    from tensortap.frameworks.capabilities import CompleteFramework
    from tensortap.frameworks.discovery import Discovery
    from tensortap.frameworks.loading import Loading
    from tensortap.frameworks.ownership import Ownership
    from tensortap.frameworks.placing import ModelPlacer
    from tensortap.frameworks.player import Player
    from tensortap.frameworks.profiling import Profiling

__all__ = ["Paddle"]

_WRAPPERS = {
    "DataParallel": "_layers",
    "MetaParallelBase": "_layers",  # fleet's tensor, pipeline, sharding and segment parallelism
    "MixPrecisionLayer": "_layers",
    "GroupShardedStage2": "_layer",
    "GroupShardedStage3": "_layer",
    "FullyShard": "_layer",
}
# BatchNorm keeps its running statistics among the parameters. No optimizer changes them.
_STATISTICS = ("_mean", "_variance")
# DLPack passes these under an integer type of the same width.
_BITS: dict[str, tuple[str, np.dtype[Any]]] = {
    "bfloat16": ("int16", np.dtype(ml_dtypes.bfloat16)),
    "float8_e4m3fn": ("uint8", np.dtype(ml_dtypes.float8_e4m3fn)),
    "float8_e5m2": ("uint8", np.dtype(ml_dtypes.float8_e5m2)),
}

# In paddle 3.0 to 3.2 these have no common base class.
_PLACES: tuple[type, ...] = tuple(
    getattr(paddle.base.core, name)
    for name in ("Place", "CPUPlace", "CUDAPlace", "CUDAPinnedPlace", "CustomPlace", "IPUPlace", "XPUPlace")
    if hasattr(paddle.base.core, name)
)

_BROKEN_GRAPH = (
    "to_static compiled the calling function piece by piece, because hooks break its graph: an error of the compiler "
    'may not show here; compiled="eager" compiles nothing at all'
)
_LOCAL_SHARDS = (
    "distributed tensors are recorded as the values that this rank holds: a shard, a replica or a partial sum, with "
    "its own shape"
)

_FLAGS = (
    "FLAGS_cudnn_deterministic",
    "FLAGS_embedding_deterministic",
    "FLAGS_cudnn_exhaustive_search",
    "FLAGS_allow_tf32",
    "FLAGS_use_mkldnn",
)


def _flags() -> dict[str, Any]:
    """Return the flags that this build has."""
    found: dict[str, Any] = {}
    for name in _FLAGS:
        with suppress(ValueError):
            found |= paddle.get_flags([name])
    return {name.removeprefix("FLAGS_"): value for name, value in found.items()}


class Paddle(PaddleSubstitution, PaddleExactExecution, PaddleOptimizers, FrameworkBase):
    """paddle.nn.Layer, paddle.Tensor and paddle's autograd."""

    name = "paddle"

    def __init__(self) -> None:
        self._uses = UseCounts()
        self._copies = plain_copies(paddle.nn.Layer)
        self._notices: dict[str, None] = {}

    # --- the process -------------------------------------------------------------------------------------------
    def environment(self) -> dict[str, Any]:
        return {
            "versions": {
                "paddle": paddle.version.full_version,
                "cuda": paddle.version.cuda() if paddle.is_compiled_with_cuda() else None,
            },
            "devices": [paddle.get_device()],
            "flags": {"default_dtype": paddle.get_default_dtype(), **_flags()},
            "seed": paddle.base.core.default_cpu_generator().initial_seed(),
        }

    def rank(self) -> int:
        return int(os.environ.get("PADDLE_TRAINER_ID", "0"))

    def world(self) -> int:
        return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))

    def model_placer(self, model: Any) -> ModelPlacer | None:
        from tensortap.frameworks.paddle.placements import PaddlePlacer

        return PaddlePlacer(model)

    def compute_threads(self, model: Any) -> int:
        on_cpu = all(parameter.place.is_cpu_place() for parameter in model.parameters())
        return int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1) if on_cpu else 1

    def openmp(self) -> str | None:
        return loaded_openmp(Path(paddle.__file__).parent)

    def random_states(self) -> Iterable[tuple[str, bytes]]:
        return random_states()

    # --- modules -----------------------------------------------------------------------------------------------
    def is_module(self, value: Any) -> bool:
        return isinstance(value, paddle.nn.Layer)

    def network(self, model: Any) -> Any:
        return model.network if isinstance(model, paddle.Model) else model

    def join(self, models: Mapping[str, Any]) -> Any:
        joined = Models()
        joined._sub_layers.update(models)
        return joined

    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        return [(name, child) for name, child in module._sub_layers.items() if child is not None]

    def own_class(self, module: Any) -> str:
        known = (cls for cls in type(module).__mro__ if cls.__module__.startswith("paddle.nn."))
        found = next(known, paddle.nn.Layer)
        return "" if found is paddle.nn.Layer else found.__name__

    def assigned_name(self, item: Any) -> str:
        return str(item.full_name() if isinstance(item, paddle.nn.Layer) else item.name)

    def wrapped(self, module: Any) -> str | None:
        for cls in type(module).__mro__:
            if (attribute := _WRAPPERS.get(cls.__name__)) and cls.__module__.startswith("paddle."):
                return attribute
        return None

    def compiled(self, module: Any) -> bool:
        return is_compiled(module)

    def signature(self, module: Any) -> Hashable:
        return *map(id, module._sub_layers.values()), is_compiled(module)

    def callable(self, module: Any) -> bool:
        return type(module).forward is not paddle.nn.Layer.forward or "forward" in vars(module)

    def parameters(self, module: Any) -> Sequence[tuple[str, Any]]:
        own = module._parameters.items()
        return [(n, t) for n, t in own if t is not None and not self._running_statistics(module, n, t)]

    def internal_attributes(self) -> Collection[str]:
        return vars(paddle.nn.Layer()).keys() - {"training"}

    def buffers(self, module: Any) -> Sequence[tuple[str, Any]]:
        own = module._parameters.items()
        statistics = [(n, t) for n, t in own if t is not None and self._running_statistics(module, n, t)]
        return statistics + [(n, t) for n, t in module._buffers.items() if t is not None]

    def _running_statistics(self, module: Any, name: str, tensor: Any) -> bool:
        """Return whether this is a BatchNorm's running mean or variance, not a user's own trainable `_mean`."""
        return name in _STATISTICS and bool(tensor.stop_gradient or self.own_class(module))

    def registered(self, module: Any) -> Iterator[tuple[str, Any, TensorRegistration]]:
        return list_registered(self, module, "_non_persistable_buffer_names_set")

    def notices(self) -> Sequence[str]:
        return list(self._notices)

    def _note(self, text: str) -> None:
        self._notices[text] = None

    # --- hooks -------------------------------------------------------------------------------------------------
    def on_call(self, module: Any, before: BeforeCall, after: AfterCall) -> Remove:
        removes = on_call(module, before, after, lambda: self._note(_BROKEN_GRAPH)), self._copies.hold()

        def remove() -> None:
            for each in removes:
                each()

        return remove

    def on_gradient(self, tensor: Any, seen: GradientCallback) -> Remove | None:
        if tensor.stop_gradient:
            return None

        def hook(gradient: Any) -> None:
            uncompiled(seen, gradient)  # no return value: it would replace the gradient

        # Paddle's own handle would keep the tensor alive until the end of the step.
        number, reference = tensor.register_hook(hook)._hook_id, weakref.ref(tensor)

        def remove() -> None:
            if (alive := reference()) is not None:
                alive._remove_grad_hook(number)

        return remove

    def propagates_exceptions(self) -> bool:
        # The engine replaces what a hook raises by an error of its own, without the original.
        return not inside_backward()

    def run_eagerly(self) -> Remove:
        return run_eagerly()

    # --- autograd ----------------------------------------------------------------------------------------------
    def recomputing(self) -> bool:
        # The engine does not report this, but a recomputation only runs below recompute's own frames.
        if "paddle.distributed.fleet.recompute" not in sys.modules:
            return False
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name in ("backward", "unpack") and "recompute" in code.co_filename:
                return True
            frame = frame.f_back
        return False

    def inside_function(self) -> bool:
        return inside_function()

    def records_gradients(self) -> bool:
        return bool(paddle.is_grad_enabled())

    def requires_gradient(self, tensor: Any) -> bool:
        return not tensor.stop_gradient

    def version(self, tensor: Any) -> int:
        return int(tensor.inplace_version)

    def edge(self, tensor: Any) -> Edge | None:
        if tensor.stop_gradient or (node := tensor.grad_fn) is None:
            return None
        # The slot is unknown. The tensor's id separates it from the operation's other outputs.
        return Edge(node, id(tensor), tuple(tensor.shape), tensor=tensor)

    def consumers(self, outputs: Iterable[Any], edges: Sequence[Edge], mark: int) -> list[Consumer]:
        return consumers(outputs, edges)

    def on_node(self, node: Any, seen: Callable[[Sequence[Any] | None], None]) -> Remove | None:
        if not can_hook(node):
            return None
        goes_on = [after is not None for after in node.next_functions]

        def hook(sent: Any, _received: Any) -> Any:
            uncompiled(seen, in_order(sent, goes_on))
            return sent  # paddle uses what the hook returns, so return the same tensors

        handle = node._register_post_hook(hook)

        def remove() -> None:
            handle.remove()

        return remove

    def count_uses(self, node: Any) -> Callable[[], int | None]:
        return partial(self._uses.of, node.node_ptr())

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def add(self, left: Any, right: Any) -> Any:
        with paddle.no_grad():
            return left + right

    def copy(self, tensor: Any) -> Any:
        return tensor.detach().clone()

    # --- tensors -----------------------------------------------------------------------------------------------
    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, paddle.Tensor)

    def opaque_value(self, value: Any) -> OpaqueValue | None:
        if type(value) is paddle.dtype:
            return OpaqueValue("dtype", str(value).removeprefix("paddle."))
        if isinstance(value, _PLACES):
            return OpaqueValue("device", str(value).removeprefix("Place(").removesuffix(")"))
        return None

    def unreadable(self, tensor: Any) -> str:
        if not tensor.is_selected_rows() and not tensor.is_sparse() and tensor.size == 0:
            return ""
        if tensor.is_selected_rows() or tensor.is_sparse():
            return "a sparse tensor (SelectedRows) has no dense elements"
        if not tensor._is_initialized():
            return "not initialised yet"
        if _name(tensor) not in dtypes.NAMES:
            return f"dtype {_name(tensor)} is not supported"
        return ""

    def identity(self, tensor: Any) -> Identity | None:
        reference = weakref.ref(tensor)
        token = (
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.strides),
            tensor.dtype,
            tensor.inplace_version,
        )
        return Identity(token, lambda: reference() is not None)

    def local_shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple((tensor._local_value() if tensor.is_dist() else tensor).shape)

    def host(self, tensor: Any) -> npt.NDArray[np.generic]:
        tensor = tensor.detach()
        if tensor.is_dist():
            self._note(_LOCAL_SHARDS)
            tensor = tensor._local_value()
        if not tensor.place.is_cpu_place():
            tensor = tensor.cpu()
        if tensor.size == 0:
            return np.empty(tuple(tensor.shape), dtypes.numpy_dtype(_name(tensor)))
        if (bits := _BITS.get(_name(tensor))) is not None:
            return np.from_dlpack(tensor.view(bits[0])).view(bits[1])
        return np.from_dlpack(tensor)

    # --- further capabilities, loaded when a feature needs them ------------------------------------------------
    def player(self) -> Player:
        from tensortap.frameworks.paddle.player import PaddlePlayer

        return PaddlePlayer()

    def profiling(self) -> Profiling:
        from tensortap.frameworks.paddle.profiling import PaddleProfiling

        return PaddleProfiling(self)

    def ownership(self) -> Ownership:
        from tensortap.frameworks.paddle.ownership import PaddleOwnership

        return PaddleOwnership(self)

    def loading(self) -> Loading:
        from tensortap.frameworks.paddle.loading import PaddleLoading

        return PaddleLoading(self)

    def discovery(self) -> Discovery:
        from tensortap.frameworks.paddle.discovery import PaddleDiscovery

        return PaddleDiscovery(self)


if TYPE_CHECKING:
    _: type[CompleteFramework] = Paddle


class Models(paddle.nn.Layer):  # type: ignore[misc]  # paddle has no types
    """Several models in one tap; see `Paddle.join`."""

    @property
    def training(self) -> bool:
        return any(model.training for model in self._sub_layers.values())

    @training.setter
    def training(self, mode: bool) -> None:
        """Leave the models as they are: paddle sets it when a layer is made."""


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("paddle.")
