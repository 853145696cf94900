"""One load of a checkpoint: what it was asked to do, and what it did to each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensortap.core.records import Summary
from tensortap.frameworks.loading import LoadCall, outcome
from tensortap.model.audit.ledger import Change, TensorSnapshots
from tensortap.report.wording import shape

__all__ = ["RunningLoad"]

ShapeOf = Callable[[str], tuple[int, ...]]


@dataclass
class RunningLoad:
    """A load that is under way, and when it is over, the judgement on it."""

    target: str
    """Name of the module that was loaded into."""
    method: str
    where: str
    call: LoadCall
    keys: Mapping[str, str]
    """Key in the checkpoint → name in the model."""
    ties: Sequence[Sequence[str]]
    """Names of one and the same tensor."""
    before: Mapping[str, Summary | None]
    """Name → summary of its values before the load."""
    handled: set[str] = field(default_factory=set)
    """What loads inside this one have told already."""

    @classmethod
    def begun(
        cls, ledger: TensorSnapshots, target: str, method: str, where: str, call: LoadCall, state: Mapping[str, Any]
    ) -> RunningLoad:
        """A load into the module `target`, whose tensors by the keys of a checkpoint are `state`."""
        by_tensor: dict[int, list[str]] = {}
        for name, _, tensor in ledger.tensors():
            by_tensor.setdefault(id(tensor), []).append(name)
        keys = {}
        for key, tensor in state.items():
            if names := by_tensor.get(id(tensor)):
                full = f"{target}.{key}" if target else key
                keys[key] = full if full in names else next((n for n in names if key.endswith(n)), names[0])
        ties = [names for names in by_tensor.values() if len(names) > 1]
        before = {name: ledger.summary(name) for name in ledger.names}
        return cls(target, method, where, call, keys, ties, before)

    def took_place(self, changed: Mapping[str, Change], error: BaseException | None) -> bool:
        """Whether the load gave any values before it raised."""
        return error is None or bool(changed) or _came_to_the_end(error)

    def told(
        self, changed: Mapping[str, Change], shape_of: ShapeOf, result: Any, error: BaseException | None
    ) -> Iterator[tuple[str, str, str]]:
        """(name, event, detail) of every tensor that the load was about, or that it changed."""
        if not self.took_place(changed, error):
            return
        wrong = self._wrong(shape_of)
        missing = {key for key in self._reported(result)[0] if key not in wrong}
        taken = {name for key, name in self.keys.items() if key not in wrong and key not in missing}
        partners = {name: group for group in self.ties for name in group}
        for key, name in self.keys.items():
            if name not in changed and (name in self.handled or (name in taken and _missed(key, error))):
                continue  # told already; or the load may not have come to it
            partner = next((other for other in partners.get(name, ()) if other in taken and other != name), None)
            if name in taken:
                yield name, "loaded", ""
            elif partner is not None:
                yield name, "loaded", f"through {partner}, which it is tied to"
            elif name in changed:
                yield name, "loaded", ""
            elif key in wrong:
                yield name, "mismatch", f"{shape(wrong[key])} in the checkpoint, {shape(shape_of(name))} here"
            elif key in missing:
                yield name, "missing", ""
        own = set(self.keys.values())
        for name in [name for name in changed if name not in own]:
            yield name, "changed", f"during {self.method} at {self.where}"

    def unexpected(self, shape_of: ShapeOf, result: Any) -> list[str]:
        """Keys that the model has no place for."""
        wrong = self._wrong(shape_of)
        return [key for key in self._reported(result)[1] if key not in wrong]

    def _wrong(self, shape_of: ShapeOf) -> dict[str, tuple[int, ...]]:
        """Keys whose value has another shape than the tensor: paddle counts them as missing and unexpected."""
        return {
            key: there
            for key, name in self.keys.items()
            if (there := self.call.given.get(key)) is not None
            and there != (here := shape_of(name))
            and not (here == () and there == (1,))  # how very old checkpoints wrote scalars
        }

    def _reported(self, result: Any) -> tuple[Sequence[str], Sequence[str]]:
        """(missing, unexpected) as the framework has them, which knows of renaming hooks; else as it would seem."""
        given = self.call.given
        absent, strange = [key for key in self.keys if key not in given], [key for key in given if key not in self.keys]
        if (told := outcome(result)) is None:
            return absent, strange
        missing, unexpected = told
        if set(strange) <= set(unexpected):
            # Nothing was renamed, so what is absent got no value from the checkpoint, even where torch does not miss
            # it: a BatchNorm helps out with its own count of batches.
            missing = absent
        return missing, unexpected


def _came_to_the_end(error: BaseException | None) -> bool:
    """Torch copies all that fits, and then raises one error about all that does not. Other errors stop it at once."""
    return error is None or "Error(s) in loading state_dict" in str(error)


def _missed(key: str, error: BaseException | None) -> bool:
    """Whether a value that was given, and fits, may not have been copied."""
    return not _came_to_the_end(error) or f'While copying the parameter named "{key}"' in str(error)
