"""An audit attributes every value to its origin, in both frameworks, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.audited import Library, MasterSGD
from tensortap.errors import UsageError
from tensortap.frameworks import framework_of
from tensortap.model.audit import audit
from tensortap.model.inspect import inspect

pytestmark = pytest.mark.filterwarnings("ignore:Skip loading", "ignore:When training, we now always track")


def whats(found: Any, name: str) -> list[str]:
    return [event.what for event in found.timeline(name)]


def test_a_whole_load(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.loader(model)(library.checkpoint())
    assert found.status("embed.weight") == found.status("head.weight") == "loaded"
    assert found.status(library.mean) == "identical"  # zeros in both
    event = found.timeline("embed.weight").events[-1]
    assert event.changed and 0.5 < event.rel_l2 < 3
    assert event.where.startswith(("test_audit.py:", "tests/model/test_audit.py:"))
    text = str(found)
    assert "loaded first at" in text and "missing" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_loading_identical_values(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, {key: value.clone() for key, value in model.state_dict().items()})
    assert {found.status(name) for name in ("embed.weight", "embed.bias", "head.weight")} == {"identical"}
    assert found.facts().happenings[0].tensors == 0


def delegating(library: Library, returns: bool) -> Any:
    """A wrapper whose loading method passes the state dict on to the model inside, as paddle's DataParallel does."""

    class Wrapper(library.base):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = library.net(0)

        def load(self, state: Any) -> Any:
            result = library.load(self.inner, {key: value for key, value in state.items() if key != "epoch"})
            return result if returns else None

        load_state_dict = set_state_dict = lambda self, state, **_: self.load(state)

    return Wrapper()


@pytest.mark.parametrize("returns", [False, True])
def test_a_load_that_delegates_is_one_load(library: Library, returns: bool) -> None:
    state = library.checkpoint()
    model = delegating(library, returns)
    with audit(model) as found:
        library.load(model, state)
    facts = found.facts()
    assert found.status("inner.embed.weight") == "loaded" and not facts.names["unexpected"]
    assert len(facts.happenings) == 1 and facts.happenings[0].tensors >= 2


@pytest.mark.parametrize("returns", [False, True])
def test_a_load_that_delegates_a_part_of_its_keys(library: Library, returns: bool) -> None:
    state = {**library.checkpoint(), "old.weight": library.tensor(2), "epoch": library.tensor(1)}
    del state["head.weight"]
    model = delegating(library, returns)
    with audit(model) as found:
        library.load(model, state)
    assert found.status("inner.head.weight") == "missing" and found.status("inner.embed.weight") == "loaded"
    unexpected = [key for key, _ in found.facts().names["unexpected"]]
    assert unexpected.count("inner.old.weight") == 1 and "old.weight" not in unexpected
    assert "epoch" in unexpected or returns  # the result says that there was none


@pytest.mark.filterwarnings("ignore:.*not a parallel execution environment:UserWarning", "ignore:The program will")
def test_paddles_data_parallel() -> None:
    paddle = pytest.importorskip("paddle")
    library = Library("paddle")
    model = paddle.DataParallel(library.net(0))
    with audit(model) as found:
        model.set_state_dict(library.checkpoint())
    assert found.status("embed.weight") == "loaded"
    assert not found.facts().names["unexpected"] and len(found.facts().happenings) == 1


def test_missing_unexpected_and_wrong_shapes(library: Library) -> None:
    state = library.checkpoint(classes=3)
    del state["embed.bias"]
    state["old.weight"] = library.tensor(2)
    model = library.net(0, classes=5)
    if library.name == "torch":
        with audit(model) as found, pytest.raises(RuntimeError, match="size mismatch"):
            library.load(model, state)
        assert any("raised RuntimeError" in note for note in found.facts().notes)
    else:
        with audit(model) as found:
            missing, unexpected = library.load(model, state)
        assert "embed.bias" in missing and "old.weight" in unexpected
    assert found.status("embed.bias") == "missing"
    assert found.status("head.weight") == found.status("head.bias") == "mismatch"
    assert found.status("embed.weight") == "loaded"
    assert set(found.facts().names["unexpected"]) == {("old.weight", "")}
    assert "3 in the checkpoint, 5 here" in found.timeline("head.bias").events[-1].detail


def test_the_return_value_is_the_frameworks_own(library: Library) -> None:
    state = library.checkpoint()
    del state["embed.bias"]
    state["old.weight"] = library.tensor(2)
    plain = library.load(library.net(0), state)
    model = library.net(0)
    with audit(model):
        watched = library.load(model, state)
    assert watched == plain and type(watched) is type(plain)


def test_a_load_into_a_submodule(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    part = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    with audit(model) as found:
        library.load(model.head, part)
    assert found.status("head.weight") == "loaded" and found.status("embed.weight") == "untouched"
    assert found.facts().happenings[0].what.endswith("of head")


def test_load_then_steps(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=3)
    assert found.status("head.weight") == "loaded"
    stepped = found.timeline("head.weight").events[-1]
    assert (stepped.what, stepped.times, stepped.step, stepped.last_step) == ("stepped", 3, 0, 2)
    assert whats(found, library.mean) == ["initialised", "loaded", "forward"]
    assert found.facts().steps == 3
    assert "optimizer step, 3 times" in str(found)


def test_training_without_a_load(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.train(model, optimizer)
    assert found.status("head.weight") == found.status(library.mean) == "trained"
    assert "No checkpoint was loaded" in str(found)


def test_overwritten_after_loading(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint())
        library.fill(model.head.weight, 0.5)
        assert found.check() == ["head.weight"]
        assert found.check() == []
    assert found.status("head.weight") == "overwritten"
    assert "noticed at" in str(found)


def test_one_element_changed_without_autograd(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint())
        values = model.embed.weight.numpy(force=True) if library.name == "torch" else model.embed.weight.numpy()
        values = values.copy()
        values[1, 3] += 1e-3
        if library.name == "torch":
            model.embed.weight.data[1, 3] += 1e-3
        else:
            model.embed.weight.set_value(values)
    assert found.status("embed.weight") == "overwritten"
    assert found.timeline("embed.weight").events[-1].where == "the end"


def test_set_without_load_state_dict(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.fill(model.embed.bias, 0.25)
        model.eval()
        model(library.tensor(6, 4))
    assert found.status("embed.bias") == "set" and found.status("embed.weight") == "untouched"


def test_a_forward_before_the_load_is_noted(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        model.eval()
        model(library.tensor(6, 4))
        library.load(model, library.checkpoint())
    assert any("a forward had run on the initial values" in note for note in found.facts().notes)


def test_nothing_is_left_and_nothing_changes(library: Library) -> None:
    def run(watched: bool) -> Any:
        model = library.net(0)
        optimizer = library.optimizer(model)
        before, own = library.attributes(model), set(vars(optimizer))
        found = audit(model, optimizer) if watched else None
        library.load(model, library.checkpoint())
        library.train(model, optimizer, steps=2)
        if found is not None:
            found.check()
            found.close()
            found.close()
            assert library.attributes(model) == before and library.hooks(model) == 0
            assert set(vars(optimizer)) == own
            library.train(model, optimizer)
            assert found.facts().steps == 2
        else:
            library.train(model, optimizer)
        noise = library.lib.rand([3]) if library.name == "paddle" else library.lib.rand(3)
        return [value.numpy().copy() for value in model.state_dict().values()] + [noise.numpy()]

    for plain, watched in zip(run(False), run(True), strict=True):
        np.testing.assert_array_equal(plain, watched)


def test_two_audits_leave_in_any_order(library: Library) -> None:
    model = library.net(0)
    before = library.attributes(model)
    first = audit(model)
    second = audit(model)
    library.load(model, library.checkpoint())
    first.close()
    library.fill(model.head.weight, 2.0)
    second.close()
    assert first.status("head.weight") == "loaded" and second.status("head.weight") == "overwritten"
    assert whats(first, "embed.weight") == whats(second, "embed.weight") == ["initialised", "loaded"]
    assert library.attributes(model) == before and library.hooks(model) == 0


def test_as_dict_is_json(library: Library) -> None:
    model = library.net(0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["tensors"]["embed.weight"]["status"] == "loaded"
    assert data["counts"]["loaded"] == len(found.facts().names["loaded"])
    with pytest.raises(UsageError, match="did you mean"):
        found.timeline("embed.weigth")
    with pytest.raises(UsageError, match="optimizer="):
        audit(model, object())
    assert library.hooks(model) == 0


def test_an_exception_inside_a_load_propagates_unchanged(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found, pytest.raises((TypeError, AttributeError)):
        library.load(model, None)
    assert found.status("embed.weight") == "untouched"
    assert "raised" in found.facts().happenings[0].what


def test_two_loads_are_both_in_the_timeline(library: Library) -> None:
    model = library.net(0)
    with audit(model) as found:
        library.load(model, library.checkpoint(7))
        library.load(model, library.checkpoint(8))
    assert whats(found, "embed.weight") == ["initialised", "loaded", "loaded"]
    assert len(found.facts().happenings) == 2


def at(found: Any, nth: int) -> str:
    """The line of the nth load."""
    return str(found.facts().happenings[nth].where)


def test_the_first_load_is_the_first_that_set_a_value(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    with audit(model) as found:
        library.loader(model)({f"module.{key}": value for key, value in state.items()})
        model.eval()
        model(library.tensor(6, 4))
        library.loader(model)(state)
    assert at(found, 0) != at(found, 1)
    assert f"loaded first at {at(found, 1)}" in " ".join(str(found).split())
    assert any("a forward had run" in note and at(found, 1) in note for note in found.facts().notes)


def test_a_proper_load_replaces_a_failed_one(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    with audit(model) as found:
        library.loader(model)({f"module.{key}": value for key, value in state.items()})
        assert len(found.facts().names["unexpected"]) == len(state)
        library.load(
            model, {key: value for key, value in state.items() if key != "embed.bias"} | {"old": state["embed.bias"]}
        )
    where = at(found, 1)
    assert found.facts().names["unexpected"] == [("old", f"at {where}")]
    assert found.facts().names["missing"] == [("embed.bias", f"at {where}")]
    assert found.as_dict()["unexpected"] == {"old": where}
    assert not any("begin with" in note for note in found.facts().notes)


def test_a_load_of_a_submodule_does_not_replace_one_of_the_model(library: Library) -> None:
    model, state = library.net(0), library.checkpoint()
    part = {key.removeprefix("head."): value for key, value in state.items() if key.startswith("head.")}
    with audit(model) as found:
        library.loader(model)({f"module.{key}": value for key, value in state.items()})
        library.loader(model.head)(part)
    facts = found.facts()
    assert len(facts.names["unexpected"]) == len(state)
    assert ("embed.weight", f"at {at(found, 0)}") in facts.names["missing"]
    assert any(f"{len(state)} of {len(state)} unexpected keys at {at(found, 0)} begin with" in n for n in facts.notes)
    assert f"loaded first at {at(found, 1)}" in " ".join(str(found).split())


def test_a_load_that_set_nothing(library: Library) -> None:
    model = library.net(0)
    state = {f"module.{key}": value for key, value in library.checkpoint().items()}
    with audit(model) as found:
        library.loader(model)(state)
        once = " ".join(str(found).split())
        library.loader(model)(state)
    total = len(state)
    assert f"None of {total} tensors comes from a checkpoint: the load at {at(found, 0)} gave none a value." in once
    assert f"{total} of {total} unexpected keys begin with 'module.'" in once
    assert f"none of 2 loads, the last at {at(found, 1)}, gave one a value." in " ".join(str(found).split())


def test_a_tensor_of_zeros_does_not_hide_how_far_the_others_moved(library: Library) -> None:
    model = library.net(0)
    library.fill(model.head.bias, 0.0)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.train(model, optimizer)
    step = next(h for h in found.facts().happenings if h.what == "optimizer step")
    moved = [event.rel_l2 for name in ("embed.weight", "head.weight") for event in found.timeline(name)]
    assert 0 < np.nanmax(moved) <= step.largest < 10
    bias = found.timeline("head.bias").events[-1]
    assert np.isnan(bias.rel_l2) and bias.l2 == pytest.approx(np.linalg.norm(library.read(model.head.bias)), rel=0.01)
    assert " abs" in str(found.timeline("head.bias"))
    assert "from 0" not in str(found) and "inf" not in str(found)
    assert bias.as_dict()["rel_l2"] is None and bias.as_dict()["l2"] == bias.l2


def test_only_zeros_changed(library: Library) -> None:
    model = library.net(0)
    library.fill(model.head.bias, 0.0)
    with audit(model) as found:
        library.fill(model.head.bias, 2.0)
    (happening,) = found.facts().happenings
    assert np.isnan(happening.largest) and happening.largest_l2 == pytest.approx(2 * 3**0.5, rel=0.01)
    assert "3.5 abs" in str(found)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["happenings"][0]["largest_rel_l2"] is None


def test_audit_and_inspection_agree_on_the_kind_of_each_tensor(library: Library) -> None:
    model = library.net(0)
    model.register_buffer("kept", library.tensor(2))
    model.register_buffer("scratch", library.tensor(2), False)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.load(model, library.checkpoint())
        library.train(model, optimizer)
    seen = {entry.name: entry for entry in inspect(model).tensors}
    told = found.as_dict()["tensors"]
    assert {name: (entry.kind, entry.statistics) for name, entry in seen.items()} == {
        name: (entry["kind"], entry["statistics"]) for name, entry in told.items()
    }
    named = model.named_parameters()
    assert {name for name, entry in seen.items() if entry.kind == "parameter"} == {name for name, _ in named}
    assert {name for name, entry in seen.items() if "buffer" in entry.kind} == {n for n, _ in model.named_buffers()}
    paddle = library.name == "paddle"
    assert found.facts().statistics == (2 if paddle else 0)
    assert ("2 of the parameters hold running statistics" in str(found)) == paddle
    assert found.status(library.mean) == "identical"  # a forward may change it


def test_non_persistent_buffers_are_not_reported_missing(library: Library) -> None:
    model = library.net(0)
    model.register_buffer("scratch", library.tensor(2), False)
    with audit(model) as found:
        library.load(model, library.checkpoint())
    text = " ".join(str(found).split())
    assert "1 buffer is never in a checkpoint." in text and "did not get a value" not in text


def test_any_object_with_a_step_is_an_optimizer(library: Library) -> None:
    model = library.net(0)
    optimizer = MasterSGD(library, model)
    before = dict(vars(optimizer))
    with audit(model, optimizer) as found:
        library.train(model, optimizer, steps=2)
    assert found.facts().steps == 2 and found.status("embed.weight") == "trained"
    assert vars(optimizer) == before


def test_lines_of_installed_packages_are_not_user_code(library: Library, tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    source = "def load(model, state):\n    return model(state)\n"
    (folder / "elsewhere.py").write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, str(folder / "elsewhere.py"), "exec"), names)
    model = library.net(0)
    with audit(model) as found:
        names["load"](library.loader(model), library.checkpoint())
    assert "test_audit.py:" in found.timeline("embed.weight").events[-1].where


def test_a_change_on_a_device_is_noticed_before_the_step_that_follows(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = library.net(0)
    loading: Any = framework_of(model)
    monkeypatch.setattr(type(loading.loading()), "in_host_memory", lambda *_: False)
    optimizer = library.optimizer(model)
    with audit(model, optimizer) as found:
        library.train(model, optimizer)
        library.fill(model.embed.weight, 0.5)  # no version counts it
        library.train(model, optimizer)
    assert whats(found, "embed.weight") == ["initialised", "stepped", "changed", "stepped"]


def test_tensors_that_fit_are_loaded_before_torch_raises(library: Library) -> None:
    model, state = library.net(0, classes=5), library.checkpoint(classes=3)
    with audit(model) as found:
        if library.name == "torch":
            with pytest.raises(RuntimeError, match="size mismatch"):
                library.load(model, state)
        else:
            library.load(model, state)
    assert {found.status(name) for name in ("norm.weight", "norm.bias", library.mean)} == {"identical"}
    assert "2 did not get a value from it" in " ".join(str(found).split())


def test_long_names_are_shortened_not_wrapped(library: Library) -> None:
    model, inner = library.base(), library.base()
    setattr(model, "a" * 30, inner)
    setattr(inner, "b" * 30, library.nn.Linear(2, 2))
    with audit(model) as found:
        pass
    assert f"…{'b' * 30}.weight" in str(found) or f"….{'b' * 30}.weight" in str(found)
