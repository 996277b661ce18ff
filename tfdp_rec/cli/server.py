"""`tfdp-rec server`."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tfdp_rec import interruption

HELP = """\
  tfdp-rec server --cluster cluster.json --job ps --index 0 --open-to-the-network
  tfdp-rec server --open-to-the-network                        job and index from TF_CONFIG

cluster.json is TF_CONFIG's JSON: {"cluster": {"worker": ["host:2222"], "ps": ["host:2223"]}}. The server waits for the
coordinator (tfdp-rec train --cluster ...) and ends on SIGTERM or Ctrl-C. It listens on all interfaces, whatever address
it is given, and asks nobody for a password: whoever reaches its port reads your data and runs what they like in it. So
it starts on a machine with a network only if it is told --open-to-the-network: where you trust everybody on it. How to
run a cluster that nobody else reaches, behind mutual TLS: docs/scaling-tls.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `server`."""
    parser.add_argument(
        "--cluster", default="TF_CONFIG", metavar="FILE", help="the cluster's JSON (default: the variable TF_CONFIG)"
    )
    parser.add_argument("--job", choices=("worker", "ps"), help="default: TF_CONFIG's task")
    parser.add_argument("--index", type=int, help="which of them, from 0 (default: TF_CONFIG's task)")
    parser.add_argument(
        "--open-to-the-network", action="store_true", help="listen for whoever reaches this machine, unprotected"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    # Blocked before TensorFlow makes its threads, so that none of them takes the signal and sigwait does.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        job, index = _serve(args)
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        raise
    caught = signal.sigwait(_STOPS)
    print(f"tfdp-rec server: {job} {index} ends ({signal.Signals(caught).name})", flush=True)
    sys.stderr.flush()
    os._exit(0)  # a TensorFlow server has no way to stop but its process' end


_STOPS = set(interruption.SIGNALS)


def _serve(args: argparse.Namespace) -> tuple[str, int]:
    from tfdp_rec.distribute import Cluster

    cluster = Cluster.read(args.cluster)
    job, index = args.job, args.index
    if (job is None) != (index is None):
        raise ValueError("give --job and --index together.")
    if job is None:
        if cluster.task is None:
            raise ValueError(f"{args.cluster} names no task; give --job and --index.")
        job, index = cluster.task
    cluster.checked_task(job, index)
    _refuse_network(args.open_to_the_network)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    from tfdp_rec.distribute.cluster import serve

    global _server
    _server = serve(cluster, job, index)
    print(f"tfdp-rec server: {job} {index} is ready at {cluster.jobs[job][index]}", flush=True)
    return job, index


def _refuse_network(told: bool) -> None:
    from tfdp_rec.distribute.local_cluster import other_interfaces

    others = other_interfaces()
    if others and not told:
        raise ValueError(
            f"TensorFlow's servers listen on all interfaces ({', '.join(others)} too), without password or encryption: "
            "whoever reaches the port reads your data and runs code. Run it behind mutual TLS (docs/scaling-tls.md); "
            "or, where you trust everybody who can, say so: --open-to-the-network."
        )


_server: object = None  # lives as long as the process
