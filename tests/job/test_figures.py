"""Figures of held-out users within the budget of a run: paid for before anyone is asked, once; exact ones apart."""

import contextlib
import errno
import io
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from job.conftest import COLUMNS, cut_at, results_of, table, train

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.job import held_out
from tfdp_rec.job.budget import Budget, figures_noise
from tfdp_rec.privacy import epsilon_of, noise_of_metrics, noise_of_one_release
from tfdp_rec.sums.private_metrics import LABEL

DELTA = 1e-6
TOWER = ["--mechanism", "lazydpsgd", "--steps", "4", "--batch-size", "80", "--width", "4", "--hidden", "0"]


@pytest.fixture
def small(tmp_path):
    """The arguments of a small run on public items, without --out."""
    pa.parquet.write_table(table(users=900, rows=9_000), tmp_path / "log.parquet")
    (tmp_path / "items.txt").write_text("".join(f"sku-{i}\n" for i in range(200)))
    return ["--data", tmp_path / "log.parquet", *COLUMNS, "--items", tmp_path / "items.txt"]


def ledger_of(run):
    return read(run / "release" / "ledger.jsonl")


def kept(run):
    return held_out.kept_figures(ledger_of(run))[0]


def payments(run):
    return [paid.label for paid in ledger_of(run).paid].count(LABEL)


# Within the budget.


def test_the_budget_holds_the_figures_and_a_run_pays_before_it_asks(run):
    ledger = ledger_of(run)
    kinds = [line["label"] for line in ledger.lines if line["kind"] in ("pay", "note")]
    assert kinds[-3:] == [LABEL, held_out.ASKS, held_out.NOTE] and payments(run) == 1
    held = json.loads((run / "private" / "config.json").read_text())
    noise = figures_noise(8.0, DELTA, held["num_users"] - held["train_users"])
    assert ledger.paid[-1].event.noise_multiplier == noise == noise_of_metrics(8.0, DELTA)
    assert 7.99 < ledger.epsilon(DELTA) <= 8.0
    said = (run / "release" / "statement.txt").read_text()
    assert "(epsilon = 8, " in said and f"of multiplier {noise:.4g}" in " ".join(said.split())


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_figures_take_a_twentieth_at_most_and_less_where_many_are_asked(epsilon):
    for asked in (1, 8000, 10**6):
        budget = Budget(epsilon, DELTA, public=True, metrics_noise=figures_noise(epsilon, DELTA, asked))
        alone = Budget(budget.sums and epsilon, DELTA, public=True)
        assert epsilon * 0.999 < epsilon_of(budget.all_days(budget.sums), DELTA) <= epsilon
        without = epsilon_of(alone.all_days(budget.sums), DELTA)
        assert 0.949 * epsilon < without < epsilon
    assert without > 0.96 * epsilon


def test_a_budget_that_items_and_figures_take_whole_is_refused():
    budget = Budget(8.0, DELTA, items_epsilon=6.5, metrics_noise=noise_of_one_release(6.5, DELTA))
    with pytest.raises(ValueError, match="nothing left for private sums beside found items and figures"):
        _ = budget.sums


def test_exact_figures_are_near_and_stand_in_no_other_file(run):
    exact = results_of(run)["spectral"]
    assert kept(run)["recall@10"]["value"] == pytest.approx(exact["recalls"]["recall@10"], abs=0.05)
    numbers = {value for result in results_of(run).values() for kind in ("recalls", "errors")
               for value in result[kind].values() if 0.001 < value < 1}  # fmt: skip
    assert len(numbers) > 15
    files = [path for path in run.rglob("*") if path.suffix in (".md", ".html", ".json", ".txt", ".jsonl")]
    open_to_others = [path for path in files if "confidential" not in path.parts]
    assert len(open_to_others) > 7
    for path in open_to_others:
        text = path.read_text()
        assert not [value for value in numbers if re.search(rf"(?<![\d.]){value:.4f}(?!\d)|{value!r}", text)], path


def test_report_model_card_and_card_show_the_same_figures_for_one_price(run, capsys):
    before = (run / "release" / "ledger.jsonl").read_bytes()
    assert main(["card", str(run)]) == 0
    assert (run / "release" / "ledger.jsonl").read_bytes() == before
    shown = {name: str(held_out.figure_of(figure)) for name, figure in kept(run).items()}
    assert len(shown) == 5
    for path in ("card/README.md", "release/card.md", "private/report.md"):
        text = (run / path).read_text()
        assert all(f"| {name} | {figure} |" in text for name, figure in shown.items()), path
    assert "epsilon = 8 at" in (main(["card", str(run)]), capsys.readouterr().out)[1]
    (run / "card" / "attack.png").unlink()
    for path in (run / "card").iterdir():
        path.unlink()
    (run / "card").rmdir()


# What ε does not cover.


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [["--mechanism", "spectral"], TOWER])
def test_without_confidential_nothing_that_is_not_paid_for_is_said_or_kept(small, tmp_path, capsys, mechanism):
    assert train(*small, *mechanism, "--out", tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert {path.name for path in (tmp_path / "run" / "private").iterdir()} == {
        "config.json", "report.html", "report.md", "results.json"
    }  # fmt: skip
    (result,) = json.loads((tmp_path / "run" / "private" / "results.json").read_text())
    assert result.keys() == {"recommender", "steps", "epsilon", "noise_multiplier"}
    shown = {str(held_out.figure_of(figure)) for figure in kept(tmp_path / "run").values()}
    assert len(shown) == 5 and all(figure in said for figure in shown)
    for word in ("loss", "rows read", "9,000", "9000", "without noise", "for you alone"):
        assert word not in said, said
    told = said.split("Held-out users, with noise that was paid for:")[0]
    assert not re.search(r"\d\.\d{3}", told.replace("noise of", "")), told


def test_a_run_compares_nothing_unless_it_may_say_how_well_they_do():
    from tfdp_rec.cli import train as command
    from tfdp_rec.job.settings import JobSettings

    def made(*words):
        import argparse

        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return command._choose_settings(parser.parse_args(list(words)), JobSettings()).mechanism

    assert made() == ("spectral",) and made("--export", "lazydpsgd") == ("lazydpsgd",)
    assert made("--local", "1", "1") == ("lazydpsgd",) and made("--sampling", "shuffled") == ("lazydpftrl",)
    assert made("--confidential") == ("spectral", "spectral-exact", "adam", "lazydpsgd")


# Once.


def asking(monkeypatch, problem=None):
    """How many were asked, and how often payments stood in the ledger then; ends with the problem, if there is one."""
    seen, whole = [], held_out.load_released

    def load(run, items):
        ask = whole(run, items)

        def asked(histories, k):
            seen.append((len(histories), payments(run)))
            if problem is not None:
                raise problem
            return ask(histories, k)

        return asked

    monkeypatch.setattr(held_out, "load_released", load)
    return seen


@pytest.mark.fast_cases("problem0")
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_what_had_shown_nothing_is_made_after_all_at_the_same_price(small, tmp_path, monkeypatch, problem):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        seen = asking(patch, problem)
        assert train(*small, "--out", run, "--quiet") in (2, 130)
    assert [paid for _, paid in seen] == [1] and payments(run) == 1 and not kept(run)
    paid = ledger_of(run).paid
    assert train("--out", run, "--resume", "--quiet") == 0
    assert ledger_of(run).paid == paid and kept(run) and ledger_of(run).epsilon(DELTA) <= 8.0


def test_a_process_that_was_killed_while_it_asked_has_spent_it_and_no_one_is_asked_again(small, tmp_path, monkeypatch):
    run, options = tmp_path / "run", ["--checkpoint", tmp_path / "kept", "--quiet"]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        asking(patch, MemoryError())
        train(*small, "--out", run, *options)
    seen = asking(monkeypatch)
    for _ in range(2):  # a finished run, too, that is gone on with
        assert train("--resume", *options) == 0 and not seen and payments(run) == 1 and not kept(run)
    assert ledger_of(run).epsilon(DELTA) <= 8.0
    assert "No figures: they were paid for, and lost" in (run / "private" / "report.md").read_text()
    assert main(["card", str(run)]) == 0 and not seen and payments(run) == 1


def test_a_finished_run_that_is_gone_on_with_asks_no_one(small, tmp_path, monkeypatch):
    run, options = tmp_path / "run", ["--checkpoint", tmp_path / "kept", "--quiet"]
    assert train(*small, "--out", run, *options) == 0
    before, seen = (run / "release" / "ledger.jsonl").read_bytes(), asking(monkeypatch)
    assert train("--resume", *options) == 0 and not seen
    assert (run / "release" / "ledger.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("dead", [False, True])
def test_a_training_that_is_cut_off_pays_once_and_asks_at_its_end(small, tmp_path, monkeypatch, dead):
    run = tmp_path / "run"
    with monkeypatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        cut_at(patch, 2, dead=dead)
        assert train(*small, *TOWER, "--out", run, "--quiet") == 130
    assert payments(run) == 1 and not ledger_of(run).notes(held_out.ASKS)
    assert train("--out", run, "--resume", "--quiet") == 0
    assert payments(run) == 1 and kept(run) and ledger_of(run).epsilon(DELTA) <= 8.0
    said = (run / "release" / "statement.txt").read_text()
    assert LABEL in said and results_of(run)["lazydpsgd"]["epsilon"] == pytest.approx(ledger_of(run).epsilon(DELTA))


# What there is not.


def test_without_figures_all_of_the_budget_is_the_recommenders(small, tmp_path, monkeypatch):
    seen = asking(monkeypatch)
    assert train(*small, "--metrics-epsilon", "0", "--out", tmp_path / "run", "--quiet") == 0
    assert not seen and [paid.label for paid in ledger_of(tmp_path / "run").paid] == ["private sums"]
    assert 7.99 < ledger_of(tmp_path / "run").epsilon(DELTA) <= 8.0
    assert "No figures: none were asked for" in (tmp_path / "run" / "private" / "report.md").read_text()


def test_users_without_two_items_give_figures_that_say_nothing(tmp_path):
    """Whether there are such users is private: the run ends as others do."""
    rows = {"user_id": [f"u-{n}" for n in range(600)], "sku": [f"s-{n % 3}" for n in range(600)], "ts": np.arange(600)}
    pa.parquet.write_table(pa.table(rows), tmp_path / "log.parquet")
    (tmp_path / "items.txt").write_text("s-0\ns-1\ns-2\n")
    asked = ["--data", tmp_path / "log.parquet", *COLUMNS, "--items", tmp_path / "items.txt", "--confidential"]
    assert train(*asked, "--out", tmp_path / "run", "--quiet") == 0
    recall = held_out.figure_of(kept(tmp_path / "run")["recall@3"])
    assert np.isnan(recall.value) and recall.interval() == (0.0, 1.0)
    assert "nothing was tested" in (tmp_path / "run" / "private" / "confidential" / "report.md").read_text()


@pytest.mark.parametrize("options, words", [
    (["--metrics-epsilon", "8"], "must be less than --epsilon 8"),
    (["--metrics-epsilon", "-1"], "must not be negative"), (["--metrics-epsilon", "nan"], "must not be negative"),
    (["--metrics-epsilon", "1", "--days", "2"], "runs of one day"),
    (["--metrics-epsilon", "1", "--mechanism", "spectral-exact"], "leave it out"),
])  # fmt: skip
def test_a_price_that_does_not_fit_is_refused_before_anything_is_paid(small, tmp_path, capsys, options, words):
    assert train(*small, *options, "--out", tmp_path / "run", "--quiet") == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not (tmp_path / "run").exists()
