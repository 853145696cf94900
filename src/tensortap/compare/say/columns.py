"""The table of pairs: one row a pair of records with the same identity, in the reference's execution order.

Every report reads it, so its columns are documented where they are defined.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = ["SCHEMA"]

SCHEMA = pa.schema(
    [
        # identity, as on the reference's side
        ("rank", pa.int32()),
        ("seq", pa.int64()),  # execution order on the reference's side
        ("step", pa.int64()),
        ("micro", pa.int32()),
        ("phase", pa.string()),
        ("module", pa.string()),
        ("call", pa.int32()),
        ("kind", pa.string()),
        ("path", pa.string()),
        ("cls", pa.string()),
        # the tensors
        ("dtype_reference", pa.string()),
        ("dtype_candidate", pa.string()),
        ("shape_reference", pa.list_(pa.int64())),
        ("shape_candidate", pa.list_(pa.int64())),
        # the judgement
        ("status", pa.string()),  # equal | close | diverged | nonfinite | shape | unjudged
        ("birth", pa.bool_()),  # wrong although its sources are right
        ("cause", pa.string()),  # of a birth: the code that made it wrong, see core.causes
        ("container", pa.string()),  # the module in whose own code it was born, if that is another module
        ("tolerance", pa.float64()),  # the relative L2 error that was allowed
        ("rule", pa.string()),  # which rule allowed it
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
        ("row_rel_l2", pa.float64()),  # rel_l2 of the worst row along the last dimension; `kernels.pairs_reference`
        ("row_index", pa.list_(pa.int64())),  # where that row is; empty if the tensor is one row
        ("row_tolerance", pa.float64()),  # the error of a row that was allowed
        # both sides
        ("mean_reference", pa.float64()),
        ("mean_candidate", pa.float64()),
        ("std_reference", pa.float64()),
        ("std_candidate", pa.float64()),
        ("var_reference", pa.float64()),
        ("var_candidate", pa.float64()),
        ("l2_reference", pa.float64()),
        ("l2_candidate", pa.float64()),
        ("nan_reference", pa.int64()),
        ("nan_candidate", pa.int64()),
        ("inf_reference", pa.int64()),
        ("inf_candidate", pa.int64()),
        # where names or layouts were mapped; null where both sides have the same
        ("module_candidate", pa.string()),  # what the candidate calls the module
        ("path_candidate", pa.string()),
        ("layout", pa.string()),  # what was done to the candidate's tensor: "transposed"
    ]
)
