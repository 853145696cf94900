"""Comparisons made by hand: a decoder of twelve layers, and possible results of comparing two runs of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tensortap.compare.say.columns import SCHEMA
from tensortap.core.causes import Cause
from tensortap.core.records import Comparison, Difference, Finding, Key, Unmatched

POLICY = "relative L2 error up to 32 × eps of the coarser dtype (float32: 3.8e-6), times √depth of the path"
_SHAPE = (2, 16, 64)


def row(module: str = "fc", **changes: Any) -> dict[str, Any]:
    """A pair that is close, in float32, measured on all elements."""
    values: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    values |= {"rank": 0, "seq": 0, "step": 3, "micro": 0, "phase": "forward", "module": module, "call": 0}
    values |= {"kind": "output", "path": "0", "cls": "Linear", "dtype_reference": "float32"}
    values |= {"dtype_candidate": "float32", "shape_reference": list(_SHAPE), "shape_candidate": list(_SHAPE)}
    values |= {"status": "close", "birth": False, "tolerance": 1.6e-5, "rule": "float32, depth 9", "exact": True}
    values |= {"rel_l2": 2.1e-6, "rel_l2_bar": 0.0, "cosine": 1 - 2e-12, "max_abs": 1.1e-5, "max_abs_index": [0, 3, 17]}
    values |= {"reference_value": 1.25, "candidate_value": 1.250011, "max_ulp": 3.0, "mismatched": 0.0}
    for side in ("reference", "candidate"):
        values |= {f"mean_{side}": 0.01, f"std_{side}": 1.0, f"var_{side}": 1.0, f"l2_{side}": 45.3}
        values |= {f"nan_{side}": 0, f"inf_{side}": 0}
    return values | changes


def equal(module: str, **changes: Any) -> dict[str, Any]:
    zeros = {"rel_l2": 0.0, "cosine": 1.0, "max_abs": 0.0, "max_abs_index": None, "max_ulp": 0.0}
    return row(module, status="equal", **zeros, **changes)


def wrong(module: str, rel: float = 4.1e-3, **changes: Any) -> dict[str, Any]:
    numbers = {"rel_l2": rel, "cosine": 1 - rel**2 / 2, "max_abs": 3 * rel, "max_ulp": 50.0, "mismatched": 0.063}
    values = {"candidate_value": 1.25 + 3 * rel, "rule": "float32, depth 9"}
    return row(module, **{"status": "diverged", **numbers, **values, **changes})


def estimated(module: str, rel: float, **changes: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(("max_abs", "max_abs_index", "reference_value", "candidate_value", "max_ulp", "mismatched"))
    return row(module, **{"rel_l2": rel, "exact": False, "rel_l2_bar": 0.07 * rel, **unknown, **changes})


def finding(values: dict[str, Any], **changes: Any) -> Finding:
    """Return a row of the table as a finding."""
    key = Key(*(values[name] for name in Key._fields))
    index = values["max_abs_index"]
    difference = None
    if values["rel_l2"] is not None:
        names = ("max_abs", "reference_value", "candidate_value", "max_ulp", "mismatched")
        numbers = {name: float("nan") if values[name] is None else values[name] for name in names}
        difference = Difference(
            elements=int(np.prod(values["shape_reference"])),
            equal=values["status"] == "equal",
            exact=values["exact"],
            rel_l2=values["rel_l2"],
            rel_l2_bar=values["rel_l2_bar"],
            cosine=values["cosine"],
            l2=values["rel_l2"] * values["l2_reference"],
            max_abs_index=None if index is None else tuple(index),
            **numbers,
        )
    given: dict[str, Any] = {"cause": Cause(values["cause"] or "output"), "row": values["seq"]}
    given |= {"inputs_matched": True, "container": values["container"], "inputs_rel_l2": 3.2e-6}
    names = ("rank", "cls", "status", "tolerance", "rule")
    return Finding(key=key, difference=difference, **{n: values[n] for n in names}, **(given | changes))


def _cause(values: dict[str, Any]) -> str | None:
    """The cause of a birth whose inputs are right, by its kind."""
    if not values["birth"]:
        return None
    between = "container_code" if values["container"] is not None else "input"
    return {"input": between, "output": "output", "grad_output": "sent_gradient"}[values["kind"]]


def comparison(rows: Sequence[dict[str, Any]], **changes: Any) -> Comparison:
    """From rows: their order is their seq, births are findings, the first of them the first."""
    rows = [{**each, "seq": seq} for seq, each in enumerate(rows)]
    rows = [{**each, "cause": each["cause"] or _cause(each)} for each in rows]
    births = [finding(each) for each in rows if each["birth"]]
    unmatched = changes.get("unmatched", ())
    values: dict[str, Any] = {
        "reference": "runs/a",
        "candidate": "runs/b",
        "verdict": "diverged" if births else "match",
        "sentence": "The runs match: 5 of 5 pairs are equal or close.",
        "first": births[0] if births else None,
        "births": births,
        "counts": {**Counter(each["status"] for each in rows), **({"unmatched": len(unmatched)} if unmatched else {})},
        "unmatched": unmatched,
        "table": pa.Table.from_pylist(rows, schema=SCHEMA),
        "policy": POLICY,
    }
    return Comparison(**{**values, **changes})


def _modules(layers: int = 12) -> Iterator[tuple[str, str]]:
    """Leaves before the modules that hold them, as their outputs come."""
    yield "embed", "Embedding"
    for n in range(layers):
        for name, cls in (("norm1", "RMSNorm"), ("self_attn.qkv", "Linear"), ("self_attn.core", "CoreAttention")):
            yield f"layers.{n}.{name}", cls
        yield f"layers.{n}.self_attn.out", "Linear"
        yield f"layers.{n}.self_attn", "Attention"
        for name, cls in (("norm2", "RMSNorm"), ("mlp.up", "Linear"), ("mlp.down", "Linear"), ("mlp", "MLP")):
            yield f"layers.{n}.{name}", cls
        yield f"layers.{n}", "Block"
    yield "norm", "RMSNorm"
    yield "lm_head", "Linear"
    yield "", "Decoder"


BORN = "layers.7.self_attn.core"


def decoder(make: Any = wrong, clean: Any = row, **changes: Any) -> list[dict[str, Any]]:
    """Equal up to layer 3, close up to the core of layer 7, and wrong from there on, backward too."""
    rows, names = [], list(_modules())
    born = next(at for at, (name, _) in enumerate(names) if name == BORN)
    for at, (name, cls) in enumerate(names):
        before = equal if name.startswith(("embed", "layers.0", "layers.1.", "layers.2")) else clean
        after = before if at < born else make
        rows.append((before if at <= born else after)(name, cls=cls, kind="input", **changes))
        rows.append(after(name, cls=cls, birth=at == born, **changes))
    for name, cls in reversed(names):
        rows.append(make(name, 6e-3, cls=cls, kind="grad_output", phase="backward", **changes))
    return rows


SENTENCE = (
    f"{BORN} (CoreAttention) is the first to diverge: output 0, forward, step 3. Its inputs still matched (3.2e-6); "
    "its relative error is 4.1e-3, allowed 1.6e-5."
)


def diverged(**changes: Any) -> Comparison:
    """One birth in layer 7, another in layer 9's backward."""
    rows = decoder()
    late = next(each for each in rows if each["module"] == "layers.2.mlp.up" and each["kind"] == "grad_output")
    late["birth"] = True
    notes = ["--noise runs/a2, a second run of the reference, measures what differs without any cause"]
    return comparison(rows, **({"sentence": SENTENCE, "notes": notes} | changes))


def from_sketches() -> Comparison:
    """The same from summaries only."""
    return comparison(
        decoder(
            lambda name, rel=4.1e-3, **more: estimated(name, rel, status="diverged", **more),
            lambda name, **more: estimated(name, 2.1e-6, **more),
        ),
        sentence=SENTENCE.replace("4.1e-3", "~4.1e-3"),
    )


def with_nan() -> Comparison:
    """A NaN that appears in the code of a container, between two of its modules."""

    def nan(name: str, rel: float = 0.0, **more: Any) -> dict[str, Any]:
        unknown = dict.fromkeys(("rel_l2", "rel_l2_bar", "cosine", "max_abs", "max_abs_index", "mismatched"))
        return row(name, status="nonfinite", nan_candidate=12, **unknown, **more)

    rows = decoder(nan)
    at = next(at for at, each in enumerate(rows) if each["birth"])
    rows[at]["birth"] = False
    rows[at - 1] = nan(BORN, cls="CoreAttention", kind="input", birth=True, container="layers.7.self_attn")
    said = "A NaN is born in the code of layers.7.self_attn, step 3: 12 of 2,048 elements of layers.7.self_attn.core"
    return comparison(rows, sentence=f"{said}, input 0, forward.")


def matching() -> Comparison:
    rows = [equal("embed"), row("layers.0.fc1"), row("layers.0.fc2", rel_l2=8e-6), equal("layers.0"), row("")]
    return comparison(rows)


def incomparable() -> Comparison:
    """Two models that name their modules differently."""
    ours = [f"layers.{n}.attn.{name}" for n in range(12) for name in ("q_proj", "k_proj", "v_proj")]
    theirs = [f"decoder.blocks.{n}.attention.{name}" for n in range(12) for name in ("query", "key", "value")]
    keys = [("reference", name) for name in ours] + [("candidate", name) for name in theirs]
    unmatched = [
        Unmatched(side, Key(0, 0, "forward", name, 0, kind, "0"), 0, "Linear")  # type: ignore[arg-type]
        for side, name in keys
        for kind in ("input", "output")
    ]
    return comparison(
        [equal("embed", step=0)],
        verdict="incomparable",
        sentence="Too little in common to judge: 1 of 73 records of the reference has a counterpart.",
        unmatched=unmatched,
        notes=[
            "names may differ only in their form: try --rename 'decoder\\.blocks\\.(\\d+)\\.attention=layers.\\1.attn'",
            "--map FILE takes rules for names and layouts",
        ],
    )


def large(rows: int = 100_000, layers: int = 1000, **changes: Any) -> Comparison:
    """Many rows over several steps, the second half wrong; quick to build."""
    half = rows // 2
    parts = [row("layers.0.fc"), wrong("layers.0.fc")]
    columns = {}
    for name in SCHEMA.names:
        field = SCHEMA.field(name).type
        columns[name] = pa.array([p[name] for p in parts], field).take(pa.array(np.arange(rows) // half))
    place = np.arange(rows)
    columns["seq"] = pa.array(place, pa.int64())
    columns["module"] = pa.array([f"layers.{n % layers}.fc" for n in place])
    columns["step"] = pa.array(place // layers, pa.int64())
    columns["birth"] = pa.array(place == half)
    columns["rel_l2"] = pa.array(np.where(place < half, 2.1e-6, 4.1e-3) * (1 + place % 97 / 97))
    table = pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    first = finding(table.slice(half, 1).to_pylist()[0])
    values: dict[str, Any] = {"verdict": "diverged", "sentence": SENTENCE, "first": first, "births": [first]}
    values |= {"counts": {"close": half, "diverged": rows - half}, "table": table}
    return comparison([], **(values | changes))
