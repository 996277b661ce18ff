"""The processes of a cluster: described, started, and recognised by their answer.

    chief      runs the trainer, and computes nothing itself; may be left out
    worker     reads rows, computes clipped gradients
    ps         holds the shards of tables, their marks and totals, and draws their noise
    evaluator  none of the trainer's business; may be listed

The description is TensorFlow's: the environment variable TF_CONFIG, or the same JSON in a file.

    {"cluster": {"worker": ["10.0.0.5:2222", "10.0.0.6:2222"], "ps": ["10.0.0.7:2222"]},
     "task": {"type": "chief", "index": 0}}

It is checked as a whole before anything starts: a mistake in it would show as a process that waits forever.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

JOBS = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = '{"cluster": {"worker": ["host:2222"], "ps": ["host:2223"]}}'

SILENT, STRANGER = "no answer", "another service"
_STATUS = "/tensorflow.WorkerService/GetStatus"
_DEVICE = re.compile(rb"/job:(\w+)/replica:0/task:(\d+)/")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of a cluster, by job, and optionally this process' place in it.

    Args:
        jobs: `chief`, `worker`, `ps` and `evaluator`, each a list of `host:port`. `worker` and `ps` must be there.
        task: This process' job and index.

    Raises:
        ValueError: for anything that could not be a cluster, with what to change.

    Example:
        >>> cluster = Cluster({"worker": ["10.0.0.5:2222"], "ps": ["10.0.0.7:2222", "10.0.0.8:2222"]})
        >>> cluster.servers
        ('10.0.0.7:2222', '10.0.0.8:2222')
        >>> Cluster({"worker": ["10.0.0.5:2222"], "ps": ["10.0.0.5:2222"]})
        Traceback (most recent call last):
        ...
        ValueError: 10.0.0.5:2222 is both worker 0 and ps 0; each process needs an address of its own.
    """

    jobs: Mapping[str, Sequence[str]]
    task: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "jobs", _check_jobs(self.jobs))
        if self.task is not None:
            object.__setattr__(self, "task", self.check_task(*self.task))

    @classmethod
    def from_json(cls, text: str, source: str = "the cluster description") -> Cluster:
        """Reads TF_CONFIG's JSON.

        Args:
            text: An object with `cluster` and perhaps `task`.
            source: Name of the text, for errors.

        Raises:
            ValueError: if it is not JSON, or no cluster.
        """
        try:
            found = json.loads(text)
        except json.JSONDecodeError as problem:
            raise ValueError(f"{source} is not JSON: {problem}. It should look like {_EXAMPLE}.") from None
        if not isinstance(found, dict) or not isinstance(found.get("cluster"), dict):
            raise ValueError(f"{source} has no 'cluster'. It should look like {_EXAMPLE}.")
        try:
            return cls(found["cluster"], _read_task(found["task"]) if "task" in found else None)
        except ValueError as problem:
            raise ValueError(f"{source}: {problem}.") from None

    @classmethod
    def read(cls, source: str | Path) -> Cluster:
        """Reads the environment variable if `source` is "TF_CONFIG", and otherwise that file.

        Raises:
            ValueError: if the description is wrong, or the variable is not set.
            OSError: if the file cannot be read.
        """
        if source != "TF_CONFIG":
            return cls.from_json(Path(source).read_text(encoding="utf-8"), str(source))
        text = os.environ.get("TF_CONFIG", "")
        if not text.strip():
            raise ValueError(f"The environment variable TF_CONFIG is not set. It should look like {_EXAMPLE}.")
        return cls.from_json(text, "TF_CONFIG")

    @property
    def workers(self) -> tuple[str, ...]:
        """Addresses of the workers."""
        return tuple(self.jobs["worker"])

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the parameter servers."""
        return tuple(self.jobs["ps"])

    def check_task(self, job: Any, index: Any) -> tuple[str, int]:
        """The place of one process; `ValueError` if the cluster has no such place."""
        if job not in self.jobs:
            raise ValueError(f"the task's type is {job!r}, but the cluster's jobs are {', '.join(self.jobs)}.")
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(self.jobs[job]):
            last = len(self.jobs[job]) - 1
            raise ValueError(f"the task's index is {index!r}, but '{job}' has index {' to '.join(('0', str(last)))}.")
        return job, index

    def resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """What the trainer takes, and `tf.distribute.ParameterServerStrategy`."""
        import tensorflow as tf

        job, index = self.task or (None, None)
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            self.tf_spec(), task_type=job, task_id=index, rpc_layer="grpc"
        )

    def tf_spec(self) -> tf.train.ClusterSpec:
        """TensorFlow's own description, which knows of no evaluator."""
        import tensorflow as tf

        return tf.train.ClusterSpec({job: list(at) for job, at in self.jobs.items() if job != "evaluator"})

    def wait(self, seconds: float = 60.0) -> None:
        """Waits until every worker and server answers, and is the one it should be.

        Args:
            seconds: Longest wait.

        Raises:
            TimeoutError: naming those that did not answer.
            ValueError: naming an address at which another process does.
        """
        left, strange, deadline = self.places, set[str](), time.monotonic() + seconds
        while True:
            found = self._find_servers(left, 3.0)
            strange = self._refuse_others(found, strange)
            left = {name: at for name, at in left.items() if found[name] != name}
            if not left:
                return
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"No answer within {seconds:g} s from {self.describe(left)}. Start each with: "
                    "tfdp-rec server --cluster FILE --job JOB --index I --open-to-the-network."
                )
            time.sleep(0.1)

    @property
    def places(self) -> dict[str, str]:
        """Addresses of workers and servers, by name: `worker 0`, ..., `ps 0`, ..."""
        return {f"{job} {i}": at for job in ("worker", "ps") for i, at in enumerate(self.jobs[job])}

    def silent(self, seconds: float = 3.0) -> dict[str, str]:
        """The workers and servers, with their addresses, that do not answer now, within so many seconds."""
        found = self._find_servers(self.places, seconds)
        return {name: at for name, at in self.places.items() if found[name] != name}

    def describe(self, names: Mapping[str, str]) -> str:
        """Names with their addresses, and which of them listen without a word."""
        mute = "; it listens and says nothing: frozen?"
        return ", ".join(f"{name} ({at}{mute if listens(at) else ''})" for name, at in names.items())

    def _find_servers(self, places: Mapping[str, str], seconds: float) -> dict[str, str]:
        """The servers that answer where these should be."""
        with ThreadPoolExecutor(min(32, len(places))) as pool:
            return dict(zip(places, pool.map(lambda at: server_at(at, seconds), places.values())))

    def _refuse_others(self, found: Mapping[str, str], before: set[str]) -> set[str]:
        """Raises for a place that another server has; returns the strangers, one of which may be ours that starts."""
        strange = {name for name, answer in found.items() if answer == STRANGER}
        wrong = [n for n, answer in found.items() if answer not in (SILENT, STRANGER, n) or n in strange & before]
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"At {self.places[name]}, where {name} should be, {found[name]} answers: correct the addresses of the "
                "cluster, or start the right server there."
            )
        return strange


def split_address(address: Any) -> tuple[str, int]:
    """Host and port of an address `host:port`."""
    if not isinstance(address, str):
        raise ValueError(f"an address must be a string 'host:port', got {address!r}.")
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or "/" in bare or bare != bare.strip():
        raise ValueError(f"an address must be 'host:port' and nothing else, got {address!r}.")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"the port of {address!r} must be a number from 1 to 65535.")
    return bare, int(port)


def _check_jobs(jobs: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(jobs, Mapping):
        raise ValueError(f"the cluster must map jobs to lists of addresses, got {jobs!r}.")
    for job in jobs:
        if job not in JOBS:
            near = difflib.get_close_matches(str(job), JOBS, 1, 0.5)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"unknown job {job!r}; jobs are {', '.join(JOBS)}.{hint}.")
    for job, meaning in (("worker", "compute gradients"), ("ps", "hold the tables (parameter servers)")):
        if not jobs.get(job):
            raise ValueError(f"the cluster has no '{job}', whose processes {meaning}; list at least one.")
    seen: dict[tuple[str, int], str] = {}
    for job, addresses in jobs.items():
        if isinstance(addresses, str) or not isinstance(addresses, Sequence):
            raise ValueError(f"'{job}' must be a list of 'host:port', got {addresses!r}.")
        for index, address in enumerate(addresses):
            place = split_address(address)
            here = f"{job} {index}"
            if seen.setdefault(place, here) != here:
                raise ValueError(
                    f"{address} is both {seen[place]} and {here}; each process needs an address of its own."
                )
    if len(jobs.get("chief", ())) > 1:
        raise ValueError(f"there can be one chief, got {len(jobs['chief'])}.")
    return {job: tuple(addresses) for job, addresses in jobs.items()}


def _read_task(task: Any) -> tuple[Any, Any]:
    if not isinstance(task, dict) or "type" not in task:
        raise ValueError(f"'task' must be like {{\"type\": \"worker\", \"index\": 0}}, got {json.dumps(task)}.")
    return task["type"], task.get("index", 0)


def serve(cluster: Cluster, job: str, index: int) -> tf.distribute.Server:
    """Starts a server in this process and returns when it listens. It lives as long as the process."""
    cluster.check_task(job, index)
    if job not in ("worker", "ps"):
        raise ValueError(f"'{job}' is not a server; servers are the cluster's 'worker' and 'ps'.")
    import tensorflow as tf

    # Each worker may hold a thread of a parameter server while it waits there: with fewer, a small machine would hang.
    threads = max(os.cpu_count() or 1, len(cluster.workers) + 1)
    try:
        return tf.distribute.Server(
            cluster.tf_spec(), job_name=job, task_index=index, protocol="grpc",
            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads),
        )  # fmt: skip
    except tf.errors.OpError as problem:
        raise OSError(
            f"{job} {index} cannot listen at {cluster.jobs[job][index]}; is the port taken? ({problem.message})."
        ) from None


# TensorFlow's servers name their devices to any client that asks for their status, and with them their job and index.
# An answer shows more than an open port: a frozen process' port stays open, and so does another service's.


def server_at(address: str, seconds: float = 2.0) -> str:
    """The server at `host:port`: "worker 0", "ps 1", …; or STRANGER, or SILENT."""
    import grpc

    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        call: Any = channel.unary_unary(_STATUS, request_serializer=None, response_deserializer=None)
        try:
            found = _DEVICE.search(call(b"", timeout=seconds))
            return f"{found[1].decode()} {int(found[2])}" if found else STRANGER
        except grpc.RpcError as problem:
            mute = problem.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
            return SILENT if mute or not listens(address, seconds) else STRANGER


def listens(address: str, seconds: float = 1.0) -> bool:
    """Whether any process listens at `host:port`."""
    try:
        connection = socket.create_connection(split_address(address), timeout=seconds)
    except OSError:
        return False
    with connection:
        connection.settimeout(min(seconds, 1.0))
        try:
            return connection.recv(1) != b""  # a proxy with nothing behind it opens, and hangs up at once
        except TimeoutError:
            return True
        except OSError:
            return False
