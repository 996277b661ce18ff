"""The private comparison: what one unit moves, by brute force; its noise; its choice; payment."""

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NonPrivateDpEvent

from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.privacy import Accountant, Ledger, PoissonSampling, Snapshot, epsilon_of, private_comparison
from tfdp_rec.sums import private_comparison as room
from tfdp_rec.sums.fixed_point import ONE

STRANGE = [0.0, 1.0, 0.3, 1 / 3, -5.0, 7.0, np.nan, np.inf, -np.inf, 1e300, -1e-300]


def compare(start, end, noise=1.0, **given):
    return private_comparison(
        np.arange(len(start)), lambda: start, lambda: end, **{"noise_multiplier": noise, **given}
    )  # fmt: skip


def exact(monkeypatch, start, end):
    """The sum before noise, in grid steps."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(room, "release_sums", lambda total, noise, words: found.append(int(total[0])) or total / ONE)
        compare(start, end)
    return found[0]


def test_no_unit_moves_the_sum_by_more_than_one_whatever_its_values_are(monkeypatch):
    rng, most = np.random.default_rng(0), 0
    for _ in range(60):
        start, end = rng.choice(STRANGE, [2, rng.integers(2, 8)])
        whole = exact(monkeypatch, start, end)
        for one in range(len(start)):
            left = np.arange(len(start)) != one
            without = exact(monkeypatch, start[left], end[left])
            assert without == exact(monkeypatch, np.where(left, start, 0.0), np.where(left, end, 0.0))
            most = max(most, abs(whole - without))
    assert most == ONE  # in whole numbers


def test_the_sum_is_that_of_the_differences(monkeypatch):
    rng = np.random.default_rng(1)
    start, end = rng.random([2, 50])
    assert abs(exact(monkeypatch, start, end) / ONE - sum(b - a for a, b in zip(start, end))) <= 50 / ONE


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.9, False), (1.1, False)])
def test_the_noise_has_its_size(error, accepted):
    start, end = np.zeros(20), np.full(20, 0.5)
    gains = [compare(start, end, 3.0, words=seeded(k)).gain for k in range(3000)]
    assert (abs(np.std(gains) / (3.0 * error) - 1) < 4.9 / (2 * 3000) ** 0.5) == accepted
    assert abs(np.mean(gains) - 10.0) < 4.9 * 3.0 / 3000**0.5


def test_the_end_is_taken_if_the_noisy_gain_is_above_the_threshold_that_is_told():
    start, end = np.zeros(20), np.full(20, 0.5)
    found = [compare(start, end, 4.0, words=seeded(k)) for k in range(2000)]
    assert {each.threshold for each in found} == {8.0}
    assert all(each.end_is_better == (each.gain > 8.0) for each in found)
    assert abs(np.mean([each.end_is_better for each in found]) - 0.6915) < 0.051  # z > −½
    for threshold, better in ((9.99, True), (10.01, False), (0.0, True), (-1.0, True)):
        assert compare(start, end, 1e-6, threshold=threshold).end_is_better == better
    assert not compare(end, start, 1e-6, threshold=0.0).end_is_better
    nothing = [compare(start, start, 4.0, words=seeded(k)).end_is_better for k in range(2000)]
    assert abs(np.mean(nothing) - 0.0228) < 0.0164  # z > 2


# Payment.


def accountant(**given):
    return Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-5, **given)


def test_it_is_paid_for_before_any_unit_is_scored_and_stays_paid_if_scoring_fails(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(1000, "user, item, time")) as ledger:
        payer, seen = accountant(ledger=ledger), []

        def score():
            seen.append([(paid.label, paid.event) for paid in ledger.paid])
            return [1.0, 0.0]

        found = private_comparison([1, 2], score, score, noise_multiplier=5.0, accountant=payer)
        assert seen == [[(room.LABEL, GaussianDpEvent(5.0))]] * 2 and found.event == GaussianDpEvent(5.0)
        assert payer.epsilon() == ledger.epsilon(1e-5) == pytest.approx(epsilon_of(found.event, 1e-5), rel=1e-6)
        for wrong in (lambda: 1 / 0, lambda: [1.0], lambda: [[1.0], [0.0]], lambda: 0.5):
            with pytest.raises((ZeroDivisionError, ValueError), match="division|one value for each of the 2 units"):
                private_comparison([1, 2], score, wrong, noise_multiplier=5.0, accountant=payer)
        assert len(ledger.paid) == 5


def test_test_noise_has_no_guarantee():
    assert compare([0.0], [1.0], words=seeded(0)).event == NonPrivateDpEvent()


@pytest.mark.parametrize(
    "change, words",
    [({"units": [1, 1]}, "twice"), ({"units": [1, None]}, "no user id"),
     ({"noise_multiplier": 0.0}, "noise_multiplier"), ({"noise_multiplier": np.nan}, "noise_multiplier"),
     ({"threshold": np.nan}, "finite"), ({"threshold": -np.inf}, "finite"), ({"unit": "row"}, "units of training")],
)  # fmt: skip
def test_bad_arguments_are_refused_in_one_sentence_before_anything_is_paid_or_scored(change, words):
    payer, seen = accountant(), []
    score = lambda: seen.append(1) or [0.0, 1.0]  # noqa: E731
    given = {"units": [1, 2], "start": score, "end": score, "noise_multiplier": 1.0, "accountant": payer, **change}
    with pytest.raises(ValueError, match=words) as refused:
        private_comparison(**given)
    said = str(refused.value)
    assert said.endswith(".") and len(said) < 500 and ". " not in said and payer.epsilon() == 0 and not seen
