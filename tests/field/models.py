"""Models as people train them, with tiny configurations, and their data.

A third of the families is held out: rules of the comparison are never tuned on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everyone writes it
from torch import Tensor, nn

WORDS, LENGTH, ROWS, CLASSES = 96, 12, 4, 5
WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 48
WINDOW = 7  # every query sees a token: what attention makes of none at all differs by implementation

Batch = dict[str, Tensor]
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


# --- data -------------------------------------------------------------------------------------------------------------


def language(random: torch.Generator, *, pad: int = 0) -> Batch:
    """Tokens, their mask, and labels that leave the padding out."""
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=random)
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 9, LENGTH, 6])[:, None]).long()
    return {
        "input_ids": tokens.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def unpadded(random: torch.Generator) -> Batch:
    """Tokens without a mask."""
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def classified(random: torch.Generator, *, pad: int = 0) -> Batch:
    """Tokens, their mask, and a class for each row."""
    batch = language(random, pad=pad)
    return batch | {"labels": torch.randint(CLASSES, (ROWS,), generator=random)}


def pictures(random: torch.Generator, *, rows: int = ROWS, size: int = 32) -> Batch:
    """Images and their classes."""
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=random),
        "labels": torch.randint(CLASSES, (rows,), generator=random),
    }


def speech(random: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(ROWS, 8, 24, generator=random),
        "labels": torch.randint(3, WORDS, (ROWS, LENGTH), generator=random),
    }


def captioned(random: torch.Generator) -> Batch:
    batch = language(random)
    del batch["labels"]
    batch["input_ids"][:, 5] = WORDS - 1  # the token whose state stands for the sentence
    return batch | {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random)}


# --- losses -----------------------------------------------------------------------------------------------------------


def own_loss(model: nn.Module, batch: Batch, **options: Any) -> Tensor:
    """The model computes its loss itself, as those of transformers do."""
    loss: Tensor = model(**batch, **options).loss
    return loss


def outer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss is computed outside the model."""
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])


# --- families ---------------------------------------------------------------------------------------------------------


def _transformers(kind: str, head: str, attention: str, **options: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    model: nn.Module = getattr(transformers, head).from_config(config, attn_implementation=attention)
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


def _fused_or_not(name: str, attention: str, **options: Any) -> nn.Module:
    """timm's attention has a switch of its own."""
    model = _timm(name, attention, **options)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = attention == "sdpa"
    return model


def _efficientnet(attention: str) -> nn.Module:
    """torchvision's, with three short stages."""
    _prepare_torchvision()
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stages = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 3, 2, 8, 16, 2), MBConvConfig(4, 5, 2, 16, 24, 2)]
    model: nn.Module = EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES)
    return model


_TEXT = functools.partial(Family, batch=language, loss=own_loss)
_UNPADDED = functools.partial(Family, batch=unpadded, loss=own_loss)
_CLASSES = functools.partial(Family, batch=classified, loss=own_loss)
_IMAGES = functools.partial(Family, batch=pictures, loss=own_loss)
_PLAIN = functools.partial(Family, batch=pictures, loss=outer_loss, attention=False)

_WITH_ROUTER = functools.partial(own_loss, output_router_logits=True)

FAMILIES: dict[str, Family] = {
    "llama": _TEXT(decoder("llama", num_key_value_heads=2), micros=2),
    "gpt2": _TEXT(
        hf(
            "gpt2",
            vocab_size=WORDS,
            n_embd=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            n_positions=32,
            attn_pdrop=0.0,
            embd_pdrop=0.1,
            resid_pdrop=0.1,
            use_cache=False,
        ),
        dropout=True,
    ),
    "bert": _CLASSES(encoder("bert", hidden_dropout_prob=0.1), dropout=True),
    "t5": _TEXT(
        hf(
            "t5",
            "AutoModelForSeq2SeqLM",
            vocab_size=WORDS,
            d_model=WIDTH,
            d_kv=8,
            d_ff=INNER,
            num_layers=LAYERS,
            num_heads=HEADS,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        ),
        attention=False,
        micros=2,
    ),
    "mistral": _TEXT(decoder("mistral", num_key_value_heads=2, sliding_window=WINDOW)),
    "qwen2": _TEXT(decoder("qwen2", num_key_value_heads=2, tie_word_embeddings=True)),
    "mixtral": _TEXT(
        decoder("mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        loss=_WITH_ROUTER,
    ),
    "gemma2": _TEXT(
        decoder(
            "gemma2",
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            num_hidden_layers=3,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        attention=False,
    ),
    "opt": _UNPADDED(decoder("opt", ffn_dim=INNER, dropout=0.0, word_embed_proj_dim=WIDTH)),
    "bloom": _TEXT(
        hf(
            "bloom",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            hidden_dropout=0.0,
            use_cache=False,
        ),
        attention=False,
    ),
    "vit": _IMAGES(
        seeing(
            "vit",
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=32,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "whisper": Family(
        hf(
            "whisper",
            "AutoModelForSpeechSeq2Seq",
            vocab_size=WORDS,
            d_model=WIDTH,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=INNER,
            decoder_ffn_dim=INNER,
            num_mel_bins=8,
            max_source_positions=12,
            max_target_positions=16,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            use_cache=False,
        ),
        speech,
        own_loss,
    ),
    "deberta": _CLASSES(
        encoder("deberta-v2", pos_att_type=["p2c", "c2p"], relative_attention=True, pad_token_id=0), attention=False
    ),
    "resnet": _PLAIN(
        seeing("resnet", embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 2, 1], layer_type="basic"),
        loss=own_loss,
    ),
    "mobilenet_v2": _PLAIN(
        tv("mobilenet_v2", width_mult=0.25, dropout=0.0), batch=functools.partial(pictures, rows=8, size=64)
    ),
    "convnext": _PLAIN(
        seeing("convnext", hidden_sizes=[16, 24, 32, 32], depths=[1, 1, 2, 1], image_size=32, drop_path_rate=0.0),
        loss=own_loss,
    ),
    "swin": _IMAGES(
        seeing(
            "swin",
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            image_size=32,
            patch_size=2,
            drop_path_rate=0.0,
        ),
        attention=False,
    ),
    # --- held out
    "qwen3": _TEXT(decoder("qwen3", num_key_value_heads=2, head_dim=8), held_out=True, micros=2),
    "phi": _UNPADDED(decoder("phi", resid_pdrop=0.0, embd_pdrop=0.0), held_out=True),
    "gpt_neox": _TEXT(decoder("gpt_neox", rotary_pct=0.5, hidden_dropout=0.0), held_out=True),
    "falcon": _TEXT(
        decoder("falcon", alibi=False, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
        held_out=True,
    ),
    "gemma3": _TEXT(
        decoder("gemma3_text", num_key_value_heads=2, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8),
        held_out=True,
    ),
    "roberta": Family(
        encoder("roberta", pad_token_id=1), functools.partial(classified, pad=1), own_loss, held_out=True
    ),
    "olmoe": _TEXT(
        decoder("olmoe", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True), loss=_WITH_ROUTER, held_out=True
    ),
    "clip": Family(
        hf(
            "clip",
            "AutoModel",
            text_config={
                "vocab_size": WORDS,
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "max_position_embeddings": 16,
                "eos_token_id": WORDS - 1,
            },
            vision_config={
                "hidden_size": WIDTH,
                "intermediate_size": INNER,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "image_size": 16,
                "patch_size": 8,
            },
            projection_dim=16,
        ),
        captioned,
        functools.partial(own_loss, return_loss=True),
        held_out=True,
    ),
    "mamba": _TEXT(
        hf("mamba", vocab_size=WORDS, hidden_size=WIDTH, state_size=4, num_hidden_layers=LAYERS, use_cache=False),
        attention=False,
        held_out=True,
    ),
    "efficientnet": _PLAIN(_efficientnet, held_out=True),
    "tv_swin": _PLAIN(
        tv(
            "SwinTransformer",
            patch_size=[2, 2],
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=[4, 4],
            stochastic_depth_prob=0.0,
        ),
        held_out=True,
    ),
    "timm_vit": Family(
        functools.partial(
            _fused_or_not,
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            embed_dim=WIDTH,
            depth=LAYERS,
            num_heads=HEADS,
        ),
        pictures,
        outer_loss,
        held_out=True,
    ),
}
