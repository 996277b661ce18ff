"""Private training beyond one machine: parameter servers that hold the tables and draw their noise."""

from __future__ import annotations

import importlib
from typing import Any

from tfdp_rec.distribute.cluster import Cluster
from tfdp_rec.distribute.local_cluster import LocalCluster

# Loaded when first asked for: a launcher or a cluster description need not wait for Keras.
_LAZY = {"ParameterServerTrainer": "trainer", "ServerLost": "connection"}

__all__ = ["Cluster", "LocalCluster", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"tfdp_rec.distribute.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'tfdp_rec.distribute' has no attribute {name!r}")
