"""Releases that are added up: the sums are those of one pass, and their noise is what it is said to be."""

import numpy as np
import pytest
from dp_accounting import SelfComposedDpEvent

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.core.mechanism.noise.words import os_entropy, seeded
from tfdp_rec.spectral import Release, SpectralRecommender
from tfdp_rec.spectral.denoising import noise_on_average, weights_between_items
from tfdp_rec.sums.fixed_point import release_pairs

NOTHING = 1e-9  # below half a step of the grid: no noise at all


def told(seed, users, items):
    """Each user has some items of one of three tastes."""
    rng = np.random.default_rng(seed)
    for _ in range(users):
        own = np.arange(1, items + 1)[rng.integers(3) :: 3]
        yield rng.choice(own, rng.integers(0, min(7, len(own))), replace=False)


def fitted(histories, items, before=None, sigma=NOTHING, words=os_entropy, **more):
    made = SpectralRecommender(np.arange(1, items + 1), noise_multiplier=sigma, before=before, words=words, **more)
    return made.fit(histories, verbose=0)


def pairs_of(release, items):
    whole = np.zeros((items, items))
    whole[np.ix_(release.head, release.head)] = release.pairs
    return whole


# Without noise, against one pass over both days.


def test_two_days_of_different_users_are_one_pass_over_both():
    one, two = list(told(1, 300, 30)), list(told(2, 500, 30))
    added = fitted(two, 30, fitted(one, 30).released)
    whole = fitted([*one, *two], 30)
    assert np.array_equal(added.released.counts, whole.released.counts) and added.released.users == 800
    assert pairs_of(added.released, 30) == pytest.approx(pairs_of(whole.released, 30), abs=1e-3)
    assert added.scores([[1, 4], []]) == pytest.approx(whole.scores([[1, 4], []]), abs=1e-4)


@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_an_item_that_was_unknown_on_the_first_day_has_zero_there(keep):
    one, two = list(told(1, 300, 20)), list(told(2, 500, 30))
    first = fitted(one, 20).released
    added = fitted(two, 30, first.faded(keep)).released
    alone = fitted(two, 30).released
    assert added.counts[20:] == pytest.approx(alone.counts[20:])
    assert added.counts[:20] == pytest.approx(keep * first.counts + alone.counts[:20])
    whole = keep * np.pad(pairs_of(first, 20), (0, 10)) + pairs_of(alone, 30)
    assert pairs_of(added, 30) == pytest.approx(whole, abs=1e-3) and added.fits == 2


def test_a_row_that_left_the_head_begins_anew():
    """Day 1 knows pairs of all, day 2 of items 1 to 4 alone, day 3 of all again."""
    release = Release()
    for head in ([0, 1, 2, 3, 4], [3, 2, 1, 0], [4, 0, 1, 2, 3]):
        places = np.array(head)
        pairs = np.ones((len(head), len(head)), np.float32) - np.eye(len(head), dtype=np.float32)
        release = release.add_counts(np.ones(5), 1.0, users=10).add_pairs(places, pairs, 2.0)
    expected = 3 * (1 - np.eye(5))
    expected[4, :4] = expected[:4, 4] = 1
    assert np.array_equal(pairs_of(release, 5), expected)
    assert release.head[0] == 4 and release.pairs_noise**2 == pytest.approx([4, 12, 12, 12, 12])


# Known noise: it is what it is said to be.


def test_the_noise_of_an_entry_is_what_is_said_of_it_and_no_other():
    """Three days of nobody's rows, items joining, heads moving: what is released is noise alone."""
    words, size = seeded(7), 260
    rng = np.random.default_rng(0)
    release, oracle = Release(), np.zeros((size, size))
    for sigma, keep, known in ((1.0, 1.0, 120), (3.0, 0.5, 200), (2.0, 0.8, size)):
        head = rng.permutation(known)[: known - 20]
        here = np.zeros(size)
        here[head] = 1
        oracle *= keep**2
        oracle *= np.outer(here, here)
        oracle += sigma**2 * np.outer(here, here)
        noisy = release_pairs(np.zeros((len(head), len(head)), np.int64), sigma, words)
        counts = np.zeros(known)
        release = release.faded(keep).add_counts(counts, sigma, users=1).add_pairs(head, noisy, sigma)
    said = np.minimum.outer(release.pairs_noise, release.pairs_noise)
    upper = np.triu_indices(len(said), 1)
    assert said[upper] ** 2 == pytest.approx(oracle[np.ix_(release.head, release.head)][upper])
    assert noise_on_average(release.pairs_noise) ** 2 == pytest.approx((said**2).mean())
    standard = release.pairs[upper] / said[upper]
    bound = 5.5 * (2 / len(standard)) ** 0.5
    assert abs(standard.var() - 1) < bound
    for wrong in (1.05, 0.95):
        assert abs((standard / wrong).var() - 1) > bound
    for each in np.unique(said[upper].round(9)):  # each kind of entry by itself
        own = release.pairs[upper][said[upper].round(9) == each] / each
        assert abs(own.var() - 1) < 5.5 * (2 / len(own)) ** 0.5


def test_the_noise_of_counts_is_what_is_said_of_it():
    words, items = seeded(3), (30_000, 50_000)
    one = fitted([[]] * 10, items[0], None, 1.5, words, head=20).released
    both = fitted([[]] * 10, items[1], one.faded(0.5), 1.5, words, head=20).released
    standard = both.counts / both.counts_noise
    assert not both.private and len(np.unique(both.counts_noise.round(9))) == 2
    for part in (standard[: items[0]], standard[items[0] :]):
        bound = 5.5 * (2 / len(part)) ** 0.5
        assert abs(part.var() - 1) < bound < abs((part / 1.05).var() - 1)


def test_the_head_is_chosen_by_what_all_days_know_and_their_noise():
    first = fitted([[1, 2, 3]] * 400, 40, None, 1.0)
    added = fitted([[]] * 400, 40, first.released, 1.0)
    assert set(added.released.head[:3].tolist()) == {0, 1, 2}
    assert added.released.noise_with(0.0) == pytest.approx(np.hypot(first.split.gram, added.split.gram))


def test_equal_noise_by_row_or_for_all_is_the_same():
    rng = np.random.default_rng(0)
    noisy = np.triu(rng.normal(0, 2.0, (40, 40)), 1).astype(np.float32)
    noisy += noisy.T
    noisy[3, 7] = noisy[7, 3] = 50
    one, other = (weights_between_items(noisy, noise, np.full(40, 5.0)) for noise in (2.0, np.full(40, 2.0)))
    assert np.array_equal(one, other)


# What is refused, and what is kept.


def test_items_join_and_never_leave():
    with pytest.raises(ValueError, match="Earlier sums have 3 items, and these 2: items only join"):
        Release().add_counts(np.zeros(3), 1.0, users=1).add_counts(np.zeros(2), 1.0, users=1)
    for keep in (0.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            Release().faded(keep)


def test_a_fit_on_a_tests_noise_has_no_guarantee_whatever_it_adds():
    first = fitted([[1, 2]] * 50, 4, None, 1.0, seeded(0)).released
    added = fitted([[1, 2]] * 50, 4, first, 1.0)
    assert np.isinf(added.epsilon) and not added.released.private
    honest = fitted([[1, 2]] * 50, 4, fitted([[1, 2]] * 50, 4, None, 1.0).released, 1.0)
    assert honest.released.private and "with the 1 earlier fits" in honest.statement().fields["Covers"]


def test_the_first_line_of_a_statement_is_of_all_fits_in_the_sums():
    """It told the ε of the last one, .8 of 1.3, and the exception far below."""
    honest = fitted([[1, 2]] * 50, 4, fitted([[1, 2]] * 50, 4, None, 1.0).released, 1.0)
    both = epsilon_of(SelfComposedDpEvent(honest.event, 2), honest.delta)
    assert honest.statement().fields["Guarantee"].startswith(f"(epsilon = {round_up(both):g}, ")


def test_what_was_added_up_is_saved_and_answers_the_same(tmp_path):
    made = fitted(list(told(3, 200, 25)), 25, fitted(list(told(4, 200, 20)), 20, None, 1.0).released.faded(0.7), 1.0)
    made.save(tmp_path / "sums.npz")
    again = SpectralRecommender.load(tmp_path / "sums.npz")
    assert np.array_equal(again.scores([[1, 4]]), made.scores([[1, 4]])) and again.released.fits == 2
    for name, value in made.released.arrays().items():
        assert np.array_equal(again.released.arrays()[name], value), name
