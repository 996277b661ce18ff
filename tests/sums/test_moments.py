"""Private means and variances: what one unit moves, found by leaving each out; the noise; and layers made of them."""

import itertools

import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

import tfdp_rec
from tfdp_rec.core.mechanism.noise.words import seeded
from tfdp_rec.privacy import Accountant, PoissonSampling, private_moments
from tfdp_rec.sums import moments
from tfdp_rec.sums.fixed_point import ONE
from tfdp_rec.sums.moments import grid_moments

HARD = (-1.0, 1.0, 0.0, 1 - 2**-53, -1 + 2**-30, 1 / 3, np.nan)


def moved(numbers, units=None):
    """The most, in ℓ₂, by which a unit's rows move the sums, over all units: by counting them as no numbers."""
    units = np.arange(len(numbers)) if units is None else units
    whole, lengths = grid_moments(numbers, units), []
    for each in np.unique(units):
        without = np.where((units == each)[:, None], np.nan, numbers)
        lengths.append(float(np.sum((whole - grid_moments(without, units)).astype(float) ** 2)) ** 0.5)
    return max(lengths) / ONE


@pytest.mark.parametrize("columns", [1, 2, 3, 7])
def test_no_row_moves_the_sums_by_more_than_one(columns):
    rows = np.array(list(itertools.islice(itertools.product(HARD, repeat=columns), 400)))
    assert 1 - 1e-5 < moved(rows) <= 1
    assert moved(np.random.default_rng(columns).uniform(-1, 1, [300, columns])) <= 1


@pytest.mark.parametrize("columns", [1, 3])
def test_no_user_moves_them_by_more_than_one_whatever_their_rows(columns):
    rng = np.random.default_rng(columns)
    units = np.sort(rng.integers(0, 40, 500))
    units = np.unique(units, return_inverse=True)[1]
    assert moved(rng.choice(HARD, [500, columns]), units) <= 1
    assert 1 - 1e-5 < moved(np.sign(rng.normal(size=[40, columns]))[units], units) <= 1  # rows that all say the same
    assert moved(np.ones([500, columns]), np.zeros(500, np.int64)) <= 1


def test_they_are_the_means_and_variances_of_what_was_given():
    rng = np.random.default_rng(0)
    x = rng.normal([3.0, -20.0], [0.5, 8.0], [200_000, 2])
    mean, variance, event = private_moments(x, [0, -80], [6, 40], noise_multiplier=4.0)
    np.testing.assert_allclose(mean, x.mean(0), atol=0.02)
    np.testing.assert_allclose(variance, x.var(0), rtol=0.1)
    assert event == GaussianDpEvent(4.0)
    one = private_moments(x[:, 0], 0.0, 6.0, noise_multiplier=4.0)
    assert np.shape(one.mean) == () and one.mean == pytest.approx(x[:, 0].mean(), abs=0.01)


def test_each_user_counts_once():
    unit = ["much"] * 5000 + [f"u{k}" for k in range(1000)]
    x = np.r_[np.full(5000, 10.0), np.zeros(1000)]
    assert private_moments(x, 0, 10, noise_multiplier=0.1, unit=unit).mean < 0.1
    assert private_moments(x, 0, 10, noise_multiplier=0.1).mean > 8


def test_numbers_beyond_the_bounds_are_cut_and_what_is_none_is_left_out():
    x = np.array([np.inf, -np.inf, 1e300, np.nan, 0.0])
    found = private_moments(x, -1, 1, noise_multiplier=1e-6)
    assert found.mean == pytest.approx((1 - 1 + 1 + 0 + 0) / 5, abs=1e-4)
    assert found.variance == pytest.approx(3 / 5 - 0.2**2, abs=1e-4)


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.9, False), (1.1, False)])
def test_the_noise_has_its_size(error, accepted):
    x = np.zeros([10, 2])
    drawn = np.array([private_moments(x, -1, 1, noise_multiplier=0.1, words=seeded(k)).mean for k in range(2000)])
    expected = 0.1 * 2 / 10 * error  # σ √(2 columns) / rows, in halves of the bounds
    assert (abs(drawn.std() / expected - 1) < 6 / np.sqrt(2 * drawn.size)) == accepted
    assert private_moments(x, -1, 1, noise_multiplier=1.0, words=seeded(1)).event != GaussianDpEvent(1.0)


def test_a_variance_that_noise_hides_is_that_of_the_noise():
    for k in range(20):
        found = private_moments(np.full(100, 0.3), 0, 1, noise_multiplier=3.0, words=seeded(k))
        assert 0.25 * 3 * 2**0.5 / 100 <= found.variance * (1 + 1e-6) and found.variance <= 0.25
        assert 0 <= found.mean <= 1


def test_they_are_paid_for_before_anything_is_summed():
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-5)
    with pytest.raises(ValueError, match="unit="):
        private_moments([0.0, 1.0], 0, 1, noise_multiplier=5.0, accountant=accountant)
    assert accountant.epsilon() == 0
    private_moments([0.0, 1.0], 0, 1, noise_multiplier=5.0, accountant=accountant, unit=["a", "b"])
    alone = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-5)
    alone.spend(GaussianDpEvent(5.0), "the same")
    assert accountant.epsilon() == alone.epsilon() > 0 and "means and variances" in accountant.statement()


def test_what_was_begun_is_paid_for(monkeypatch):
    accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-5)
    monkeypatch.setattr(moments, "grid_moments", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        private_moments([0.0, 1.0], 0, 1, noise_multiplier=5.0, accountant=accountant, unit=["a", "b"])
    assert accountant.epsilon() > 0


def test_a_user_without_rows_is_one_of_the_accountants_users():
    """Who contributes nothing has no row: the number of users that have one stood in each variance that noise hides."""
    found = []
    for users in (1000, 999):
        accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10, unit="user"), delta=1e-5)
        given = {"unit": np.arange(users), "accountant": accountant, "words": seeded(1)}
        found.append(private_moments(np.full(users, 0.5), 0, 1, noise_multiplier=200.0, **given))
    assert found[0].variance == found[1].variance == pytest.approx(0.25 * 200 * 2**0.5 / 1000, rel=1e-5)


@pytest.mark.parametrize(
    "change, words",
    [({"noise_multiplier": 0.0}, "noise_multiplier"), ({"upper": 0.0}, "lower"), ({"upper": np.inf}, "lower"),
     ({"values": []}, "shape"), ({"values": np.zeros([2, 2, 2])}, "shape"), ({"unit": [1]}, "one id")],
)  # fmt: skip
def test_bad_arguments_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        private_moments(**{"values": [0.0, 1.0], "lower": 0.0, "upper": 1.0, "noise_multiplier": 1.0, **change})


def test_a_layer_is_made_of_them_in_a_line():
    x = np.random.default_rng(1).normal(5.0, 2.0, [20_000, 3])
    mean, variance, _ = private_moments(x, -5, 15, noise_multiplier=3.0)
    layer = keras.layers.Normalization(mean=mean, variance=variance)
    layer.build([None, 3])
    made = np.asarray(layer(x[:1000]))
    np.testing.assert_allclose(made.mean(0), 0, atol=0.15)
    np.testing.assert_allclose(made.std(0), 1, atol=0.1)
    assert tfdp_rec.privacy.private_moments is private_moments
