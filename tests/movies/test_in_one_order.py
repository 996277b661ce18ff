"""`tfdp-rec train --sampling shuffled`: planned noise for users in one order, and what it costs."""

import json

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent

from tfdp_rec.cli import main
from tfdp_rec.movies import two_towers
from tfdp_rec.movies.problem import prepare
from tfdp_rec.movies.settings import SHUFFLED, Settings
from tfdp_rec.privacy import FixedOrder, epsilon_of, optimised_correlation

SMALL = "--users 600 --movies 150 --steps 12 --batch-size 60 --width 4 --hidden 0 --quiet --epsilon 2".split()
DELTA = 1e-6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of planned and of independent noise on one order: its folder."""
    folder = tmp_path_factory.mktemp("shuffled") / "run"
    chosen = ["--sampling", "shuffled", "--mechanism", "lazydpftrl", "--mechanism", "lazydpsgd"]
    assert main(["train", *SMALL, *chosen, "--out", str(folder)]) == 0
    return folder


def test_each_costs_what_the_run_may(run):
    results = {r["mechanism"]: r for r in json.loads((run / "results.json").read_text())}
    noises = json.loads((run / "config.json").read_text())["noise_multipliers"]
    order = FixedOrder(480, 60, unit="user")
    plan = optimised_correlation(12, order.separation, participations=order.participations(12))
    whole = {
        "lazydpftrl": plan.dp_event(noises["lazydpftrl"]),
        "lazydpsgd": SelfComposedDpEvent(GaussianDpEvent(noises["lazydpsgd"]), 2),
    }
    for name, event in whole.items():
        spent = epsilon_of(ComposedDpEvent([event, GaussianDpEvent(4.0)]), DELTA)
        assert results[name]["epsilon"] == pytest.approx(spent, rel=1e-6) and 1.9 < spent <= 2
        assert results[name]["steps"] == 12


def test_the_report_says_what_the_order_promises_and_releases_the_planned_one(run):
    said = (run / "report.md").read_text()
    assert "no amplification claimed" in " ".join(said.split())
    assert "**LazyDPFTRL** is in `servable/`" in said and "LazyDPFTRL" in said.split("## What is promised")[1]


def test_planned_noise_leaves_less_in_the_released_sum_at_equal_epsilon():
    """600 steps of 27 batches an epoch: what is left of it in the weights' noise, planned and independent."""
    timelines = two_towers_data()
    both = ("lazydpftrl", "lazydpsgd")
    settings = Settings(mechanisms=both, sampling=SHUFFLED, batch_size=30, steps=594, epsilon=8.0)
    problem = prepare(timelines, settings)
    noises = two_towers.noises_for(problem, settings)
    planned = two_towers.correlation_for("lazydpftrl", problem, settings)
    left = planned.error("last") * noises["lazydpftrl"] / (np.sqrt(594) * noises["lazydpsgd"])
    assert left == pytest.approx(planned.against_independent(), rel=0.02) and left < 0.25


def test_the_users_order_is_shuffled_and_is_everybodys():
    problem = prepare(two_towers_data(), Settings(mechanisms=("lazydpftrl",), sampling=SHUFFLED, batch_size=30))
    assert len(np.unique(problem.train)) == 810 and (np.diff(problem.train) < 0).mean() > 0.4
    assert problem.sampling.num_units == 810 and problem.sampling.adjacency == "zero-out"


def two_towers_data():
    from tfdp_rec.datasets.movielens import generated

    return generated.timelines(num_users=1012, num_movies=60, events=5_000)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--mechanism", "lazydpftrl"], "add --sampling shuffled"),
        (["--sampling", "shuffled", "--local", "1", "1"], "--sampling shuffled trains in one process"),
        (["--sampling", "shuffled", "--checkpoint", "kept"], "keeps no checkpoint"),
        (["--sampling", "unshuffled"], "invalid choice"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(tmp_path, capsys, arguments, says):
    try:
        assert main(["train", *SMALL, "--out", str(tmp_path / "run"), *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()
