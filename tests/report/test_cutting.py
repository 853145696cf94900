"""Names that differ look different, however little room there is, as long as that is possible."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from tensortap.report.terminal.shortening import cut
from tensortap.report.terminal.table import TableColumn, lines
from tensortap.report.terminal.times import times_page
from tensortap.report.wording import middle

EXPERTS = [
    f"layers.{layer}.moe.experts.{expert}.{part}"
    for layer in range(12)
    for expert in range(4)
    for part in ("up", "down")
]


@pytest.mark.parametrize("width", range(15, 30))
def test_experts_of_all_layers(width: int) -> None:
    texts = cut(EXPERTS, width)
    assert len(set(texts)) == len(EXPERTS)
    assert all(cell_len(text) <= width for text in texts)
    for name, text in zip(EXPERTS, texts, strict=True):
        assert text.endswith(f"{name.split('.')[4]}.{name.split('.')[5]}")
        assert name.split(".")[1] in text


@pytest.mark.parametrize(
    "names",
    [
        ["model.decoder.layers.1.self_attn.q_proj", "model.decoder.layers.2.self_attn.q_proj"],
        ["a_very_long_name_1_without_dots_at_all", "a_very_long_name_2_without_dots_at_all"],
        ["tower.left.blocks.0.mlp.fc", "tower.blocks.0.mlp.fc", "other.blocks.0.mlp.fc"],
        ["外.層.一.注意力.投影.權重", "外.層.二.注意力.投影.權重"],
    ],
)
def test_names_of_all_sorts(names: list[str]) -> None:
    texts = cut(names, 16)
    assert len(set(texts)) == len(names)
    assert all(cell_len(text) <= 16 for text in texts)


@pytest.mark.parametrize("width", range(1, 40))
def test_no_text_is_too_long_and_equal_names_stay_equal(width: int) -> None:
    texts = cut([*EXPERTS, *EXPERTS], width)
    assert texts[: len(EXPERTS)] == texts[len(EXPERTS) :]
    assert all(cell_len(text) <= width for text in texts)


def test_names_that_still_differ_are_cut_as_usual() -> None:
    names = ["model.layers.11.self_attn.q_proj", "model.layers.12.self_attn.k_proj"]
    assert cut(names, 24) == [middle(name, 24) for name in names]


def test_a_table_cuts_its_names_together() -> None:
    column = TableColumn("module", EXPERTS, left=True, least=10)
    assert len({line.plain for line in lines([column], 16)}) == len(EXPERTS) + 1


def test_times_of_modules_with_long_names_drop_the_class_first() -> None:
    numbers = {"calls": 3, "cpu_own": 123.0, "cpu_own_share": 0.01, "cpu_total": 123.0, "memory": 9980}
    rows = [
        {"module": name, "class": "Linear", "phase": phase, **numbers, "device_memory": 0}
        for phase in ("forward", "backward")
        for name in EXPERTS
    ]
    whole = {
        "framework": "torch",
        "backward_calls": "graph nodes",
        "span": 1e6,
        "steps": 3,
        "device": {"kernels": 0, "unlinked": 0},
    }
    facts = {**whole, "by": "module", "rows": rows, "rows_left_out": 0}
    page = [line.plain for line in times_page(facts, 80)]
    names = [line.split()[0] for line in page[3 : 3 + len(EXPERTS)]]
    assert len(set(names)) == len(EXPERTS)
    assert "experts.0.up" in names[0] and "memory" in page[2]
    assert max(map(len, page)) <= 80
