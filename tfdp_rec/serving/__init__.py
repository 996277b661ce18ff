"""A released recommender as a SavedModel with the log's own ids, and a server for it: docs/serving.md."""

from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from tfdp_rec.serving.own_ids import export as export
    from tfdp_rec.serving.rest import Served as Served
    from tfdp_rec.serving.server import Server as Server
else:
    __getattr__, __all__ = lazy_getattr(__name__)
