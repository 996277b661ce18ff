"""Stops `tfdp-rec train` as `docker stop` does, at random moments of a run with 6,000 items: nothing paid is lost.

SIGTERM, and SIGKILL 10 seconds later if the run still lives. What was stopped goes on with --resume; where nothing was
paid, or all of it was given back, it is begun again. Runs are with and without --checkpoint in turn, and a third of
them hold no vote on order. At its end each has a release, and has paid for its private sums once: the epsilon of the
one Gaussian that was planned.

Victims are forked from a process that has imported TensorFlow. `--quick` replaces the algebra by nothing in the runs
that go on, which nobody stops: it reads the sums that were kept and no user, and takes minutes.

    python scripts/stop_test.py --kills 30
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow  # noqa: E402, F401  (imported before forking, started after)
from dp_accounting import GaussianDpEvent  # noqa: E402

from tfdp_rec.cli import main as command  # noqa: E402
from tfdp_rec.core.claim.composition import epsilon_of  # noqa: E402
from tfdp_rec.core.claim.ledger import read  # noqa: E402
from tfdp_rec.job.budget import Budget  # noqa: E402
from tfdp_rec.spectral import scores  # noqa: E402

GRACE, EPSILON, DELTA, LABELS = 10.0, 1000.0, 1e-6, ["private sums"]


def write_log(folder: Path, users: int, items: int) -> list[str]:
    """A log whose noise is so small that every item has a row of pairs; the arguments of a run on it."""
    rng, a_user = np.random.default_rng(0), min(30, items // 2)
    taken = (rng.integers(0, items, [users, 1]) + rng.integers(0, items, [users, a_user])) % items
    rows = "".join(f"u{u},s{i},{1_700_000_000 + t}\n" for u in range(users) for t, i in enumerate(taken[u]))
    (folder / "log.csv").write_text("user,item,time\n" + rows)
    (folder / "items.txt").write_text("".join(f"s{i}\n" for i in range(items)))
    data = ["--data", folder / "log.csv", "--items", folder / "items.txt"]
    asked = [*data, "--user", "user", "--item", "item", "--time", "time", "--epsilon", EPSILON, "--delta", DELTA]
    asked += ["--metrics-epsilon", 0]
    return ["train", "--mechanism", "spectral", *map(str, asked)]


def begun(arguments: list[str], said: Path, quick: bool = False) -> int:
    """The pid of a process that runs a command, whose words go to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        handle = os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if quick:
            scores.weights_between_items = lambda noisy, *_: np.zeros_like(noisy)
        code = command(arguments)
        for thread in threading.enumerate():  # as a process that ends does
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    finally:
        os._exit(code)


def waited(pid: int, seconds: float) -> int | None:
    """The exit code of a process, negative for a signal; None if it lives on after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.05)


def labels(run: Path) -> list[str]:
    """What a run's ledger has paid for."""
    ledger = run / "release" / "ledger.jsonl"
    return [paid.label for paid in read(ledger).paid] if ledger.exists() and ledger.stat().st_size else []


def check_kept(run: Path, kept: Path) -> str:
    """What became of a stopped run; what was paid for is in its file."""
    found = labels(run)
    if not found:
        return "nothing is paid"
    if found != LABELS:
        raise AssertionError(f"{run} has paid for {found}")
    if (run / "release" / "released.npz").exists():
        return "released"
    if not (kept / "recommender.npz").exists():
        raise AssertionError(f"{run} has paid, and its sums are lost")
    return "the sums are kept"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--items", type=int, default=6000)
    parser.add_argument("--users", type=int, default=4000)
    parser.add_argument("--longest", type=float, default=120.0, help="seconds that a run has before it is stopped")
    parser.add_argument("--quick", action="store_true", help="go on without the algebra")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, root = random.Random(args.seed), Path(tempfile.mkdtemp(prefix="stops-"))
    asked, said, became = write_log(root, args.users, args.items), root / "said.txt", dict[str, int]()
    planned = Budget(EPSILON, DELTA, public=True)
    epsilon, by_sigkill = epsilon_of(GaussianDpEvent(planned.sums), DELTA), 0
    for kill in range(args.kills):
        out = root / f"run-{kill}"
        kept = root / f"kept-{kill}" if kill % 2 else out / "private" / "resume"
        more = ["--checkpoint", str(kept)] if kill % 2 else []
        begin = [*asked, *more, "--out", str(out), "--order", "no" if kill % 3 == 2 else "auto"]
        pid = begun(begin, said)
        code = waited(pid, rng.uniform(0, args.longest))
        if code is None:
            os.kill(pid, signal.SIGTERM)
            code = waited(pid, GRACE)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                by_sigkill += 1
        if code not in (None, 0, 143, -signal.SIGTERM):
            raise AssertionError(f"ended with {code}: {said.read_text()[-2000:]}")
        what = check_kept(out, kept)
        became[what] = became.get(what, 0) + 1
        if code != 0:
            go_on = (kept / "run.json").exists() and (kill % 2 or labels(out))
            words = ["train", *(more or ["--out", str(out)]), "--resume"] if go_on else begin
            if waited(begun(words, said, args.quick), 3600):
                raise AssertionError(f"{words} failed: {said.read_text()[-2000:]}")
        now = read(out / "release" / "ledger.jsonl").epsilon(DELTA)
        if labels(out) != LABELS or now != epsilon or not (out / "release" / "released.npz").exists():
            raise AssertionError(f"{out} has paid for {labels(out)}, epsilon {now} instead of {epsilon}")
        print(f"{kill + 1} stops, {by_sigkill} by SIGKILL: {became}; all released at {epsilon:.6g}", flush=True)
        for folder in (out, kept):
            shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(root)
    print("nothing paid is lost, and nothing is paid twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
