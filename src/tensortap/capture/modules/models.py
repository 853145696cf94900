"""Several models in one tap or check: each is a part of a container that nothing calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensortap.errors import UsageError
from tensortap.frameworks import framework_of, network_of

__all__ = ["one_model"]

_EXAMPLE = '{"generator": generator, "critic": critic}'


def one_model(model: Any) -> Any:
    """Return a model as it is, and a dict of models as the parts of one, under their names.

    Raise UsageError for a list of models, or for names that module names cannot have.
    """
    if isinstance(model, (list, tuple)):
        raise UsageError(f"several models are passed by name: give {_EXAMPLE} instead of a list")
    if not isinstance(model, Mapping):
        return model
    if not model:
        raise UsageError(f"the dict of models is empty: pass them by name, as in {_EXAMPLE}")
    for name in model:
        if not isinstance(name, str) or not name or "." in name:
            raise UsageError(f"{name!r} cannot be the name of a model; use a text without dots")
    networks = {name: network_of(each) for name, each in model.items()}
    frameworks = [framework_of(each) for each in networks.values()]
    if len({framework.name for framework in frameworks}) > 1:
        raise UsageError("the models belong to several frameworks: tap those of each framework on their own")
    return frameworks[0].join(networks)
