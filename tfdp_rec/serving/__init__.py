"""A released recommender in service: a SavedModel that knows your ids, and HTTP. See docs/serving.md."""

from tfdp_rec.lazily import imported_when_asked

__getattr__ = imported_when_asked(__name__, {"export": "own_ids", "Served": "rest", "Server": "server"})
