"""Contestants in processes of their own that take turns: peak memory is each one's own, and drift hits all alike.

A worker reads one command a line and answers with one line of JSON:

    {"name": …, "case": …}  builds the contestant  -> {"seconds": until its first step was done}
    {"steps": n}            n timed steps after one more   -> {"times": [[wall ms, processor ms], …]}
    {"call": name}          one of `CALLS`         -> its answer

What a contestant is, a module says: `build(name, the case's fields)` makes one, and `CALLS` are what it can be asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # of the checkout


class Worker:
    """A process with one contestant; a context manager, since it must be ended.

    Args:
        name: of the contestant.
        case: what it is to do, a dataclass.
        contestants: the module that says how.
    """

    def __init__(self, name: str, case: Any, contestants: str = "experiments.bench.measures"):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # a GPU is shared by all contestants
        command = [sys.executable, "-W", "ignore", "-m", "experiments.bench.workers", contestants]
        self._messages = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._messages, text=True, env=environment
        )
        self.name, self._case = name, dataclasses.asdict(case)

    def begin(self) -> dict[str, Any]:
        """Builds the contestant and makes its first step."""
        return self.ask(name=self.name, case=self._case)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command and waits for the answer.

        Raises:
            OSError: if the process has died.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code = self._process.wait()
            self._messages.seek(0)
            said = self._messages.read()[-2000:]
            raise OSError(f"The benchmark's process for '{self.name}' died (exit code {code}). It said: {said}.")
        return json.loads(answer)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
        self._messages.close()


def _answers(commands: Iterator[str], contestants: Any) -> Iterator[dict[str, Any]]:
    contestant: Any = None
    for line in commands:
        command = json.loads(line)
        if "case" in command:
            began = time.perf_counter()
            contestant = contestants.build(command["name"], command["case"])
            contestant.step()
            yield {"seconds": time.perf_counter() - began}
        elif contestant is None:
            raise ValueError("The first command must name a case.")
        elif "steps" in command:
            yield {"times": contestant.timed(command["steps"])}
        else:
            yield {"answer": contestants.CALLS[command["call"]](contestant)}


def peak_megabytes() -> float:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    # TensorFlow writes to stdout at times; answers go to the real one.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for found in _answers(iter(sys.stdin), importlib.import_module(sys.argv[1])):
        answers.write(json.dumps(found) + "\n")
        answers.flush()
