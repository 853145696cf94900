"""Families that were run once before any rule was changed for them: three blind trials of the whole comparison.

Rules were changed after each, so none of them is held out any more.
"""

from __future__ import annotations

import functools

from .blind_eighth_models import EIGHTH
from .blind_fifth_models import FIFTH
from .blind_fourth_models import FOURTH
from .blind_seventh_models import SEVENTH
from .blind_sixth_models import AFTER_SIXTH, SIXTH
from .blind_third_models import THIRD
from .building import (
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    LEFT,
    PATCHES,
    PLAIN,
    TEXT,
    WIDTH,
    WINDOW,
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
    tv,
)
from .data import (
    CLASSES,
    WORDS,
    pictures,
    recordings,
    unmasked,
    waves,
)

FIRST: dict[str, Family] = {
    "olmo3": TEXT(
        decoder(
            "olmo3",
            num_key_value_heads=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        micros=2,
    ),
    "smollm3": TEXT(decoder("smollm3", num_key_value_heads=2, no_rope_layers=[1, 0], use_sliding_window=False)),
    "cohere2": TEXT(decoder("cohere2", num_key_value_heads=2, sliding_window=WINDOW)),
    "diffllama": TEXT(decoder("diffllama", num_key_value_heads=2)),
    "lfm2": TEXT(
        decoder(
            "lfm2",
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
            conv_L_cache=3,
            block_multiple_of=8,
        ),
    ),
    "xglm": TEXT(
        hf(
            "xglm",
            vocab_size=WORDS,
            d_model=WIDTH,
            ffn_dim=INNER,
            num_layers=LAYERS,
            attention_heads=HEADS,
            max_position_embeddings=40,
            dropout=0.0,
            attention_dropout=0.0,
            pad_token_id=0,
            use_cache=False,
        ),
        attention=False,
    ),
    "persimmon": TEXT(decoder("persimmon", hidden_dropout=0.0, attention_dropout=0.0)),
    "ernie_moe": TEXT(
        decoder(
            "ernie4_5_moe",
            num_key_value_heads=2,
            moe_intermediate_size=24,
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=0,
            moe_layer_end_index=1,
        ),
    ),
    "roformer": CLASSIFIED(encoder("roformer", embedding_size=WIDTH, pad_token_id=0), attention=False),
    "convbert": CLASSIFIED(
        encoder("convbert", embedding_size=WIDTH, head_ratio=2, conv_kernel_size=3, pad_token_id=0),
        attention=False,
    ),
    "pegasus": TEXT(sequences("pegasus", eos_token_id=1, decoder_start_token_id=0, scale_embedding=True)),
    "pvt_v2": IMAGES(
        seeing(
            "pvt_v2",
            image_size=32,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
            drop_path_rate=0.0,
        ),
        attention=False,
    ),
    "convnextv2": IMAGES(
        seeing("convnextv2", num_stages=2, hidden_sizes=[16, 32], depths=[1, 2], drop_path_rate=0.0),
        attention=False,
    ),
    "focalnet": IMAGES(
        seeing(
            "focalnet",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            focal_levels=[2, 2],
            focal_windows=[3, 3],
            drop_path_rate=0.0,
        ),
        attention=False,
    ),
    "hiera": IMAGES(
        seeing(
            "hiera",
            image_size=[32, 32],
            patch_size=[3, 3],
            patch_stride=[4, 4],
            patch_padding=[1, 1],
            embed_dim=16,
            depths=[1, 1],
            num_heads=[1, 2],
            num_query_pool=1,
            query_stride=[2, 2],
            masked_unit_size=[2, 2],
            masked_unit_attention=[True, False],
            drop_path_rate=0.0,
        ),
        attention=False,
    ),
    "wavlm": Family(hearing("wavlm", num_buckets=16, max_bucket_distance=32), recordings, own_loss, attention=False),
    "mnasnet": PLAIN(tv("mnasnet0_5", dropout=0.0)),
}


SECOND: dict[str, Family] = {
    "helium": TEXT(decoder("helium", num_key_value_heads=2, head_dim=8)),
    "mpt": TEXT(
        hf(
            "mpt",
            vocab_size=WORDS,
            d_model=WIDTH,
            n_heads=HEADS,
            n_layers=LAYERS,
            expansion_ratio=2,
            max_seq_len=32,
            use_cache=False,
        ),
        attention=False,
    ),
    "glm": LEFT(decoder("glm", num_key_value_heads=2, head_dim=8, partial_rotary_factor=0.5)),
    "olmo": TEXT(decoder("olmo", num_key_value_heads=2, clip_qkv=1.5), micros=2),
    "exaone4": TEXT(
        decoder(
            "exaone4",
            num_key_value_heads=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "dots1": TEXT(
        decoder(
            "dots1",
            num_key_value_heads=2,
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            norm_topk_prob=True,
        ),
    ),
    "nanochat": TEXT(decoder("nanochat", num_key_value_heads=2, final_logit_softcapping=5.0)),
    "ctrl": TEXT(
        hf(
            "ctrl",
            vocab_size=WORDS,
            n_positions=32,
            n_embd=WIDTH,
            dff=INNER,
            n_layer=LAYERS,
            n_head=HEADS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            use_cache=False,
        ),
    ),
    "gpt_bigcode": TEXT(gpt("gpt_bigcode", multi_query=True)),
    "recurrent_gemma": TEXT(
        decoder(
            "recurrent_gemma",
            num_key_value_heads=1,
            lru_width=WIDTH,
            attention_window_size=WINDOW,
            conv1d_width=4,
            block_types=("recurrent", "attention"),
            logits_soft_cap=5.0,
            intermediate_size=2 * INNER,
        ),
        attention=False,
    ),
    "fnet": CLASSIFIED(
        encoder("fnet", pad_token_id=0),
        batch=unmasked,
        attention=False,
        short=False,
    ),
    "funnel": CLASSIFIED(
        hf(
            "funnel",
            "AutoModelForSequenceClassification",
            vocab_size=WORDS,
            block_sizes=[1, 1],
            num_decoder_layers=1,
            d_model=WIDTH,
            n_head=HEADS,
            d_head=8,
            d_inner=INNER,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            num_labels=CLASSES,
        ),
        attention=False,
    ),
    "esm": CLASSIFIED(
        encoder(
            "esm",
            pad_token_id=0,
            mask_token_id=3,
            position_embedding_type="rotary",
            token_dropout=True,
        ),
    ),
    "mobilebert": CLASSIFIED(
        encoder(
            "mobilebert",
            embedding_size=16,
            intra_bottleneck_size=16,
            num_feedforward_networks=2,
            pad_token_id=0,
            true_hidden_size=16,
        ),
    ),
    "m2m": TEXT(sequences("m2m_100", scale_embedding=True, encoder_layerdrop=0.0, decoder_layerdrop=0.0)),
    "umt5": TEXT(t5("umt5", feed_forward_proj="gated-gelu"), attention=False, micros=2),
    "cvt": IMAGES(
        seeing(
            "cvt",
            patch_sizes=[3, 3],
            patch_stride=[4, 2],
            patch_padding=[1, 1],
            embed_dim=[16, 32],
            num_heads=[2, 4],
            depth=[1, 2],
            mlp_ratio=[2.0, 2.0],
            attention_drop_rate=[0.0, 0.0],
            drop_rate=[0.0, 0.0],
            drop_path_rate=[0.0, 0.0],
            qkv_bias=[True, True],
            cls_token=[False, True],
            qkv_projection_method=["dw_bn", "dw_bn"],
            kernel_qkv=[3, 3],
            padding_kv=[1, 1],
            stride_kv=[2, 2],
            padding_q=[1, 1],
            stride_q=[1, 1],
        ),
        attention=False,
    ),
    "bit": IMAGES(
        seeing(
            "bit",
            embedding_size=16,
            hidden_sizes=[16, 32],
            depths=[1, 2],
            num_groups=4,
            width_factor=1,
            drop_path_rate=0.0,
        ),
        attention=False,
    ),
    "siglip": IMAGES(
        seeing(
            "siglip",
            vision_config=PATCHES,
        ),
    ),
    "mobilevit": IMAGES(
        seeing(
            "mobilevit",
            image_size=64,
            patch_size=2,
            hidden_sizes=[16, 24, 32],
            neck_hidden_sizes=[8, 8, 8, 16, 16, 16, 32],
            num_attention_heads=2,
            mlp_ratio=2.0,
            expand_ratio=2.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ),
        batch=functools.partial(pictures, size=64),
        attention=False,
    ),
    "conformer": Family(
        hearing("wav2vec2-conformer", position_embeddings_type="relative", conv_depthwise_kernel_size=5),
        waves,
        own_loss,
        attention=False,
    ),
}

BLIND = FIRST | SECOND | THIRD | FOURTH | FIFTH | SIXTH | AFTER_SIXTH | SEVENTH | EIGHTH
