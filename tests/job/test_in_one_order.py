"""`tfdp-rec train --sampling shuffled`: planned noise for users in one order, and what it costs."""

import json

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent
from job.conftest import cut_at, results_of
from scipy import optimize

from tfdp_rec.cli import main
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.data import Interactions
from tfdp_rec.job.budget import LABELS, PRIOR, Budget, prior_noise
from tfdp_rec.job.recommenders import training
from tfdp_rec.job.settings import SHUFFLED, JobSettings
from tfdp_rec.job.users import split_users
from tfdp_rec.privacy import FixedOrder, epsilon_of, optimised_correlation

SMALL = "--users 600 --movies 150 --steps 12 --batch-size 60 --width 4 --hidden 0 --quiet --epsilon 2".split()
DELTA = 1e-6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of planned noise on one order, killed and gone on with: its folder."""
    root = tmp_path_factory.mktemp("shuffled")
    cut_and_gone_on_with(root, True)
    return root / "run"


def cut_and_gone_on_with(root, dead):
    """Of a plan that was cut after 7 steps, the ledger's total then and at its end."""
    kept, chosen = root / "kept", ["--sampling", "shuffled", "--mechanism", "lazydpftrl"]
    ledger = root / "run" / "release" / "ledger.jsonl"
    with pytest.MonkeyPatch.context() as cutting:
        cut_at(cutting, 7, dead)
        keeping = ["--checkpoint", str(kept), "--checkpoint-every", "5"]
        assert main(["train", *SMALL, *chosen, *keeping, "--out", str(root / "run")]) == 130
    before = read(ledger).epsilon(DELTA)
    assert main(["train", "--checkpoint", str(kept), "--resume", "--quiet"]) == 0
    result = results_of(root / "run")["lazydpftrl"]
    assert result["steps"] == 12 and 1.9 < result["epsilon"] <= 2
    assert read(ledger).epsilon(DELTA) == pytest.approx(before) == pytest.approx(result["epsilon"], rel=1e-6)


@pytest.mark.slow
def test_it_costs_what_the_run_may(run):
    results = results_of(run)
    config = json.loads((run / "private" / "config.json").read_text())
    noises, order = config["noise_multipliers"], FixedOrder(config["train_users"], 60, unit="user")
    plan = optimised_correlation(12, order.separation, participations=order.participations(12))
    paid = read(run / "release" / "ledger.jsonl").paid
    figures = [each.event for each in paid if each.label == "metrics of held-out units"]
    whole = [plan.dp_event(noises["lazydpftrl"]), GaussianDpEvent(prior_noise(2.0, DELTA)), *figures]
    assert len(figures) == 1
    spent, result = epsilon_of(ComposedDpEvent(whole), DELTA), results["lazydpftrl"]
    assert result["epsilon"] == pytest.approx(spent, rel=1e-6) and 1.9 < spent <= 2 and result["steps"] == 12


@pytest.mark.slow
def test_the_report_says_what_the_order_promises_and_releases_the_planned_one(run):
    said = (run / "private" / "report.md").read_text()
    assert "no amplification claimed" in " ".join(said.split())
    assert "**LazyDPFTRL** is in `release/servable/`" in said and "**Recommender**: **LazyDPFTRL**" in said


@pytest.mark.slow
def test_planned_noise_leaves_less_in_the_released_sum_at_equal_epsilon():
    """600 steps of 27 batches an epoch: what is left of it in the weights' noise, planned and independent."""
    settings = JobSettings(mechanism=("lazydpftrl",), sampling=SHUFFLED, batch_size=30, steps=594, epsilon=8.0)
    order = FixedOrder(810, 30, unit="user")
    spent = [(event, LABELS[file]) for file, event in Budget(8.0, DELTA, public=True).releases(PRIOR).items()]
    noises = training.noises_for(settings, order, DELTA, {PRIOR: spent})
    planned = training.correlation_for("lazydpftrl", settings, order)
    times, besides = order.participations(594), [event for event, _ in spent]

    def over(noise):
        each = SelfComposedDpEvent(GaussianDpEvent(noise), times)
        return epsilon_of(ComposedDpEvent([each, *besides]), DELTA) - 8.0

    independent = optimize.brentq(over, 1.0, 50.0, xtol=1e-3)
    left = planned.error("last") * noises["lazydpftrl"] / (np.sqrt(594) * independent)
    assert left == pytest.approx(planned.against_independent(), rel=0.02) and left < 0.25


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 30.0])
def test_the_popularity_counts_leave_the_budget_to_training(epsilon):
    """A twenty-fifth of it at most, in σ⁻²; at ε = 8 what the rest was tuned with."""
    share = (noise_of_one_release(epsilon, DELTA) / prior_noise(epsilon, DELTA)) ** 2
    assert share <= 1 / 25 + 1e-9 and prior_noise(8.0, DELTA) == 4.0


def test_the_users_order_is_shuffled_and_is_everybodys():
    log = Interactions.read({"u": range(1000), "i": np.arange(1000) % 7}, user="u", item="i")
    users = split_users(log, JobSettings(mechanism=("lazydpftrl",), sampling=SHUFFLED, batch_size=30))
    assert 750 < len(np.unique(users.train)) == users.sampling.num_units and (np.diff(users.train) < 0).mean() > 0.4


@pytest.mark.slow  # the same after a kill is the module's run
def test_a_plan_that_was_interrupted_goes_on_and_is_paid_for_once(tmp_path):
    cut_and_gone_on_with(tmp_path, False)


@pytest.mark.slow
def test_a_plan_that_was_killed_goes_on_and_is_paid_for_once(run):
    """The fixture compares its total with that of the moment of the kill."""
    assert [paid.label for paid in read(run / "release" / "ledger.jsonl").paid].count("popularity counts") == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--mechanism", "lazydpftrl"], "add --sampling shuffled"),
        (["--sampling", "shuffled", "--local", "1", "1"], "--sampling shuffled trains in one process"),
        (["--sampling", "shuffled", "--mechanism", "lazydpsgd"], "planned noise alone"),
        (["--sampling", "unshuffled"], "invalid choice"),
        (["--sampling", "shuffled", "--mechanism", "lazydpftrl", "--days", "2"], "trainings of independent noise"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_line(tmp_path, capsys, arguments, says):
    try:
        assert main(["train", *SMALL, "--out", str(tmp_path / "run"), *arguments]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()
