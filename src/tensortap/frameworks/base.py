"""What capture asks of a framework.

One small class for each framework answers these questions; capture itself knows neither torch nor paddle. Modules,
tensors, parameters and graph nodes are opaque here: they go in and come out, and only their framework looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tensortap.core.arguments import OpaqueValue
from tensortap.core.host_copies import DeviceBytes, MemoryPinning

__all__ = [
    "After",
    "Before",
    "Collected",
    "Consumer",
    "DeferralBound",
    "Described",
    "DeviceReader",
    "Edge",
    "Exchange",
    "Framework",
    "Gradient",
    "Identity",
    "Remove",
    "Trial",
    "Watch",
]

Remove = Callable[[], None]
"""Takes back what was placed; calling it twice does no harm."""

Before = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Called with args and kwargs before the module runs. It may return others that the module gets in their place."""

After = Callable[[Any], Any]
"""Called with what the module returned; None also when it raised. It may return what the caller gets instead."""

Gradient = Callable[[Any], None]
"""Called with the gradient of one tensor; with None if backward passes the tensor without a gradient for it."""

Exchange = Callable[[Any], "npt.NDArray[np.generic] | None"]
"""Called with a gradient on its way back; may return the values that go on in its place."""


@dataclass(slots=True)  # not frozen: one is made for every sighting, and that would take twice as long
class Identity:
    """Says that two sightings are of the very same tensor, unchanged in between."""

    token: Hashable
    """Equal while memory, geometry and version are; may be reused by another tensor once this one is gone."""
    alive: Callable[[], bool] = field(compare=False)
    """Whether the tensor that the token was made for still holds that memory."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Where a tensor's gradient arrives in the autograd graph."""

    node: Any
    slot: int
    shape: tuple[int, ...] = ()
    """The tensor's own shape: a gradient that arrives through its base is brought into it."""
    base: Edge | None = None
    """The edge of the tensor that this one is a view of: a change in place reroutes the gradient there."""
    tensor: Any = field(default=None, compare=False)
    """The tensor itself, where only a hook on it tells its gradient from those of others that its operation made."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A graph node that sends gradient along an edge: the index is its place among the node's outgoing gradients."""

    node: Any
    index: int
    edge: Edge
    rivals: tuple[Edge, ...] = ()
    """Further edges that may be meant as well, where the framework does not tell the outputs of an operation apart."""


Described = tuple[Hashable | None, str, tuple[int, ...], bool]
"""Token, dtype, shape and whether it lies flat: see `DeviceReader.described`."""


class Collected(NamedTuple):
    """What a device found, one row a ticket."""

    columns: Mapping[str, npt.NDArray[Any]]
    """The fields of summaries, by name."""
    unchanged: Sequence[bool]
    """Whether the tensor turned out to be what it was at the sighting that it was compared with."""
    missed: Collection[int] = ()
    """Rows of tensors that were put off and then not read, as a rule because they had been changed: there is nothing of
    them."""


class DeferralBound(Protocol):
    """Says of a tensor how long it may wait to be read."""

    @property
    def proven(self) -> int:
        """Of how many further tensors it is known that it has not changed when they come."""

    def lost(self) -> None:
        """It was changed before it was read."""


class Trial(Protocol):
    """Wants to know how long a tensor, which was read at once, could have waited."""

    @property
    def proven(self) -> int:
        """As of `DeferralBound`: there is no need to wait longer."""

    def waited(self, others: int, ticket: Any) -> None:
        """It was read again when so many others had come. No ticket, if it had been changed."""


class Watch(Protocol):
    """Sees to it that a token stays that of one tensor."""

    def add(self, tensor: Any) -> None:
        """From now on no other tensor than this gets its token."""

    def clear(self) -> None:
        """Leave all of them to others."""


class DeviceReader(Protocol):
    """Looks at tensors where they are, on their device, without waiting for it."""

    lock: AbstractContextManager[Any]
    """Held by all that is done here. What was put off may be looked at in any thread, when a backward ends: whoever
    looks under a lock of its own sets it here."""

    def described(self, tensor: Any) -> Described:
        """A token; the name of the dtype, and the shape, of this rank's share where it has one; and whether it lies
        flat, which `submit` wants to know.

        The token is equal at two sightings of the very same tensor, unchanged in between, if a watch was kept on it.
        None where the framework does not track changes, and every sighting must be looked at anew."""

    def watch(self) -> Watch:
        """A new one, with no tensor yet."""

    def submit(self, tensor: Any, known: Any = None, flat: bool | None = None) -> Any:
        """Summarise a tensor, which may be changed or freed right after. Returns a ticket. `known` is that of an
        earlier sighting of what should be the same tensor: a few elements are enough then, unless they have changed.
        `flat` is what `described` has said; None if it was not asked."""

    def put_off(self, tensor: Any, bound: DeferralBound, look: Callable[[Any], None]) -> bool:
        """Call `look` a little later, with another name of the tensor, in one go with others; what it submits then may
        be read together with what others do. The tensor may be freed meanwhile, but not changed: if it was, `look` is
        called with None. False if it cannot wait."""

    def catch_up(self) -> None:
        """Have all looked at that was put off, for something comes that must be looked at now."""

    def submit_again(self, tensor: Any, trial: Trial) -> None:
        """Summarise a tensor that was just submitted once more, as late as it would be read at the latest if it were
        put off. One that cannot be put off is not tried."""

    def settle(self) -> None:
        """Read all that was put off: the forward, the backward or the step is over."""

    def forget(self) -> None:
        """Let go of all that was put off, unread: nobody wants it any more."""

    def parts(self, tensor: Any) -> Iterator[DeviceBytes]:
        """The whole of a tensor in C order. It may be changed or freed once all parts have been gone through; each must
        be copied before the next is asked for."""

    def end_step(self) -> None:
        """Let the step's summaries travel to the host."""

    def arrive(self, tickets: Sequence[Any]) -> None:
        """Wait until what was found is in host memory, where nothing that befalls the device can take it back. Another
        thread may ask."""

    def collect(self, tickets: Sequence[Any]) -> Collected:
        """What was found, once the step has ended; waits for it. Another thread may ask."""

    def close(self) -> None:
        """Wait for all that is under way, and let go of the memory."""


class Framework(Protocol):
    """The questions. `frameworks.torch` and `frameworks.paddle` answer them."""

    name: str

    # --- the process -------------------------------------------------------------------------------------------
    def environment(self) -> dict[str, Any]:
        """Versions, devices, flags and seeds: what two runs may differ in before the first step."""

    def rank(self) -> int: ...

    def world(self) -> int: ...

    def compute_threads(self, model: Any) -> int:
        """How many CPU threads the model's own computation keeps busy."""

    def openmp(self) -> str | None:
        """The file of the OpenMP runtime whose threads compute, if there is one."""

    # --- modules -----------------------------------------------------------------------------------------------
    def children(self, module: Any) -> Sequence[tuple[str, Any]]:
        """Direct children, a shared one under each of its names."""

    def own_class(self, module: Any) -> str:
        """The framework's own class that a module is of, itself or by inheritance; empty if it is the user's alone."""

    def wrapped(self, module: Any) -> str | None:
        """The child's attribute name if this module only wraps another (DDP, compile, FSDP, checkpoint)."""

    def compiled(self, module: Any) -> bool:
        """Whether calling this module runs a compiled graph, inside which hooks do not run."""

    def callable(self, module: Any) -> bool:
        """Whether the module computes anything itself; a list of modules does not."""

    def parameters(self, module: Any) -> Sequence[tuple[str, Any]]:
        """The module's own parameters, not its children's."""

    def parameters_of(self, modules: Sequence[Any]) -> Sequence[tuple[int, str, Any]]:
        """The same for many at once, each with its module's place among them: asked at the beginning of every step."""

    def buffers(self, module: Any) -> Sequence[tuple[str, Any]]:
        """The module's own buffers, not its children's."""

    def remarks(self, module: Any) -> str:
        """What a tap on this module cannot help changing or missing; usually nothing."""

    def notices(self) -> Sequence[str]:
        """What has come up so far that the run as a whole should report; usually nothing."""

    # --- hooks -------------------------------------------------------------------------------------------------
    def on_call(self, module: Any, before: Before, after: After) -> Remove:
        """Around every call. `after` comes also when the module raises. Copies of the module do not report."""

    def on_gradient(self, tensor: Any, seen: Gradient) -> Remove | None:
        """When the gradient of this tensor is known; None if it takes no part in autograd."""

    def on_parameter_gradient(self, parameter: Any, seen: Gradient) -> Remove | None:
        """This backward's own gradient of a parameter, not the accumulated one; None if it is frozen."""

    def hook_stays(self, parameter: Any, remove: Remove) -> bool:
        """Whether what `on_parameter_gradient` returned some time ago is still right: it is on this very parameter, and
        comes after all other hooks. False where that is not known."""

    def on_optimizer_step(self, optimizer: Any, stepped: Callable[[], None]) -> Remove:
        """After each step of the optimizer."""

    def run_eagerly(self) -> Remove:
        """Make compiled modules run uncompiled, so that everything can be seen."""

    # --- autograd ----------------------------------------------------------------------------------------------
    def replaying(self) -> bool:
        """Whether this forward is a recomputation during backward (activation checkpointing)."""

    def inside_function(self) -> bool:
        """Whether the caller runs inside the forward of an autograd function, where autograd is off."""

    def records_gradients(self) -> bool:
        """Whether autograd is on right now."""

    def requires_gradient(self, tensor: Any) -> bool: ...

    def version(self, tensor: Any) -> int:
        """Counts changes in place; 0 where the framework does not count."""

    def mark(self) -> int:
        """A point in the graph's growth: nodes made later are told from earlier ones by it."""

    def edge(self, tensor: Any) -> Edge | None:
        """Where this tensor's gradient would arrive now; None if it takes no part in autograd."""

    def consumers(self, outputs: Iterable[Any], edges: Sequence[Edge], mark: int) -> list[Consumer]:
        """The nodes between `outputs` and `edges`, made since `mark`, that feed one of the edges."""

    def on_node(self, node: Any, seen: Callable[[Sequence[Any] | None], None]) -> Remove | None:
        """When this node has computed the gradients that it sends on; None if it cannot be watched. `seen` gets them by
        the index of `Consumer`, or None if it is not known which of them goes where."""

    def uses(self, node: Any) -> Callable[[], int | None]:
        """To be asked in backward: how many gradients it sends to this node; None if that is not known. The question
        keeps no node alive."""

    def memory(self, tensor: Any) -> int:
        """Where the elements are: of two tensors that live, equal if they share them. 0 if there are none."""

    def add(self, left: Any, right: Any) -> Any:
        """A new tensor: the sum of two gradients."""

    def copy(self, tensor: Any) -> Any:
        """A detached copy in memory of its own."""

    # --- tensors -----------------------------------------------------------------------------------------------
    def is_tensor(self, value: Any) -> bool: ...

    def named(self, value: Any) -> OpaqueValue | None:
        """What a dtype or a device is called; None of all else."""

    def unreadable(self, tensor: Any) -> str:
        """Why this tensor's elements cannot be read (meta, nested, vmapped, ...); empty if they can."""

    def identity(self, tensor: Any) -> Identity | None:
        """None where the framework does not track changes, and every sighting must be looked at anew."""

    def host(self, tensor: Any) -> npt.NDArray[np.generic]:
        """The elements as a NumPy array; of a tensor in host memory a view, not a copy. It is to be read, or copied,
        before the user's code goes on, which may change that memory or give it back."""

    # --- devices -----------------------------------------------------------------------------------------------
    def device_reader(self, tensor: Any) -> DeviceReader | None:
        """Where to look at this tensor without bringing it to the host; None if it is there or must come."""

    def pinning(self, model: Any) -> MemoryPinning | None:
        """For memory that the model's device writes into; None if its tensors are in the host's memory."""

    # --- other values in their place ---------------------------------------------------------------------------
    def forced(self, tensor: Any, values: npt.NDArray[np.generic], exchange: Exchange) -> Any | None:
        """A new tensor in `tensor`'s place: its dtype, device and layout, these values, and its part in autograd. The
        gradient that comes back through it goes through `exchange`. None for tensors that cannot be replaced."""

    def exchange_gradient(self, tensor: Any, exchange: Exchange) -> Remove | None:
        """Put the gradient of this tensor, summed over all its uses, through `exchange` before it goes any further;
        None if the tensor takes no part in autograd."""

    def has_past(self, gradient: Any) -> bool:
        """Whether a gradient may itself be differentiated, as in a backward with create_graph=True."""

    def overwrite(self, tensor: Any, values: Any) -> None:
        """Change a tensor in place to another one's values, as an operation that autograd sees."""

    def remember(self, model: Any) -> Callable[[], None]:
        """Keep parameters, buffers, gradients and the random state; calling what is returned puts all of it back,
        bit for bit and as often as one likes."""

    def backward(self, tensors: Sequence[Any]) -> None:
        """Backward from these: with 1 from numbers, with random gradients, always the same, from all else."""

    def fill(self, tensor: Any, values: npt.NDArray[np.generic], recast: bool = False) -> None:
        """Put values into a parameter or buffer, bit for bit and not as an operation of autograd. Its dtype and device
        stay as they are; `recast` gives it the values' dtype where the framework can change it, as torch can."""
