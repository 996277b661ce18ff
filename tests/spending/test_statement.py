"""The statement says what the guarantee rests on, and borrows TF Privacy's words only where they hold."""

import re
import sys

import pytest
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent

from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.privacy import Accountant, PoissonSampling

USERS = PoissonSampling(num_units=110_794, expected_batch_size=1024, unit="user")


def test_it_names_everything_it_rests_on():
    accountant = Accountant(GaussianDpEvent(1.0), USERS, 1e-6, "rdp")
    accountant.spend(GaussianDpEvent(30.0), "popularity counts")
    text = " ".join(accountant.statement(steps=500).split())
    for part in (
        f"epsilon = {round_up(accountant.epsilon(500)):g}",
        "delta = 1e-06",
        "one user",
        "Adjacency: zero-out: data sets that differ by one user, which contributes nothing in one of them",
        "Poisson",
        "q = 1024/110794",
        "500 steps of Gaussian noise of multiplier 1",
        "popularity counts: Gaussian noise of multiplier 30",
        "RDP, dp-accounting",
        "Public: the number of users, 110794",
    ):
        assert part in text
    assert "TF Privacy" not in text, "TF Privacy's text knows nothing of what else was spent"


@pytest.mark.slow_cases("1237-pld")
@pytest.mark.parametrize("by", ["rdp", "pld"])
@pytest.mark.parametrize("steps", [1, 500, 1237])
def test_tf_privacy_agrees(by, steps):
    accountant = Accountant(GaussianDpEvent(1.1), USERS, 1e-6, by)
    text = accountant.statement(steps)
    theirs = float(re.search(r"Poisson sampling \(\*\): +([\d.]+)", text).group(1))
    assert theirs == pytest.approx(accountant.epsilon(steps), abs=5.1e-4)


def test_the_import_switch_is_left_as_it_was():
    Accountant(GaussianDpEvent(1.1), USERS, 1e-6, "rdp").statement(10)
    assert not hasattr(sys, "skip_tf_privacy_import")


def test_no_guarantee_is_said_plainly():
    text = Accountant(NonPrivateDpEvent(), USERS, 1e-6).statement(steps=10)
    assert "epsilon is infinite" in text and "Covers:" not in text and "TF Privacy" not in text


@pytest.mark.parametrize("epsilon", [0.0, 0.00012345, 0.9999999, 1.0, 2.71404, 7.99999, 8.0, 123456.0])
def test_epsilon_is_never_rounded_down(epsilon):
    shown = float(f"{round_up(epsilon):g}")
    assert epsilon * (1 - 1e-9) <= shown <= epsilon * 1.0011
