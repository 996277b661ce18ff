"""What every study is made of: a folder that remembers its cells, and a training whose cost is accounted.

    study = Study("runs/mine", {"steps": 600})
    results = study.cells({name: work for each training})

A cell is a name and a piece of work that returns what JSON can hold. Its result stands in cells/NAME.json, and what is
there is not done again: a study that was stopped goes on with the cells it lacks. config.json says what all cells
depend on, and a folder with another one is refused.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdp_rec.core.ground.files import open_atomically
from tfdp_rec.privacy import Accountant, Sampling

WARM_UP = 10  # steps before the clock starts: tracing, and memory being found


class Study:
    """A folder of results, one file a cell.

    Args:
        folder: made if it is not there.
        config: what all cells depend on.
        say: called with a line of progress.

    Raises:
        ValueError: the folder holds a study with another config.

    Example:
        >>> import tempfile
        >>> study = Study(tempfile.mkdtemp(), {"steps": 3}, say=lambda line: None)
        >>> study.cell("one", lambda: {"score": 0.5}), study.cell("one", lambda: {"score": 0.6})
        ({'score': 0.5}, {'score': 0.5})
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any], say: Callable[[str], None] | None = None):
        self.folder, self._say = Path(folder), say or (lambda line: print(line, flush=True))
        (self.folder / "cells").mkdir(parents=True, exist_ok=True)
        wanted, path = json.loads(json.dumps(config)), self.folder / "config.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else wanted
        if changed := sorted(key for key in {*before, *wanted} if before.get(key) != wanted.get(key)):
            raise ValueError(
                f"{self.folder} holds a study with other settings ({', '.join(changed)}); give another --out."
            )
        self.write("config.json", wanted)

    def cell(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of an earlier run, or of the work now.

        Args:
            name: of the cell's file.
            work: what finds the result.
        """
        path = self.folder / "cells" / f"{name}.json"
        if not path.exists():
            self._say(name)
            found = work()
            keras.backend.clear_session()  # or the graphs of all trainings stay in memory
            gc.collect()
            self.write(f"cells/{name}.json", found)
        return json.loads(path.read_text(encoding="utf-8"))

    def cells(self, works: Mapping[str, Callable[[], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """All results by name, with a count of what is done and a guess at what is left.

        Args:
            works: name -> what finds the result.
        """
        todo = [name for name in works if not (self.folder / "cells" / f"{name}.json").exists()]
        began, results = time.monotonic(), {}
        for name, work in works.items():
            results[name] = self.cell(name, work)
            if name in todo:
                done = todo.index(name) + 1
                left = (time.monotonic() - began) / done * (len(todo) - done)
                self._say(f"  {done} of {len(todo)} done, about {left / 60:.0f} min left")
        return results

    def write(self, name: str, value: Any) -> None:
        """Writes a JSON file of the folder, whole."""
        with open_atomically(self.folder / name) as file:
            json.dump(value, file, indent=1)

    def report(self, page: str) -> None:
        """Writes and prints report.md."""
        (self.folder / "report.md").write_text(page, encoding="utf-8")
        print(f"{page}\n{self.folder}/report.md")


class Clock(keras.callbacks.Callback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())

    @property
    def steps_per_second(self) -> float | None:
        """Of the steps after the warm-up, data included; None if there are none."""
        timed = len(self.ends) - WARM_UP
        return timed / (self.ends[-1] - self.ends[WARM_UP - 1]) if timed > 0 else None

    def median_seconds(self, warm_up: int) -> float:
        """Of a step after so many."""
        return float(np.median(np.diff(self.ends)[warm_up - 1 :]))


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training cost.

    Attributes:
        steps: that were made.
        clock: when each of them ended.
        epsilon: spent by them and before them; None without privacy, or without an ε (EANA).
    """

    steps: int
    clock: Clock
    epsilon: float | None


def train(
    model: Any,
    optimizer: keras.optimizers.Optimizer,
    batches: Any,
    steps: int,
    sampling: Sampling,
    delta: float,
    **compiled: Any,
) -> Result:
    """Trains a model and accounts for what that spent.

    Args:
        model: any Keras model; a private one if the optimizer is private.
        optimizer: of the training.
        batches: that it reads, in the order in which they come.
        steps: to make.
        sampling: how the batches were drawn.
        delta: of the whole.
        **compiled: for `model.compile`.
    """
    clock = Clock()
    model.compile(optimizer, **compiled)
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[clock], shuffle=False)
    return Result(len(clock.ends), clock, spent(optimizer, sampling, delta, len(clock.ends)))


def spent(optimizer: Any, sampling: Sampling, delta: float, steps: int) -> float | None:
    """ε of so many steps and of what was released before them; None where there is none.

    Args:
        optimizer: private or not.
        sampling: of the batches.
        delta: of the whole.
        steps: that were, or will be, made.
    """
    if not hasattr(optimizer, "dp_event"):
        return None
    accountant = Accountant(optimizer.dp_event(), sampling, delta, accountant="rdp")
    before: Sequence[tuple[Any, str]] = getattr(optimizer, "events_before_training", list)()
    for event, label in before:
        accountant.spend(event, label)
    epsilon = accountant.epsilon(steps)
    return epsilon if math.isfinite(epsilon) else None
