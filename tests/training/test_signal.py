"""The share of the signal that ε allows, and the choice of batch size and epochs by it."""

import math

import keras
import numpy as np
import pytest

import tfdp_rec
from tfdp_rec.core.claim.calibration import calibrate_noise
from tfdp_rec.core.claim.schemes import PoissonSampling
from tfdp_rec.training.signal import choose_batches, share_of_signal


def share(units, batch, epochs, epsilon=8.0, delta=1e-6):
    sampling, steps = PoissonSampling(units, batch), epochs * math.ceil(units / batch)
    noise = calibrate_noise(epsilon, delta, sampling, steps, "rdp")
    return share_of_signal(sampling, steps, noise, epsilon, delta)


def test_all_units_in_one_sum_reach_all_of_it():
    # The accountant's search ends within some ten-thousandths of the noise.
    noise = calibrate_noise(8.0, 1e-6, PoissonSampling(36_000, 36_000), 1)
    assert share_of_signal(PoissonSampling(36_000, 36_000), 1, noise, 8.0, 1e-6) == pytest.approx(1, abs=2e-3)


def test_it_is_the_signal_to_noise_of_the_summed_steps():
    """Simulated: one direction that every unit pulls by 1, against the one release."""
    rng, units, batch, steps, noise = np.random.default_rng(0), 1_000, 100, 50, 1.5
    sums = rng.binomial(units, batch / units, size=[20_000, steps]).sum(axis=1)
    told = sums.mean() / (noise * math.sqrt(steps))
    sampling = PoissonSampling(units, batch)
    from_one = units / calibrate_noise(2.0, 1e-5, PoissonSampling(units, units), 1)
    assert share_of_signal(sampling, steps, noise, 2.0, 1e-5) == pytest.approx(told / from_one, rel=5e-3)


def test_larger_batches_and_more_epochs_reach_more():
    grid = [[share(36_000, batch, epochs) for batch in (500, 2_000, 8_000)] for epochs in (5, 20, 60)]
    assert (np.diff(grid, axis=0) > 0).all() and (np.diff(grid, axis=1) > 0).all() and np.max(grid) < 1


@pytest.mark.parametrize(
    ("units", "values", "epsilon", "chosen"),
    [
        (36_000, 3, 8.0, (3_600, 40)),
        (36_000, 3, 1.0, (1_800, 20)),
        (300_000, 3, 1.0, (8_109, 40)),
        (10_000_000, 3, 8.0, (8_191, 2)),  # signal is not what lacks
        (100_000, 500, 8.0, (524, 40)),  # memory: half a million values a batch
        (10, 3, 8.0, (1, 40)),
    ],
)
def test_the_fewest_epochs_that_reach_nearly_all_are_chosen(units, values, epsilon, chosen):
    assert choose_batches(units, values, epsilon, 1e-6) == chosen


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_nearly_all_is_what_the_least_noise_reaches(epsilon):
    """By a search for the noise of every number of epochs."""
    size, epochs = choose_batches(5_000, 3, epsilon, 1e-6)
    sizes = {each: choose_batches(5_000, 3, epsilon, 1e-6, epochs=each)[0] for each in (5, 10, 20, 40)}
    reached = {each: share(5_000, sizes[each], each, epsilon) for each in sizes}
    assert (size, epochs) == next(((sizes[each], each) for each in sizes if reached[each] >= 0.9), (sizes[40], 40))


def test_what_is_given_stays():
    assert choose_batches(36_000, 3, 8.0, 1e-6, batch_size=500)[0] == 500
    assert choose_batches(36_000, 3, 8.0, 1e-6, epochs=7) == (621, 7)  # 58 steps an epoch


def test_make_private_chooses_both_and_says_what_they_reach(capsys):
    ids = np.arange(400) % 30
    model = keras.Sequential([keras.layers.Embedding(30, 4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    y = (ids[:, None] / 30).astype("float32")
    private = tfdp_rec.make_private(model, (ids, y), epsilon=3.0, accountant="rdp")
    plan = private.plan
    assert (plan.sampling.expected_batch_size, private.epochs) == choose_batches(400, 2, 3.0, plan.delta)
    few = tfdp_rec.make_private(model, (ids, y), epsilon=3.0, batch_size=20, epochs=1, accountant="rdp")
    few.fit(verbose=2)
    assert f"Batches of 20 x 1 epochs reach {few.share_of_signal:.0%} of the signal that epsilon = 3 allows" in (
        said := capsys.readouterr().out
    )
    assert "without batch_size and epochs chooses both" in said
    assert "reliability=30.0" not in said
    clicks = keras.Sequential([keras.layers.Embedding(30, 4), keras.layers.Dense(1)])
    clicks.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    labels = (y > 0.5).astype("float32")
    tfdp_rec.make_private(clicks, (ids, labels), epsilon=3.0, batch_size=20, epochs=1, accountant="rdp").fit(verbose=2)
    assert "reliability=30.0" in capsys.readouterr().out
