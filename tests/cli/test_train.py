"""`tfdp-rec train`, `recommend` and `export`, from arguments to a served answer; and every kind of bad input."""

import json
import re
import shutil

import pytest
from dp_accounting import GaussianDpEvent
from helpers import bytes_in, of_this_machine
from job.conftest import results_of
from pages import fits, self_contained

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import Mark, read
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.data import Items
from tfdp_rec.job import report
from tfdp_rec.job.budget import prior_noise
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.privacy import epsilon_of
from tfdp_rec.sums.private_metrics import LABEL as METRICS

SMALL = "--users 600 --movies 150 --steps 8 --batch-size 60 --width 4 --hidden 3 --quiet --epsilon 2"
SMALL = SMALL.split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    several = [word for name in ("lazydpsgd", "eana", "spectral", "spectral-exact") for word in ("--mechanism", name)]
    assert main(["train", *SMALL, *several, "--confidential", "--out", str(folder)]) == 0
    return folder


def test_a_run_folder_holds_everything(run):
    assert {p.name for p in run.iterdir()} == {"private", "release"}
    private, confidential = run / "private", run / "private" / "confidential"
    assert {p.name for p in private.iterdir()} == {
        "config.json", "results.json", "report.html", "report.md", "ledgers", "confidential"
    }  # fmt: skip
    assert {p.name for p in confidential.iterdir()} == {
        "metrics.jsonl", "results.json", "report.html", "report.md", "recall_at_k.png", "tensorboard", "log.jsonl"
    }  # fmt: skip
    assert {p.stat().st_mode & 0o77 for p in [run / "private", *(run / "private").rglob("*")]} == {0}
    released = {"servable", "released.npz", "ledger.jsonl", "statement.txt", "card.md"}
    assert {p.name for p in (run / "release").iterdir()} == released
    statement, card = ((run / "release" / name).read_text() for name in ("statement.txt", "card.md"))
    assert "differential privacy" in statement and statement in card
    results = results_of(run)
    assert set(results) == {"popularity", "dp-popularity", "lazydpsgd", "eana", "spectral", "spectral-exact"}
    assert 0 < results["lazydpsgd"]["epsilon"] <= 2
    assert 1.99 < results["spectral"]["epsilon"] <= 2
    counts = GaussianDpEvent(prior_noise(2.0, 1e-6))
    assert results["dp-popularity"]["epsilon"] == pytest.approx(epsilon_of(counts, 1e-6))
    assert {results[name]["epsilon"] for name in ("eana", "spectral-exact")} == {float("inf")}
    (tested,) = {result["test_users"] for result in results.values()}
    config = json.loads((run / "private" / "config.json").read_text())
    assert tested == 600 - config["train_users"] and 80 < tested < 160 and config["released"] == "spectral"
    assert results["lazydpsgd"]["steps"] == 8
    assert config["shared_negatives"] == 150  # all movies: there are no 4,000
    lines = [json.loads(line) for line in (confidential / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["recommender"] == "lazydpsgd"] == [2, 4, 6, 8]


def test_one_private_recommender_leaves_the_run(run):
    """Chosen by its name; of the others there is nothing in the folder, and the page says what more would cost."""
    assert not (run / "release" / "model.keras").exists()
    page = (run / "private" / "report.md").read_text()
    assert "**SpectralRecommender** is in `release/servable/`, and it alone" in page
    assert "LazyDPSGD, SpectralRecommender were made from the same users" in page and "the sum of their ε" in page
    assert page.count("Guarantee:") == 3  # EANA's says that it has none


def test_each_private_one_has_a_ledger_of_all_that_it_cost_and_that_of_the_released_one_is_handed_on(run):
    results = results_of(run)
    peer = run / "private" / "ledgers" / "lazydpsgd.jsonl"
    ledgers = {"spectral": run / "release" / "ledger.jsonl", "lazydpsgd": peer}
    assert [path.name for path in (run / "private" / "ledgers").iterdir()] == ["lazydpsgd.jsonl"]
    for name, path in ledgers.items():
        assert read(path).epsilon(1e-6) == pytest.approx(results[name]["epsilon"], rel=1e-6)
    assert [paid.label for paid in read(ledgers["spectral"]).paid] == ["private sums", METRICS]
    labels = [paid.label for paid in read(ledgers["lazydpsgd"]).paid]
    assert labels[0] == "popularity counts" and set(labels[1:]) == {"training"}  # a payment for each checkpoint
    assert read(ledgers["lazydpsgd"]).steps == 8


def test_the_report_says_what_it_is_made_of(run):
    page = (run / "private" / "confidential" / "report.md").read_text()
    assert "without noise" in page.split("|")[0]
    assert "LazyDPSGD" in page and "∞" in page
    assert "norm" not in (run / "private" / "report.md").read_text().split("## What is promised")[0]


def test_the_report_is_one_page_that_says_what_its_markdown_says(run):
    page = self_contained((run / "private" / "report.html").read_text())
    told = (run / "private" / "report.md").read_text()
    exact, results = self_contained((run / "private" / "confidential" / "report.html").read_text()), results_of(run)
    assert (page.tags.count("img"), exact.tags.count("img")) == (0, 1)
    assert exact.rows == report.table([*results.values()])
    assert "computed from users' data without noise" in exact.text
    statements = re.findall(r"```\n(Guarantee:.*?)\n```", told, re.S)
    assert len(statements) == 3 and all(page.text.count(statement) == 1 for statement in statements)
    shown = [row[4] for row in exact.rows if row[0] == "two-tower, LazyDPSGD"]
    assert shown == [f"{round_up(results['lazydpsgd']['epsilon']):g}"]


@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_the_report_has_the_browsers_width(run, tmp_path, width):
    fits((run / "private" / "report.html").read_text(), width, tmp_path)


def test_the_card_says_what_the_statement_says_and_how_to_ask(run, capsys):
    page = self_contained((run / "private" / "report.html").read_text())
    assert page.text.count((run / "release" / "statement.txt").read_text()) == 1
    assert "Guarantee:      (epsilon = 2, delta = 1e-06)-differential privacy.\n" in page.text
    assert "generated timelines, of no real users" in page.text and "nothing of real users" in page.text
    (typed,) = re.findall("tfdp-rec (recommend small --history .*)", page.text)
    first, *_ = [row for row in page.rows if row[0].isdigit()]
    assert first[1] == WarmStart.load(run).titles[int(first[0])] and first[0] in typed
    assert main(["recommend", str(run), *typed.split()[2:]]) == 0


def test_recommend_answers_and_names_unknown_ids(run, capsys):
    known = WarmStart.load(run).items.of([1, 2])
    assert main(["recommend", str(run), "--history", *map(str, known), "999999999", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["unknown"] == [999999999]
    assert len(answer["recommendations"]) == 10
    assert not set(known) & {r["id"] for r in answer["recommendations"]}
    assert main(["recommend", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert main(["recommend", str(run), "--top-k", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    wrong = {"--top-k 0": "positive", "--history x": "64 bits"}
    for options, says in wrong.items():
        assert main(["recommend", str(run), *options.split()]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_export_of_the_saved_model_gives_the_same_answer(run, tmp_path, capsys):
    import tensorflow as tf

    assert main(["export", str(run / "release" / "released.npz"), str(tmp_path / "again"), "--top-k", "10"]) == 0
    history = tf.constant([[0]], tf.int64)
    # Under another name: the file has its ids itself, and its numbers were served in their place.
    shutil.copy(run / "release" / "released.npz", tmp_path / "spring.npz")
    assert main(["export", str(tmp_path / "spring.npz"), str(tmp_path / "spring"), "--top-k", "10"]) == 0
    assert main(["export", str(run), str(tmp_path / "whole"), "--top-k", "10"]) == 0  # by the run's folder
    folders = run / "release" / "servable", tmp_path / "again", tmp_path / "spring", tmp_path / "whole"
    served = [tf.saved_model.load(str(folder)) for folder in folders]
    first, *others = (one.signatures["serving_default"](history=history) for one in served)
    for again in others:
        assert all(first[name].numpy().tolist() == again[name].numpy().tolist() for name in ("ids", "titles", "scores"))
    assert main(["export", str(run / "release" / "released.npz"), str(tmp_path / "again")]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_beside_another_runs_items_is_refused(tmp_path, capsys):
    """It answered with the other run's ids."""
    import tfdp_rec

    for name, ids in (("one", ["tea", "jam"]), ("other", ["bread", "milk"])):
        folder = tmp_path / name
        (folder / "release").mkdir(parents=True)
        tfdp_rec.models.TwoTower([1, 2], width=4, history_length=2).save(folder / "release" / "model.keras")
        WarmStart(Items(ids), Mark("", 0, ""), None).save(folder)
    model, exported = tmp_path / "one" / "release" / "model.keras", tmp_path / "servable"
    assert main(["export", str(model), str(exported), "--top-k", "2"]) == 0
    assert b"tea" in (exported / "assets" / "items.txt").read_bytes()
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "whole"), "--top-k", "2"]) == 0
    assert b"tea" in (tmp_path / "whole" / "assets" / "items.txt").read_bytes()
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "again")]) == 2
    assert "is no run with a released recommender" in capsys.readouterr().err
    shutil.copy(tmp_path / "other" / "release" / "released.npz", model.with_name("released.npz"))
    assert main(["export", str(model), str(tmp_path / "again"), "--top-k", "2"]) == 2
    assert "is not the model that" in capsys.readouterr().err and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epsilon", "0"], "--epsilon must be positive"),
        (["--epsilon", "much"], "invalid float value"),
        (["--delta", "1"], "--delta must be between 0 and 1"),
        (["--delta", "0.5"], "delta"),
        (["--data", "no-such-folder"], "there is no folder no-such-folder; for files of your own say --user"),
        (["--data", ".", "."], "--data takes one MovieLens folder"),
        (["--mechanism", "lazydpsgd", "--batch-size", "5000"], "is more than the 486 users that are trained on"),
        (["--mechanism", "magic"], "invalid choice"),
        (["--mechanism", "eana", "--export", "spectral"], "--export spectral is not among those that are made (eana)"),
        (["--steps", "-3"], "--steps must be positive"),
        (["--top-k", "1000"], "1000"),
        (["--negatives", "1000"], "--negatives must be at most the 150 items"),
    ],
)
def test_bad_arguments_are_answered_in_one_line_and_leave_nothing(arguments, words, tmp_path, capsys):
    folder = tmp_path / "run"
    try:
        code = main(["train", *SMALL, "--out", str(folder), *arguments])
    except SystemExit as stopped:
        code = stopped.code
    said = capsys.readouterr().err
    assert code == 2
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert not folder.exists()


def test_a_folder_is_not_written_twice(run, capsys):
    assert main(["train", *SMALL, "--out", str(run)]) == 2
    assert "holds another run" in capsys.readouterr().err


def test_the_released_part_names_no_folder_of_this_machine(run):
    names = of_this_machine(run.parent)
    for path in (run / "release").rglob("*"):
        assert not path.is_file() or not [n for n in names for held in bytes_in(path) if n.encode() in held], path


@pytest.mark.parametrize("left", ["servable", "statement.txt"])
def test_what_a_run_released_is_not_written_over_where_all_else_of_it_is_gone(run, tmp_path, capsys, left):
    (tmp_path / "copy" / "release").mkdir(parents=True)
    (tmp_path / "copy" / "release" / left).symlink_to(run / "release" / left)
    assert main(["train", *SMALL, "--out", str(tmp_path / "copy")]) == 2
    assert "holds another run" in capsys.readouterr().err


def test_recommend_takes_the_newest_run_if_none_is_named(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recommend", "--history", "1"]) == 2 and "There is no run in runs/" in capsys.readouterr().err
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "2").symlink_to(run, target_is_directory=True)
    assert main(["recommend"]) == 0
    assert "of runs/2:" in capsys.readouterr().err


def test_recommend_from_nowhere(tmp_path, capsys):
    assert main(["recommend", str(tmp_path)]) == 2
    assert "no exported model" in capsys.readouterr().err
