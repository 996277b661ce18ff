"""Sampling against coin flips and counting, and what it makes of events."""

import fractions
import itertools
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import ComposedDpEvent, GaussianDpEvent, NonPrivateDpEvent
from scipy import stats

from tfdp_rec.core.claim import secret_draws
from tfdp_rec.core.claim.schemes import fold_gaussians
from tfdp_rec.core.mechanism.noise.words import os_entropy
from tfdp_rec.privacy import FixedOrder, PoissonSampling, epsilon_of


def subset_chi_square(samples, num_units, probability):
    """p-value of the observed subsets under independent coin flips."""
    codes = [sum(1 << int(unit) for unit in sample) for sample in samples]
    observed = np.bincount(codes, minlength=2**num_units)
    sizes = np.array([code.bit_count() for code in range(2**num_units)])
    expected = probability**sizes * (1 - probability) ** (num_units - sizes) * len(samples)
    return stats.chisquare(observed, expected).pvalue


def test_every_subset_is_as_likely_as_under_coin_flips():
    batches = PoissonSampling(5, 2).index_batches(seed=0)
    assert subset_chi_square([next(batches) for _ in range(20_000)], 5, 0.4) > 1e-6


@pytest.mark.parametrize("wrong", ["fixed size", "other probability", "pairs stick together"])
def test_the_subset_test_rejects_what_is_not_poisson(wrong):
    rng = np.random.default_rng(0)
    draw = {
        "fixed size": lambda: rng.choice(5, 2, replace=False),
        "other probability": lambda: np.flatnonzero(rng.random(5) < 0.42),
        "pairs stick together": lambda: np.flatnonzero(
            np.append(np.repeat(rng.random(2) < 0.4, 2), rng.random() < 0.4)
        ),
    }[wrong]
    assert subset_chi_square([draw() for _ in range(20_000)], 5, 0.4) < 1e-6


def test_large_samples_have_distinct_units_evenly_and_the_right_sizes():
    sampling = PoissonSampling(50_000, 500)
    samples = list(itertools.islice(sampling.index_batches(seed=3), 400))
    sizes = [len(sample) for sample in samples]
    counts = np.bincount(np.concatenate(samples), minlength=50_000)
    assert all(len(np.unique(sample)) == len(sample) for sample in samples)
    assert abs(np.mean(sizes) - 500) < 5 * np.sqrt(500 / 400)
    assert 0.7 < np.var(sizes) / (500 * 0.99) < 1.4
    assert stats.chisquare(counts.reshape(100, 500).sum(axis=1)).pvalue > 1e-6


def test_without_a_seed_nothing_repeats_and_with_one_it_goes_on_where_it_stopped():
    sampling = PoissonSampling(1000, 50)
    fresh = [next(sampling.index_batches()).tolist() for _ in range(2)]
    straight = list(itertools.islice(sampling.index_batches(seed=7), 5))
    resumed = list(itertools.islice(sampling.index_batches(seed=7, position=3), 2))
    assert fresh[0] != fresh[1]
    assert [batch.tolist() for batch in straight[3:]] == [batch.tolist() for batch in resumed]


def test_keras_global_seed_does_not_make_samples_repeat():
    import keras

    drawn = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        drawn.append(next(PoissonSampling(10_000, 100).index_batches()).tolist())
    assert drawn[0] != drawn[1]


def fetch(indices):
    context = np.zeros([len(indices), 3], np.int32) + np.asarray(indices, np.int32)[:, None]
    return {"context": context, "label": np.asarray(indices, np.int64)}


def negatives():
    return {"negatives": np.ones(4, np.float32)}


def test_the_dataset_has_open_batch_dimensions_and_yields_empty_batches():
    sampling = PoissonSampling(20, 1, unit="user")
    dataset = sampling.batches(fetch, seed=0, shared=negatives)
    features, draw = dataset.element_spec.batch, dataset.element_spec.draw
    assert features["context"] == tf.TensorSpec([None, 3], tf.int32)
    assert features["label"] == tf.TensorSpec([None], tf.int64)
    assert features["negatives"] == tf.TensorSpec([4], tf.float32)
    assert draw.sampling == sampling.name and draw.seeded and draw.shared == ("negatives",)
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    drawn = list(dataset.take(50))
    assert [int(d.draw.number) for d in drawn] == list(range(50))
    assert len({int(d.draw.iteration) for d in drawn}) == 1
    sizes = [len(d.batch["label"]) for d in drawn]
    assert sizes == [int(d.draw.size) for d in drawn] and 0 in sizes and max(sizes) > 1


def test_a_single_unit_and_a_full_batch():
    assert PoissonSampling(1, 1).batches(fetch).element_spec.batch["label"].shape == [None]
    assert len(next(PoissonSampling(9, 9).index_batches())) == 9


def test_shared_inputs_need_a_dict_to_go_into():
    with pytest.raises(ValueError, match="shared= must give a dict"):
        PoissonSampling(10, 2).batches(lambda i: i, shared=negatives)
    with pytest.raises(ValueError, match="without those keys"):
        PoissonSampling(10, 2).batches(lambda i: {"negatives": i}, shared=negatives)
    both = PoissonSampling(10, 2).batches(lambda i: ({"id": i}, i), shared=negatives).element_spec.batch
    assert set(both[0]) == {"id", "negatives"}


def test_fetch_with_a_careless_empty_batch_is_refused():
    with pytest.raises(ValueError, match="fetch gives arrays of different dtype"):
        PoissonSampling(10, 2).batches(lambda indices: np.array([[i, i] for i in indices.tolist()]))
    with pytest.raises(ValueError, match="one row for each index"):
        PoissonSampling(10, 2).batches(lambda indices: np.zeros(3))


@pytest.mark.parametrize("scheme", [PoissonSampling, FixedOrder])
def test_bad_sizes_are_refused(scheme):
    with pytest.raises(ValueError, match="num_units must be a positive integer"):
        scheme(0, 1)
    with pytest.raises(ValueError, match="expected_batch_size must be.* positive"):
        scheme(10, 0)
    with pytest.raises(ValueError, match="fewer units than a batch"):
        scheme(10, 11)
    if scheme is PoissonSampling:
        with pytest.raises(ValueError, match="position means nothing without a seed"):
            scheme(10, 2).batches(fetch, position=3)


def test_poisson_composes_as_sampled_steps():
    event = PoissonSampling(1000, 10).compose(GaussianDpEvent(1.5), 7)
    step = dp_accounting.PoissonSampledDpEvent(0.01, GaussianDpEvent(1.5))
    assert event == dp_accounting.SelfComposedDpEvent(step, 7)


def test_folding_keeps_what_is_not_gaussian():
    laplace = dp_accounting.LaplaceDpEvent(2.0)
    mixed = ComposedDpEvent([GaussianDpEvent(1.0), laplace])
    nested = dp_accounting.SelfComposedDpEvent(ComposedDpEvent([GaussianDpEvent(2), GaussianDpEvent(2)]), 2)
    assert fold_gaussians(mixed) is mixed and fold_gaussians(laplace) is laplace
    assert fold_gaussians(nested) == GaussianDpEvent(1.0)
    assert fold_gaussians(NonPrivateDpEvent()) == NonPrivateDpEvent()


def test_the_state_of_a_sampling_tells_nothing_of_its_samples():
    sampling = PoissonSampling(100, 10)
    list(sampling.batches(fetch).take(3))
    assert set(sampling.get_state()) == {"scheme", "num_units", "expected_batch_size", "unit"}
    with pytest.raises(ValueError, match="Unknown sampling scheme"):
        PoissonSampling.from_state({"scheme": "Wonderful"})
    with pytest.raises(ValueError, match="PoissonSampling does not have these settings"):
        PoissonSampling.from_state({"scheme": "PoissonSampling", "units": 3})


def test_lookahead_is_the_function_whoever_imported_its_module():
    import sys

    import tfdp_rec
    import tfdp_rec.training.model

    assert tfdp_rec.training.lookahead is sys.modules["tfdp_rec.training.lookahead"].lookahead
    with pytest.raises(AttributeError, match="no attribute 'look_ahead'"):
        tfdp_rec.data.look_ahead  # noqa: B018


# Neighbours.


def test_neighbours_are_zero_out_under_every_scheme():
    from tfdp_rec.privacy import BoundedStream

    assert {scheme.adjacency for scheme in (PoissonSampling, FixedOrder, BoundedStream)} == {"zero-out"}


@pytest.mark.slow_cases("0.5-0.3")
@pytest.mark.parametrize("noise, probability", [(1.0, 0.01), (0.5, 0.3), (2.0, 1.0)])
def test_a_sampled_step_costs_what_zero_out_neighbours_can_tell(noise, probability):
    """δ(ε) of (1 - q) N(s, σ²) + q N(s + g, σ²) against N(s, σ²), both ways, by integration."""
    x, width = np.linspace(-12 * noise, 1 + 12 * noise, 400_001, retstep=True)
    without, present = stats.norm.pdf(x, 0, noise), stats.norm.pdf(x, 1, noise)
    with_it = (1 - probability) * without + probability * present
    for epsilon in (0.01, 0.1, 1.0):
        pairs = ((with_it, without), (without, with_it))
        both = [np.maximum(p - np.exp(epsilon) * q, 0).sum() * width for p, q in pairs]
        found = epsilon_of(PoissonSampling(1000, 1000 * probability).compose(GaussianDpEvent(noise), 1), max(both))
        assert found == pytest.approx(epsilon, abs=2e-4)


# Where the draws come from.


def test_draws_are_of_the_systems_entropy_and_of_no_generator_that_was_seeded_once(monkeypatch):
    """Whoever knows a generator's state knows who is in every later batch, and amplification is gone."""
    words = []
    monkeypatch.setattr(secret_draws, "os_entropy", lambda count: words.append(count) or os_entropy(count))
    monkeypatch.setattr(np.random, "default_rng", None)
    batches = PoissonSampling(1000, 50).index_batches()
    sizes = [len(next(batches)) for _ in range(3)]
    assert sum(words) >= sum(sizes) > 0
    with pytest.raises(TypeError):
        next(PoissonSampling(1000, 50).index_batches(seed=0))  # for tests: it is seeded


@pytest.mark.parametrize("expected", [2, 4])  # more than half: what is left out is drawn
def test_every_subset_is_as_likely_as_under_coin_flips_of_the_systems_entropy(expected):
    batches = PoissonSampling(5, expected).index_batches()
    samples = [next(batches) for _ in range(20_000)]
    assert subset_chi_square(samples, 5, expected / 5) > 1e-6
    for wrong in (expected / 5 - 0.02, expected / 5 + 0.02):
        assert subset_chi_square(samples, 5, wrong) < 1e-6


@pytest.mark.parametrize("num_units, expected", [(3000, 40), (1 << 20, 300.5)])
def test_units_are_drawn_at_the_rate_that_is_priced_and_evenly(num_units, expected):
    batches = PoissonSampling(num_units, expected).index_batches()
    samples = [next(batches) for _ in range(2000)]
    assert all(np.all(np.diff(sample) > 0) and sample.dtype == np.int64 for sample in samples)
    drawn = np.concatenate(samples)
    rate = lambda q: stats.binomtest(len(drawn), 2000 * num_units, q).pvalue  # noqa: E731
    assert rate(expected / num_units) > 1e-6 > max(rate(1.03 * expected / num_units), rate(0.97 * expected / num_units))
    assert 0.85 < np.var([len(sample) for sample in samples]) / expected < 1.15
    assert stats.chisquare(np.bincount(drawn * 16 // num_units, minlength=16)).pvalue > 1e-6


@pytest.mark.parametrize(
    "num_units, probability", [(1, 0.3), (7, 0.3), (7, 1.0), (40, 1 - 2**-20), (60, 1e-9), (150, 0.1)]
)
def test_sizes_are_binomial_to_within_2_to_the_minus_90(num_units, probability):
    """By whole numbers: the chances that the page claims, all together."""
    q = fractions.Fraction(probability)
    least, ends = secret_draws.sizes(num_units, probability)
    weights = np.diff([0, *ends])
    exact = [math.comb(num_units, m) * q**m * (1 - q) ** (num_units - m) for m in range(num_units + 1)]
    held = {least + number: fractions.Fraction(int(weight), ends[-1]) for number, weight in enumerate(weights)}
    assert sum(abs(chance - held.get(size, 0)) for size, chance in enumerate(exact)) < 2**-90
    assert set(held) <= set(range(num_units + 1))


def test_a_batch_of_half_a_million_users_has_no_user_twice():
    drawn = secret_draws.poisson_sample(1_000_000, 0.5)
    assert 490_000 < len(drawn) < 510_000 and (np.diff(drawn) > 0).all()


@pytest.mark.parametrize("entropy", ["all ones", "one after the other"])
def test_no_word_prefers_a_unit(entropy, monkeypatch):
    """2^64 is no multiple of 5: the last word would make unit 0 likelier, and is drawn anew."""
    words = [2**64 - 1, 7, 7, 8] if entropy == "all ones" else [11, 12]
    given = lambda count: np.array([words.pop(0) for _ in range(count)], np.uint64)  # noqa: E731
    monkeypatch.setattr(secret_draws, "os_entropy", given)
    monkeypatch.setattr(secret_draws, "sizes", lambda *_: (2, [1]))
    assert secret_draws.poisson_sample(5, 0.4).tolist() == ([2, 3] if entropy == "all ones" else [1, 2])
