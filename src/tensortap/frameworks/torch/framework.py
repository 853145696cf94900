"""PyTorch behind the contracts of `frameworks.base` and `frameworks.capabilities`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tensortap.errors import UsageError
from tensortap.frameworks.base import AfterCall, BeforeCall, GradientCallback, Remove
from tensortap.frameworks.copies import PlainCopies, plain_copies
from tensortap.frameworks.frames import inside_function
from tensortap.frameworks.framework_base import FrameworkBase
from tensortap.frameworks.hooks import CallHook, Detour, ModuleCalls, NativeHooks, RepeatableHooks
from tensortap.frameworks.libraries import loaded_openmp
from tensortap.frameworks.registered import TensorRegistration, list_registered
from tensortap.frameworks.torch import environment as torch_environment
from tensortap.frameworks.torch.access import tensor_access
from tensortap.frameworks.torch.changes import module_changes, uses_compiler
from tensortap.frameworks.torch.exact import TorchExactExecution
from tensortap.frameworks.torch.gradient_hooks import GradientHooks, ParameterHook, ViewHook
from tensortap.frameworks.torch.graph import TorchGraph
from tensortap.frameworks.torch.module_calls import module_calls
from tensortap.frameworks.torch.optimizers import TorchOptimizers
from tensortap.frameworks.torch.random_states import random_states
from tensortap.frameworks.torch.reading import TensorReading
from tensortap.frameworks.torch.replacing import TorchSubstitution
from tensortap.frameworks.torch.tensors import PLAIN, all_parameters, is_distributed
from tensortap.frameworks.torch.tracing import tracing

if TYPE_CHECKING:
    from tensortap.frameworks.capabilities import CompleteFramework, GraphTaps
    from tensortap.frameworks.discovery import Discovery
    from tensortap.frameworks.loading import Loading
    from tensortap.frameworks.operators import OperatorTracer
    from tensortap.frameworks.ownership import Ownership
    from tensortap.frameworks.placing import ModelPlacer
    from tensortap.frameworks.player import Player
    from tensortap.frameworks.profiling import Profiling

__all__ = ["Torch"]

# Wrapper classes, and the attribute of the module that each wraps.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}
_FUSED_INFERENCE = ("TransformerEncoderLayer", "TransformerEncoder", "MultiheadAttention")


class Torch(TensorReading, TorchGraph, TorchSubstitution, TorchExactExecution, TorchOptimizers, FrameworkBase):
    """torch.nn.Module, torch.Tensor and torch's autograd."""

    name = "torch"

    def __init__(self) -> None:
        super().__init__()
        self._copies = plain_copies(torch.nn.Module)
        self._gradient_hooks = GradientHooks()

    # --- the process -------------------------------------------------------------------------------------------
    def environment(self) -> dict[str, Any]:
        return torch_environment.environment()

    def rank(self) -> int:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return int(os.environ.get("RANK", "0"))

    def world(self) -> int:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size()
        return int(os.environ.get("WORLD_SIZE", "1"))

    def model_placer(self, model: torch.nn.Module) -> ModelPlacer | None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None
        from tensortap.frameworks.torch.placements.placer import TorchPlacer

        return TorchPlacer(model)

    def compute_threads(self, model: torch.nn.Module) -> int:
        return torch.get_num_threads() if all(parameter.is_cpu for parameter in all_parameters(model)) else 1

    def openmp(self) -> str | None:
        return loaded_openmp(Path(torch.__file__).parent.parent / "torch")

    def random_states(self) -> Iterable[tuple[str, bytes]]:
        return random_states()

    # --- modules -----------------------------------------------------------------------------------------------
    def is_module(self, value: Any) -> bool:
        return isinstance(value, torch.nn.Module)

    def join(self, models: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
        joined = Models()
        joined._modules.update(models)  # add_module would refuse names like "type"
        return joined

    def children(self, module: torch.nn.Module) -> Sequence[tuple[str, torch.nn.Module]]:
        return [(name, child) for name, child in module._modules.items() if child is not None]

    def own_class(self, module: torch.nn.Module) -> str:
        return _own_class(type(module))  # type: ignore[arg-type]  # a class is hashable

    def wrapped(self, module: torch.nn.Module) -> str | None:
        for cls in type(module).__mro__:
            if (attribute := _WRAPPERS.get(cls.__name__)) and cls.__module__.partition(".")[0] in (
                "torch",
                "deepspeed",
            ):
                return attribute
        return None

    def compiled(self, module: torch.nn.Module) -> bool:
        return (
            vars(module).get("_compiled_call_impl") is not None
            or type(module).__name__ == "OptimizedModule"
            or isinstance(module, torch.jit.ScriptModule)
        )

    def uses_compiler(self) -> bool:
        return uses_compiler()

    children_attribute = "_modules"

    def signature(self, module: torch.nn.Module) -> Hashable:
        return tuple(map(id, module._modules.values()))

    def on_change(self, changed: Callable[[Any], None], wrapped: Callable[[Any], None]) -> Remove:
        return module_changes.listen(changed, wrapped)

    def callable(self, module: torch.nn.Module) -> bool:
        if isinstance(module, torch.jit.ScriptModule):
            return True
        return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)

    def parameters(self, module: torch.nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in module._parameters.items() if tensor is not None]

    parameters_attribute = "_parameters"
    hooks_attribute = "_backward_hooks"

    def parameters_of(self, modules: Sequence[torch.nn.Module]) -> Sequence[tuple[int, str, torch.Tensor]]:
        return [
            (place, name, tensor)
            for place, module in enumerate(modules)
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]

    def buffers(self, module: torch.nn.Module) -> Sequence[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in module._buffers.items() if tensor is not None]

    def internal_attributes(self) -> Collection[str]:
        return vars(torch.nn.Module()).keys() - {"training"}

    def remarks(self, module: torch.nn.Module) -> str:
        if isinstance(module, torch.jit.ScriptModule):
            return "a scripted module takes no hooks: neither it nor its parts can be seen"
        name = type(module).__name__
        if name in _FUSED_INFERENCE and not module.training:
            return "its fused inference path is off while it is tapped; results may move in the last digits"
        if name == "DataParallel":
            return "the replicas that DataParallel makes on other devices are not tapped"
        if name == "DistributedDataParallel":
            return "parameter gradients are each rank's own, before DistributedDataParallel averages them"
        for parameter in module._parameters.values():
            if parameter is not None and getattr(parameter, "_is_flat_param", False):
                return "FSDP has joined its parameters in one: pass use_orig_params=True to see each of them"
            if parameter is not None and getattr(parameter, "_fsdp_flattened", False):
                return "parameter gradients are each rank's own, before FSDP reduces them; step_grad is the reduced one"
            if parameter is not None and is_distributed(parameter):
                return "its parameters are sharded: recorded is this rank's shard, and its gradient after the reduction"
        return ""

    def registered(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, TensorRegistration]]:
        return list_registered(self, module, "_non_persistent_buffers_set")

    # --- hooks -------------------------------------------------------------------------------------------------
    def on_call(self, module: torch.nn.Module, before: BeforeCall, after: AfterCall) -> Remove:
        if isinstance(module, torch.jit.ScriptModule):
            return lambda: None  # it takes no hooks; `remarks` reports that
        if getattr(module, "_compiled_call_impl", None) is not None:
            return _around_compiled(module, before, after, self._copies.hold())

        begins, ends = _BeginHook(module, before, self._gradient_hooks), _EndHook(module, after, self._gradient_hooks)
        return _CallHooks(module, begins, ends, self._copies)

    @property
    def native_hooks(self) -> NativeHooks | None:
        if vars(torch.compiler).get(_COMPILING_FLAG) is not False:  # an unknown version, or a graph is being traced
            return None
        return NativeHooks(_BeginHook, _EndHook, ViewHook, vars(torch.compiler), _COMPILING_FLAG)

    @property
    def module_calls(self) -> ModuleCalls | None:
        return module_calls()

    @property
    def watch_view(self) -> Callable[..., Remove]:
        """Callback of the C code for an output that is a view and whose hook it has placed."""
        return self._gradient_hooks.watch_view

    def on_gradient(self, tensor: torch.Tensor, seen: GradientCallback) -> Remove | None:
        return self._gradient_hooks.place(tensor, seen)

    def on_parameter_gradient(self, parameter: torch.Tensor, seen: GradientCallback) -> Remove | None:
        if type(parameter) not in PLAIN and isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            return None
        if type(parameter) in PLAIN or not is_distributed(parameter):
            if parameter.requires_grad and parameter.is_leaf:  # the common case
                return ParameterHook(parameter, seen).remove
            return self.on_gradient(parameter, seen)
        if not parameter.requires_grad:
            return None

        # A sharded parameter's own hook never fires. Only the reduced, accumulated gradient is visible.
        def hook(accumulated: torch.Tensor) -> None:
            if accumulated.grad is not None:
                seen(accumulated.grad)

        return parameter.register_post_accumulate_grad_hook(hook).remove

    def replaces_parameter(self, parameter: torch.Tensor) -> bool:
        return getattr(parameter, "_fsdp_flattened", False) is True

    def hook_is_current(self, parameter: torch.Tensor, remove: Remove) -> bool:
        hook = getattr(remove, "__self__", None)
        return isinstance(hook, ParameterHook) and hook.is_current(parameter)

    def run_eagerly(self) -> Remove:
        if not hasattr(torch.compiler, "set_stance"):
            raise UsageError(f'compiled="eager" needs torch 2.6 or newer, this is {torch.__version__}')
        stance = torch.compiler.set_stance("force_eager")
        return lambda: stance.__exit__(None, None, None)

    def compile(self, model: torch.nn.Module, options: Mapping[str, Any]) -> Any:
        return torch.compile(model, **options)

    def graph_taps(self, kinds: frozenset[str], emulate_casts: bool) -> GraphTaps:
        try:
            from tensortap.frameworks.torch.inside.graphs import TorchGraphTaps  # loads the compiler
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f'compiled="inside" does not know the compiler of torch {torch.__version__} ({error}): use a torch '
                'that tensortap is tested with, or compiled="boundary"'
            ) from error
        return TorchGraphTaps(kinds, emulate_casts, self.opaque_value, self._copies.hold())

    def memory_of(self, tensor: torch.Tensor) -> Hashable:
        return tensor.untyped_storage()._cdata, tensor.data_ptr()

    # --- autograd ----------------------------------------------------------------------------------------------
    def tracing(self) -> bool:
        return tracing()

    def is_fitting(self, model: torch.nn.Module) -> bool:
        state = getattr(vars(model).get("_trainer"), "state", None)  # a LightningModule's; the property may raise
        function = getattr(state, "fn", None)
        return getattr(function, "value", function) == "fit"

    tensor_exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    tensor_access = staticmethod(tensor_access)
    graph_task = staticmethod(torch._C._current_graph_task_id)

    def recomputing(self) -> bool:
        return self.graph_task() != -1

    def inside_function(self) -> bool:
        return inside_function()

    records_gradients = staticmethod(torch.is_grad_enabled)

    def requires_gradient(self, tensor: torch.Tensor) -> bool:
        return tensor.requires_grad

    def require_gradients(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        return [tensor.requires_grad for tensor in tensors]

    def versions(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        try:
            return {id(tensor): tensor._version for tensor in tensors}
        except RuntimeError:  # an inference tensor has none
            return {id(tensor): self.version(tensor) for tensor in tensors}

    def version(self, tensor: torch.Tensor) -> int:
        return 0 if tensor.is_inference() else tensor._version

    def mark(self) -> int:
        return torch._C._autograd._get_sequence_nr()

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return left + right

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    # --- further capabilities, loaded when a feature needs them ------------------------------------------------
    def player(self) -> Player:
        from tensortap.frameworks.torch.player import TorchPlayer

        return TorchPlayer()

    def operator_tracer(self) -> OperatorTracer:
        from tensortap.frameworks.torch.operators import TorchOperatorTracer

        return TorchOperatorTracer()

    def profiling(self) -> Profiling:
        from tensortap.frameworks.torch.profiling import TorchProfiling

        return TorchProfiling(self)

    def ownership(self) -> Ownership:
        from tensortap.frameworks.torch.ownership import TorchOwnership

        return TorchOwnership(self)

    def loading(self) -> Loading:
        from tensortap.frameworks.torch.loading import TorchLoading

        return TorchLoading(self)

    def discovery(self) -> Discovery:
        from tensortap.frameworks.torch.discovery import TorchDiscovery

        return TorchDiscovery(self)


if TYPE_CHECKING:
    _: type[CompleteFramework] = Torch


class _ModuleHook(CallHook):
    """A hook on a module.

    Its subclasses run twice for each call of a module, so all of their work is in one function. `native/module_hooks.h`
    does the same where the interpreter calls them, not a compiler.

    While a graph is compiled there are no values, and reading would break the graph.
    """

    __slots__ = ("_gradient_hooks", "_views")
    _report: Callable[..., Any]

    def __init__(self, module: torch.nn.Module, report: Callable[..., Any], gradient_hooks: GradientHooks) -> None:
        super().__init__(module, report)
        self._gradient_hooks = gradient_hooks
        self._views = gradient_hooks.views


class _BeginHook(_ModuleHook):
    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if id(module) != self._module or _is_compiling():
            return None
        if self._views:
            self._gradient_hooks.check_views()
        return self._report(args, kwargs)


class _EndHook(_ModuleHook):
    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if id(module) != self._module or _is_compiling():
            return None
        if self._views:
            self._gradient_hooks.check_views()
        return self._report(output)


class _CallHooks(RepeatableHooks):
    """The two hooks on a module.

    Torch's functions that register hooks take ten times as long as entries in its tables, and a run that leaves steps
    out places all hooks in every recorded step.
    """

    __slots__ = ("_begins", "_copies", "_ends", "_first", "_last", "_module", "_release")

    def __init__(self, module: torch.nn.Module, begins: _BeginHook, ends: _EndHook, copies: PlainCopies) -> None:
        self._module = weakref.ref(module)
        self._begins, self._ends = begins, ends
        self._first = module.register_forward_pre_hook(begins, with_kwargs=True)
        self._last = module.register_forward_hook(ends, with_kwargs=True, always_call=True)
        self._copies = copies
        self._release = copies.hold()

    def __call__(self) -> None:
        self._first.remove()
        self._last.remove()
        self._release()

    def place_again(self) -> bool:
        module, first, last = self._module(), self._first, self._last
        if (
            module is None
            or first.hooks_dict_ref() is not module._forward_pre_hooks
            or last.hooks_dict_ref() is not module._forward_hooks
        ):
            return False
        module._forward_pre_hooks[first.id] = self._begins
        module._forward_pre_hooks_with_kwargs[first.id] = True
        module._forward_hooks[last.id] = self._ends
        module._forward_hooks_with_kwargs[last.id] = True
        module._forward_hooks_always_called[last.id] = True
        self._release = self._copies.hold()
        return True


_is_compiling = torch.compiler.is_compiling
_COMPILING_FLAG = "_is_compiling_flag"


class Models(torch.nn.Module):  # type: ignore[misc]  # torch is optional, so it has no types here
    """Several models in one tap; see `Torch.join`."""

    @property
    def training(self) -> bool:
        return any(model.training for model in self._modules.values() if model is not None)

    @training.setter
    def training(self, mode: bool) -> None:
        """Leave the models as they are: torch sets it when a module is made."""


@lru_cache(maxsize=1024)
def _own_class(cls: type) -> str:
    found = next((each for each in cls.__mro__ if each.__module__.startswith("torch.nn.")), torch.nn.Module)
    return "" if found is torch.nn.Module else found.__name__


def _around_compiled(module: torch.nn.Module, before: BeforeCall, after: AfterCall, release: Remove) -> Remove:
    """Hook a module that was compiled in place from outside, since its own hooks would be part of the graph."""

    def around(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (others := before(args, kwargs)) is not None:
            args, kwargs = others
        try:
            output = compiled(*args, **kwargs)
        except BaseException:
            after(None)
            raise
        replaced = after(output)
        return output if replaced is None else replaced

    detour = Detour(module, "_compiled_call_impl", around)

    def remove() -> None:
        detour.remove()
        release()

    return remove
