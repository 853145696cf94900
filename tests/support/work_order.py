"""Which tests each worker process of pytest-xdist runs, and in which order: `--dist loadfile`, with two changes."""

from __future__ import annotations

from typing import Any

__all__ = ["LONGEST", "ONE_WORKER", "scheduler"]

ONE_WORKER = ("tests/parallel", "tests/browser")
"""Folders whose files share runs that take long to make: each worker process of pytest-xdist would make them anew."""

LONGEST = (
    "tests/mistakes/test_mistakes.py",
    "tests/mistakes/test_isolated.py",
    "tests/parallel",
    "tests/browser",
    "tests/field/test_field.py",
    "tests/loops/test_loops.py",
    "tests/compiled/test_inside_keys.py",
    "tests/replay/test_replayed_modules.py",
    "tests/test_pytest_plugin.py",
    "tests/compiled/test_inside_code.py",
    "tests/fuzz/test_fuzz.py",
    "tests/compat/test_saving_ranks.py",
    "tests/capture/test_distributed.py",
    "tests/capture/test_paddle_distributed.py",
    "tests/model/test_pages.py",
    "tests/test_portable.py",
    "tests/replay/test_replay_page.py",
    "tests/cli/test_run_command.py",
)
"""Files with few tests that take long. Left for the end, as pytest-xdist would, one worker would wait for the other."""


def scheduler(config: Any, log: Any) -> Any:
    """Return a scheduler that keeps such folders in one worker, and starts with the longest."""
    from xdist.scheduler import LoadFileScheduling

    class LongestFirst(LoadFileScheduling):  # type: ignore[misc, unused-ignore] - a checker may not find xdist
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return next((folder for folder in ONE_WORKER if file.startswith(f"{folder}/")), file)

        def _assign_work_unit(self, node: Any) -> None:
            longest = next((scope for scope in LONGEST if scope in self.workqueue), None)
            if longest is not None:
                self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)
