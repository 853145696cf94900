"""Models and optimizers of a paddle program."""

from __future__ import annotations

from typing import Any

import paddle

from tensortap.frameworks.discovery import Discovery

__all__ = ["PaddleDiscovery"]


class PaddleDiscovery(Discovery):
    """Calls of `paddle.nn.Layer`, and `paddle.optimizer.Optimizer`."""

    module_class = paddle.nn.Layer
    calling = "__call__"
    optimizer_classes = (paddle.optimizer.Optimizer, paddle.optimizer.AdamW)

    def is_complete(self, optimizer: Any) -> bool:
        return "_param_groups" in vars(optimizer)
