"""Matching modules by name, by rule and by structure; what is left has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tensortap.mapping.model_mapping import ModelMapping, map_models
from tensortap.mapping.outline import ModelOutline, ModuleOutline, TensorOutline
from tensortap.mapping.rules_file import read_rules

Shapes = Mapping[str, tuple[int, ...]]


def linear(inner: int, outer: int, torch: bool = True, bias: bool = True) -> tuple[str, dict[str, TensorOutline]]:
    shape = (outer, inner) if torch else (inner, outer)
    return "Linear", {"weight": TensorOutline(shape)} | ({"bias": TensorOutline((outer,))} if bias else {})


def outline(framework: str, modules: Mapping[str, Any]) -> ModelOutline:
    """Build an outline from name → class, or → (class, tensors)."""
    found = [ModuleOutline("", "Model")]
    for name, what in modules.items():
        cls, tensors = (what, {}) if isinstance(what, str) else what
        found.append(ModuleOutline(name, cls, tensors))
    return ModelOutline(framework, found)


def placed(ours: Mapping[str, Any], theirs: Mapping[str, Any], rules: Any = None, same: bool = False) -> ModelMapping:
    target, source = outline("torch", ours), outline("torch" if same else "paddle", theirs)
    return map_models(target, source, None if rules is None else read_rules(rules))


def names(found: ModelMapping) -> dict[str, str]:
    return {source: target for source, target in found.modules.items() if source}


def why(found: ModelMapping) -> dict[tuple[str, str], str]:
    return {(left.side, left.name): left.why for left in found.report().left}


def test_same_names() -> None:
    ours = {"fc1": linear(4, 8), "act": "ReLU", "fc2": linear(8, 2)}
    theirs = {"act": "ReLU", "fc2": linear(8, 2, torch=False), "fc1": linear(4, 8, torch=False)}
    found = placed(ours, theirs)
    assert names(found) == {name: name for name in ours}
    assert not found.report().left
    assert {
        conversion.permute for name, conversion in found.tensor_matches.conversions.items() if name.endswith("weight")
    } == {(1, 0)}


def test_other_names_in_the_same_order() -> None:
    ours = {"fc1": linear(4, 8), "fc2": linear(8, 8), "fc3": linear(8, 8)}
    theirs = {"a": linear(4, 8, torch=False), "b": linear(8, 8, torch=False), "c": linear(8, 8, torch=False)}
    assert names(placed(ours, theirs)) == {"a": "fc1", "b": "fc2", "c": "fc3"}


def test_the_order_in_which_modules_ran_counts_more_than_how_they_were_defined() -> None:
    target = ModelOutline(
        "torch", [ModuleOutline("", ""), ModuleOutline("x", *linear(8, 8), 1), ModuleOutline("y", *linear(8, 8), 5)]
    )
    source = ModelOutline(
        "paddle", [ModuleOutline("", ""), ModuleOutline("b", *linear(8, 8), 6), ModuleOutline("a", *linear(8, 8), 2)]
    )
    assert names(map_models(target, source)) == {"a": "x", "b": "y"}


def test_numbers_do_not_count_as_names() -> None:
    """An extra module at the beginning shifts all others."""
    ours = {"0": linear(6, 6), "1": "ReLU", "2": linear(6, 6), "3": "ReLU", "4": linear(6, 6)}
    theirs = {"0": "Flatten", "1": linear(6, 6), "2": "ReLU", "3": linear(6, 6), "4": "ReLU", "5": linear(6, 6)}
    found = placed(ours, theirs)
    assert names(found) == {"1": "0", "2": "1", "3": "2", "4": "3", "5": "4"}
    assert why(found) == {("candidate", "0"): "no unmapped module in the reference's (root) resembles it"}


def test_another_depth() -> None:
    block = {"conv1": linear(4, 4), "conv2": linear(4, 4)}
    ours = {"stem": linear(3, 4)}
    theirs: dict[str, Any] = {"first": "Stem", "first.conv": linear(3, 4), "stages": "LayerList"}
    for stage in range(2):
        ours[f"layer{stage + 1}"] = "Sequential"
        theirs |= {f"stages.{stage}": "Stage", f"stages.{stage}.blocks": "LayerList"}
        for unit in range(2):
            ours[f"layer{stage + 1}.{unit}"] = "Block"
            ours |= {f"layer{stage + 1}.{unit}.{name}": what for name, what in block.items()}
            theirs[f"stages.{stage}.blocks.{unit}"] = "Unit"
            theirs |= {f"stages.{stage}.blocks.{unit}.{name}": linear(4, 4) for name in ("a", "b")}
    found = placed(ours, theirs)
    assert names(found)["stages.1.blocks.0.b"] == "layer2.0.conv2"
    assert names(found)["stages.1"] == "layer2"
    assert names(found)["first.conv"] == "stem"
    left = "a container that the reference does not have; its modules are mapped"
    blocks = ("stages.0.blocks", "stages.1.blocks")
    assert why(found) == {("candidate", name): left for name in ("first", "stages", *blocks)}


def test_a_container_around_everything() -> None:
    ours = {"fc1": linear(4, 8), "fc2": linear(8, 8)}
    theirs = {"net": "Net"} | {f"net.{name}": what for name, what in ours.items()}
    assert names(placed(ours, theirs)) == {"net.fc1": "fc1", "net.fc2": "fc2"}


def test_a_module_without_a_bias_is_matched() -> None:
    ours = {"fc1": linear(4, 8), "fc2": linear(8, 8), "fc3": linear(8, 2)}
    theirs = {"net": "Sequential", "net.0": linear(4, 8), "net.1": linear(8, 8, bias=False), "net.2": linear(8, 2)}
    found = placed(ours, theirs)
    assert names(found) == {"net.0": "fc1", "net.1": "fc2", "net.2": "fc3"}
    assert why(found)["reference", "fc2.bias"] == "net.1 has no such tensor"


def test_an_activation_of_another_class_is_matched_by_name() -> None:
    ours = {"fc1": linear(4, 8), "act": "GELU", "fc2": linear(8, 8)}
    theirs = {"fc1": linear(4, 8), "act": "ReLU", "fc2": linear(8, 8)}
    assert names(placed(ours, theirs))["act"] == "act"


def test_dissimilar_modules_are_left() -> None:
    found = placed({"a": linear(4, 8), "b": "ReLU"}, {"x": linear(3, 5), "y": "Flatten", "z": "Dropout"})
    assert names(found) == {}
    assert len(found.report().left) == 5


def test_shapes_that_do_not_fit_are_both_reported() -> None:
    found = placed({"fc": linear(4, 8)}, {"fc": linear(4, 9, torch=False)})
    assert why(found)["reference", "fc.weight"] == "its shape 8×4 does not fit 4×9 of fc.weight"
    assert why(found)["candidate", "fc.bias"] == "its shape 9 does not fit 8 of fc.bias"


def test_a_square_weight_is_transposed_by_its_class() -> None:
    found = placed({"fc": linear(4, 4)}, {"fc": linear(4, 4, torch=False)})
    assert found.tensor_matches.conversions["fc.weight"].permute == (1, 0)
    own = ("MyLinear", {"weight": TensorOutline((4, 4))})
    assert placed({"fc": own}, {"fc": own}).tensor_matches.conversions["fc.weight"].permute == (1, 0), "by its name"
    dense = ("Dense", {"weight": TensorOutline((4, 4))})
    assert placed({"fc": dense}, {"fc": dense}).tensor_matches.conversions["fc.weight"].permute == ()


def test_within_one_framework_nothing_is_transposed() -> None:
    ours, theirs = {"fc": linear(4, 4)}, {"head": linear(4, 4)}
    found = placed(ours, theirs, same=True)
    assert found.tensor_matches.conversions["fc.weight"].plain
    assert names(found) == {"head": "fc"}


# --- rules ---------------------------------------------------------------------------------------------------------
TWO = {"a": linear(4, 4), "b": linear(4, 4)}


@pytest.mark.parametrize(
    "rule",
    [
        {"torch": "a", "paddle": "y"},
        {"torch": "a", "paddle": "(y)", "regex": "paddle"},
        {"torch": "(a)", "paddle": "y", "regex": "torch"},
        {"reference": "a", "candidate": "y"},
    ],
)
def test_a_rule_takes_precedence_over_the_order(rule: dict[str, str]) -> None:
    found = placed(TWO, {"x": linear(4, 4), "y": linear(4, 4)}, {"module": [rule]})
    assert names(found) == {"y": "a", "x": "b"}
    assert found.module_matches.how["a"] == "rule"
    assert not found.unused


def test_patterns() -> None:
    ours = {f"layer{n}.{m}.conv": linear(4, 4) for n in range(2) for m in range(2)}
    theirs = {f"s.{n}.u.{m}.c": linear(4, 4) for n in range(2) for m in range(2)}
    rules = {"structure": False, "module": [{"torch": "layer*.*.conv", "paddle": "s.*.u.*.c"}]}
    assert names(placed(ours, theirs, rules))["s.1.u.0.c"] == "layer1.0.conv"


def test_an_unused_rule_is_reported() -> None:
    found = placed(TWO, TWO, {"module": [{"torch": "no", "paddle": "one"}], "tensor": [{"torch": "p", "paddle": "q"}]})
    assert found.unused == ["the mapping: [[module]] 1", "the mapping: [[tensor]] 1"]


def test_without_structure_only_names_count() -> None:
    found = placed(TWO, {"a": linear(4, 4), "c": linear(4, 4)}, {"structure": False})
    assert names(found) == {"a": "a"}


def test_several_in_one() -> None:
    ours = {"qkv": linear(4, 12), "out": linear(4, 4)}
    theirs = {name: linear(4, 4, torch=False) for name in ("q", "k", "v", "out")}
    parts = ["q.weight", "k.weight", "v.weight"]
    rules = {"tensor": [{"torch": "qkv.weight", "paddle": parts, "permute": [1, 0]}]}
    found = placed(ours, theirs, rules)
    conversion = found.tensor_matches.conversions["qkv.weight"]
    assert (conversion.parts, conversion.permute, conversion.result([(4, 4)] * 3)) == (tuple(parts), (1, 0), (12, 4))
    back = map_models(outline("paddle", theirs), outline("torch", ours), read_rules(rules))
    cut = back.tensor_matches.conversions["k.weight"]
    assert (cut.parts, cut.cut, cut.result([(12, 4)])) == (("qkv.weight",), (4, 8), (4, 4))


def test_parts_of_other_sizes() -> None:
    ours = {"qkv": linear(8, 16, bias=False)}
    theirs = {"q": linear(8, 8, False, False), "k": linear(8, 4, False, False), "v": linear(8, 4, False, False)}
    rules = {"tensor": [{"torch": "qkv.weight", "paddle": ["q.weight", "k.weight", "v.weight"], "permute": [1, 0]}]}
    back = map_models(outline("paddle", theirs), outline("torch", ours), read_rules(rules))
    assert [back.tensor_matches.conversions[f"{name}.weight"].cut for name in "qkv"] == [(0, 8), (8, 12), (12, 16)]


def test_ignored_tensors_are_not_left() -> None:
    ours = TWO | {"teacher": "Net", "teacher.fc": linear(4, 4)}
    found = placed(ours, TWO, {"ignore": [{"torch": "teacher.**", "why": "only used in training"}]})
    report = found.report()
    assert {(each.name, each.why) for each in report.ignored} == {
        ("teacher.fc.weight", "only used in training"),
        ("teacher.fc.bias", "only used in training"),
    }
    assert "teacher.fc.weight" not in {left.name for left in report.left}
    assert found.ignored(0, "teacher.fc", "output", "0")


def test_a_users_class() -> None:
    ours = {"norm": ("MyNorm", {"gain": TensorOutline((4,)), "shift": TensorOutline((4,))})}
    theirs = {"norm": ("Norm", {"bias": TensorOutline((4,)), "weight": TensorOutline((4,))})}
    tensors = [{"torch": "gain", "paddle": "weight"}, {"torch": "shift", "paddle": "bias"}]
    found = placed(ours, theirs, {"class": [{"torch": "MyNorm", "paddle": "Norm", "tensor": tensors}]})
    assert found.tensor_matches.conversions["norm.gain"].parts == ("norm.weight",)
    assert found.tensor_matches.conversions["norm.shift"].parts == ("norm.bias",)
