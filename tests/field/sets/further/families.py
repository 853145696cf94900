"""Further architectures with tiny configurations, for right pairs alone: nobody plants mistakes into them.

A third of them is held out: rules of the comparison are never tuned on these.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from field.kit.building import (
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    LEFT,
    PLAIN,
    TEXT,
    UNPADDED,
    WIDTH,
    WITH_ROUTER,
    Family,
    decoder,
    encoder,
    gpt,
    hearing,
    hf,
    own_loss,
    seeing,
    sequences,
    t5,
    timm_model,
    tv,
)
from field.kit.data import (
    CLASSES,
    WORDS,
    pictures,
    scenes,
    waves,
)

_LARGER = functools.partial(pictures, rows=8, size=64)

_TUNED: dict[str, Family] = {
    "stablelm_left": LEFT(decoder("stablelm", num_key_value_heads=2, use_qkv_bias=True)),
    "phi3_left": LEFT(decoder("phi3", num_key_value_heads=2)),
    "cohere_left": LEFT(decoder("cohere", num_key_value_heads=2)),
    "mamba2": TEXT(
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
    "xlnet": CLASSIFIED(
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
    "mt5": TEXT(t5("mt5", feed_forward_proj="gated-gelu"), attention=False),
    "switch": TEXT(
        t5("switch_transformers", num_experts=4, router_jitter_noise=0.0),
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
    "swinv2": IMAGES(
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
    "densenet": PLAIN(
        tv("DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=8, drop_rate=0.0), batch=_LARGER
    ),
    "mobilenet_v3": PLAIN(tv("mobilenet_v3_small", dropout=0.0, width_mult=0.5), batch=_LARGER),
    "timm_lcnet": PLAIN(timm_model("lcnet_035"), batch=_LARGER),
}
_HELD_OUT: dict[str, Family] = {
    "codegen": TEXT(gpt("codegen", rotary_dim=4, n_ctx=32), attention=False),
    "nemotron": TEXT(decoder("nemotron", num_key_value_heads=2)),
    "qwen3_moe": LEFT(
        decoder(
            "qwen3_moe",
            num_key_value_heads=2,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=INNER,
            decoder_sparse_step=1,
        ),
        loss=WITH_ROUTER,
    ),
    "falcon_mamba": TEXT(
        hf("falcon_mamba", vocab_size=WORDS, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, use_cache=False),
        attention=False,
    ),
    "rwkv": UNPADDED(
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
    "deberta_v1": CLASSIFIED(
        encoder("deberta", pos_att_type=["p2c", "c2p"], relative_attention=True, pad_token_id=0),
        attention=False,
        short=False,
    ),
    "modernbert": CLASSIFIED(
        encoder(
            "modernbert", pad_token_id=0, global_attn_every_n_layers=2, local_attention=8, classifier_pooling="mean"
        )
    ),
    "mbart": TEXT(sequences("mbart")),
    "poolformer": PLAIN(
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
    "hubert": Family(hearing("hubert", conv_kernel=(10, 4)), waves, own_loss),
    "squeezenet": PLAIN(tv("squeezenet1_1", dropout=0.0), batch=_LARGER),
    "shufflenet": PLAIN(tv("shufflenet_v2_x0_5"), batch=_LARGER),
}
FAMILIES: dict[str, Family] = _TUNED | {name: replace(of, held_out=True) for name, of in _HELD_OUT.items()}
