"""The tree of modules on a page: every name has one place in it, however odd or deep the name is."""

from __future__ import annotations

import pytest

from tensortap.report.html.data.module_tree import Modules

ODD = (".", "..", "...", ".a", "..a", ".a.b", "a.", "a..", "a..b", "a...b", ".7.x", "a", "b")


def tree(*names: str) -> Modules:
    return Modules.of(dict.fromkeys(names, "Linear"))


def above(modules: Modules, name: str) -> list[str]:
    """Names from a module up to the root."""
    code, found = modules.names.index(name), []
    while code >= 0:
        found.append(modules.names[code])
        code = modules.parents[code]
    return found


def test_ancestors_without_rows_are_listed() -> None:
    modules = tree("layers.0.fc", "head")
    assert modules.names == ["", "layers", "layers.0", "layers.0.fc", "head"]
    assert modules.parents == [-1, 0, 1, 2, 0]
    assert modules.object()["label"] == ["(root)", "layers", "0", "fc", "head"]


@pytest.mark.parametrize("name", ODD)
def test_odd_dots_end_at_the_root(name: str) -> None:
    assert above(tree(name), name)[-1] == ""


def test_odd_names_stay_apart() -> None:
    modules = tree(*ODD)
    assert set(ODD) < set(modules.names)
    assert len(set(modules.names)) == len(modules.names)
    assert modules.parents[0] == -1
    assert all(0 <= parent < code for code, parent in enumerate(modules.parents) if code)
    assert all(modules.object()["label"])
    assert above(modules, "..a") == ["..a", ".", ""]
    assert above(modules, "a..b") == ["a..b", "a.", "a", ""]


@pytest.mark.parametrize("part", ["a", ""])
def test_one_deep_name_adds_a_bounded_number_of_lines(part: str) -> None:
    sizes = [sum(map(len, tree(".".join([part] * depth)).names)) / depth for depth in (1_000, 10_000)]
    assert sizes[1] < 2 * sizes[0]


def test_deep_modules_hang_under_the_nearest_listed_one() -> None:
    middle, deep = ".".join("m" * 500), ".".join("m" * 900)
    modules = tree(deep, middle, f"{middle}.3.x")
    assert above(modules, deep)[1] == middle
    assert above(modules, f"{middle}.3.x")[1:3] == [f"{middle}.3", middle]
    assert modules.layer_objects()[-1]["module"] == modules.names.index(f"{middle}.3")
    assert modules.object()["label"][modules.names.index(deep)] == ".".join("m" * 400)
