"""Further architectures with tiny configurations, for right pairs alone: nobody plants mistakes into them.

A third of them is held out: rules of the comparison are never tuned on these.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .building import (
    CLASSES,
    HEADS,
    INNER,
    LAYERS,
    ROWS,
    WIDTH,
    WORDS,
    Batch,
    Family,
    classified,
    decoder,
    encoder,
    hf,
    language,
    outer_loss,
    own_loss,
    pictures,
    seeing,
    timm_model,
    tv,
    unpadded,
)
from .models import FAMILIES

__all__ = ["EVERY", "FURTHER"]


def padded_left(random: torch.Generator) -> Batch:
    """Tokens with padding before them, as for generation. No loss reads what attention makes of the padding."""
    batch = {name: value.flip(1) for name, value in language(random).items()}
    first = batch["attention_mask"].argmax(1, keepdim=True)
    return batch | {"labels": batch["labels"].scatter(1, first, -100)}


def waves(random: torch.Generator) -> Batch:
    """Sound, of which a part is padding, and a class for each row."""
    mask = (torch.arange(400) < torch.tensor([400, 320, 400, 360])[:, None]).long()
    return {
        "input_values": torch.randn(ROWS, 400, generator=random) * mask,
        "attention_mask": mask,
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def spectra(random: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(ROWS, 32, 16, generator=random),
        "labels": torch.randint(CLASSES, (ROWS,), generator=random),
    }


def scenes(random: torch.Generator) -> Batch:
    """Images with a class for each pixel."""
    return pictures(random) | {"labels": torch.randint(CLASSES, (ROWS, 32, 32), generator=random)}


_TEXT = functools.partial(Family, batch=language, loss=own_loss)
_LEFT = functools.partial(Family, batch=padded_left, loss=own_loss)
_UNPADDED = functools.partial(Family, batch=unpadded, loss=own_loss)
_CLASSES = functools.partial(Family, batch=classified, loss=own_loss)
_IMAGES = functools.partial(Family, batch=pictures, loss=own_loss)
_PLAIN = functools.partial(Family, batch=pictures, loss=outer_loss, attention=False)
_LARGER = functools.partial(pictures, rows=8, size=64)
_WITH_ROUTER = functools.partial(own_loss, output_router_logits=True)

_GPT = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "use_cache": False}
_NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_SEEN = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_SEQUENCES = {
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
_T5 = {
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
_HEARD = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 4),
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


def _sequences(kind: str, **options: Any) -> Any:
    return hf(kind, "AutoModelForSeq2SeqLM", **(_SEQUENCES | options))


_TUNED: dict[str, Family] = {
    "stablelm_left": _LEFT(decoder("stablelm", num_key_value_heads=2, use_qkv_bias=True)),
    "phi3_left": _LEFT(decoder("phi3", num_key_value_heads=2)),
    "cohere_left": _LEFT(decoder("cohere", num_key_value_heads=2)),
    "mamba2": _TEXT(
        hf(
            "mamba2",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            state_size=8,
            num_hidden_layers=LAYERS,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=4,
            use_cache=False,
        ),
        attention=False,
    ),
    "xlnet": _CLASSES(
        hf(
            "xlnet",
            "AutoModelForSequenceClassification",
            vocab_size=WORDS,
            d_model=WIDTH,
            n_layer=LAYERS,
            n_head=HEADS,
            d_inner=INNER,
            dropout=0.0,
            summary_last_dropout=0.0,
            num_labels=CLASSES,
        ),
        attention=False,
    ),
    "mt5": _TEXT(hf("mt5", "AutoModelForSeq2SeqLM", **_T5, feed_forward_proj="gated-gelu"), attention=False),
    "switch": _TEXT(
        hf("switch_transformers", "AutoModelForSeq2SeqLM", **_T5, num_experts=4, router_jitter_noise=0.0),
        attention=False,
    ),
    "segformer": Family(
        hf(
            "segformer",
            "AutoModelForSemanticSegmentation",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        scenes,
        own_loss,
        attention=False,
    ),
    "swinv2": _IMAGES(
        seeing(
            "swinv2",
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
    "densenet": _PLAIN(
        tv("DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=8, drop_rate=0.0), batch=_LARGER
    ),
    "mobilenet_v3": _PLAIN(tv("mobilenet_v3_small", dropout=0.0, width_mult=0.5), batch=_LARGER),
    "timm_lcnet": _PLAIN(timm_model("lcnet_035"), batch=_LARGER),
}
_HELD_OUT: dict[str, Family] = {
    "codegen": _TEXT(hf("codegen", **(_GPT | _NO_DROPOUT), rotary_dim=4, n_ctx=32), attention=False),
    "nemotron": _TEXT(decoder("nemotron", num_key_value_heads=2)),
    "qwen3_moe": _LEFT(
        decoder(
            "qwen3_moe",
            num_key_value_heads=2,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=INNER,
            decoder_sparse_step=1,
        ),
        loss=_WITH_ROUTER,
    ),
    "falcon_mamba": _TEXT(
        hf("falcon_mamba", vocab_size=WORDS, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, use_cache=False),
        attention=False,
    ),
    "rwkv": _UNPADDED(
        hf(
            "rwkv",
            vocab_size=WORDS,
            hidden_size=WIDTH,
            attention_hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            context_length=32,
            use_cache=False,
        ),
        attention=False,
    ),
    "deberta_v1": _CLASSES(
        encoder("deberta", pos_att_type=["p2c", "c2p"], relative_attention=True, pad_token_id=0), attention=False
    ),
    "modernbert": _CLASSES(
        encoder(
            "modernbert", pad_token_id=0, global_attn_every_n_layers=2, local_attention=8, classifier_pooling="mean"
        )
    ),
    "mbart": _TEXT(_sequences("mbart")),
    "poolformer": _PLAIN(
        seeing(
            "poolformer",
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            padding=[2, 1],
            drop_path_rate=0.0,
        ),
        loss=own_loss,
    ),
    "hubert": Family(hf("hubert", "AutoModelForAudioClassification", **_HEARD), waves, own_loss),
    "squeezenet": _PLAIN(tv("squeezenet1_1", dropout=0.0), batch=_LARGER),
    "shufflenet": _PLAIN(tv("shufflenet_v2_x0_5"), batch=_LARGER),
}
FURTHER: dict[str, Family] = _TUNED | {
    name: Family(
        of.build, of.batch, of.loss, attention=of.attention, held_out=True, micros=of.micros, dropout=of.dropout
    )
    for name, of in _HELD_OUT.items()
}
EVERY: dict[str, Family] = FAMILIES | FURTHER
