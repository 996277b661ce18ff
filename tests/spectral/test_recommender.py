"""The recommender: what it costs, what it answers, what it refuses; and its export answers the same."""

import itertools
import math
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from tfdp_rec.core.mechanism.noise.words import os_entropy, seeded
from tfdp_rec.privacy import Accountant, PoissonSampling, epsilon_of, noise_of_one_release
from tfdp_rec.spectral import Histories, SpectralRecommender, order
from tfdp_rec.spectral.order import OrderVote
from tfdp_rec.spectral.rules import Split, head_of

ITEMS = np.random.default_rng(9).permutation(np.arange(1, 121)) * 7


def tastes(users=3000, seed=0):
    """Each user has eight items of one of six tastes and two of any."""
    rng = np.random.default_rng(seed)
    for _ in range(users):
        taste = rng.integers(6)
        yield np.concatenate([ITEMS[taste * 20 + rng.choice(20, 8, replace=False)], rng.choice(ITEMS, 2)])


@pytest.fixture(scope="module")
def fitted():
    return SpectralRecommender(ITEMS, epsilon=4.0, words=seeded(1)).fit(list(tastes()), verbose=0)


# What it costs.


def test_the_sums_of_a_run_do_not_state_a_cost_of_their_own(fitted, tmp_path):
    """The run may have found its items privately: a copy said so no more, and epsilon was that of the sums alone."""
    with open(tmp_path / "released.npz", "wb") as file:
        fitted.write(file, mark="{}")
    one = SpectralRecommender.load(tmp_path / "released.npz")
    one.save(tmp_path / "copy.npz")
    copied = SpectralRecommender.load(tmp_path / "copy.npz")
    for each in (one, copied):
        for cost in ("event", "epsilon", "uses"):
            with pytest.raises(ValueError, match="ledger.jsonl"):
                getattr(each, cost)
        with pytest.raises(ValueError, match="ledger.jsonl"):
            each.statement()
    upon = SpectralRecommender(ITEMS, noise_multiplier=2.0, before=one.released)
    assert upon.epsilon > 0, "of its own fit alone"
    upon.fit([[ITEMS[0], ITEMS[1]]] * 100, verbose=0)
    for cost in (upon.statement, lambda: upon.uses):
        with pytest.raises(ValueError, match="ledger.jsonl"):
            cost()


@pytest.mark.parametrize("told", [0, 1])
def test_sums_of_two_fits_whose_file_tells_fewer_costs_state_none(tmp_path, told):
    """Without its costs a file of sums had no uses at all, and a plan would have counted nothing for them."""

    def fit(before=None):
        made = SpectralRecommender(ITEMS, noise_multiplier=2.0, head=20, before=before)
        return made.fit([[ITEMS[0], ITEMS[1]]] * 100, verbose=0)

    fit(fit().released).save(tmp_path / "whole.npz")
    with np.load(tmp_path / "whole.npz") as file:
        arrays = dict(file)
    assert len(SpectralRecommender.load(tmp_path / "whole.npz").uses) == arrays["released_fits"] == 2
    for name in ("released_multipliers", "released_names"):
        arrays[name] = arrays[name][:told]
    np.savez(tmp_path / "less.npz", **arrays)
    less = SpectralRecommender.load(tmp_path / "less.npz")
    for tell in (lambda: less.uses, less.statement):
        with pytest.raises(ValueError, match="do not tell their cost"):
            tell()


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-6])
def test_epsilon_is_dp_accountings_and_within_the_budget(epsilon, delta):
    recommender = SpectralRecommender(ITEMS, epsilon=epsilon, delta=delta)
    found = dp_accounting.pld.PLDAccountant().compose(recommender.event).get_epsilon(delta)
    assert recommender.epsilon == pytest.approx(found, rel=1e-9)
    assert 0.995 * epsilon < found <= epsilon


@pytest.mark.parametrize("users, items", [(10, 10**6), (10**6, 10), (3000, 9000)])
def test_the_two_releases_together_cost_the_one_that_is_claimed(users, items):
    split = Split.from_budget(0.8, users, items)
    both = dp_accounting.ComposedDpEvent([GaussianDpEvent(split.counts), GaussianDpEvent(split.gram)])
    assert epsilon_of(both, 1e-6) == pytest.approx(epsilon_of(GaussianDpEvent(0.8), 1e-6), rel=1e-3)


def test_the_releases_are_made_with_the_noise_that_is_claimed(monkeypatch):
    from tfdp_rec.spectral import counting as module

    used = []
    counts, pairs = module.private_counts, module.release_pairs
    monkeypatch.setattr(
        module, "private_counts", lambda *a, noise_multiplier, **o: used.append(noise_multiplier)
        or counts(*a, noise_multiplier=noise_multiplier, **o),
    )  # fmt: skip
    monkeypatch.setattr(module, "release_pairs", lambda t, sigma, w: used.append(sigma) or pairs(t, sigma, w))
    SpectralRecommender(ITEMS, noise_multiplier=1.3).fit([[7, 14]] * 9, verbose=0)
    assert len(used) == 2 and sum(sigma**-2 for sigma in used) == pytest.approx(1.3**-2)


def test_an_accountant_adds_it_to_a_training():
    sampling = PoissonSampling(num_units=3000, expected_batch_size=100, unit="user")
    accountant = Accountant(GaussianDpEvent(2.0), sampling, delta=1e-5)
    accountant.spend(SpectralRecommender(ITEMS, epsilon=1.0, delta=1e-5).event, "spectral release")
    assert accountant.epsilon(0) == pytest.approx(1.0, rel=5e-3)
    assert "spectral release: Gaussian noise" in accountant.statement(steps=10)


def test_noise_of_one_release_is_no_more_than_is_needed():
    sigma = noise_of_one_release(2.0, 1e-6)
    assert epsilon_of(GaussianDpEvent(sigma), 1e-6) <= 2.0 < epsilon_of(GaussianDpEvent(sigma * 0.999), 1e-6)


def test_noise_that_a_test_supplied_has_no_guarantee(fitted):
    assert fitted.event == dp_accounting.NonPrivateDpEvent()
    assert math.isinf(fitted.epsilon) and fitted.statement().startswith("Guarantee:      none")


def test_the_statement_says_what_was_released():
    said = SpectralRecommender(ITEMS, epsilon=4.0).fit([[7, 14, 21]] * 50, verbose=0).statement()
    for words in ("epsilon = 4", "delta = 1e-06", "one user", "the number of users, 50", "120 items", "zero-out"):
        assert words in said, said


def test_the_operating_system_decides():
    one, other = (SpectralRecommender(ITEMS, epsilon=4.0).fit([[7, 14]] * 50, verbose=0) for _ in range(2))
    assert (one.released.counts != other.released.counts).mean() > 0.9
    assert not np.array_equal(one.estimates.weights, other.estimates.weights)


# What it answers.


def test_it_recommends_the_rest_of_a_taste(fitted):
    histories = [ITEMS[taste * 20 : taste * 20 + 6] for taste in range(6)]
    ids, scores = fitted.recommend(histories, k=10)
    for taste, (row, history) in enumerate(zip(ids, histories)):
        assert len(set(row) & set(ITEMS[taste * 20 : taste * 20 + 20])) >= 9
        assert not set(row) & set(history)
    assert (np.diff(scores) <= 0).all()


def test_an_empty_history_is_answered_by_the_noisy_counts(fitted):
    ids, _ = fitted.recommend([[], [999_999]], k=5)
    assert ids.tolist() == [ITEMS[np.argsort(-fitted.released.counts)[:5]].tolist()] * 2


@pytest.mark.parametrize("history", [[1.9], [1.9, 3], ["1.9"], [float("nan")], [None], [2**70]])
def test_what_is_no_whole_number_is_unknown(fitted, history):
    """1.9 was item 1."""
    known = [3] if 3 in history else []
    np.testing.assert_array_equal(fitted.scores([history]), fitted.scores([known]))
    np.testing.assert_array_equal(fitted.scores([["1", 3.0]]), fitted.scores([[1, 3]]))
    with pytest.raises(TypeError, match="which has no order"):
        fitted.scores([{1, 3}])
    with pytest.raises(TypeError, match="give each user's items"):
        fitted.scores([1, 3])


def test_users_without_items_and_unknown_ids_change_nothing_but_the_number_of_users():
    told = list(tastes(2000))
    with_more = [[*history, 8, 8, 10**12] for history in told]
    one, other = (SpectralRecommender(ITEMS, epsilon=4.0, words=seeded(2)).fit(t, verbose=0) for t in (told, with_more))
    assert np.array_equal(one.estimates.weights, other.estimates.weights)
    assert np.array_equal(one.released.counts, other.released.counts)
    emptied = SpectralRecommender(ITEMS, epsilon=4.0, words=seeded(2)).fit([*told, [], []], verbose=0)
    assert np.array_equal(one.released.counts, emptied.released.counts) and emptied.num_users == 2002


def test_the_number_of_users_is_counted_with_noise_where_it_is_private(tmp_path):
    """200 numbers: a scale wrong by a half is rejected, and the right one fails once in a million."""
    private = {"noise_multiplier": 2.0, "users_private": True}
    found = [SpectralRecommender(ITEMS, **private, words=seeded(s))._counting.number_of(1000) for s in range(200)]
    spread = np.sum((np.array(found) - 1000.0) ** 2) / 20**2
    assert 114 < spread < 314  # chi-squared with 200 degrees of freedom beyond 1e-6 on each side
    assert not 114 < spread / 0.5**2 < 314 and not 114 < spread / 2.0**2 < 314
    told = list(tastes())
    made = SpectralRecommender(ITEMS, **private, delta=0.9).fit(told, verbose=0)  # no refusal by the true number
    others = (SpectralRecommender(ITEMS, **private).fit(told, verbose=0) for _ in range(4))
    assert any(one.num_users != len(told) for one in itertools.chain([made], others))  # one in fifty is equal
    assert made.event == GaussianDpEvent(2.0)
    assert made.split.counts**-2 + made.split.gram**-2 == pytest.approx(0.99 * 2.0**-2)
    said = made.statement().fields
    assert "number of users" not in said["Public"] and "the number of users with Gaussian noise" in said["Mechanism"]
    made.save(tmp_path / "made.npz")
    again = SpectralRecommender.load(tmp_path / "made.npz")
    assert again.users_private and again.split == made.split and str(again.statement()) == str(made.statement())
    assert SpectralRecommender(ITEMS, **private).fit([], verbose=0).num_users >= 1


def test_nobody_has_anything_and_still_there_is_an_answer():
    ids, scores = SpectralRecommender(ITEMS, epsilon=1.0).fit([[]] * 20, verbose=0).recommend([[7], []], k=3)
    assert ids.shape == (2, 3) and np.isfinite(scores).all()


def test_more_noise_makes_a_smaller_head():
    counts = 3000 / np.arange(1, 2001) ** 0.8
    sizes = [len(head_of(counts, 5000, sigma)) for sigma in (0.5, 1.0, 4.0, 1e6)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 16 and sizes[0] < 2000  # not all


@pytest.mark.parametrize("ordered", [False, None])
def test_a_wide_head_is_told_by_what_is_released_and_costs_nothing(ordered, monkeypatch):
    """600 users with 40 of 1,500 items each, any of them: the head holds little of what a user has."""
    rng, items = np.random.default_rng(0), np.arange(1, 1501)
    histories = [rng.choice(items, 40, replace=False, p=items[::-1] / items.sum()) for _ in range(600)]
    monkeypatch.setattr(order, "vote", lambda *asked: OrderVote(-100.0, 5.0))
    made, usual = (
        SpectralRecommender(items, epsilon=8.0, delta=1e-4, head=head, ordered=ordered, words=seeded(1)).fit(
            histories, verbose=0
        )
        for head in ("wide", None)
    )
    asked = made.released.counts, 600, made.released.pairs_noise[0]
    assert made.released.head.tolist() == head_of(*asked, "wide").tolist()
    assert usual.released.head.tolist() == head_of(*asked).tolist()
    assert len(made.released.head) > 1.3 * len(usual.released.head)
    assert (made.released.counts == usual.released.counts).all() and not made.ordered
    assert made.noise_multiplier == usual.noise_multiplier and made.split == usual.split
    assert made.released.pairs_noise[0] == usual.released.pairs_noise[0]


def test_a_history_of_the_whole_catalogue_leaves_zeros(fitted):
    ids, _ = fitted.recommend([ITEMS[3:]], k=5)
    assert set(ids[0, :3]) == set(ITEMS[:3]) and ids[0, 3:].tolist() == [0, 0]


def test_item_0_is_an_item_as_any_other(tmp_path):
    import tensorflow as tf

    histories = [[0, 1]] * 300 + [[1, 2]] * 50
    recommender = SpectralRecommender([0, 1, 2], epsilon=8.0, delta=1e-4).fit(histories, verbose=0)
    assert recommender.recommend([[1]], k=1)[0].tolist() == [[0]]
    assert recommender.recommend([[0, 1, 2]], k=2)[0].tolist() == [[-1, -1]]
    recommender.export(str(tmp_path / "servable"), k=3)
    answers = tf.saved_model.load(str(tmp_path / "servable")).signatures["serving_default"]
    assert answers(history=tf.constant([[1, -1]], tf.int64))["ids"].numpy().tolist() == [[0, 2, -1]]


def test_each_task_is_printed(capsys):
    SpectralRecommender(ITEMS, epsilon=4.0).fit([[7, 14]] * 9)
    said = "counting 120 items of 9 users\ncounting pairs of 16 items\ndenoising\ndone\n"
    assert capsys.readouterr().out == said


# What is exported.


@pytest.fixture(scope="module")
def served(fitted, tmp_path_factory):
    import tensorflow as tf

    path = str(tmp_path_factory.mktemp("served") / "servable")
    fitted.export(path, k=6)
    return tf.saved_model.load(path)


@pytest.mark.parametrize("history", [ITEMS[:4], ITEMS[[5, 50, 100, 5]], [], [999, ITEMS[7]], ITEMS[2:]])
def test_the_export_answers_as_python_does(fitted, served, history):
    import tensorflow as tf

    padded = np.concatenate([[0], np.asarray(history, np.int64), [0, 0]])
    answer = served.signatures["serving_default"](history=tf.constant([padded], tf.int64))
    ids, scores = fitted.recommend([history], k=6)
    assert answer["ids"].numpy().tolist() == ids.tolist()
    found = ids > 0
    np.testing.assert_allclose(answer["scores"].numpy()[found], scores[found], rtol=1e-4, atol=1e-6)


def test_the_export_takes_many_histories(fitted, served):
    histories = np.stack([history for history in tastes(40, seed=5)])
    ids, _ = fitted.recommend(histories, k=6)
    assert served.serve(histories)["ids"].numpy().tolist() == ids.tolist()


@pytest.mark.slow
def test_what_came_last_weighs_most_where_order_counts(fitted, tmp_path):
    import tensorflow as tf

    ordered = SpectralRecommender(ITEMS, epsilon=4.0, recency=0.5, words=seeded(1)).fit(list(tastes()), verbose=0)
    one, other = ITEMS[[0, 30, 60]], ITEMS[[60, 0, 30]]
    plain = fitted.scores([one])[0]
    alone = fitted.estimates.prior.copy()
    alone[fitted.released.head] -= fitted.estimates.overlap
    own = [fitted.scores([[item]])[0] - alone for item in one]
    weights = np.array([3**-0.5, 2**-0.5, 1])
    expected = alone + np.average(own, axis=0, weights=weights) * 3
    np.testing.assert_allclose(ordered.scores([one])[0], expected, atol=1e-5)
    np.testing.assert_allclose(fitted.scores([other])[0], plain, atol=1e-6)
    repeating = [ITEMS[60], 5, ITEMS[0], ITEMS[60], ITEMS[30], 999]
    ordered.export(str(tmp_path / "servable"), k=4)
    served = tf.saved_model.load(str(tmp_path / "servable"))
    answer = served.serve(tf.constant([repeating], tf.int64))
    ids, scores = ordered.recommend([repeating], k=4)
    assert answer["ids"].numpy().tolist() == ids.tolist()
    np.testing.assert_allclose(answer["scores"].numpy(), scores, rtol=1e-4)


# In order.


def walks(users=2000, seed=0):
    """Each user goes through the items in steps of one to three, from anywhere, and sees some of them again."""
    rng = np.random.default_rng(seed)
    for _ in range(users):
        path = (rng.integers(120) + np.cumsum(rng.integers(0, 4, 15))) % 120
        yield ITEMS[path]


def found(recommender, users):
    """Share of users whose last item is among the five that are recommended after the others."""
    told, last = [walk[:-1][walk[:-1] != walk[-1]] for walk in users], [walk[-1] for walk in users]
    return np.mean([item in answer for item, answer in zip(last, recommender.recommend(told, k=5)[0], strict=True)])


def test_ordered_histories_tell_what_comes_next(tmp_path):
    counted, asked = list(walks()), list(walks(300, seed=1))
    ordered = SpectralRecommender(ITEMS, epsilon=4.0, ordered=True, words=seeded(1)).fit(counted, verbose=0)
    assert ordered.recency == 1.0 and ordered.released.ordered
    assert "at most 10 places apart" in str(SpectralRecommender(ITEMS, 4.0, ordered=True).fit(counted, 0).statement())
    plain = SpectralRecommender(ITEMS, epsilon=4.0, words=seeded(1)).fit(counted, verbose=0)
    assert found(ordered, asked) > 1.5 * found(plain, asked)
    ordered.save(tmp_path / "ordered.npz")
    loaded = SpectralRecommender.load(tmp_path / "ordered.npz")
    assert loaded.ordered and loaded.recency == 1.0
    np.testing.assert_array_equal(loaded.recommend(asked[:5])[1], ordered.recommend(asked[:5])[1])


def test_releases_with_and_without_order_are_not_added_up():
    first = SpectralRecommender(ITEMS, epsilon=4.0, words=seeded(1)).fit(list(walks(300)), verbose=0).released
    with pytest.raises(ValueError, match="of any two items .* give ordered=False"):
        SpectralRecommender(ITEMS, epsilon=4.0, ordered=True, before=first)
    with pytest.raises(ValueError, match="not added up"):
        first.add_pairs(first.head, first.pairs, 1.0, ordered=True)
    both = SpectralRecommender(ITEMS, epsilon=4.0, ordered=True, words=seeded(1)).fit(list(walks(300)), verbose=0)
    added = SpectralRecommender(ITEMS, epsilon=4.0, ordered=True, before=both.released, words=seeded(2))
    assert added.fit(list(walks(300)), verbose=0).released.fits == 2


def test_a_file_that_does_not_tell_what_its_sums_cost_is_refused(fitted, tmp_path):
    fitted.save(tmp_path / "now.npz")
    for lost in ("released_multipliers", "released_names", "released_ordered", "overlap", "users_private"):
        with np.load(tmp_path / "now.npz") as file:
            np.savez(tmp_path / "older.npz", **{name: file[name] for name in file if name != lost})
        with pytest.raises(ValueError, match=f"holds no recommender that `save` wrote: .*{lost}"):
            SpectralRecommender.load(tmp_path / "older.npz")


# What is refused.


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({}, TypeError, "either epsilon"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, TypeError, "either epsilon"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be positive"),
        ({"noise_multiplier": 0.0}, ValueError, "noise_multiplier"),
        ({"epsilon": 1.0, "delta": 0.0}, ValueError, "delta"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, ValueError, "delta"),
        ({"epsilon": 1.0, "head": 121}, ValueError, "head must be between"),
        ({"epsilon": 1.0, "head": "Wide"}, ValueError, "head must be between"),
        ({"epsilon": 1.0, "head": 20.0}, ValueError, "head must be between"),
        ({"epsilon": 1.0, "head": "wide", "ordered": True}, ValueError, "near pairs were asked for"),
        ({"epsilon": 1.0, "recency": -0.1}, ValueError, "recency must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        SpectralRecommender(ITEMS, **arguments)


def test_a_second_fit_is_refused(fitted):
    with pytest.raises(RuntimeError, match="fitted already"):
        fitted.fit([[7]], verbose=0)


def test_nothing_is_answered_before_there_is_a_release(tmp_path):
    recommender = SpectralRecommender(ITEMS, epsilon=1.0)
    for ask in (lambda: recommender.recommend([[7]]), lambda: recommender.export(str(tmp_path)), recommender.statement):
        with pytest.raises(RuntimeError, match="call fit"):
            ask()
    with pytest.raises(ValueError, match="no user"):
        recommender.fit([], verbose=0)
    with pytest.raises(TypeError, match="readable twice"):
        recommender.fit(iter([[7]]), verbose=0)


def test_a_delta_that_would_allow_to_publish_somebody_is_refused():
    recommender = SpectralRecommender(ITEMS, epsilon=1.0, delta=1e-2)
    with pytest.raises(ValueError, match="above 1 / 101 users"):
        recommender.fit([[7]] * 101, verbose=0)
    recommender.fit([[7]] * 99, verbose=0)  # nothing was spent


@pytest.mark.parametrize("k", [0, 121])
def test_k_out_of_range_is_refused(fitted, k):
    with pytest.raises(ValueError, match="k must be a whole number between 1 and the 120 items"):
        fitted.recommend([[7]], k=k)


# What it takes.

MEASURE = """
import resource, sys
import numpy as np
from tfdp_rec.core.mechanism.noise.words import os_entropy, seeded
from tfdp_rec.spectral import Histories, SpectralRecommender
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
SpectralRecommender(np.arange(1, 2001), epsilon=1.0, head=300).fit(Histories.load(sys.argv[1]), verbose=0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_hang_on_the_number_of_events(tmp_path):
    taken = []
    for users in (20_000, 200_000):
        items = np.random.default_rng(0).integers(1, 2001, users * 30)
        Histories(items, np.arange(0, users * 30 + 1, 30)).save(tmp_path / str(users))
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / str(users))], check=True, capture_output=True, text=True
        )
        taken.append(int(done.stdout) / 1024)  # MB
    events = 180_000 * 30 * 8 / 2**20
    # The mapped pages of the file count as resident while there is room: they are taken off.
    assert taken[1] - taken[0] - events < 60, taken


# Files.


def test_what_was_saved_answers_and_costs_the_same(tmp_path):
    for words, private in ((os_entropy, True), (seeded(3), False)):
        made = SpectralRecommender(ITEMS, epsilon=4.0, delta=1e-5, recency=0.5, words=words)
        made.fit(list(tastes(300)), verbose=0).save(tmp_path / "made.npz")
        again = SpectralRecommender.load(tmp_path / "made.npz")
        asked = [ITEMS[:6], [], ITEMS[60:63]]
        assert all(np.array_equal(*pair) for pair in zip(made.recommend(asked), again.recommend(asked)))
        assert again.event == made.event and math.isinf(again.epsilon) != private
        assert again.statement() == made.statement()
    with pytest.raises(RuntimeError, match="fitted already"):
        again.fit(list(tastes(300)))


def test_another_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", weights=np.zeros(3))
    np.save(tmp_path / "other.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("weights")
    for name in ("other.npz", "other.npy", "text.npz"):
        with pytest.raises(ValueError, match="holds no recommender that `save` wrote"):
            SpectralRecommender.load(tmp_path / name)
    with pytest.raises(RuntimeError, match="call fit"):
        SpectralRecommender(ITEMS, epsilon=4.0).save(tmp_path / "none.npz")
