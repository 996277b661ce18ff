"""A race: contestants in processes of their own, each of which takes a turn in every round."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.workers import Worker

Figures = dict[str, dict[str, Any]]


def race(
    names: Sequence[str],
    case: Any,
    module: str,
    rounds: int,
    *,
    ready: Callable[[Worker, dict[str, Any]], int],
    finish: Callable[[Worker], dict[str, Any]],
    apart: bool = False,
    done: Callable[[], None] = lambda: None,
) -> Figures:
    """Every contestant's figures: `start_seconds`, `rounds` (times of each turn), and what it is asked besides.

    Args:
        names: of the contestants.
        case: what each does, a dataclass.
        module: that makes them; see `Worker`.
        rounds: turns of each.
        ready: (worker, its figures) -> steps of a turn, once its first step is done.
        finish: further figures, after the last round.
        apart: one contestant in memory at a time; nothing alternates.
        done: called after each turn.
    """
    if apart:
        alone = [race([name], case, module, rounds, ready=ready, finish=finish, done=done) for name in names]
        return {name: figures for found in alone for name, figures in found.items()}
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, case, module)) for name in names]
        found: Figures = {name: {"rounds": []} for name in names}
        steps = {}
        for worker in workers:  # one after the other, so that none builds while another steps
            found[worker.name]["start_seconds"] = worker.begin()["seconds"]
            steps[worker.name] = ready(worker, found[worker.name])
        for _ in range(rounds):
            for worker in workers:
                found[worker.name]["rounds"].append(worker.ask(steps=steps[worker.name])["times"])
                done()
        return {worker.name: found[worker.name] | finish(worker) for worker in workers}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import keras
    import tensorflow as tf

    devices = [tf.config.experimental.get_device_details(each) for each in tf.config.list_physical_devices("GPU")]
    return {
        "gpus": [each.get("device_name", "") for each in devices],
        "processor": _said("/proc/cpuinfo", "model name"), "cores": os.cpu_count(),
        "memory": _said("/proc/meminfo", "MemTotal"), "python": platform.python_version(),
        "tensorflow": tf.__version__, "keras": keras.__version__, "load": os.getloadavg(),
    }  # fmt: skip


def free_bytes() -> int | None:
    """Memory that is free now; None where the system does not say."""
    said = _said("/proc/meminfo", "MemAvailable")
    return int(said.split()[0]) * 1024 if said else None


def _said(path: str, key: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith(key)), "")
