"""Suggestions for names of modules that do not exist."""

from __future__ import annotations

import pytest

from tensortap.core.spelling import close_names

NAMES = ["(root)", "embed", "blocks.0", "blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "lm_head"]


@pytest.mark.parametrize(
    ("patterns", "first"),
    [
        (["atn"], "blocks.0.attn"),
        (["block.1.attn"], "blocks.1.attn"),
        (["Blocks.0.MLP"], "blocks.0.mlp"),
        (["*.0.atten*"], "blocks.0.attn"),
        (["zzz", "lmhead"], "lm_head"),
    ],
)
def test_the_closest_name_comes_first(patterns: list[str], first: str) -> None:
    assert close_names(patterns, NAMES)[0] == first


@pytest.mark.parametrize("patterns", [["qwerty"], ["*"], [""], []])
def test_nothing_is_suggested_for_a_name_that_resembles_none(patterns: list[str]) -> None:
    assert close_names(patterns, NAMES) == []
