"""Kills workers, servers and coordinators of a local cluster at random moments, and checks every release.

A coordinator trains with LazyDPSGD on two workers and two servers, releases the model every few steps, and goes on
until told to stop. The model is linear with a known gradient, and noise is a function of table, row and clock, so that
a row has exactly one right value for each pair (k, t): k gradients, the noise of t steps. Checked at every release:

- a row that no step touches has the noise of exactly the steps on its server's clock;
- a row that every step touches has that noise, and k <= t gradients: never a gradient without its noise;
- a checkpoint is not behind what was released before it;
- every step that was ever dispatched is counted, and epsilon is that of the count.

    python scripts/cluster_kill_test.py --workers 50 --servers 20 --coordinators 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402  (imported before forking, started after)

import tfdp_rec  # noqa: E402
from tfdp_rec.distribute import Cluster, LocalCluster, ParameterServerTrainer, ServerLost  # noqa: E402
from tfdp_rec.noise import KeyedNoise  # noqa: E402
from tfdp_rec.privacy import epsilon_of  # noqa: E402

ROWS, WIDTH, RATE, SIGMA, CLIP, BATCH = 40, 8, 0.5, 1.0, 10.0, 2
DIRECTION = np.linspace(0.5, 1.5, WIDTH).astype("float32")
IDS = [[0, 1], [ROWS - 2, ROWS - 1]]  # for each server a row that every step touches, and one that is only read
STEPS_A_FIT = 20
SERVER_LOST, WRONG = 3, 9


class Linear(tfdp_rec.PrivateTraining, keras.Model):
    """Each example reads two rows; the gradient of the first is `DIRECTION`, that of the second is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.items = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer="zeros", name="items")

    def per_example_loss(self, data: Any, training: bool = True) -> tf.Tensor:
        rows = self.items(data["ids"])
        return tf.reduce_sum(DIRECTION * rows[:, 0] + tf.stop_gradient(rows[:, 1]), axis=1)


def trainer_of(cluster: Cluster, directory: str) -> tuple[ParameterServerTrainer, tfdp_rec.data.PoissonSampling]:
    """The trainer, and the sampling: both examples, one a server, in every batch."""
    sampling = tfdp_rec.data.PoissonSampling(BATCH, BATCH)

    def optimizer() -> tfdp_rec.LazyDPSGD:
        return tfdp_rec.LazyDPSGD(
            RATE,
            l2_norm_clip=CLIP,
            noise_multiplier=SIGMA,
            expected_batch_size=BATCH,
            noise=KeyedNoise(3),
            aggregate_noise=False,
        )

    trainer = ParameterServerTrainer(
        Linear, optimizer, lambda: sampling.graph_batches(lambda i: {"ids": tf.gather(IDS, i)}), cluster.resolver(),
        sampling=sampling, checkpoint_directory=directory, checkpoint_every=STEPS_A_FIT, min_shard_bytes=256,
        seconds_without_progress=60,
    )  # fmt: skip
    return trainer, sampling


# The oracle.


class NoiseSums:
    """Sums of the noise of the first t steps, for all rows."""

    def __init__(self) -> None:
        self._sums = np.zeros([1, ROWS, WIDTH])

        @tf.function(autograph=False)
        def draw(steps: tf.Tensor) -> tf.Tensor:
            one = lambda step: KeyedNoise(3).normal(0, tf.range(ROWS, dtype=tf.int64), step, WIDTH)  # noqa: E731
            return tf.map_fn(one, steps, fn_output_signature=tf.float64)

        self._draw = draw

    def __call__(self, steps: int) -> np.ndarray:
        """What the noise has moved each row by."""
        have = len(self._sums) - 1
        if steps > have:
            new = self._draw(tf.range(have, steps, dtype=tf.int64)).numpy()
            self._sums = np.concatenate([self._sums, self._sums[-1] + np.cumsum(new, axis=0)])
        return -RATE * SIGMA * CLIP / BATCH * self._sums[steps]


def problem_with(table: np.ndarray, clocks: list[int], noise: NoiseSums) -> str | None:
    """What is wrong with a released table, or None."""
    half = ROWS // 2
    for server, (clock, rows) in enumerate(zip(clocks, (range(half), range(half, ROWS)))):
        left = table[rows] - noise(clock)[rows]
        scale = 1e-4 * (1 + np.abs(table[rows]).max())
        touched = IDS[server][0] - rows[0]
        moves = left[touched] @ DIRECTION / (DIRECTION @ DIRECTION) / (-RATE / BATCH)
        if np.abs(np.delete(left, touched, axis=0)).max() > scale:
            return f"server {server}: rows that nothing touched lack noise, or have too much, at clock {clock}"
        if np.abs(left[touched] + RATE / BATCH * round(moves) * DIRECTION).max() > scale:
            return f"server {server}: the touched row is no sum of gradients and the noise of {clock} steps"
        if not 0 <= round(moves) <= clock:
            return f"server {server}: {round(moves)} gradients with the noise of {clock} steps"
    return None


# The coordinator's process.


def coordinate(cluster: Cluster, folder: Path) -> NoReturn:
    """A coordinator's life: trains until told to finish or until a server dies."""
    try:
        code = _coordinate(cluster, folder)
    except ServerLost:
        code = SERVER_LOST
    except BaseException as problem:  # noqa: BLE001
        print(f"coordinator: {type(problem).__name__}: {problem}"[:3000], file=sys.stderr, flush=True)
        code = SERVER_LOST if "job:ps" in str(problem) else 1
    os._exit(code)


def _coordinate(cluster: Cluster, folder: Path) -> int:
    supervisor = os.getppid()
    trainer, sampling = trainer_of(cluster, str(folder / "training"))
    accountant = tfdp_rec.privacy.Accountant(trainer.cluster_model.optimizer.dp_event(), sampling, 0.1, "rdp")
    trainer.resume(accountant)
    clocks = lambda: [int(s.optimizer.step_number.numpy()) for s in trainer._served.servers]  # noqa: E731
    released, noise = folder / "released.json", NoiseSums()
    if released.exists() and any(now < then for now, then in zip(clocks(), json.loads(released.read_text()))):
        print("the checkpoint is behind a release", file=sys.stderr, flush=True)
        return WRONG
    dispatched, made = (os.open(folder / n, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for n in ("dispatched", "made"))
    step = trainer._rounds.step

    def counted(*arguments: Any) -> Any:
        os.write(dispatched, b"!")
        result = step(*arguments)
        os.write(made, b"!")
        return result

    trainer._rounds.step = counted
    while os.getppid() == supervisor:
        last = (folder / "finish").exists()
        trainer.fit(STEPS_A_FIT, steps_per_report=10, verbose=0)
        table = trainer.model().get_weights()[0]
        now = clocks()
        problem = problem_with(table, now, noise)
        if problem is not None:
            print(problem, file=sys.stderr, flush=True)
            return WRONG
        released.write_text(json.dumps(now))
        if last:
            event = sampling.compose(trainer.cluster_model.optimizer.dp_event(), accountant.steps)
            epsilon = epsilon_of(event, accountant.delta, "rdp")  # as if the noise were no test's
            found = {"attempts": trainer.attempts, "counted": accountant.steps, "epsilon": epsilon}
            (folder / "result.json").write_text(json.dumps({**found, "clocks": now}))
            return 0
    return 1


# The supervisor.


class Trial:
    """A cluster, a coordinator, and somebody who kills."""

    def __init__(self, local: LocalCluster, folder: Path):
        self._local, self._folder, self._pid, self.lives = local, folder, 0, 0

    def start(self) -> None:
        """Forks a coordinator."""
        self.lives += 1
        self._pid = os.fork()
        if self._pid == 0:
            coordinate(self._local.cluster, self._folder)

    def end(self) -> None:
        """Kills the coordinator."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def size(self, name: str) -> int:
        """How many steps were dispatched, or made."""
        path = self._folder / name
        return path.stat().st_size if path.exists() else 0

    def wait_for_steps(self, number: int, seconds: float = 120) -> None:
        """Waits until so many more steps were made."""
        until, deadline = self.size("made") + number, time.monotonic() + seconds
        while self.size("made") < until:
            self._refuse_end()
            if time.monotonic() > deadline:
                raise SystemExit(f"no progress for {seconds:g} s")
            time.sleep(0.005)

    def _refuse_end(self) -> None:
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if pid:
            self._pid = 0
            raise SystemExit(f"the coordinator ended by itself: {os.waitstatus_to_exitcode(status)}")

    def wait(self, seconds: float) -> int:
        """The coordinator's exit code."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise SystemExit(f"the coordinator noticed nothing for {seconds:g} s")

    def kill(self, victim: str, number: int, chance: random.Random) -> None:
        """Kills one process and starts it again, with all that this takes."""
        if victim == "coordinator":
            self.end()
            self.start()
            return
        name = f"{'ps' if victim == 'server' else victim}:{number}"
        self._local.kill(name)
        if victim == "worker":
            time.sleep(chance.uniform(0, 0.3))
            self._local.restart(name)
            return
        code = self.wait(90)
        if code != SERVER_LOST:
            raise SystemExit(f"a server was killed and the coordinator ended with {code}")
        self._local.restart(name)
        self.start()


def end_with(parent: int) -> NoReturn:
    """Ends the trial when whoever started it is gone; cluster and coordinator then end by themselves."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> int:
    """Runs the trial; 0 if all went well."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for victim, count in (("workers", 50), ("servers", 20), ("coordinators", 5)):
        parser.add_argument(f"--{victim}", type=int, default=count, help=f"how many {victim} to kill")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    plan = ["worker"] * chosen.workers + ["server"] * chosen.servers + ["coordinator"] * chosen.coordinators
    chance.shuffle(plan)
    folder = Path(tempfile.mkdtemp(prefix="cluster-kill-test-"))
    began = time.monotonic()
    try:
        with LocalCluster(2, 2) as local:
            trial = Trial(local, folder)
            try:
                trial.start()
                for count, victim in enumerate(plan):
                    trial.wait_for_steps(chance.randrange(1, 40))
                    time.sleep(chance.uniform(0, 0.05))
                    print(f"{time.monotonic() - began:6.0f} s  {count + 1}/{len(plan)}: {victim}", flush=True)
                    trial.kill(victim, chance.randrange(2), chance)
                (folder / "finish").touch()
                code = trial.wait(180)
            finally:
                trial.end()
        if code:
            raise SystemExit(f"the last coordinator ended with {code}")
        return _report(trial, json.loads((folder / "result.json").read_text()), chosen, time.monotonic() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(trial: Trial, result: dict[str, Any], chosen: argparse.Namespace, seconds: float) -> int:
    sampling = tfdp_rec.data.PoissonSampling(BATCH, BATCH)
    event = tfdp_rec.LazyDPSGD(RATE, l2_norm_clip=CLIP, noise_multiplier=SIGMA, expected_batch_size=BATCH).dp_event()
    accountant = tfdp_rec.privacy.Accountant(event, sampling, 0.1, "rdp")
    dispatched = trial.size("dispatched")
    good = (
        dispatched <= result["attempts"] <= result["counted"]
        and result["attempts"] <= dispatched + 10 * (trial.lives - 1)
        and result["epsilon"] >= accountant.epsilon() * (1 - 1e-9)
    )
    killed = f"{chosen.workers} workers, {chosen.servers} servers, {chosen.coordinators} coordinators killed"
    print(f"{killed}; {trial.lives} coordinators lived; {seconds:.0f} s")
    made, counted, clocks = trial.size("made"), result["attempts"], result["clocks"]
    print(f"dispatched {dispatched}, made {made}, counted {counted}, clocks {clocks}")
    print("good" if good else f"WRONG: {result}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
