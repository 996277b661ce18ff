"""A released recommender as a SavedModel with the log's own ids, and a server for it: docs/serving.md."""

from tfdp_rec.lazily import imported_when_asked

__getattr__ = imported_when_asked(__name__, {"export": "own_ids", "Served": "rest", "Server": "server"})
