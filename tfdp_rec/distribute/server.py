"""One server of a cluster: a worker or a parameter server, which computes what a coordinator asks for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tfdp_rec.distribute.cluster import Cluster

if TYPE_CHECKING:
    import tensorflow as tf


def serve(cluster: Cluster, job: str, index: int) -> tf.distribute.Server:
    """Starts a server in this process and returns when it listens. It lives as long as the process."""
    cluster.checked_task(job, index)
    if job not in ("worker", "ps"):
        raise ValueError(f"'{job}' is not a server; servers are the cluster's 'worker' and 'ps'.")
    import tensorflow as tf

    # Each worker may hold a thread of a parameter server while it waits there: with fewer, a small machine would hang.
    threads = max(os.cpu_count() or 1, len(cluster.workers) + 1)
    jobs = {name: list(at) for name, at in cluster.jobs.items() if name != "evaluator"}
    try:
        return tf.distribute.Server(
            tf.train.ClusterSpec(jobs), job_name=job, task_index=index, protocol="grpc",
            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
        )  # fmt: skip
    except tf.errors.OpError as problem:
        raise OSError(
            f"{job} {index} cannot listen at {cluster.jobs[job][index]}; is the port taken? ({problem.message})."
        ) from None
