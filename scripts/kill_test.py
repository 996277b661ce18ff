"""Kills training processes at random moments, resumes them, and looks at everything they left on disk.

Every victim trains with LazyDPSGD, releases a model every few steps and writes training checkpoints, until SIGKILL
hits. The next one resumes. After each kill:

- every released file is that of eager DP-SGD after the same number of steps, row for row: no row lacks any noise.
  (Noise here is a pure function of table, row and step, so that eager training is a number-for-number oracle.)
- the last training checkpoint is whole, its accountant has counted exactly its steps, and no released file is ahead
  of it.

Victims are forked from a process that has imported TensorFlow and not yet started it: an import takes seconds.

    python scripts/kill_test.py --kills 200
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import h5py  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow  # noqa: E402, F401  (imported before forking, started after)

import tfdp_rec  # noqa: E402
from tfdp_rec.callbacks import TrainingCheckpoint  # noqa: E402
from tfdp_rec.core.claim.entries import Entries  # noqa: E402
from tfdp_rec.noise import KeyedNoise  # noqa: E402

UNITS, ROWS, WIDTH, STEPS = 200, 120, 4, 150
RELEASE_EVERY, CHECKPOINT_EVERY = 4, 3
RELEASED = re.compile(r"step-(\d+)\.keras$")


def model_of(kind: type, **options: object) -> keras.Model:
    """A table of which a batch reads a few rows, and a dense layer."""
    keras.utils.set_random_seed(0)
    ids = keras.Input([2], dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, WIDTH, name="items")(ids))
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(hidden))
    optimizer = kind(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4, noise=KeyedNoise(5), **options)
    model.compile(optimizer, loss="mse", run_eagerly=True)
    return model


def batches_of(sampling: tfdp_rec.data.PoissonSampling, position: int = 0) -> object:
    """Seeded batches, so that a resumed run sees those that an uninterrupted one would."""
    rng = np.random.default_rng(1)
    ids, labels = rng.integers(0, ROWS, [UNITS, 2]).astype("int32"), rng.normal(size=[UNITS, 1]).astype("float32")
    return sampling.batches(lambda units: (ids[units], labels[units]), seed=3, position=position)


def train_eagerly(path: Path) -> None:
    """The oracle: the table after each step of DP-SGD, by hand-written steps."""
    model, tables = model_of(tfdp_rec.DPSGD), []
    for (x, y), _ in batches_of(tfdp_rec.data.PoissonSampling(UNITS, 4)).take(STEPS):
        model.train_on_batch(x, y)
        tables.append(np.array(model.layers[1].embeddings))
    np.save(path, np.stack(tables))


class Release(keras.callbacks.Callback):
    """Saves the model every few steps; tells the parent when training has begun."""

    keeps_off_weights = True  # it saves by the model's own method

    def __init__(self, folder: Path, begun: int):
        super().__init__()
        self.folder, self.begun = folder, begun

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        os.write(self.begun, b".")

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        step = int(self.model.optimizer.iterations)
        if step % RELEASE_EVERY == 0:
            self.model.save(self.folder / f"step-{step}.keras")


def victim(folder: Path, begun: int) -> None:
    """Trains, or goes on training, until it is done or killed."""
    model, sampling = model_of(tfdp_rec.LazyDPSGD, aggregate_noise=False), tfdp_rec.data.PoissonSampling(UNITS, 4)
    accountant = tfdp_rec.privacy.Accountant(
        model.optimizer.dp_event(), sampling, delta=1e-3, accountant="rdp", ledger=folder / "ledger.jsonl"
    )
    checkpoint = TrainingCheckpoint(folder / "training", every=CHECKPOINT_EVERY, accountant=accountant)
    resumed = checkpoint.resume(model)
    position = 0 if resumed is None else resumed.step
    accountant.follow(model)
    if accountant.spending.history.steps != position:
        raise AssertionError(f"resumed at step {position} with {accountant.spending.history.steps} counted")
    model.fit(
        batches_of(sampling, position),
        steps_per_epoch=STEPS // 3,
        epochs=3,
        verbose=0,
        callbacks=[checkpoint, Release(folder, begun)],
    )
    counted, made = accountant.spending.history.steps, int(model.optimizer.iterations)
    if counted != STEPS or made != STEPS:
        raise AssertionError(f"{counted} steps counted and {made} made of {STEPS}")


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Runs `work` in a forked process: (its pid, a pipe on which it reports)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        work(writing)
        code = 0
    except BaseException as error:  # noqa: BLE001  (a child must end here, whatever happens)
        print(f"victim: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def kill_at_random(pid: int, reading: int, rng: random.Random) -> bool:
    """Lets the victim begin some steps, and lives on for part of another; False if it was done before.

    Steps, not seconds, so that a busy machine's victims get as far as others. A few are killed before their first step.
    """
    steps, started = rng.randrange(16), time.monotonic()
    for _ in range(steps):
        started = time.monotonic()
        if not os.read(reading, 1):
            break
    time.sleep(rng.random() * min(1.0, 2 * (time.monotonic() - started)))
    done, status = os.waitpid(pid, os.WNOHANG)
    if done and status != 0:
        raise AssertionError(f"a victim ended by itself with status {status}")
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return not done


def released_table(path: Path) -> np.ndarray:
    """The table in a released file, without Keras."""
    with zipfile.ZipFile(path) as archive:
        json.loads(archive.read("config.json"))
        with h5py.File(io.BytesIO(archive.read("model.weights.h5")), "r") as weights:
            return np.array(weights["layers/embedding/vars/0"])


def look(folder: Path, oracle: np.ndarray, seen: set[str]) -> int:
    """Checks what a killed victim left; returns how many released files were new."""
    checked, ahead = 0, 0
    for path in folder.iterdir():
        match = RELEASED.match(path.name)
        if match is None:
            continue
        step = int(match.group(1))
        ahead = max(ahead, step)
        stamp = f"{path}{path.stat().st_mtime_ns}"
        if stamp not in seen:
            seen.add(stamp)
            checked += 1
            table = released_table(path)
            wrong = np.flatnonzero(np.max(np.abs(table - oracle[step - 1]), axis=1) > 1e-5)
            if len(wrong):
                raise AssertionError(f"{path}: rows {wrong.tolist()} are not settled")
    checkpoints = sorted((folder / "training").glob("[0-9]*.training-checkpoint"))
    if checkpoints:
        with zipfile.ZipFile(checkpoints[-1]) as archive:
            if archive.testzip() is not None:
                raise AssertionError(f"{checkpoints[-1]} is damaged")
            header = json.loads(archive.read("training_checkpoint.json"))
        counted = Entries.loads(header["history"]).steps
        if counted != header["step"]:
            raise AssertionError(f"{checkpoints[-1]}: {counted} steps counted, {header['step']} made")
        if ahead > header["step"]:
            raise AssertionError(f"step {ahead} is released, and {checkpoints[-1]} would forget it")
    elif ahead:
        raise AssertionError(f"step {ahead} is released, and there is no training checkpoint")
    return checked


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, root = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="kills-"))
    pid, _ = forked(lambda _: train_eagerly(root / "oracle.npy"))
    if os.waitpid(pid, 0)[1]:
        return 1
    oracle = np.load(root / "oracle.npy")
    kills = runs = released = 0
    seen: set[str] = set()
    while kills < args.kills:
        folder = root / f"run-{runs}"
        folder.mkdir(exist_ok=True)
        pid, reading = forked(lambda begun, folder=folder: victim(folder, begun))  # type: ignore[misc]
        killed = kill_at_random(pid, reading, rng)
        os.close(reading)
        released += look(folder, oracle, seen)
        kills += killed
        runs += not killed
        print(f"{kills} kills, {runs} trainings finished, {released} released files checked", flush=True)
    shutil.rmtree(root)
    print("every row settled, every step counted once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
