"""What reference and candidate have in common, and the rightful difference between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.mistake import nothing
from field.kit.patches import Apply, both, does, trains
from field.kit.running import Training
from field.kit.unpadded import UNPADDED_ATTENTION
from field.sets import EVERY


def linear_summed_in_two(share: float) -> Callable[..., Tensor]:
    """The sum over the inputs is broken at some place, as split-K kernels do. Short dtypes are summed in float32."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight if isinstance(self, nn.Linear) else self.weight.T
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        cut = int(weight.shape[1] * share)
        with torch.autocast("cpu", enabled=False):
            x, weight = x.to(dtype).float(), weight.to(dtype).float()
            result = F.linear(x[..., :cut], weight[:, :cut]) + F.linear(x[..., cut:], weight[:, cut:])
            result = result if self.bias is None else result + self.bias.to(dtype).float()
        return result.to(dtype)

    return forward


def linear_in_chunks(self: Any, x: Tensor) -> Tensor:
    """Half of the batch after the other."""
    weight = self.weight if isinstance(self, nn.Linear) else self.weight.T
    return torch.cat([F.linear(part, weight, self.bias) for part in x.chunk(2)])


def all_linear(forward: Callable[..., Tensor]) -> Apply:
    """All products with weights are computed that way."""

    def apply(training: Training) -> None:
        for name, module in training.model.named_modules():
            # A subclass, such as a router, may compute more.
            if type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D":
                does(name, forward)(training)

    return apply


def sums_in_two(share: float) -> Apply:
    """All products with weights are summed in two parts, and convolutions run on another library's kernels."""
    return both(all_linear(linear_summed_in_two(share)), trains(mkldnn=False))


@dataclass(frozen=True)
class Setting:
    common: Apply = nothing
    """Changes of both sides."""
    candidate: Apply = nothing
    """A rightful change of the candidate."""
    noise: Apply | None = None
    """A rightful change of the reference, for a run that shows how far right runs differ."""
    attention: str = "eager"
    """The candidate's; the reference's is eager."""

    def suits(self, family: str) -> bool:
        return self.attention == "eager" or EVERY[family].attention


AUTOCAST = trains(autocast=torch.bfloat16)

SETTINGS = {
    "float32": Setting(),
    "gemm": Setting(candidate=sums_in_two(1 / 2)),
    "bf16": Setting(common=AUTOCAST, candidate=sums_in_two(1 / 2), noise=sums_in_two(1 / 4)),
    "attention": Setting(attention="sdpa"),
    "unpadded": Setting(attention=UNPADDED_ATTENTION),
}
