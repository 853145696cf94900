"""The table of pairs: one row a pair of records with the same identity, in the reference's execution order.

Every report reads it, so its columns are documented where they are defined.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tensortap.core import statistics

__all__ = ["SCHEMA", "pairs_schema"]

# Words repeat: a column without nulls holds codes, and each word once.
_WORDS = pa.dictionary(pa.int32(), pa.string())
_FEW_WORDS = pa.dictionary(pa.int8(), pa.string())

SCHEMA = pa.schema(
    [
        # identity, as on the reference's side
        ("rank", pa.int32()),
        ("seq", pa.int64()),  # execution order on the reference's side
        ("step", pa.int64()),
        ("micro", pa.int64()),
        ("phase", _FEW_WORDS),
        ("module", _WORDS),
        ("call", pa.int64()),
        ("kind", _FEW_WORDS),
        ("path", _WORDS),
        ("cls", _WORDS),
        # the tensors
        ("dtype_reference", _FEW_WORDS),
        ("dtype_candidate", _FEW_WORDS),
        ("shape_reference", pa.list_(pa.int64())),
        ("shape_candidate", pa.list_(pa.int64())),
        # the judgement
        ("status", _FEW_WORDS),  # equal | close | diverged | nonfinite | shape | unjudged
        ("birth", pa.bool_()),  # wrong although its sources are right
        ("cause", pa.string()),  # of a birth: the code that made it wrong, see core.causes
        ("container", pa.string()),  # the module in whose own code it was born, if that is another module
        ("tolerance", pa.float64()),  # the relative L2 error that was allowed
        ("rule", _WORDS),  # which rule allowed it
        # how far apart; null where it is not known
        ("exact", pa.bool_()),  # measured on all elements, not estimated from sketches
        ("rel_l2", pa.float64()),  # |candidate - reference| / |reference|
        ("rel_l2_bar", pa.float64()),  # half-width of a 95 % interval around it; inf: it is at least that far
        ("cosine", pa.float64()),
        ("max_abs", pa.float64()),
        ("max_abs_index", pa.list_(pa.int64())),
        ("reference_value", pa.float64()),  # at that index
        ("candidate_value", pa.float64()),
        ("max_ulp", pa.float64()),
        ("mismatched", pa.float64()),  # share of elements outside atol + rtol * |reference|
        ("row_rel_l2", pa.float64()),  # rel_l2 of the worst row along the last dimension; `kernels.pairs.reference`
        ("row_index", pa.list_(pa.int64())),  # where that row is; empty if the tensor is one row
        ("row_tolerance", pa.float64()),  # the error of a row that was allowed
        # with a truth: how far each side is from it, relative to its size
        ("truth_reference", pa.float64()),
        ("truth_candidate", pa.float64()),
        # both sides
        *(
            (f"{each.name}_{side}", pa.type_for_alias(each.dtype))
            for each in sorted((*statistics.STORED, *statistics.DERIVED), key=lambda each: each.show.sides or 0)
            if each.show.sides
            for side in ("reference", "candidate")
        ),
        # where names or layouts were mapped; null where both sides have the same
        ("module_candidate", pa.string()),  # what the candidate calls the module
        ("path_candidate", pa.string()),
        ("layout", pa.string()),  # what was done to the candidate's tensor: "transposed"
    ]
)


def pairs_schema() -> Any:
    """Return the columns of a table that is made now: SCHEMA, and both sides of each statistic that was added."""
    schema = SCHEMA
    for each in statistics.added():
        for side in ("reference", "candidate"):
            schema = schema.append(pa.field(f"{each.name}_{side}", pa.type_for_alias(each.dtype)))
    return schema
