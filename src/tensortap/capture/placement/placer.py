"""Placements of records: from the user's layout, from the framework, or as a guess that says so.

The sources, in this order: a rule of the layout; the tensor itself (a DTensor); the parameter or layer; a convention.
By the convention, processes along data axes get other samples, in the first dimension, and all others hold the same
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tensortap.capture.modules.tree import Site
from tensortap.capture.placement.layout import Layout
from tensortap.core.placement import GUESS, PARTIAL, REPLICA, SHARD, Mesh, Placement
from tensortap.core.positions import Division, divide
from tensortap.core.records import STATE_KINDS, Key, display_name
from tensortap.frameworks.device_reader import SlotPlacement
from tensortap.frameworks.placing import DATA_AXES, PIPELINE_AXES, SEQUENCE_AXES, ModelPlacer, StageInfo

__all__ = ["Placer"]

_INPUTS = ("input", "grad_input")


class Placer:
    """Finds the placement of each record of one model. `native/deferred.h` reads its `batch`."""

    __slots__ = (
        "_cache",
        "_data_axes",
        "_forward",
        "_layout",
        "_model",
        "_notice",
        "_own_names",
        "_wrong",
        "batch",
        "mesh",
    )

    def __init__(
        self,
        model: ModelPlacer | None,
        layout: Layout,
        mesh: Mesh | None,
        notice: Callable[[str], None],
    ) -> None:
        self.mesh = mesh
        self._model = model
        self._layout = layout
        self._notice = notice
        self._own_names: dict[str, Sequence[str]] = {}
        known = [] if model is None else list(model.data_axes)
        known += [name for name in (mesh.names if mesh is not None else ()) if name in DATA_AXES and name not in known]
        self._data_axes = [name for name in known if mesh is not None and mesh.size(name) > 1]
        self.batch: tuple[int, int, tuple[int, ...]] | None = None
        """Step, micro step and shape of the first input of the forward in progress. Equal shapes of two forwards in a
        row are one object."""
        self._forward: dict[tuple[str, int, str, str], Placement | None] = {}
        """Placements of a forward's tensors, for their gradients; None where it is not known. They stay for later steps
        of the same batch shape, in which placements are not looked for again."""
        self._cache: dict[Any, tuple[bool, Placement | None]] = {}
        self._wrong: set[str] = set()

    @property
    def stage(self) -> StageInfo | None:
        return None if self._model is None else self._model.stage

    def alone(self, modules: Mapping[str, Sequence[str]]) -> None:
        """Name the axes along which other processes have other modules under the names of these."""
        self._own_names = dict(modules)

    def place(self, tensor: Any, shape: tuple[int, ...], key: Key, site: Site) -> Placement | None:
        """Return the placement of a record; None if it is not known."""
        if self.mesh is None:
            return None
        if key.kind in STATE_KINDS:
            found = self._of_state(tensor, shape, key, site)
        else:
            found = self._of_value(tensor, shape, key, site)
        if found is None or not (without := self._without(key.module)):
            return found
        axes = {axis: role for axis, role in found.axes.items() if axis not in without}
        return found if len(axes) == len(found.axes) else replace(found, axes=axes)

    def follows_from_shape(self, tensor: Any) -> bool:
        """Return whether tensors of this one's slot and shape have its placement as long as `batch` has that shape."""
        return self._model is None or self._model.of_tensor(tensor) is None

    def is_current(self, place: SlotPlacement, kind: str, step: int, micro: int) -> bool:
        """Return whether a placement of an earlier record still holds for one of its shape.

        The first input of a forward is always placed anew.
        """
        if self.batch is None:
            return place.batch is None and kind != "input"
        if kind == "input" and self.batch[:2] != (step, micro):
            return False
        return place.batch is self.batch[2]

    def key_in_whole(self, key: Key) -> Key:
        """Return the key of a record among those of all stages.

        Inputs and outputs of a stage's own root, other than the model's, belong to a module "(stage 1)".
        """
        stage = self.stage
        if stage is None or key.module or key.kind in STATE_KINDS or stage.count < 2:
            return key
        edge = 0 if key.kind in _INPUTS else stage.count - 1
        return key if stage.index == edge else key._replace(module=f"(stage {stage.index})")

    def _without(self, module: str) -> Sequence[str]:
        for name, axes in self._own_names.items():
            if module == name or module.startswith(f"{name}."):
                return axes
        return ()

    def _of_state(self, tensor: Any, shape: tuple[int, ...], key: Key, site: Site) -> Placement | None:
        path = key.path.partition("~")[0]
        given, placement = self._given(shape, key, f"{key.module}.{path}" if key.module else path)
        if given:
            return placement
        found = None if self._model is None else self._model.of_parameter(site.owner, path, tensor, key.kind)
        if found is None:
            if not self._holds_all():
                return None
            found = Placement.of_whole(shape, {}, GUESS)
        if key.kind == "param_grad":
            due = {axis: PARTIAL + "mean" for axis in self._reducing_axes() if axis not in found.axes}
            found = replace(found, axes={**due, **found.axes})
        return self._complete(found)

    def _reducing_axes(self) -> list[str]:
        """Return the axes along which gradients of parameters are averaged after the hooks have seen them."""
        assert self.mesh is not None
        tokens = [name for name in SEQUENCE_AXES if self.mesh.size(name) > 1]
        return [*self._data_axes, *tokens]

    def _of_value(self, tensor: Any, shape: tuple[int, ...], key: Key, site: Site) -> Placement | None:
        gradient = key.kind.startswith("grad_")
        if key.kind == "input" and shape and (self.batch is None or self.batch[:2] != (key.step, key.micro)):
            self._begin_forward(key.step, key.micro, shape)
        given, placement = self._given(shape, key, key.module)
        if given:
            return placement
        spot = key.module, key.call, key.kind.removeprefix("grad_"), key.path.partition("~")[0]
        found = None if self._model is None else self._model.of_tensor(tensor)
        if found is None and gradient and spot in self._forward:
            forward = self._forward[spot]
            return None if forward is None else self._of_gradient(forward, shape)
        if found is None and self._model is not None:
            found = self._model.of_activation(site.owner, key.kind, tensor)
        if found is None:
            assert self.mesh is not None
            if any(self.mesh.size(name) > 1 for name in SEQUENCE_AXES):
                return None  # which dimension holds the tokens, and in which order, only the user knows
            found = Placement.of_whole(shape, {}, GUESS) if self._model is None else self._model.guess(tensor)
        found = None if found is None else self._complete(self._with_batch(found, shape))
        if not gradient:
            self._forward[spot] = found
        return found

    def _begin_forward(self, step: int, micro: int, shape: tuple[int, ...]) -> None:
        if self.batch is not None and self.batch[2] == shape:
            shape = self.batch[2]
        elif micro == 0:
            self._forward.clear()
        self.batch = step, micro, shape

    def _of_gradient(self, forward: Placement, shape: tuple[int, ...]) -> Placement | None:
        """Return the placement of a gradient: that of its value, with partial sums reduced to replicas."""
        if not forward.fits(shape):
            return None
        axes = {axis: REPLICA if role.startswith(PARTIAL) else role for axis, role in forward.axes.items()}
        return replace(forward, axes=axes)

    def _given(self, shape: tuple[int, ...], key: Key, name: str) -> tuple[bool, Placement | None]:
        """Return whether the layout has a rule for the record, and its placement; None if the rule does not fit."""
        spot = (name, key.kind, key.path, shape, key.micro if self._layout.uses_micro else 0)
        if spot not in self._cache:
            self._cache[spot] = self._placed_by_rule(shape, key, name)
        return self._cache[spot]

    def _placed_by_rule(self, shape: tuple[int, ...], key: Key, name: str) -> tuple[bool, Placement | None]:
        assert self.mesh is not None
        rule = self._layout.rule_of(name, key.kind, key.path, len(shape))
        if rule is None:
            return False, None
        try:
            found = rule.place(shape, self.mesh, key.micro, self._pipeline_axes())
        except ValueError as error:
            what = f"{display_name(name)} ({key.kind} {key.path})"
            self._report(f"layout {rule.text!r} of {what}: {error}. It is recorded without one.")
            return True, None
        if key.kind == "param_grad":
            spoken = {axis.name for axis in rule.axes}
            due = {axis: PARTIAL + "mean" for axis in self._reducing_axes() if axis not in spoken}
            return True, replace(found, axes={**found.axes, **due})
        if key.kind.startswith("grad_") and not rule.of_gradient:
            return True, self._of_gradient(found, shape)
        return True, found

    def _with_batch(self, found: Placement, shape: tuple[int, ...]) -> Placement:
        """Return the placement with the dimension of the batch divided along the data axes."""
        axes = [name for name in self._data_axes if name not in found.axes]
        assert self.mesh is not None
        if not axes:
            return found
        if not shape:
            return replace(found, axes={**found.axes, **dict.fromkeys(axes, PARTIAL + "mean")}, source=GUESS)
        along = self._batch_dimension(shape)
        if along is None or len(found.boxes) != 1 or found.order:
            return replace(found, axes={**found.axes, **dict.fromkeys(axes, REPLICA)}, source=GUESS)
        start, at, length = found.boxes[0][along]
        divisions = [Division(self.mesh.size(name), self.mesh.coordinate(name)) for name in axes]
        size, positions = divide(found.shape[along], divisions)
        box = list(found.boxes[0])
        box[along] = (start, int(positions[0]) + at if positions.size else 0, length)
        whole = [size if each == along else old for each, old in enumerate(found.shape)]
        return Placement(tuple(whole), (tuple(box),), {**dict.fromkeys(axes, SHARD), **found.axes}, GUESS)

    def _batch_dimension(self, shape: tuple[int, ...]) -> int | None:
        first = self.batch[2] if self.batch is not None else ()
        if not first:
            return None
        if shape[0] == first[0] or (len(first) > 1 and shape[0] == first[0] * first[1]):
            return 0
        if len(shape) > 2 and len(first) > 1 and shape[:2] == (first[1], first[0]):
            return 1
        return None

    def _complete(self, found: Placement) -> Placement:
        """Return the placement as a replica along all further axes along which processes have the same modules."""
        assert self.mesh is not None
        left_out = self._pipeline_axes()
        more = {
            name: REPLICA
            for name, size in zip(self.mesh.names, self.mesh.sizes, strict=True)
            if size > 1 and name not in found.axes and name not in left_out
        }
        return replace(found, axes={**found.axes, **more}) if more else found

    def _pipeline_axes(self) -> list[str]:
        assert self.mesh is not None
        return [name for name in self.mesh.names if name in (*PIPELINE_AXES, "micro")]

    def _holds_all(self) -> bool:
        """Return whether it is plausible that every process has the whole of a plain parameter."""
        return self.mesh is not None

    def _report(self, text: str) -> None:
        if text not in self._wrong:
            self._wrong.add(text)
            self._notice(text)
