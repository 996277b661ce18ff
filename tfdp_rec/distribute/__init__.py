"""Private training beyond one machine: parameter servers that hold the tables and draw their noise."""

from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr
from tfdp_rec.distribute.cluster import Cluster as Cluster
from tfdp_rec.distribute.local_cluster import LocalCluster as LocalCluster

# A launcher or a cluster description need not wait for Keras.
if TYPE_CHECKING:
    from tfdp_rec.distribute.connection import ServerLost as ServerLost
    from tfdp_rec.distribute.trainer import ParameterServerTrainer as ParameterServerTrainer
else:
    __getattr__, __all__ = lazy_getattr(__name__)
    __all__ += ["Cluster", "LocalCluster"]
