"""Sampling schemes, the look-ahead stage and data sets."""

from typing import TYPE_CHECKING

from tfdp_rec.core.claim.orders import FixedOrder
from tfdp_rec.core.claim.schemes import PoissonSampling, RandomAllocation, Sampling
from tfdp_rec.core.ground.lazy_imports import lazy_getattr
from tfdp_rec.correlated.bounded_stream import BoundedStream
from tfdp_rec.datasets.mind import files as mind
from tfdp_rec.datasets.movielens import files as movielens
from tfdp_rec.datasets.movielens import generated as synthetic
from tfdp_rec.datasets.next_item import NextItemExamples
from tfdp_rec.datasets.padded import padded
from tfdp_rec.datasets.timelines import Timelines
from tfdp_rec.training.lookahead import lookahead

__all__ = [
    "BoundedStream", "FixedOrder", "Interactions", "Items", "NextItemExamples", "PoissonSampling", "RandomAllocation",
    "RowFiles", "Sampling", "Timelines", "lookahead", "mind", "movielens", "padded", "synthetic",
]  # fmt: skip

# They stand on PyArrow, which an extra brings.
if TYPE_CHECKING:
    from tfdp_rec.datasets.logs.interactions import Interactions
    from tfdp_rec.datasets.logs.items import Items
    from tfdp_rec.datasets.logs.row_files import RowFiles
else:
    __getattr__, _ = lazy_getattr(__name__)
