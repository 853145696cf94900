"""Families that were run once, before any rule was changed for them: a blind trial of the whole comparison."""

from __future__ import annotations

from .building import (
    CLASSIFIED,
    HEADS,
    IMAGES,
    INNER,
    LAYERS,
    PLAIN,
    TEXT,
    WIDTH,
    WINDOW,
    Family,
    decoder,
    encoder,
    hearing,
    hf,
    own_loss,
    seeing,
    sequences,
    tv,
)
from .data import (
    WORDS,
    recordings,
)

BLIND: dict[str, Family] = {
    "olmo3": TEXT(
        decoder(
            "olmo3",
            num_key_value_heads=2,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        held_out=True,
        micros=2,
    ),
    "smollm3": TEXT(
        decoder("smollm3", num_key_value_heads=2, no_rope_layers=[1, 0], use_sliding_window=False), held_out=True
    ),
    "cohere2": TEXT(decoder("cohere2", num_key_value_heads=2, sliding_window=WINDOW), held_out=True),
    "diffllama": TEXT(decoder("diffllama", num_key_value_heads=2), held_out=True),
    "lfm2": TEXT(
        decoder(
            "lfm2",
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
            conv_L_cache=3,
            block_multiple_of=8,
        ),
        held_out=True,
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
        held_out=True,
    ),
    "persimmon": TEXT(decoder("persimmon", hidden_dropout=0.0, attention_dropout=0.0), held_out=True),
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
        held_out=True,
    ),
    "roformer": CLASSIFIED(encoder("roformer", embedding_size=WIDTH, pad_token_id=0), attention=False, held_out=True),
    "convbert": CLASSIFIED(
        encoder("convbert", embedding_size=WIDTH, head_ratio=2, conv_kernel_size=3, pad_token_id=0),
        attention=False,
        held_out=True,
    ),
    "pegasus": TEXT(
        sequences("pegasus", eos_token_id=1, decoder_start_token_id=0, scale_embedding=True), held_out=True
    ),
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
        held_out=True,
    ),
    "convnextv2": IMAGES(
        seeing("convnextv2", num_stages=2, hidden_sizes=[16, 32], depths=[1, 2], drop_path_rate=0.0),
        attention=False,
        held_out=True,
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
        held_out=True,
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
        held_out=True,
    ),
    "wavlm": Family(
        hearing("wavlm", num_buckets=16, max_bucket_distance=32), recordings, own_loss, attention=False, held_out=True
    ),
    "mnasnet": PLAIN(tv("mnasnet0_5", dropout=0.0), held_out=True),
}
