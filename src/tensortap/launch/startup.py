"""Starts the search for a trained model in a process of a launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tensortap.capture.messages import say
from tensortap.core.interrupts import suppress_errors
from tensortap.frameworks.registry import registered_frameworks
from tensortap.launch.finder import Finder
from tensortap.launch.recording import Recordings
from tensortap.launch.settings import LaunchSettings

__all__ = ["attach_framework", "watching"]

_finder: Finder | None = None
"""The finder of this process. A program may import several frameworks."""


def attach_framework(root: str) -> None:
    """Search for models of a framework that was just imported, with the settings that this process inherited."""
    global _finder
    if _finder is None:
        settings = LaunchSettings.inherited()
        if settings is None:
            return
        _finder = Finder(Recordings(settings))
        os.register_at_fork(after_in_child=_finder.forked)
    _finder.attach(registered_frameworks()[root]())


@contextmanager
def watching(settings: LaunchSettings, *roots: str) -> Iterator[Finder]:
    """Record the models that the block trains in this process, of the frameworks with these root packages.

    >>> with watching(LaunchSettings("/tmp/run"), "torch"):                    # doctest: +SKIP
    ...     runpy.run_path("train.py", run_name="__main__")
    """
    finder = Finder(Recordings(settings))
    reason = ""
    try:
        for root in roots:
            finder.attach(registered_frameworks()[root]())
        yield finder
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        with suppress_errors():
            finder.stop()
            finder.recordings.close(reason)
        if not finder.recordings.count:
            say("nothing was recorded: no model was called and no optimizer trained the parameters of one")
