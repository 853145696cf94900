"""What families of models are made of: losses, and builders for models with tiny configurations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

from .data import CLASSES, WORDS, Batch, classified, language, padded_left, pictures, unpadded
from .unpadded import UNPADDED_ATTENTION, register

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 48
WINDOW = 7  # every query sees a token: what attention makes of none at all differs by implementation

Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Family:
    """One architecture: how to build it, what it is fed, and how its loss is computed."""

    build: Callable[[str], nn.Module]
    """Takes the attention implementation."""
    batch: Callable[[torch.Generator], Batch]
    loss: Loss
    attention: bool = True
    """Whether it can run with another attention implementation."""
    held_out: bool = False
    micros: int = 1
    dropout: bool = False
    """Whether it draws random numbers in its forward."""
    short: bool = True
    """Whether it runs in bfloat16 at all."""
    steps: int = 2
    """How long mistakes are trained."""


# --- losses -----------------------------------------------------------------------------------------------------------


def own_loss(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    """The model computes its loss itself, as those of transformers do."""
    loss: Tensor = model(**batch, **options).loss
    return loss


def outer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is computed outside the model."""
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])


def object_loss(model: nn.Module, batch: Batch, *, masked: bool = True) -> Tensor:
    """The n-th query is to find the n-th object. A model that is `masked` is told which part of an image is margin."""
    told = {"pixel_mask": batch["pixel_mask"]} if masked else {}
    found = model(batch["pixel_values"], **told)
    classes = F.cross_entropy(found.logits.float().flatten(0, 1), batch["classes"].flatten())
    return classes + F.l1_loss(found.pred_boxes.float(), batch["boxes"])


# --- families ---------------------------------------------------------------------------------------------------------


def _transformers(kind: str, head: str, attention: str, **options: Any) -> nn.Module:
    _prepare_torchvision()  # transformers imports it if it is installed
    import transformers

    if attention == UNPADDED_ATTENTION:
        register()
    config = transformers.AutoConfig.for_model(kind, **options)
    made = getattr(transformers, head)
    build = made.from_config if head.startswith("AutoModel") else made._from_config
    model: nn.Module = build(config, attn_implementation=attention)
    return model


def hf(kind: str, head: str = "AutoModelForCausalLM", **options: Any) -> Callable[[str], nn.Module]:
    """A model of transformers, built from its configuration alone."""
    return functools.partial(_transformers, kind, head, **options)


def decoder(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """A decoder whose configuration has the usual names."""
    usual = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    return hf(kind, **(usual | options))


def encoder(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    usual = {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 40,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": CLASSES,
    }
    return hf(kind, "AutoModelForSequenceClassification", **(usual | options))


def seeing(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    return hf(kind, "AutoModelForImageClassification", num_labels=CLASSES, **options)


PATCHES = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
"""The configuration of a small vision transformer."""


def patched(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """A vision transformer whose configuration has the usual names."""
    return seeing(kind, **(PATCHES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | options))


def gpt(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """A decoder whose configuration has GPT-2's names."""
    usual = {
        "vocab_size": WORDS,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 32,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "use_cache": False,
    }
    return hf(kind, **(usual | options))


def sequences(kind: str, head: str = "AutoModelForSeq2SeqLM", **options: Any) -> Callable[[str], nn.Module]:
    """An encoder and a decoder whose configuration has BART's names."""
    usual = {
        "vocab_size": WORDS,
        "d_model": WIDTH,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": INNER,
        "decoder_ffn_dim": INNER,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "use_cache": False,
    }
    return hf(kind, head, **(usual | options))


def t5(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """An encoder and a decoder whose configuration has T5's names."""
    usual = {
        "vocab_size": WORDS,
        "d_model": WIDTH,
        "d_kv": 8,
        "d_ff": INNER,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "dropout_rate": 0.0,
        "use_cache": False,
        "decoder_start_token_id": 0,
    }
    return hf(kind, "AutoModelForSeq2SeqLM", **(usual | options))


def hearing(kind: str, **options: Any) -> Callable[[str], nn.Module]:
    """A classifier of sound whose configuration has wav2vec 2.0's names."""
    usual = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "conv_dim": (16, 16),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "final_dropout": 0.0,
        "layerdrop": 0.0,
        "mask_time_prob": 0.0,
        "apply_spec_augment": False,
        "classifier_proj_size": 16,
        "num_labels": CLASSES,
    }
    return hf(kind, "AutoModelForAudioClassification", **(usual | options))


def _torchvision(name: str, attention: str, **options: Any) -> nn.Module:
    _prepare_torchvision()
    from torchvision import models

    model: nn.Module = getattr(models, name)(num_classes=CLASSES, **options)
    return model


@functools.cache
def _prepare_torchvision() -> Any:
    """Declare the operators that torchvision looks for on import, where its build and torch's do not fit together."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return None
    except RuntimeError:
        import sys

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


def tv(name: str, **options: Any) -> Callable[[str], nn.Module]:
    """A model of torchvision."""
    return functools.partial(_torchvision, name, **options)


def _timm(name: str, attention: str, **options: Any) -> nn.Module:
    _prepare_torchvision()
    import timm

    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model


def timm_model(name: str, **options: Any) -> Callable[[str], nn.Module]:
    """A model of timm."""
    return functools.partial(_timm, name, **options)


def fused_or_not(name: str, attention: str, **options: Any) -> nn.Module:
    """timm's attention has a switch of its own."""
    model = _timm(name, attention, **options)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = attention == "sdpa"
    return model


def efficientnet(attention: str) -> nn.Module:
    """torchvision's, with three short stages."""
    _prepare_torchvision()
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2), MBConvConfig(4, 5, 2, 16, 24, 2)]
    model: nn.Module = EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES)
    return model


TEXT = functools.partial(Family, batch=language, loss=own_loss)
LEFT = functools.partial(Family, batch=padded_left, loss=own_loss)
UNPADDED = functools.partial(Family, batch=unpadded, loss=own_loss)
CLASSIFIED = functools.partial(Family, batch=classified, loss=own_loss)
IMAGES = functools.partial(Family, batch=pictures, loss=own_loss)
PLAIN = functools.partial(Family, batch=pictures, loss=outer_loss, attention=False)

WITH_ROUTER = functools.partial(own_loss, output_router_logits=True)
