"""Independence by construction: a traced loss is read, operation by operation, before a step is made of it.

Tensors by example belong to one example each; others that matter are refused, with the operation and the user's own
line. The argument, and how to register an operation, is in docs/privacy-independence.md.
"""

from __future__ import annotations

from tfdp_rec.core.sensitivity.independence import rules
from tfdp_rec.core.sensitivity.independence.loss_terms import find_terms
from tfdp_rec.core.sensitivity.independence.reading import At, Reading, Walk, known_operations, rows_of, rule
from tfdp_rec.core.sensitivity.independence.values import ByExample, Mixed, Shared, Sized, Value

__all__ = [
    "At", "ByExample", "Mixed", "Reading", "Shared", "Sized", "Value", "Walk",
    "find_terms", "known_operations", "rows_of", "rule", "rules",
]  # fmt: skip
