r"""`tfdp-rec server`.

  tfdp-rec server --cluster cluster.json --job ps --index 0 \
      --open-to-the-network
  tfdp-rec server --open-to-the-network       job and index from TF_CONFIG

cluster.json is TF_CONFIG's JSON: {"cluster": {"worker": ["host:2222"], "ps": ["host:2223"]}}. The server waits for the
coordinator (tfdp-rec train --cluster ...) and ends on SIGTERM or Ctrl-C. It listens on all interfaces, for any address
in cluster.json, without passwords: every machine that reaches its port can read the data and run code in the server. So
on a machine with a network it needs --open-to-the-network, for a network on which all machines are trusted. A cluster
behind mutual TLS: docs/scaling-tls.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tfdp_rec.core.ground import interruption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `server`."""
    parser.add_argument(
        "--cluster", default="TF_CONFIG", metavar="FILE", help="the cluster's JSON (default: the variable TF_CONFIG)"
    )
    parser.add_argument("--job", choices=("worker", "ps"), help="default: TF_CONFIG's task")
    parser.add_argument("--index", type=int, help="which of them, from 0 (default: TF_CONFIG's task)")
    parser.add_argument(
        "--open-to-the-network", action="store_true", help="listen to all machines that reach this one, unprotected"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it."""
    # Blocked before TensorFlow starts its threads, so that sigwait gets the signal and none of them does.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        job, index = _serve(args)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        raise
    caught = signal.sigwait(_STOPS)
    print(f"tfdp-rec server: {job} {index} ends ({signal.Signals(caught).name})", flush=True)
    sys.stderr.flush()
    os._exit(0)  # a TensorFlow server stops only when its process ends


_STOPS = set(interruption.SIGNALS)


def _serve(args: argparse.Namespace) -> tuple[str, int]:
    from tfdp_rec.distribute import Cluster

    cluster = Cluster.read(args.cluster)
    job, index = args.job, args.index
    if (job is None) != (index is None):
        raise ValueError("--job and --index must be given together.")
    if job is None:
        if cluster.task is None:
            raise ValueError(f"{args.cluster} names no task; give --job and --index.")
        job, index = cluster.task
    cluster.check_task(job, index)
    _refuse_network(args.open_to_the_network)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    from tfdp_rec.distribute.cluster import serve

    global _server
    _server = serve(cluster, job, index)
    print(f"tfdp-rec server: {job} {index} is ready at {cluster.jobs[job][index]}", flush=True)
    return job, index


def _refuse_network(permitted: bool) -> None:
    from tfdp_rec.distribute.local_cluster import other_interfaces

    others = other_interfaces()
    if others and not permitted:
        raise ValueError(
            f"TensorFlow's servers listen on all interfaces ({', '.join(others)} too), without password or encryption: "
            "every machine that reaches the port can read the data and run code. Run it behind mutual TLS "
            "(docs/scaling-tls.md), or, where all these machines are trusted, give --open-to-the-network."
        )


_server: object = None  # lives as long as the process
