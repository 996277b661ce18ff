"""A cluster of real server processes on this machine, for tests, benchmarks and first steps.

One launcher process imports TensorFlow and forks the servers, so that four servers start as fast as one and a killed
one is back within a tenth of a second. The launcher ends when the pipe from its parent closes, which the kernel sees to
even if the parent is killed, and the servers end with the launcher.

TensorFlow's servers listen on all interfaces, whatever address they are given, and ask for no password. Where a
machine has another interface than loopback, a warning says so. `tfdp-rec train --local` runs in a network of its own
(`own_network`); a program gets one by

    unshare -rn sh -c "ip link set lo up; exec python program.py"
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfdp_rec.distribute.cluster import Cluster

if TYPE_CHECKING:
    import tensorflow as tf

_START_SECONDS = 60.0  # the longest time until a server answers


class LocalCluster:
    """Workers and parameter servers on 127.0.0.1; a context manager that ends them all, whatever happens.

    Warns on a machine with other interfaces, where strangers can reach the servers too.

    Args:
        workers: Number of workers.
        servers: Number of parameter servers.
        folder: Folder for the logs; a temporary one if left out.

    Raises:
        ValueError: if there is not at least one of each.
        OSError: if a server does not start; with what it wrote.

    Example:
        >>> with LocalCluster(workers=1, servers=2) as cluster:  # doctest: +SKIP
        ...     trainer = ParameterServerTrainer(model_fn, optimizer_fn, dataset_fn, cluster.resolver())
        ...     trainer.fit(100)
    """

    def __init__(self, workers: int = 2, servers: int = 2, folder: str | Path | None = None):
        if workers < 1 or servers < 1:
            raise ValueError(f"a cluster needs at least one worker and one server, got {workers} and {servers}.")
        self._counts = {"worker": workers, "ps": servers}
        self._folder_given = folder
        self._launcher: subprocess.Popen[str] | None = None
        self._pids: dict[str, int] = {}
        self._ends = contextlib.ExitStack()

    # Life.

    def __enter__(self) -> LocalCluster:
        warn_of_others()
        with contextlib.ExitStack() as ends:
            if self._folder_given is None:
                temporary = tempfile.TemporaryDirectory(prefix="tfdp-rec-cluster-", ignore_cleanup_errors=True)
            self.folder = Path(self._folder_given or ends.enter_context(temporary))
            self.folder.mkdir(parents=True, exist_ok=True)
            self.cluster = Cluster(
                {job: [ends.enter_context(_hold_port()) for _ in range(n)] for job, n in self._counts.items()}
            )
            self._launcher = _launcher(self.folder, temporary=self._folder_given is None)
            ends.callback(_end, self._launcher)
            for name in self.names:
                self._start(name)
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._launcher = None
        self._ends.close()

    # The cluster.

    @property
    def names(self) -> tuple[str, ...]:
        """Of all processes: `worker:0`, ..., `ps:0`, ..."""
        return tuple(f"{job}:{i}" for job, addresses in self.cluster.jobs.items() for i in range(len(addresses)))

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """What the trainer takes."""
        return self.cluster.resolver()

    # One process.

    def pid(self, name: str) -> int | None:
        """The process number of a server, one of `names`; None if it is dead."""
        pid = self._check_name(name)
        return pid if pid is not None and not _has_ended(pid, 0) else None

    def kill(self, name: str) -> None:
        """Kills a server, one of `names`, without warning (SIGKILL) and returns when it is gone."""
        pid = self._check_name(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)  # its number is its own, dead or alive, as long as the launcher lives
            _has_ended(pid, None)

    def restart(self, name: str) -> None:
        """Starts a dead server, one of `names`, again, at its old address and empty; returns when it answers.

        Raises:
            ValueError: if it is alive.
            OSError: if it does not start.
        """
        if self.pid(name) is not None:
            raise ValueError(f"{name} is alive; kill it first.")
        self._start(name)

    def log(self, name: str) -> str:
        """What a server, one of `names`, or the `launcher` has written, all its lives together."""
        return self._log_path(name).read_text(encoding="utf-8", errors="replace")

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name.replace(':', '-')}.log"

    def _start(self, name: str) -> None:
        self._check_name(name)
        assert self._launcher is not None and self._launcher.stdin is not None and self._launcher.stdout is not None
        job, index = name.split(":")
        order = {"job": job, "index": int(index), "log": str(self._log_path(name)), "seconds": _START_SECONDS}
        with contextlib.suppress(BrokenPipeError):
            self._launcher.stdin.write(json.dumps({**order, "cluster": dict(self.cluster.jobs)}) + "\n")
            self._launcher.stdin.flush()
        line = self._launcher.stdout.readline()
        if not line:
            raise OSError(f"the launcher of the local cluster died:\n{self.log('launcher')[-2000:]}.")
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(f"{name} did not start: {answer['error']}\n{self.log(name)[-2000:]}.")
        self._pids[name] = answer["answer"]

    def _check_name(self, name: str) -> int | None:
        """The last process number of a server, dead or alive."""
        if self._launcher is None:
            raise ValueError("the cluster is not running; use it in a with statement.")
        if name not in self.names:
            raise ValueError(f"there is no {name!r}; there are {', '.join(self.names)}.")
        return self._pids.get(name)


def _has_ended(pid: int, seconds: float | None) -> bool:
    """Whether a process ends within so many seconds."""
    watched = os.pidfd_open(pid)
    try:
        return bool(select.select([watched], [], [], seconds)[0])
    finally:
        os.close(watched)


def warn_of_others() -> None:
    """Says that servers are open to more than this machine, if they are."""
    others = other_interfaces()
    if others:
        warnings.warn(
            f"The servers of a local cluster listen on all interfaces ({', '.join(others)} too), without password or "
            "encryption: a client that reaches a port reads your data and runs code. Keep a firewall before this "
            'machine, or give the program a network of its own: unshare -rn sh -c "ip link set lo up; exec COMMAND".',
            stacklevel=3,
        )


def other_interfaces() -> list[str]:
    """This machine's, without loopback."""
    return [name for _, name in socket.if_nameindex() if name != "lo"]


@contextlib.contextmanager
def _hold_port() -> Iterator[str]:
    """The address of a port that stays ours, also while the server that listens there is dead."""
    # Servers with TF_GRPC_REUSE_PORT may listen at a port that is bound here; other programs cannot.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def _launcher(folder: Path, temporary: bool) -> subprocess.Popen[str]:
    """A session of its own: Ctrl-C reaches the parent alone, which then ends the cluster."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ, "TF_GRPC_REUSE_PORT": "1"}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, "-W", "ignore", "-m", "tfdp_rec.distribute.launcher"]
    with open(folder / "launcher.log", "wb") as messages:
        return subprocess.Popen(
            command + ([str(folder)] if temporary else []),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True, env=environment,
            start_new_session=True,
        )  # fmt: skip


def _end(launcher: subprocess.Popen[str]) -> None:
    """Ends launcher and servers: they are one process group, whose leader is not reaped before the group is dead."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    for pipe in (launcher.stdin, launcher.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
