"""`tfdp-rec train --local` and `--cluster`: the main job through real servers; what cannot be is refused at once."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from cli.test_going_on import wait_for

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.distribute import own_network
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.privacy import Accountant, PoissonSampling

SMALL = "--users 600 --movies 150 --steps 4 --batch-size 60 --width 4 --hidden 3 --negatives 40 --quiet --epsilon 2"
SMALL = SMALL.split()


@pytest.mark.slow
def test_the_main_job_trains_on_local_servers_and_releases(tmp_path):
    folder = tmp_path / "run"
    command = ["train", *SMALL, "--mechanism", "lazydpsgd", "sgd", "--local", "1", "2", "--out", str(folder)]
    command.append("--confidential")
    # A process of its own: what TensorFlow connects to, it stays connected to.
    done = subprocess.run(
        [sys.executable, "-m", "tfdp_rec.cli", *command], capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Failed to remove" not in done.stderr, "pages about servers that are gone, as they should be"
    assert {"report.md", "results.json"} <= {p.name for p in (folder / "private").iterdir()}
    assert {"servable", "model.keras"} <= {p.name for p in (folder / "release").iterdir()}
    assert not (folder / "private" / "resume").exists() and read(folder / "release" / "ledger.jsonl").steps == 4
    results = {r["recommender"]: r for r in json.loads((folder / "private" / "results.json").read_text())}
    assert results["lazydpsgd"]["steps"] == 4 and 0 < results["lazydpsgd"]["epsilon"] <= 2
    assert results["sgd"]["steps"] == 4 and results["sgd"]["epsilon"] == float("inf")  # trained by EANA without noise
    curve = folder / "private" / "confidential" / "metrics.jsonl"
    lines = [json.loads(line) for line in curve.read_text().splitlines()]
    assert "recall@10" in lines[-1] and lines[-1]["step"] == 4


@pytest.mark.slow
def test_a_further_day_goes_on_from_what_servers_released(tmp_path):
    """Two days in one ledger; the model's file tells of all that both have spent, as the ledger does."""
    run = tmp_path / "run"
    for day, more in enumerate([["--mechanism", "lazydpsgd", "--days", "2", "--out", run], ["--continue", run]]):
        rng = np.random.default_rng(day)
        items = rng.integers(0, 60 + 30 * day, 9000 + 100 * day)
        rows = {"u": rng.integers(0, 700 + 20 * day, len(items)), "i": items, "t": np.arange(len(items))}
        pa.parquet.write_table(pa.table(rows), tmp_path / f"{day}.parquet")
        log = ["--data", tmp_path / f"{day}.parquet", *("--user u --item i --time t --batch-size 60".split())]
        settings = "--steps 4 --width 4 --hidden 3 --negatives 30 --local 1 2".split()
        command = ["train", *log, *(settings if not day else []), *more, "--quiet"]
        done = subprocess.run(
            [sys.executable, "-m", "tfdp_rec.cli", *map(str, command)], capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        known = WarmStart.load(run).items if not day else known  # noqa: F821
    ledger = read(run / "release" / "ledger.jsonl")
    assert [paid.label for paid in ledger.paid if not paid.steps] == 2 * ["private vocabulary", "popularity counts"]
    assert ledger.steps == 8
    model = keras.models.load_model(run / "release" / "model.keras")
    assert model.scores.embeddings.shape[0] == 1 + len(WarmStart.load(run).items) > 1 + len(known)
    follower = Accountant(model.optimizer.dp_event(), PoissonSampling(576, 60, unit="user"), 1e-6)
    follower.follow(model)
    assert follower.epsilon() == pytest.approx(ledger.epsilon(1e-6), abs=0.01) and ledger.epsilon(1e-6) <= 8.0


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--local", "0", "2"], "at least one worker and one server"),
        (["--local", "1", "1", "--mechanism", "adam"], "adam keeps state .* take --mechanism sgd"),
        (["--cluster", "TF_CONFIG", "--mechanism", "lazydpsgd", "adam"], "adam keeps state .* take --mechanism sgd"),
        (["--local", "1", "1", "--mechanism", "lazydpftrl"], "lazydpftrl plans .* take --mechanism lazydpsgd"),
        (["--cluster", "{folder}/nowhere.json"], "No such file"),
        (["--cluster", "TF_CONFIG"], "this process is worker 0 of the cluster; start it with: tfdp-rec server"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, says, tmp_path, capsys, monkeypatch):
    jobs = {"worker": ["a:1"], "ps": ["a:2"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": "worker", "index": 0}}))
    given = [argument.format(folder=tmp_path) for argument in arguments]
    assert main(["train", *SMALL, *given, "--out", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert re.search(says, errors) and errors.count("\n") == 1 and not (tmp_path / "run").exists()


def test_the_same_of_a_log_of_ones_own_before_it_is_read(tmp_path, capsys):
    """It was refused when training began: the log was grouped and its items were paid for by then."""
    log, out = tmp_path / "log.csv", tmp_path / "run"
    log.write_text("user,item\n" + "a,b\n" * 10)
    own = ["--data", str(log), "--user", "user", "--item", "item", "--local", "1", "1", "--out", str(out)]
    assert main(["train", *own, "--mechanism", "spectral", "adam", "--quiet"]) == 2
    assert "take --mechanism sgd" in capsys.readouterr().err and not out.exists()


@pytest.mark.slow
def test_a_lost_server_is_one_sentence_and_no_server_listens_where_others_could_reach_it(tmp_path):
    """A thousand lines of TensorFlow's stood before the sentence; four ports were open on all interfaces."""
    folder, kept = tmp_path / "run", tmp_path / "kept"
    command = ["train", *SMALL, "--steps", "5000", "--mechanism", "lazydpsgd", "--local", "1", "2"]
    command += ["--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tfdp_rec.cli", *command, "--checkpoint", str(kept)], stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"},
    )  # fmt: skip
    ledger = folder / "release" / "ledger.jsonl"
    wait_for(process, lambda: ledger.exists() and len(read(ledger).lines) > 4)
    started, alone = descendants(process.pid), own_network.run(["true"]) == 0
    assert not alone or os.readlink("/proc/self/ns/net") not in {os.readlink(f"/proc/{pid}/ns/net") for pid in started}
    os.kill(started[-1], signal.SIGKILL)  # the last that was started: a parameter server
    said = process.communicate(timeout=200)[1]
    assert process.returncode == 2 and "A parameter server died" in said
    assert said.count("\n") <= (2 if alone else 5), said[:3000]  # how to go on, and what happened


def descendants(pid):
    """Of a process, the last that was started last."""
    own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [each for child in own for each in descendants(child)]
