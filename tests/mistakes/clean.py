"""Pairs of right runs: the same again, or the same computed in another way. None of them may raise an alarm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from . import models, same
from .models import MODELS
from .patches import Apply, both, does, reads, trains
from .running import Batch, Runs, Training, training_of, unchanged
from .same import everywhere, sums_in_two


@dataclass(frozen=True)
class Clean:
    name: str
    model: str
    candidate: Apply = unchanged
    """Changes of the candidate."""
    common: Apply = unchanged
    """Changes of both sides compared with the usual training."""
    noise: tuple[Apply, ...] = ()
    """Further runs of the reference that show how far right runs may differ."""

    def reference(self, runs: Runs, keep: str) -> Path:
        return runs.reference(self.model, keep, common=self.common)

    def candidate_and_noise(self, runs: Runs, keep: str) -> tuple[Path, list[Path]]:
        """Return the candidate, and the runs for the noise floor."""
        noise = [self._run(runs, keep, "noise of", apply) for apply in self.noise]
        return self._run(runs, keep, "clean", self.candidate), noise

    def _run(self, runs: Runs, keep: str, role: str, apply: Apply) -> Path:
        training = training_of(self.model)
        both(self.common, apply)(training)
        return runs.make(training, f"{role} {self.name}", keep)


def _wrapped(training: Training) -> None:
    training.model = nn.DataParallel(training.model)


def _channels_last(training: Training) -> None:
    training.model.to(memory_format=torch.channels_last)
    reads(lambda batch: Batch(batch.inputs.contiguous(memory_format=torch.channels_last), batch.target))(training)


def _compiled(module: str) -> Apply:
    """Compiled in place, with kernels of the compiler's own: small modules, since each takes a second or two."""
    return lambda training: training.model.get_submodule(module).compile(backend="inductor")


IN_BF16 = trains(autocast=torch.bfloat16)
TWO_THREADS = trains(threads=2)

AGAIN = [Clean(f"{model}-again", model) for model in MODELS]

THREADS = [Clean(f"{model}-on-two-threads", model, TWO_THREADS) for model in MODELS if model != "frozen resnet"]

PRECISION = [
    Clean("decoder-bf16-again", "decoder", common=IN_BF16),
    Clean("decoder-bf16-on-two-threads", "decoder", TWO_THREADS, common=IN_BF16),
    Clean("encoder-bf16-on-two-threads", "encoder", TWO_THREADS, common=IN_BF16),
    Clean("resnet-bf16-on-two-threads", "resnet", TWO_THREADS, common=IN_BF16),
    Clean(
        "decoder-bf16-sums-in-two",
        "decoder",
        sums_in_two(1 / 2),
        common=IN_BF16,
        noise=(sums_in_two(1 / 4), sums_in_two(3 / 4)),
    ),
]

SUMS = [
    Clean("decoder-one-sum-in-two", "decoder", does("layers.1.mlp.down", same.linear_summed_in_two(1 / 2))),
    Clean("decoder-sums-in-two", "decoder", sums_in_two(1 / 2), noise=(sums_in_two(1 / 4),)),
    Clean("encoder-sums-in-two", "encoder", sums_in_two(1 / 2), noise=(sums_in_two(1 / 4),)),
    Clean("vision-sums-in-two", "vision", sums_in_two(1 / 2), noise=(sums_in_two(1 / 4),)),
    Clean("experts-sums-in-two", "experts", sums_in_two(1 / 2), noise=(sums_in_two(1 / 4),)),
    Clean("decoder-in-chunks", "decoder", everywhere(nn.Linear, same.linear_in_chunks)),
    Clean("encoder-in-chunks", "encoder", everywhere(nn.Linear, same.linear_in_chunks)),
    Clean("resnet-in-chunks", "resnet", everywhere(nn.Conv2d, same.conv_in_chunks)),
]

EQUIVALENT = [
    Clean("decoder-attention-fused", "decoder", everywhere(models.CausalCore, same.causal_core_fused)),
    Clean("decoder-attention-scaled-first", "decoder", everywhere(models.CausalCore, same.causal_core_scaled_first)),
    Clean("decoder-norm-of-library", "decoder", everywhere(models.RMSNorm, same.rms_norm_library)),
    Clean("decoder-norm-in-double", "decoder", everywhere(models.RMSNorm, same.rms_norm_in_double)),
    Clean("decoder-silu-by-hand", "decoder", everywhere(nn.SiLU, same.silu_by_sigmoid)),
    Clean("decoder-embedding-by-matrix", "decoder", does("embed", same.embedding_by_matrix)),
    Clean("decoder-loss-by-hand", "decoder", trains(loss=same.cross_entropy_by_hand)),
    Clean("decoder-checkpointed", "decoder", same.layers_checkpointed),
    Clean("decoder-optimizer-foreach", "decoder", trains(adam={"foreach": True})),
    Clean("decoder-optimizer-fused", "decoder", trains(adam={"fused": True})),
    Clean("encoder-attention-fused", "encoder", everywhere(models.PaddedCore, same.padded_core_fused)),
    Clean("encoder-norm-by-hand", "encoder", everywhere(nn.LayerNorm, same.layer_norm_by_hand)),
    Clean("encoder-gelu-by-erf", "encoder", everywhere(nn.GELU, same.gelu_by_erf)),
    Clean("encoder-wrapped", "encoder", _wrapped),
    Clean("vision-attention-explicit", "vision", everywhere(models.Attention, same.attention_explicit)),
    Clean("vision-patches-by-matrix", "vision", does("patches", same.conv_by_matrix)),
    Clean("resnet-channels-last", "resnet", _channels_last),
    Clean("resnet-convolution-by-matrix", "resnet", everywhere(nn.Conv2d, same.conv_by_matrix)),
    Clean("resnet-batch-norm-by-hand", "resnet", everywhere(nn.BatchNorm2d, same.batch_norm_by_hand)),
    Clean("recurrent-cell-of-library", "recurrent", everywhere(models.Cell, same.cell_library)),
    Clean("recurrent-one-product", "recurrent", everywhere(models.Cell, same.gates_in_one_product, "gates")),
    Clean("experts-softmax-last", "experts", everywhere(models.Mixture, same.route_softmax_last, "route")),
    Clean("experts-stacked", "experts", everywhere(models.Mixture, same.moe_stacked)),
]

COMPILED = [
    Clean("decoder-compiled", "decoder", trains(compiled="aot_eager")),
    Clean("decoder-mlp-compiled", "decoder", _compiled("layers.1.mlp")),
    Clean("decoder-norm-compiled", "decoder", _compiled("layers.1.norm1")),
]

CLEAN = [*AGAIN, *THREADS, *PRECISION, *SUMS, *EQUIVALENT, *COMPILED]
