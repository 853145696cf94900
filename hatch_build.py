"""Adds the compiled hooks to a wheel, with TENSORTAP_BUILD=1: a wheel for one platform and one Python.

Without it the wheel is the same for all, and the hooks are compiled on first use.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Hatchling finds this class by its name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("TENSORTAP_BUILD", "") in ("", "0") or version == "editable":
            return
        compiler = runpy.run_path(str(Path(self.root) / "src/tensortap/native/compiler.py"))
        target = Path(self.directory) / compiler["file_name"]()
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler["build"](target)
        build_data["force_include"][str(target)] = f"tensortap/native/{target.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
