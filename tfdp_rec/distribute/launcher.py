"""`python -m tfdp_rec.distribute.launcher`: imports TensorFlow once and forks servers on demand, for a LocalCluster.

Reads one command a line, answers with one line of JSON:

    {"command": "start", "name": …, "job": …, "index": …, "cluster": {…}, "log": …, "seconds": …}  -> {"answer": pid}
    {"command": "kill", "name": …}    SIGKILL, and waits                                           -> {"answer": null}
    {"command": "pid", "name": …}                                                                  -> {"answer": pid}

Ends with its input, and its servers with it: each holds the reading end of a pipe whose only writer is the launcher. If
it was given a folder, this is temporary and goes as well.
Requests to stop are for the parent, which may still need its servers, to save what they hold: a system that tells every
process of a service tells these in vain.
Forking is safe because this process itself never makes a TensorFlow device, session or thread pool.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tfdp_rec import interruption
from tfdp_rec.distribute.cluster import Cluster, serve


class Nursery:
    """Starts, watches and kills servers; `private` are descriptors that no server may keep open."""

    def __init__(self, private: list[int]):
        self._private = private
        self._pids: dict[str, int] = {}
        self._lifeline, self._alive = os.pipe()

    def start(self, name: str, log: str, seconds: float, **what: Any) -> int:
        """Forks a server and waits until it listens."""
        listening, says_so = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._live(says_so, log, **what)
        os.close(says_so)
        self._pids[name] = pid
        try:
            if not select.select([listening], [], [], seconds)[0]:
                self.kill(name)
                raise OSError(f"it did not listen within {seconds:g} s.")
            if not os.read(listening, 1):
                self.kill(name)
                raise OSError("it ended.")
        finally:
            os.close(listening)
        return pid

    def pid(self, name: str) -> int | None:
        """Of a live server."""
        pid = self._pids.get(name)
        if pid is not None and os.waitpid(pid, os.WNOHANG)[0]:
            del self._pids[name]
            return None
        return pid

    def kill(self, name: str) -> None:
        """Kills a server if it lives, and waits for its end."""
        pid = self._pids.pop(name, None)
        if pid is not None:  # not reaped yet, so the number is still this server's
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def kill_all(self) -> None:
        """Kills every server."""
        for name in list(self._pids):
            self.kill(name)

    def _live(self, says_so: int, log: str, job: str, index: int, cluster: dict[str, list[str]]) -> NoReturn:
        """A server's life, in the forked process."""
        try:
            for descriptor in (*self._private, self._alive):
                os.close(descriptor)
            messages = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(messages, 1)
            os.dup2(messages, 2)
            server = serve(Cluster(cluster), job, index)  # noqa: F841  lives as long as this name
            os.write(says_so, b"!")
            os.read(self._lifeline, 1)  # returns when the launcher is gone
        except BaseException as problem:
            os.write(2, f"{type(problem).__name__}: {problem}\n".encode())
        finally:
            os._exit(0)


def main() -> None:
    """Obeys until the input ends."""
    for number in interruption.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # TensorFlow writes to stdout at times; answers go to the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import tensorflow  # noqa: F401  before the first fork, not in each server

    nursery = Nursery([0, answers.fileno()])
    commands: dict[str, Callable[..., Any]] = {"start": nursery.start, "kill": nursery.kill, "pid": nursery.pid}
    try:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                answer: dict[str, Any] = {"answer": commands[order.pop("command")](**order)}
            except OSError as problem:
                answer = {"error": str(problem)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        nursery.kill_all()
        for folder in sys.argv[1:]:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
