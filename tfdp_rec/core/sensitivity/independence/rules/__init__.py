"""The rules by which operations give values to their outputs: one file for each kind of operation."""

import tfdp_rec.core.sensitivity.independence.rules.layout
import tfdp_rec.core.sensitivity.independence.rules.lookups
import tfdp_rec.core.sensitivity.independence.rules.loops
import tfdp_rec.core.sensitivity.independence.rules.products
import tfdp_rec.core.sensitivity.independence.rules.slices
import tfdp_rec.core.sensitivity.independence.rules.state  # noqa: F401
from tfdp_rec.core.sensitivity.independence.rules.elementwise import along_the_last, elementwise

__all__ = ["along_the_last", "elementwise"]
