"""Reference models, each usable with every mechanism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from tfdp_rec.models import news as news
    from tfdp_rec.models.dlrm import DLRM as DLRM
    from tfdp_rec.models.kg_entity import KGEntity as KGEntity
    from tfdp_rec.models.pctr import PCTR as PCTR
    from tfdp_rec.models.sasrec import SASRec as SASRec
    from tfdp_rec.models.two_tower import TwoTower as TwoTower
else:
    __getattr__, __all__ = lazy_getattr(__name__)
