"""`tfdp-rec train --checkpoint` and `--resume`: nothing is spent twice, nothing is forgotten, misuse is one line."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from job.conftest import cut_at, results_of

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.job.budget import prior_noise
from tfdp_rec.privacy import Accountant, Ledger, PoissonSampling, Snapshot, noise_of_metrics
from tfdp_rec.spectral import SpectralRecommender

SMALL = "--users 600 --movies 150 --steps 12 --batch-size 60 --width 4 --hidden 0 --quiet --epsilon 2 --confidential"
SMALL = SMALL.split()
DELTA = 1e-6


def train(kept, *arguments):
    return main(["train", "--checkpoint", str(kept), *map(str, arguments)])


def files(folder):
    return {p.name for p in folder.rglob("*")}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was cut after 7 steps of lazydpsgd: its folders, with what was said."""
    root = tmp_path_factory.mktemp("kept")
    arguments = ["--mechanism", "spectral-exact", "lazydpsgd", "spectral", "--export", "lazydpsgd"]
    arguments += ["--out", root / "run", "--checkpoint-every", 5]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stderr(said):
        cut_at(monkeypatch, 7)
        assert train(root / "kept", *SMALL, *arguments) == 130
    (root / "said").write_text(said.getvalue())
    return root


def copied(interrupted, root):
    """A copy elsewhere, and what its run.json says."""
    shutil.copytree(interrupted, root, dirs_exist_ok=True)
    run = json.loads((root / "kept" / "run.json").read_text())
    (root / "kept" / "run.json").write_text(json.dumps({**run, "out": str(root / "run")}))
    return run


@pytest.fixture(scope="module")
def resumed(interrupted, tmp_path_factory):
    """A copy that went on to its end."""
    root = tmp_path_factory.mktemp("resumed")
    copied(interrupted, root)
    assert train(root / "kept", "--resume", "--quiet") == 0
    return root


def test_ctrl_c_says_how_to_go_on_and_keeps_what_it_takes(interrupted):
    kept = interrupted / "kept"
    assert f"Go on with: tfdp-rec train --checkpoint {kept} --resume" in (interrupted / "said").read_text()
    assert {"run.json", "prior.npy", "recommender.npz", "000007-step-7.training-checkpoint"} <= files(kept)
    assert read(interrupted / "run" / "release" / "ledger.jsonl").steps == 7
    assert {p.stat().st_mode & 0o77 for p in [kept, *kept.iterdir()] if p.name not in ("in-use", ".log.lock")} == {0}


@pytest.mark.slow
def test_what_was_cut_goes_on_with_nothing_paid_twice(interrupted, resumed):
    ledger = resumed / "run" / "release" / "ledger.jsonl"
    paid = read(ledger).paid
    assert [p.label for p in paid].count("popularity counts") == 1 and read(ledger).steps == 12
    result = results_of(resumed / "run")["lazydpsgd"]
    assert result["steps"] == 12
    config = json.loads((resumed / "run" / "private" / "config.json").read_text())
    noise = config["noise_multipliers"]["lazydpsgd"]
    oracle = Accountant(GaussianDpEvent(noise), PoissonSampling(config["train_users"], 60, unit="user"), DELTA)
    oracle.spend(GaussianDpEvent(prior_noise(2.0, DELTA)), "popularity counts")
    oracle.spend(GaussianDpEvent(noise_of_metrics(2.0, DELTA)), "figures")
    assert result["epsilon"] == pytest.approx(oracle.epsilon(12)) == pytest.approx(read(ledger).epsilon(DELTA))
    assert 1.9 < result["epsilon"] <= 2.0
    prior = [np.load(root / "kept" / "prior.npy") for root in (interrupted, resumed)]
    assert np.array_equal(*prior)
    assert {"report.md", "servable", "model.keras"} <= files(resumed / "run")


@pytest.mark.slow
def test_private_sums_are_paid_for_once_and_never_made_again(interrupted, resumed):
    ledgers = [root / "run" / "private" / "ledgers" / "spectral.jsonl" for root in (interrupted, resumed)]
    (paid,) = read(ledgers[1]).paid
    assert (paid.label, paid.adjacency) == ("private sums", "zero-out")
    assert ledgers[0].read_bytes() == ledgers[1].read_bytes()
    kept = [(root / "kept" / "recommender.npz").read_bytes() for root in (interrupted, resumed)]
    assert kept[0] == kept[1]
    result = results_of(resumed / "run")["spectral"]
    assert result["epsilon"] == pytest.approx(read(ledgers[0]).epsilon(DELTA)) and 1.85 < result["epsilon"] <= 2.0
    assert "recommender.npz" not in files(resumed / "run")


def test_sums_of_a_checkpoint_state_no_cost_of_their_own(interrupted):
    """They told 5.109 where the ledger held 5.342, for items that were found privately."""
    kept = SpectralRecommender.load(interrupted / "kept" / "recommender.npz")
    for tell in (lambda: kept.epsilon, lambda: kept.uses, kept.statement):
        with pytest.raises(ValueError, match="These sums are a run's"):
            tell()


def test_what_a_peer_has_paid_for_and_lost_is_not_made_again(interrupted, tmp_path, capsys):
    copied(interrupted, tmp_path)
    (tmp_path / "kept" / "recommender.npz").unlink()
    assert train(tmp_path / "kept", "--resume", "--quiet") == 2
    assert "spectral.jsonl has paid for the private sums of a run that ended" in capsys.readouterr().err


@pytest.mark.slow
def test_its_curve_has_each_step_once_and_what_was_done_is_not_done_again(interrupted, resumed):
    exact = resumed / "run" / "private" / "confidential" / "metrics.jsonl"
    lines = [json.loads(line) for line in exact.read_text().splitlines()]
    assert [line["step"] for line in lines if line["recommender"] == "lazydpsgd"] == [2, 4, 6, 8, 10, 12]
    exact = [(root / "kept" / "spectral-exact" / "result.json").read_bytes() for root in (interrupted, resumed)]
    assert exact[0] == exact[1]


@pytest.mark.slow
def test_a_finished_run_that_is_gone_on_with_pays_nothing_and_releases_the_same(resumed, tmp_path):
    import keras

    ledger = resumed / "run" / "release" / "ledger.jsonl"
    before = ledger.read_bytes()
    weights = keras.models.load_model(resumed / "run" / "release" / "model.keras").get_weights()
    shutil.rmtree(resumed / "run" / "release" / "servable")
    (resumed / "run" / "release" / "model.keras").unlink()
    assert train(resumed / "kept", "--resume", "--quiet") == 0
    again = keras.models.load_model(resumed / "run" / "release" / "model.keras").get_weights()
    assert all(np.array_equal(one, other) for one, other in zip(weights, again, strict=True))
    assert ledger.read_bytes() == before
    model = resumed / "run" / "release" / "model.keras"
    assert main(["export", str(model), str(tmp_path / "servable"), "--top-k", "3"]) == 0


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--steps", 13], "has --steps 12, and is asked to go on with 13: leave --steps out"),
        (["--mechanism", "eana"], "--export lazydpsgd is not among those that are made (eana)"),
        (["--users", 700], "has --users 600"),
        # All that has a price, or that noise was decided by.
        (["--epsilon", 3], "has --epsilon 2"),
        (["--delta", 1e-7], "has --delta left out"),
        (["--clip", 0.5], "has --clip left out"),
        (["--noise-multiplier", 3], "has --noise-multiplier left out"),
        (["--batch-size", 50], "has --batch-size 60"),
        (["--seed", 1], "has --seed 0"),
        (["--recency", 2], "has --recency left out"),
        (["--local", 1, 1], "has --local left out, and is asked to go on with 1, 1: leave --local out"),
        (["--out", "elsewhere"], "leave --out out to go on with it"),
        (["--checkpoint-every", 0], "--checkpoint-every must be positive"),
    ],
)
def test_another_run_than_the_one_that_was_kept_is_refused_in_one_line(interrupted, capsys, arguments, says):
    assert train(interrupted / "kept", "--resume", "--quiet", *arguments) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_folder_is_begun_in_once_and_gone_on_with_where_a_run_is(interrupted, tmp_path, capsys):
    assert train(interrupted / "kept", *SMALL) == 2
    assert "holds a run: go on with it by --resume" in capsys.readouterr().err
    assert train(tmp_path / "nowhere", "--resume") == 2
    assert "holds no run to go on with: leave --resume out" in capsys.readouterr().err
    assert main(["train", "--resume"]) == 2
    assert "--resume needs --checkpoint DIR" in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "harm, says",
    [
        (lambda kept: (kept / "../run/release/ledger.jsonl").unlink(), "is gone, so that what was spent"),
        (lambda kept: _first_lines(kept / "../run/release/ledger.jsonl", 2), "lacks entries that were in it before"),
        (lambda kept: (kept / "../run/private/ledgers/spectral.jsonl").unlink(), "is gone, so that what was spent"),
        (lambda kept: (kept / "run.json").write_text("{"), "run.json was changed"),
        (lambda kept: (kept / "run.json").write_text('{"job": "log"}'), "run.json was changed"),
        (lambda kept: _another(kept / "../run/release/ledger.jsonl"), "is not the ledger that this was counted in"),
        (lambda kept: _other_data(kept / "run.json"), "was begun with other data"),
    ],
)
def test_a_folder_that_was_tampered_with_is_refused(interrupted, tmp_path, capsys, harm, says):
    copied(interrupted, tmp_path)
    harm(tmp_path / "kept")
    assert train(tmp_path / "kept", "--resume", "--quiet") == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def _first_lines(path, number):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:number]))


def _another(path):
    path.unlink()
    Ledger(path, "user", Snapshot(9, "x")).close()


def _other_data(path):
    """As if the run had begun with data that look like these from outside."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "data": "0" * 64}))


@pytest.mark.slow
def test_a_run_that_has_lost_its_last_steps_ends_within_its_budget(interrupted, tmp_path):
    """Killed when all was paid for: no further step is made, and the model is released as it is."""
    run = copied(interrupted, tmp_path)
    path = tmp_path / "run" / "release" / "ledger.jsonl"
    sampling = PoissonSampling(read(path).paid[-1].settings["sampling"]["num_units"], 60, unit="user")
    ledger = Ledger(path, "user", Snapshot(600, "user, item, time"), sampling.adjacency)
    accountant = Accountant(GaussianDpEvent(run["noises"]["lazydpsgd"]), sampling, DELTA, ledger=ledger)
    accountant.spending.payments.pay_steps(accountant.event, 4)  # that a process made, and took with it
    accountant.close()
    assert train(tmp_path / "kept", "--resume", "--quiet") == 0
    results = results_of(tmp_path / "run")
    assert results["lazydpsgd"]["steps"] == 8 and read(path).steps == 12
    assert 1.9 < results["lazydpsgd"]["epsilon"] <= 2.0


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    """SIGKILL at whatever moment, three times; the end is within the budget, and the checker's ε is the report's."""
    command = [sys.executable, "-m", "tfdp_rec.cli", "train", "--checkpoint", str(tmp_path / "kept")]
    begin = [*SMALL, "--steps", "400", "--mechanism", "lazydpsgd", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    ledger = tmp_path / "run" / "release" / "ledger.jsonl"
    for life in range(3):
        process = subprocess.Popen([*command, *(begin if not life else ["--resume", "--quiet"])], env=environment)
        wait_for(process, lambda wanted=100 * life + 1: ledger.exists() and read(ledger).steps >= wanted)
        time.sleep(0.3 * life)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run([*command, "--resume", "--quiet"], env=environment, check=True, timeout=300)
    result = results_of(tmp_path / "run")["lazydpsgd"]
    assert result["epsilon"] == pytest.approx(read(ledger).epsilon(DELTA)) and result["epsilon"] <= 2.0
    assert 100 <= result["steps"] <= 400 and read(ledger).steps >= result["steps"]


def wait_for(process, done, seconds=200):
    for _ in range(50 * seconds):
        if done():
            return
        assert process.poll() is None, "it ended before"
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s")


def trainer_of(process):
    """The process that trains: where servers have a network of their own, a child of the one that was started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    of_command = [pid for pid in children if b"tfdp_rec.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(of_command[0]) if of_command else process.pid


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_on_a_cluster_goes_on(tmp_path, end):
    """Attempts are paid for in the trainer's ledger, beside the prior; what is made again is paid for again."""
    kept, out = tmp_path / "kept", tmp_path / "run"
    command = [sys.executable, "-m", "tfdp_rec.cli", "train", "--checkpoint", str(kept)]
    begin = [*SMALL, "--steps", "300", "--mechanism", "lazydpsgd", "--negatives", "40", "--local", "1", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    ledger = out / "release" / "ledger.jsonl"
    process = subprocess.Popen(
        [*command, *begin, "--out", str(out)], env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(process, lambda: ledger.exists() and read(ledger).steps > 100)
    timelines = kept / "timelines"
    assert {p.stat().st_mode & 0o77 for p in [timelines, *timelines.iterdir()]} == {0}
    os.kill(trainer_of(process) if end == signal.SIGKILL else process.pid, end)
    said = process.communicate(timeout=100)[1]
    assert (end == signal.SIGKILL) == timelines.exists()
    assert end == signal.SIGKILL or f"Go on with: tfdp-rec train --checkpoint {kept} --resume" in said
    subprocess.run([*command, "--resume", "--quiet"], env=environment, check=True, timeout=300)
    results = results_of(out)
    assert not timelines.exists()
    assert [p.label for p in read(ledger).paid].count("popularity counts") == 1
    assert 250 <= results["lazydpsgd"]["steps"] == read(ledger).steps <= 300
    spent = read(ledger).epsilon(DELTA)
    assert results["lazydpsgd"]["epsilon"] == pytest.approx(spent) and spent <= 2
