"""Reference models, each usable with every mechanism."""

from __future__ import annotations

from tfdp_rec.lazily import imported_when_asked

HOMES = {
    "DLRM": "dlrm",
    "KGEntity": "kg_entity",
    "PCTR": "pctr",
    "SASRec": "sasrec",
    "TwoTower": "two_tower",
    "news": "news",
}

__all__ = [*HOMES]
__getattr__ = imported_when_asked(__name__, HOMES)
