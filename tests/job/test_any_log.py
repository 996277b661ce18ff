"""Any recommender on any log: two-towers on files of one's own, private sums on MovieLens files, what has no ε."""

import contextlib
import io
import itertools
import json
import math
import shutil
import subprocess
import sys

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from checker import checked
from dp_accounting import ComposedDpEvent
from job.conftest import COLUMNS, answer, cut_at, results_of, table, train

from tfdp_rec.cli import main
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.ledger import ZERO_OUT, read
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.job.recommenders import training
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.privacy import Accountant, Ledger, Snapshot
from tfdp_rec.spectral import SpectralRecommender

LABELS = ["private vocabulary", "popularity counts", "training"]  # of several days, which have no figures
UPON_LABELS = ["private vocabulary", "private sums to train upon"]


def labels_of(ledger):
    """What was paid for, in order; a training's payments follow one another."""
    return [label for label, _ in itertools.groupby(paid.label for paid in ledger.paid)]


SMALL = ["--steps", "6", "--batch-size", "80", "--width", "4", "--hidden", "0", "--quiet"]


def named(*asked):
    """Ids and titles of an answer."""
    return [(each["id"], each["title"]) for each in answer(*asked)["recommendations"]]


def movielens(folder, seed, movies):
    rng = np.random.default_rng(seed)
    folder.mkdir()
    listed = "".join(f'{10 * i},"Film, {i}",Drama\n' for i in range(1, movies + 1))
    (folder / "movies.csv").write_text("movieId,title,genres\n" + listed)
    rows = [f"{u},{10 * m},3.0,{rng.integers(10**9)}" for u in range(1, 301) for m in
            1 + rng.choice(movies, 6, replace=False)]  # fmt: skip
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "\n".join(rows) + "\n")
    return folder


@pytest.mark.slow
def test_private_sums_of_movielens_files_have_days_a_ledger_and_a_statement(tmp_path, capsys):
    first, second = movielens(tmp_path / "one", 1, 30), movielens(tmp_path / "two", 2, 34)
    options = ["--mechanism", "spectral", "--days", "2", "--out", tmp_path / "run", "--quiet"]
    assert train("--data", first, *options) == 0
    assert train("--continue", tmp_path / "run", "--data", second, "--quiet") == 0
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    assert [paid.label for paid in ledger.paid] == ["private sums"] * 2 and 7.99 < ledger.epsilon(1e-6) <= 8.0
    assert "2 so far, of at most 2" in (tmp_path / "run" / "release" / "statement.txt").read_text()
    earlier = WarmStart.load(tmp_path / "run")
    assert earlier.items.ids.to_pylist() == [10 * i for i in range(1, 35)] and earlier.titles[340] == "Film, 34"
    found = named(capsys, tmp_path / "run", "--history", "10", "--top-k", "33")
    assert len(found) == 33 and (340, "Film, 34") in found
    assert named(capsys, tmp_path / "run", "--history", "10", "--top-k", "99999999999") == found  # took all memory
    capsys.readouterr()
    assert train("--continue", tmp_path / "run", "--quiet") == 2
    assert "--data is missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spectral-exact", "eana"])
def test_what_claims_no_epsilon_says_so_in_its_statement_its_card_and_its_ledger(tmp_path, name):
    data, options = movielens(tmp_path / "one", 1, 30), ["--mechanism", name, "--quiet"]
    small = ["--batch-size", "8", "--steps", "1", "--width", "4", "--hidden", "0"]
    assert train("--data", data, *options, *small, "--out", tmp_path / "run") == 0
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    before = ["popularity counts"] if name == "eana" else []
    assert [paid.label for paid in ledger.paid] == [*before, "training without a guarantee"]
    assert math.isinf(ledger.epsilon(1e-6))
    said = (tmp_path / "run" / "release" / "statement.txt").read_text()
    assert said.startswith("Guarantee:") and "none" in said.splitlines()[0]
    card = (tmp_path / "run" / "release" / "card.md").read_text()
    assert "**Not private.**" in card and "A private recommender" not in card and "covered by" not in card


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """A two-tower on a log whose items are found, on the first of two days; cut off after 4 steps, and gone on with."""
    root, said = tmp_path_factory.mktemp("towers"), io.StringIO()
    pa.parquet.write_table(table(users=800, rows=12_000), root / "log.parquet")
    (root / "titles.csv").write_text("sku,title\n" + "".join(f"sku-{i},Thing {i}\n" for i in range(200)))
    options = ["--mechanism", "lazydpsgd", "--titles", root / "titles.csv", "--days", "2", "--items-epsilon", "4"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        cut_at(patch, 4)
        assert train("--data", root / "log.parquet", *COLUMNS, *SMALL, *options, "--out", root / "run") == 130
    assert f"Go on with: tfdp-rec train --out {root / 'run'} --resume" in said.getvalue()
    assert read(root / "run" / "release" / "ledger.jsonl").steps == 4
    assert not (root / "run" / "private" / "resume" / "log").exists()
    assert train("--out", root / "run", "--resume", "--quiet") == 0
    return root / "run"


@pytest.mark.slow
def test_a_training_that_is_cut_off_without_a_checkpoint_goes_on_in_its_run_folder(towers):
    ledger = read(towers / "release" / "ledger.jsonl")
    assert [paid.label for paid in ledger.paid].count("popularity counts") == 1 and ledger.steps == 6
    assert not (towers / "private" / "resume").exists()


@pytest.mark.slow
def test_a_two_tower_on_ones_own_log_costs_its_items_its_prior_and_its_steps(towers, tmp_path):
    ledger = towers / "release" / "ledger.jsonl"
    assert labels_of(read(ledger)) == LABELS
    delta = json.loads((towers / "private" / "config.json").read_text())["delta"]
    spent = read(ledger).epsilon(delta)
    assert 4 < spent < 6.5 and checked(ledger, delta, tmp_path) == pytest.approx(spent, abs=1e-3)
    result = results_of(towers)["lazydpsgd"]
    assert result["epsilon"] == pytest.approx(spent) and result["steps"] == 6
    said = (towers / "release" / "statement.txt").read_text()
    assert "private vocabulary" in said and "popularity counts" in said and "released.npz" in said
    assert said in (towers / "release" / "card.md").read_text()


@pytest.mark.slow
def test_a_two_tower_answers_in_the_logs_ids_with_titles(towers, tmp_path, capsys):
    names = {path.name for path in (towers / "release").iterdir()}
    assert names == {"servable", "model.keras", "released.npz", "ledger.jsonl", "statement.txt", "card.md"}
    one, other, third = WarmStart.load(towers).items.of([1, 2, 3])
    found = named(capsys, towers, "--history", one, other, "--top-k", "4")
    assert len(found) == 4 and all(title == item.replace("sku-", "Thing ") for item, title in found)
    assert not {one, other} & {item for item, _ in found}
    among = named(capsys, towers, "--history", one, "--among", other, one, third, "nowhere")
    assert sorted(item for item, _ in among) == sorted([other, third])
    model = towers / "release" / "model.keras"
    assert main(["export", str(model), str(tmp_path / "again"), "--top-k", "4"]) == 0
    assert named(capsys, tmp_path / "again", "--history", one, other) == found
    assert not any(b"person-" in path.read_bytes() for path in towers.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def upon(tmp_path_factory):
    """A training upon sums of its own on the first of two days; cut off after 4 steps, and gone on with."""
    root = tmp_path_factory.mktemp("upon")
    pa.parquet.write_table(table(users=800, rows=12_000), root / "log.parquet")
    options = ["--mechanism", "upon-sums", "--days", "2", "--items-epsilon", "4", "--out", root / "run"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        cut_at(patch, 4)
        assert train("--data", root / "log.parquet", *COLUMNS, *SMALL, *options) == 130
    assert labels_of(read(root / "run" / "release" / "ledger.jsonl")) == [*UPON_LABELS, "training"]
    assert train("--out", root / "run", "--resume", "--quiet") == 0
    return root / "run"


@pytest.mark.slow
def test_a_training_upon_sums_costs_its_items_its_sums_and_its_steps(upon, tmp_path, capsys):
    ledger, config = upon / "release" / "ledger.jsonl", json.loads((upon / "private" / "config.json").read_text())
    assert labels_of(read(ledger)) == [*UPON_LABELS, "training"]
    assert read(ledger).steps == 6
    spent = read(ledger).epsilon(config["delta"])
    assert checked(ledger, config["delta"], tmp_path) == pytest.approx(spent, abs=1e-3)
    results = results_of(upon)
    assert results["upon-sums"]["epsilon"] == pytest.approx(spent) and results["upon-sums"]["steps"] == 6
    said = (upon / "release" / "statement.txt").read_text()
    assert "private sums to train upon" in said and said in (upon / "release" / "card.md").read_text()
    assert "Trained: 6 steps of 80 users on average, clip 0.05." in (upon / "release" / "card.md").read_text()
    names = {path.name for path in (upon / "release").iterdir()}
    assert names == {"servable", "model.keras", "released.npz", "ledger.jsonl", "statement.txt", "card.md"}
    # The file of the model tells the same cost without the ledger.
    model = keras.models.load_model(upon / "release" / "model.keras")
    entries = [entry for entry in model.privacy_history.snapshot() if not entry.label]
    alone = Accountant(entries[-1].event, Sampling.from_state(entries[-1].sampling), config["delta"])
    alone.follow(model)
    assert alone.epsilon() == pytest.approx(spent, abs=1e-4)
    # It begins with sums that the released ones are, and answers in the log's ids.
    sums = SpectralRecommender.load(upon / "release" / "released.npz")
    np.testing.assert_allclose(model.sums.between.numpy()[1:, 1:], sums.estimates.weights, rtol=1e-6)
    one, other = WarmStart.load(upon).items.of([1, 2])
    found = named(capsys, upon, "--history", one, other, "--top-k", "4")
    assert len(found) == 4 and not {one, other} & {item for item, _ in found}


@pytest.mark.slow
def test_a_kill_in_a_training_costs_no_more_than_the_steps_that_were_planned(tmp_path, monkeypatch):
    """Steps are paid for no further ahead than checkpoints lie apart."""
    pa.parquet.write_table(table(users=400, rows=6_000), tmp_path / "log.parquet")
    options = ["--mechanism", "lazydpsgd", "--items-epsilon", "4", "--noise-multiplier", "5", "--out", tmp_path / "run"]
    with monkeypatch.context() as patch:
        cut_at(patch, 4, dead=True)
        patch.setattr(training.TrainingCheckpoint, "save", lambda self: None)
        assert train("--data", tmp_path / "log.parquet", *COLUMNS, *SMALL, *options) == 130
    lost = read(tmp_path / "run" / "release" / "ledger.jsonl").steps
    assert 4 <= lost <= 6
    assert train("--out", tmp_path / "run", "--resume", "--quiet") == 0
    ledger = read(tmp_path / "run" / "release" / "ledger.jsonl")
    made = results_of(tmp_path / "run")["lazydpsgd"]["steps"]
    assert ledger.epsilon(1e-6) <= 8.0 and ledger.steps == lost + 6 and made == 6


@pytest.mark.slow
def test_a_training_upon_sums_goes_on_upon_the_sums_of_both_days(upon, tmp_path, monkeypatch):
    run, began, counts, new_model = shutil.copytree(upon, tmp_path / "run"), [], [], training.Training.first_model
    pa.parquet.write_table(table(users=850, rows=12_000, seed=5), tmp_path / "next.parquet")
    before = keras.models.load_model(run / "release" / "model.keras", compile=False)

    def remembered(self):
        model = new_model(self)
        began.append({table.name: table.embeddings.numpy() for table in model.item_tables()})
        return model

    made = training.NextItemExamples

    def examples(*args, **named):
        counts.append(named["released_counts"])
        return made(*args, **named)

    monkeypatch.setattr(training.Training, "first_model", remembered)
    monkeypatch.setattr(training, "NextItemExamples", examples)
    kept = (run / "release" / "model.keras").rename(tmp_path / "kept.keras")
    paid = len(read(run / "release" / "ledger.jsonl").paid)
    assert train("--continue", run, "--data", tmp_path / "next.parquet", "--quiet") == 2
    assert len(read(run / "release" / "ledger.jsonl").paid) == paid, "without the model to go on from, nothing is paid"
    kept.rename(run / "release" / "model.keras")
    assert train("--continue", run, "--data", tmp_path / "next.parquet", "--quiet") == 0
    for table_before in before.item_tables():
        rows = table_before.embeddings.numpy()
        assert np.array_equal(began[0][table_before.name][: len(rows)], rows)
    config, items = json.loads((run / "private" / "config.json").read_text()), len(WarmStart.load(run).items)
    assert config["negatives"] is None and config["shared_negatives"] == items > len(before.vocabulary)
    release, ledger = WarmStart.load(run).release, read(run / "release" / "ledger.jsonl")
    assert release.fits == 2 and ledger.steps == 12
    assert np.array_equal(counts[-1], SpectralRecommender.load(run / "release" / "released.npz").popularity)
    assert labels_of(ledger) == 2 * [*UPON_LABELS, "training"]
    assert 7.9 < ledger.epsilon(1e-6) <= 8.0
    model = keras.models.load_model(run / "release" / "model.keras")
    assert len(model.vocabulary) == len(WarmStart.load(run).items) and model.sums.head == len(release.head)
    entries = [entry for entry in model.privacy_history.snapshot() if not entry.label]
    alone = Accountant(entries[-1].event, Sampling.from_state(entries[-1].sampling), 1e-6)
    alone.follow(model)
    assert alone.epsilon() == pytest.approx(ledger.epsilon(1e-6), abs=1e-4)
    assert train("--continue", run, "--data", tmp_path / "next.parquet", "--quiet") == 2


@pytest.mark.slow
def test_a_two_tower_goes_on_from_what_it_released_within_one_budget(towers, tmp_path, monkeypatch):
    run, began, new_model = tmp_path / "run", [], training.Training.first_model
    shutil.copytree(towers, run)
    before, known = keras.models.load_model(run / "release" / "model.keras", compile=False), WarmStart.load(run).items
    pa.parquet.write_table(table(users=850, rows=12_000, seed=5), tmp_path / "next.parquet")

    def remembered(self):
        model = new_model(self)
        began.append([variable.numpy() for variable in model.trainable_variables])
        return model

    monkeypatch.setattr(training.Training, "first_model", remembered)
    assert train("--continue", run, "--data", tmp_path / "next.parquet", "--confidential", "--quiet") == 0
    for mine, released in zip(began[0], before.trainable_variables):
        assert np.array_equal(mine[: released.shape[0]], released.numpy())
    earlier, ledger = WarmStart.load(run), read(run / "release" / "ledger.jsonl")
    assert len(began[0][0]) == len(earlier.items) + 1
    assert earlier.items.ids.to_pylist()[: len(known)] == known.ids.to_pylist()
    assert labels_of(ledger) == 2 * LABELS and ledger.steps == 12
    assert 7.9 < ledger.epsilon(1e-6) <= 8.0
    # The popularity of the second day is that of items that were found on both: one day's cost was told of it.
    untrained = ComposedDpEvent([paid.event for paid in ledger.paid if paid.label in LABELS[:2]])
    assert results_of(run)["dp-popularity"]["epsilon"] >= epsilon_of(untrained, 1e-6)
    assert "2 so far, of at most 2" in (run / "release" / "statement.txt").read_text()
    assert train("--continue", run, "--data", tmp_path / "next.parquet", "--quiet") == 2


@pytest.mark.slow
def test_the_models_own_history_is_all_that_its_days_have_spent(tmp_path):
    """A model.keras that is handed on, and trained further elsewhere, is told of no smaller epsilon than it has."""
    rng, run = np.random.default_rng(0), tmp_path / "run"
    options = ["--mechanism", "lazydpsgd", "--days", "3", "--items", tmp_path / "items.txt", "--out", run, *SMALL]
    for day, items in enumerate((30, 40)):
        (tmp_path / "items.txt").write_text("\n".join(map(str, range(items))))
        rows = {"u": rng.integers(0, 500, 3000), "i": rng.integers(0, items, 3000), "t": np.arange(3000)}
        pa.parquet.write_table(pa.table(rows), tmp_path / "day.parquet")
        own = ["--continue", run, "--quiet"] if day else ["--user", "u", "--item", "i", "--time", "t", *options]
        assert train("--data", tmp_path / "day.parquet", *own) == 0
        model = keras.models.load_model(run / "release" / "model.keras", compile=False)
        entries = [entry for entry in model.privacy_history.snapshot() if not entry.label]
        assert [entry.steps for entry in entries] == [6] * (1 + day)
        last = Sampling.from_state(entries[-1].sampling)
        alone = Accountant(entries[-1].event, last, 1e-6)
        alone.follow(model)
        spent = read(run / "release" / "ledger.jsonl").epsilon(1e-6)
        assert alone.epsilon() == pytest.approx(spent, abs=1e-4) and spent > 1
        # Against the ledger nothing of it is owed, or paid for twice.
        copy = shutil.copy(run / "release" / "ledger.jsonl", tmp_path)
        with Ledger(copy, "user", Snapshot(last.num_units, "user"), ZERO_OUT, data_changed=True) as ledger:
            held = Accountant(entries[-1].event, last, 1e-6, ledger=ledger)
            held.follow(model)
            assert held.epsilon() == pytest.approx(spent, abs=1e-4)


@pytest.mark.slow
def test_where_nothing_is_trained_no_optimizer_is_loaded(tmp_path):
    data = movielens(tmp_path / "one", 1, 30)
    rooms = ("optimizers", "training", "models", "callbacks", "clipping", "distribute", "private_plan")
    code = f"""
import sys
from tfdp_rec.cli import main
own = ["--user", "userId", "--item", "movieId", "--time", "timestamp", "--items-epsilon", "4", "--quiet"]
assert main(["train", "--data", {str(data / 'ratings.csv')!r}, *own, "--out", {str(tmp_path / 'run')!r}]) == 0
loaded = [name for name in sys.modules if name.startswith("tfdp_rec.") and name.split(".")[1] in {rooms!r}]
assert not loaded, loaded
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
