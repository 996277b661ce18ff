"""`python -m tfdp_rec.distribute.launcher`: imports TensorFlow once and forks servers on demand, for a LocalCluster.

Reads one order a line, answers with one line of JSON, {"answer": pid} or {"error": words}:

    {"job": …, "index": …, "cluster": {…}, "log": …, "seconds": …}

Ends with its input, and all of its session with it; if it is killed, each server still ends, by the reading end of a
pipe whose only writer is the launcher. If it was given a folder, this is temporary and goes as well.
A server that has ended is not reaped here: its number stays its own as long as the launcher lives.
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
from typing import Any, NoReturn

from tfdp_rec.core.ground import interruption
from tfdp_rec.distribute.cluster import Cluster, serve


def main() -> None:
    """Obeys until the input ends."""
    for number in interruption.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # TensorFlow writes to stdout at times; answers go to the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import tensorflow  # noqa: F401  before the first fork, not in each server

    lifeline, alive = os.pipe()
    try:
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"answer": _start(lifeline, [0, answers.fileno(), alive], **json.loads(line))}
            except OSError as problem:
                answer = {"error": str(problem)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        for folder in sys.argv[1:]:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # servers that are frozen too, and this process


def _start(lifeline: int, private: list[int], seconds: float, **what: Any) -> int:
    """Forks a server and waits until it listens; `private` are descriptors that it may not keep open."""
    listening, says_so = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(lifeline, private, says_so, **what)
    os.close(says_so)
    try:
        if not select.select([listening], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            raise OSError(f"it did not listen within {seconds:g} s.")
        if not os.read(listening, 1):
            raise OSError("it ended.")
    finally:
        os.close(listening)
    return pid


def _live(
    lifeline: int, private: list[int], says_so: int, log: str, job: str, index: int, cluster: dict[str, list[str]]
) -> NoReturn:
    """A server's life, in the forked process."""
    try:
        for descriptor in private:
            os.close(descriptor)
        messages = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(messages, 1)
        os.dup2(messages, 2)
        server = serve(Cluster(cluster), job, index)  # noqa: F841  lives as long as this name
        os.write(says_so, b"!")
        os.read(lifeline, 1)  # returns when the launcher is gone
    except BaseException as problem:
        os.write(2, f"{type(problem).__name__}: {problem}\n".encode())
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
