"""The split of users, the popularity prior under noise of the size its event claims, and the tests of a job."""

import numpy as np
import pytest

from tfdp_rec.data import Interactions, NextItemExamples
from tfdp_rec.datasets.timelines import Timelines
from tfdp_rec.job.evaluation import Evaluation, NewItemExamples, same_for_all
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.users import UserSubset, split_users

MOVIES = 200_000
UNLIKELY = 6.0  # standard errors: two-sided chance 2e-9


@pytest.mark.parametrize("error, accepted", [(1.0, True), (0.95, False), (1.05, False)])
def test_popularity_of_movies_without_a_user_is_the_noise_above_zero(error, accepted):
    """What is left of N(0, σ²) above zero has mean square σ²/2, and that has variance 5/4 σ⁴."""
    catalogue = np.arange(1, MOVIES + 1)
    log = Interactions.read({"u": [1], "i": [MOVIES + 1]}, user="u", item="i", items=catalogue.tolist())
    sigma = 3.0
    users = UserSubset(log, np.array([0]))
    released, event = users.noisy_popularity(log.catalogue, sigma)
    above = (released - 0.25 * sigma - 0.1) / (error * sigma)
    assert above.min() >= -1e-9
    assert (abs(np.mean(above**2) - 0.5) < UNLIKELY * np.sqrt(1.25 / MOVIES)) == accepted
    assert event.noise_multiplier == sigma
    assert not np.array_equal(released, users.noisy_popularity(log.catalogue, sigma).values)


def test_popularity_of_a_popular_movie_stays_visible():
    watched = Interactions.read({"u": range(500), "i": [8] * 500}, user="u", item="i", items=[7, 8])
    released = UserSubset(watched, np.arange(500)).noisy_popularity(watched.catalogue, 1.0).values
    assert abs(released[1] - 500.35) < 8 and 0 < released[0] < 8


def test_a_held_out_user_without_a_row_in_a_log_without_times_has_no_example():
    """NumPy refused to shuffle no rows of a mapped log, after the release was paid for."""
    rows = {"u": ["ann", "ann", "bob"], "i": ["tea", "jam", None]}
    log = Interactions.read(rows, user="u", item="i", items=["tea", "jam"])
    assert len(log) == 2 and len(NewItemExamples(log, np.arange(2)).fixed()["label"]) == 1


def watching(lengths, movies=40, seed=0):
    rng = np.random.default_rng(seed)
    each = [rng.permutation(movies)[:length] + 1 for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Timelines(np.concatenate(each), offsets, range(len(lengths)), range(1, movies + 1), [""] * movies)


@pytest.mark.parametrize("left", [0, 1])
def test_the_items_of_a_user_do_not_change_the_split_of_the_other_users(left):
    """Else neighbouring data sets would train on other users altogether, whatever noise they got."""
    settings, lengths = JobSettings(batch_size=10, mechanism=("lazydpsgd",)), np.full(100, 6)
    whole, of_all = split(watching(lengths), settings)
    for user in (0, 57, 99):
        fewer, tested = split(watching(np.where(np.arange(100) == user, left, lengths)), settings)
        assert np.array_equal(fewer.train, whole.train) and fewer.sampling.num_units == len(whole.train)
        assert tested == of_all - (user in whole.test)
    assert not set(whole.train) & set(whole.test) and len(whole.train) + len(whole.test) == 100 and of_all > 8


def split(timelines, settings):
    """The users' sides, and how many are tested; a user without known items has a row of another item."""
    users = np.repeat(timelines.user_ids, timelines.lengths)
    rows = {"u": [*range(100), *users], "i": [999] * 100 + timelines.numbers.tolist()}
    log = Interactions.read(rows, user="u", item="i")
    found = split_users(log, settings)
    known = log.with_items(range(1, 41))
    return found, sum(len(np.unique(known[user])) > 1 for user in found.test)


def test_ranks_are_those_that_sorting_gives():
    timelines = watching(np.arange(2, 32))
    tests = Evaluation(NextItemExamples(timelines, history=5, negatives=1), seed=3)
    scores = np.random.default_rng(1).integers(0, 8, [30, 40]).astype(np.float32)  # many are equal
    scores[4, 7] = np.nan
    row = iter(range(30))
    places = tests.ranks(lambda context: scores[[next(row) for _ in context]])
    for user, (context, label) in enumerate(zip(tests.context, tests.label)):
        others = [movie for movie in range(1, 41) if movie not in context]
        order = sorted(others, key=lambda movie: (-np.nan_to_num(scores[user, movie - 1], nan=-np.inf), movie))
        assert places[user] == order.index(label)
    found = tests.measure(lambda context: scores[: len(context)])
    assert found["recall@5"].value == np.mean(places < 5)
    assert found["nDCG@10"].value == pytest.approx(np.mean([1 / np.log2(p + 2) if p < 10 else 0 for p in places]))


def test_scores_that_are_no_numbers_rank_last():
    tests = Evaluation(NextItemExamples(watching([9] * 20), history=5, negatives=1), seed=3)
    assert tests.measure(same_for_all(np.full(40, np.nan)))["recall@1"].value < 0.5
