"""Private training beyond one machine: parameter servers that hold the tables and draw their noise."""

from tfdp_rec.distribute.cluster import Cluster
from tfdp_rec.distribute.local_cluster import LocalCluster
from tfdp_rec.lazily import imported_when_asked

__all__ = ["Cluster", "LocalCluster", "ParameterServerTrainer", "ServerLost"]

# A launcher or a cluster description need not wait for Keras.
__getattr__ = imported_when_asked(__name__, {"ParameterServerTrainer": "trainer", "ServerLost": "connection"})
