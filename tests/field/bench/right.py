"""Pairs of right runs: the same maths computed in another way. None of them may raise an alarm."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from field.kit.mistake import nothing
from field.kit.patches import Apply, does, reads, trains
from field.kit.running import STEPS, Training, training_of
from field.kit.unpadded import UNPADDED_ATTENTION
from field.kit.wrong import checkpointed
from field.sets import EVERY, FAMILIES, FURTHER, TRIALS

from .measuring import Bench, Outcome, right_outcome
from .settings import AUTOCAST, all_linear, linear_in_chunks, sums_in_two


@dataclass(frozen=True)
class Right:
    """Two right trainings of one family."""

    setting: str
    family: str
    candidate: Apply = nothing
    common: Apply = nothing
    noise: Apply | None = None
    attention: str = "eager"
    steps: int = STEPS

    @property
    def name(self) -> str:
        return f"{self.setting}, {self.steps} steps"

    @property
    def held_out(self) -> bool:
        return EVERY[self.family].held_out

    def judged(self, bench: Bench, way: str) -> Outcome:
        training = training_of(self.family, self.attention, self.steps)
        self.common(training)
        self.candidate(training)
        result = bench.compared(self.family, self.common, training, way, self.noise, self.steps)
        return right_outcome(self.name, self.family, self.setting, way, self.held_out, result)


def _channels_last(training: Training) -> None:
    training.model.to(memory_format=torch.channels_last)

    def change(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"pixel_values": batch["pixel_values"].contiguous(memory_format=torch.channels_last)}

    reads(change)(training)


def _in_bf16(training: Training) -> None:
    training.model.to(torch.bfloat16)


def _compiled(module: str, backend: str = "inductor") -> Apply:
    return lambda training: training.model.get_submodule(module).compile(backend=backend)


def _each_layer_compiled(training: Training) -> None:
    """The layers of each outermost list are compiled on their own, as large models usually are."""
    lists = [(name, each) for name, each in training.model.named_modules() if isinstance(each, nn.ModuleList)]
    for name, layers in lists:
        inner = any(name.startswith(f"{other}.") for other, _ in lists)
        if not inner and all(any(layer.children()) for layer in layers):
            for layer in layers:
                layer.compile(backend="aot_eager")


def _experts_in_a_batch(training: Training) -> None:
    training.model.set_experts_implementation("batched_mm")


def _split(training: Training) -> None:
    """Each micro batch becomes two of half the rows."""
    training.batches = [
        [{name: value.chunk(2)[half] for name, value in batch.items()} for batch in micros for half in (0, 1)]
        for micros in training.batches
    ]
    training.share /= 2


def _fused_norms(training: Training) -> None:
    """Norms that are written out are replaced by torch's own."""
    for name, module in training.model.named_modules():
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            epsilon = next(getattr(module, each) for each in ("variance_epsilon", "eps") if hasattr(module, each))
            does(name, functools.partial(_fused_norm, epsilon=epsilon))(training)


def _fused_norm(self: Any, x: Tensor, *, epsilon: float) -> Tensor:
    return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), epsilon).to(x.dtype)


_SUMS, _OTHER_SUMS = sums_in_two(1 / 2), sums_in_two(1 / 4)
_CHUNKS = all_linear(linear_in_chunks)
_THREADS = trains(threads=2)
_SGD = trains(optimizer=functools.partial(torch.optim.SGD, momentum=0.9))
_CHECKPOINTED = {
    "llama": "model.layers.1",
    "gpt2": "transformer.h.0",
    "t5": "encoder.block.0",
    "qwen3": "model.layers.0",
    "deepseek_v4": "model.layers.1",
    "gemma4": "model.layers.1",
    "luke": "luke.encoder.layer.0",
    "perceiver": "perceiver.encoder.self_attends.0",
    "vjepa2": "vjepa2.encoder.layer.1",
    "mllama": "model.language_model.layers.1",
}
_PADDED = (
    "llama",
    "qwen2",
    "mistral",
    "helium",
    "glm",
    "olmo",
    "exaone4",
    "dots1",
    "nanochat",
    "esm",
    "roberta",
    "apertus",
    "seed_oss",
    "eurobert",
    "gemma",
    "nomic_bert",
    "prelayernorm",
    "arcee",
    "xlm_roberta",
    "modernbert_decoder",
    "nemotron_h",
)
_NOT_COMPILED = (
    *("qwen3_next", "qwen3_5", "doge"),  # torch's compiler fails on their code
    "decision_transformer",  # the gradient of an unused output becomes zero instead of None, so its weights decay
)
_COMPILED_BY_LAYER = (
    *("t5", "speecht5"),  # layers that return a value which they read
    *("qwen2_moe", "flex_olmo", "mixtral", "jetmoe"),  # scores of routers in the loss
    "gptj",  # layers that return what nothing reads
    "moonshine_streaming",  # a value changed in place
    *("llama", "bert", "vit", "whisper", "clip", "gpt_neox", "detr", "mamba", "qwen3_vl"),
)
_LATER_TRIALS = {family: of for trial in list(TRIALS.values())[1:] for family, of in trial.items()}
_IMAGES = ("resnet", "mobilenet_v2", "convnext", "efficientnet", "hgnet", "swiftformer", "levit", "mobilevitv2")


def _right() -> Iterator[Right]:
    for family, of in FAMILIES.items():
        yield Right("gemm", family, _SUMS)
        yield Right("threads", family, _THREADS)
        if of.attention:
            yield Right("attention", family, attention="sdpa")
        if of.short and not of.dropout:  # other dtypes draw other random numbers
            yield Right("autocast", family, AUTOCAST)
        if family not in _IMAGES:
            yield Right("chunks", family, _CHUNKS)
        if of.short:
            yield Right("bf16", family, _SUMS, common=AUTOCAST, noise=_OTHER_SUMS)
    for family in ("llama", "gpt2", "vit", "resnet", "phi", "roberta", "efficientnet"):
        yield Right("bf16 parameters", family, _SUMS, common=_in_bf16, noise=_OTHER_SUMS)
    for family in ("llama", "bert", "vit", "mixtral", "gpt_neox", "clip"):
        yield Right("attention and gemm", family, _SUMS, attention="sdpa")
    for family in ("llama", "t5", "resnet", "mixtral", "gemma3", "efficientnet"):
        yield Right("gemm", family, _SUMS, steps=1)
        yield Right("gemm", family, _SUMS, steps=10)
    for family in ("qwen2", "vit", "qwen3", "clip"):
        yield Right("attention", family, attention="sdpa", steps=3)
        yield Right("attention", family, attention="sdpa", steps=10)
    for number, family in enumerate(_PADDED):
        yield Right("unpadded attention", family, attention=UNPADDED_ATTENTION, steps=(1, 2, 3)[number % 3])
    for family in ("helium", "glm", "esm", "seed_oss"):
        yield Right(
            "unpadded attention in bf16", family, common=AUTOCAST, noise=_OTHER_SUMS, attention=UNPADDED_ATTENTION
        )
    for family in _IMAGES:
        yield Right("channels-last", family, _channels_last)
    for family, module in _CHECKPOINTED.items():
        yield Right("checkpointed", family, checkpointed(module))
    for number, (family, of) in enumerate(_LATER_TRIALS.items()):
        yield Right("gemm", family, _SUMS, steps=(1, 3)[number % 2])
        if of.attention and of.short:
            yield Right("attention in bf16", family, common=AUTOCAST, noise=_OTHER_SUMS, attention="sdpa")
        if of.attention:
            yield Right("attention and chunks", family, _CHUNKS, attention="sdpa", steps=(3, 1)[number % 2])
        if number % 3 == 0 and family not in _NOT_COMPILED:
            yield Right("compiled", family, trains(compiled="aot_eager"))
    for family in ("deepseek_v4", "gemma4", "nemotron_h"):
        yield Right("batched experts", family, _experts_in_a_batch)
    for number, family in enumerate(TRIALS["tenth"]):
        options = {"fused": True} if number % 2 else {"foreach": True}
        yield Right("optimizer's kernels", family, trains(adam=options), steps=3)
    for family in ("luke", "perceiver", "vjepa2"):
        yield Right("micro batches", family, _split)
    for family in ("deepseek_v4", "gemma4", "nemotron_h", "mllama"):
        yield Right("fused norms", family, _fused_norms)
    for family in _COMPILED_BY_LAYER:
        yield Right("compiled layers", family, _each_layer_compiled)
        if EVERY[family].short:
            yield Right("compiled layers under autocast", family, _each_layer_compiled, common=AUTOCAST)
    yield Right("compiled layer", "modernbert_decoder", _compiled("model.layers.1", "aot_eager"))
    yield Right("compiled layer", "mllama", _compiled("model.vision_model.transformer.layers.0", "aot_eager"))
    yield Right("compiled layer", "dac", _compiled("decoder.block.0", "aot_eager"))
    yield Right("compiled", "llama", _compiled("model.layers.1.mlp"))
    yield Right("compiled", "bert", _compiled("bert.pooler"))
    yield Right("compiled", "mistral", trains(compiled="aot_eager"))
    yield Right("compiled", "phi", _compiled("model.layers.0.mlp"))


def _further() -> Iterator[Right]:
    """Every family in every setting that suits it, over other numbers of steps and with two optimizers."""
    for number, (family, of) in enumerate(FURTHER.items()):
        trained = _SGD if number % 3 == 1 else nothing
        few, many = (1, 10) if number % 2 else (3, 1)
        yield Right("gemm", family, _SUMS, common=trained, steps=few)
        yield Right("gemm", family, _SUMS, steps=10 if number % 4 == 0 else 2)
        yield Right("threads", family, _THREADS, common=trained)
        yield Right("chunks", family, _CHUNKS, steps=few)
        yield Right("compiled", family, trains(compiled="aot_eager"))
        if of.short:
            yield Right("autocast", family, AUTOCAST, common=trained)
            yield Right("bf16", family, _SUMS, common=AUTOCAST, noise=_OTHER_SUMS)
        if of.attention:
            yield Right("attention", family, attention="sdpa", common=trained, steps=many)
            yield Right("attention and gemm", family, _SUMS, attention="sdpa", steps=few)
            yield Right("attention in bf16", family, common=AUTOCAST, noise=_OTHER_SUMS, attention="sdpa")
        if "pixel_values" in of.batch(torch.Generator()):
            yield Right("channels-last", family, _channels_last, steps=few)


RIGHT = [*_right(), *_further()]
