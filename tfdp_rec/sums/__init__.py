"""Private sums on a fixed-point grid: counts, moments, items that may be named at all, clicks by value and by logit."""

from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from tfdp_rec.sums.clicks import ClickModel as ClickModel
else:
    __getattr__, __all__ = lazy_getattr(__name__)
