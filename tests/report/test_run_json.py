"""The JSON object: its keys, and strict JSON throughout."""

from __future__ import annotations

import json
import math
from typing import Any

from reporting import facts, record

from tensortap.core.arguments import OpaqueValue
from tensortap.core.records import Location
from tensortap.report.files.run_json import text


def strict(given: str) -> Any:
    """As a reader that knows no NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(given, parse_constant=refuse)


def test_the_keys_are_the_documented_ones() -> None:
    value = strict("".join(text(facts(), [record()], 5)))
    assert list(value) == ["format", "version", "run", "coverage", "matching", "records"]
    assert (value["format"], value["version"], value["matching"]) == ("tensortap-show", 1, 5)
    assert set(value["run"]) == {
        *("path", "framework", "model", "started", "finished", "world", "ranks", "steps", "records", "tensors"),
        *("kept", "bytes_on_disk", "config", "environment", "notices"),
    }
    assert value["coverage"]["counts"] == {"seen": 2}
    assert set(value["coverage"]["modules"][0]) == {"rank", "module", "class", "status", "calls", "reason"}
    assert set(value["records"][0]) == {
        *("step", "micro", "phase", "module", "call", "kind", "path"),
        *("rank", "seq", "class", "dtype", "shape", "tensor", "elements", "nan", "posinf", "neginf", "zeros"),
        *("edge", "min", "max", "mean", "std", "l1", "l2", "digest", "location", "placement", "arguments"),
    }


def test_every_key_is_documented() -> None:
    from tensortap.report.files import run_json

    value = strict("".join(text(facts(), [record()], 1, sketch=True)))
    said = (run_json.__doc__ or "").replace(",", " ").replace(";", " ").split()
    for part in (value, value["run"], value["records"][0]):
        assert not set(part) - set(said)


def test_numbers_that_json_lacks_are_null() -> None:
    odd = record(min=math.nan, l2=math.inf, mean=-math.inf)
    value = strict("".join(text(facts(info={"config": {"lr": math.nan, "x": [math.inf]}}), [odd], 1)))
    assert [value["records"][0][name] for name in ("min", "l2", "mean", "std")] == [None, None, None, 0.5]
    assert value["run"]["config"] == {"lr": None, "x": [None]}


def test_plain_arguments_are_written_as_in_a_run() -> None:
    given = {"scale": math.nan, "size": (2, None), "past": OpaqueValue("object", "Cache")}
    value = strict("".join(text(facts(), [record(), record(1)], 2, arguments=lambda r: None if r.seq else given)))
    assert [each["arguments"] for each in value["records"]] == [
        {"scale": {"float": "nan"}, "size": {"tuple": [2, None]}, "past": {"object": "Cache"}},
        None,
    ]


def test_digest_location_and_sketch() -> None:
    kept = record(digest=2**64 - 1, location=Location("step_000000.0.safetensors", 8, 48))
    value = strict("".join(text(facts(), [kept, record(1)], 2, sketch=True)))
    first, second = value["records"]
    assert first["digest"] == "f" * 16
    assert first["location"] == {"file": "step_000000.0.safetensors", "offset": 8, "nbytes": 48}
    assert second["location"] is None
    assert second["digest"] == "0000000000000abc"
    assert first["sketch"] == [1.0] * 4


def test_no_records_and_hostile_names() -> None:
    assert strict("".join(text(facts(), [], 0)))["records"] == []
    name = 'a"\n\x1b\ud800层'
    given = "".join(text(facts(path=name), [record(module=name)], 1))
    assert given.isascii()
    assert strict(given)["records"][0]["module"] == name
