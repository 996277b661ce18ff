"""The rules by which operations give values to their outputs: one file for each kind of operation."""

from __future__ import annotations

from tfdp_rec.independence.rules import elementwise as _elementwise
from tfdp_rec.independence.rules import layout, lookups, loops, products, reductions, shapes, slices, state

elementwise = _elementwise.elementwise
along_the_last = _elementwise.along_the_last

__all__ = [
    "along_the_last", "elementwise", "layout", "lookups", "loops", "products", "reductions", "shapes", "slices",
    "state",
]  # fmt: skip
