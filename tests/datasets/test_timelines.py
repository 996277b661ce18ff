"""Timelines: the container, the generator against MovieLens-20M's shape, examples from them."""

import numpy as np
import pytest

from tfdp_rec.data import Interactions, NextItemExamples, PoissonSampling, Timelines, synthetic

SMALL = dict(num_users=3000, num_movies=2000, events=90_000)


@pytest.fixture(scope="module")
def small():
    return synthetic.timelines(**SMALL)


@pytest.fixture
def tiny():
    """Users with 5, 0, 1, 2 and 3 events."""
    return Timelines(
        movies=[1, 2, 3, 4, 5, 3, 2, 4, 1, 2, 3],
        offsets=[0, 5, 5, 6, 8, 11],
        user_ids=[10, 20, 30, 40, 50],
        movie_ids=[900, 17, 40, 3, 8],
        titles=["A", "B", "C", "D", "E"],
    )


def test_parts_and_lookups(tiny):
    assert [tiny[u].tolist() for u in range(5)] == [[1, 2, 3, 4, 5], [], [3], [2, 4], [1, 2, 3]]
    assert (tiny.num_users, tiny.num_movies, tiny.num_events, len(tiny)) == (5, 5, 11, 5)
    assert tiny.index_of([[900, 8], [1, 3], [-5, 10**9]]).tolist() == [[1, 5], [0, 4], [0, 0]]
    assert [tiny.title(int(i)) for i in tiny.index_of([17, 3])] == ["B", "D"]
    with pytest.raises(IndexError):
        tiny.title(0)
    with pytest.raises(IndexError):
        tiny[5]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"titles": ["A"]}, "as many titles"),
        ({"movie_ids": [1, 1, 2]}, "all different"),
        ({"offsets": [0, 4]}, "offsets must rise from 0 to the 3"),
        ({"offsets": [0, 2, 3]}, "offsets must have 1 parts"),
        ({"offsets": [0, 2, 1, 3], "user_ids": [1, 2, 3]}, "offsets must rise"),
        ({"movies": [1, 2, 4]}, "indices from 1 to 3"),
        ({"movies": [0, 1, 2]}, "indices from 1 to 3"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    parts = dict(movies=[1, 2, 3], offsets=[0, 3], user_ids=[1], movie_ids=[5, 6, 7], titles=["A", "B", "C"])
    assert Timelines(**parts).num_events == 3
    with pytest.raises(ValueError, match=message):
        Timelines(**{**parts, **change})


def test_split_parts_the_users_and_leaves_out_the_short(tiny, small):
    train, test = small.split_users(0.8, seed=3)
    assert (len(train), len(test)) == (2400, 600)
    assert sorted([*train, *test]) == list(range(3000))
    assert train.tolist() == small.split_users(0.8, seed=3)[0].tolist() != small.split_users(0.8, seed=4)[0].tolist()
    assert sorted(np.concatenate(tiny.split_users(0.5))) == [0, 3, 4]
    with pytest.raises(ValueError, match="train must be between 0 and 1"):
        tiny.split_users(1.0)


def test_the_smallest_catalogue_has_as_many_tastes_as_a_user():
    assert synthetic.timelines(num_users=100, num_movies=30, events=500).num_movies == 30


def test_generated_timelines_repeat_with_the_seed_only(small):
    again, other = synthetic.timelines(**SMALL), synthetic.timelines(**SMALL, seed=1)
    assert again.numbers.tolist() == small.numbers.tolist() and again.titles == small.titles
    assert other.num_events != small.num_events or other.numbers.tolist() != small.numbers.tolist()


def test_each_user_has_movies_and_none_twice(small):
    pairs = np.repeat(np.arange(3000), small.lengths) * 10_000 + small.numbers
    assert len(np.unique(pairs)) == small.num_events
    assert small.lengths.min() >= 4
    assert small.num_events == pytest.approx(90_000, rel=0.1)


def test_ids_and_titles_look_like_the_real_ones(small):
    assert len(set(small.titles)) == 2000
    assert all(title.endswith(")") and 1930 <= int(title[-5:-1]) <= 2015 for title in small.titles)
    assert small.movie_ids.tolist() == sorted(set(small.movie_ids.tolist())) != list(range(1, 2001))


@pytest.mark.slow
def test_a_tenth_of_movielens_20m_has_its_shape():
    users = 13_850
    timelines = synthetic.timelines(num_users=users)
    lengths = timelines.lengths
    counts = np.sort(np.bincount(timelines.numbers, minlength=27_279)[1:])[::-1] * (138_493 / users)
    assert lengths.min() == 20 and 64 <= np.median(lengths) <= 72 and 135 <= lengths.mean() <= 150
    assert lengths.max() > 3000
    assert 57_000 < counts[0] < 77_000, "the real one: 67,310"
    assert counts[9] > 0.75 * counts[0] and counts[999] < 0.1 * counts[0]
    assert 0.55 < counts[:1000].sum() / counts.sum() < 0.75


def lift(timelines, gap):
    """How much likelier two events `gap` apart share a taste-mate than two of different users: by pairs of movies."""
    movies, users = timelines.numbers, np.repeat(np.arange(len(timelines)), timelines.lengths)
    frequent = np.argsort(-np.bincount(movies))[:200]
    code = np.full(timelines.num_movies + 1, -1)
    code[frequent] = np.arange(200)
    together = np.zeros([200, 200])
    same = (users[gap:] == users[:-gap]) & (code[movies[gap:]] >= 0) & (code[movies[:-gap]] >= 0)
    np.add.at(together, (code[movies[:-gap]][same], code[movies[gap:]][same]), 1)
    expected = np.outer(together.sum(1), together.sum(0)) / together.sum()
    return ((together - expected) ** 2 / expected.clip(1)).sum() / 200**2


def test_order_matters():
    timelines = synthetic.timelines(num_users=20_000, num_movies=2000, events=1_000_000, num_tastes=10)
    near, far = lift(timelines, 1), lift(timelines, 15)
    rng = np.random.default_rng(0)
    shuffled = np.concatenate([rng.permutation(timelines[u]) for u in range(len(timelines))])
    unordered = Timelines(shuffled, timelines.offsets, timelines.user_ids, timelines.movie_ids, timelines.titles)
    assert near > 1.3 * far > 1.3 and near > 1.3 * lift(unordered, 1)


@pytest.mark.parametrize(
    "sizes", [{"num_users": 0}, {"num_movies": 5}, {"events": 100}, {"num_users": 10, "events": 10**6}]
)
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="needed|must come to"):
        synthetic.timelines(**{**SMALL, **sizes})


def context_of(example):
    return [movie for movie in example.tolist() if movie]


def test_examples_are_a_label_and_what_came_before(small):
    users = np.array([5, 17, 1200, 44])
    examples = NextItemExamples(small, users, history=6, negatives=30, seed=0)
    for _ in range(20):
        batch = examples.fetch([0, 2, 3])
        assert {name: array.dtype.name for name, array in batch.items()} == dict.fromkeys(batch, "int32")
        for row, user in enumerate(users[[0, 2, 3]]):
            timeline = small[user].tolist()
            place = timeline.index(batch["label"][row])
            assert place >= 1
            context = context_of(batch["context"][row])
            assert context == timeline[max(0, place - 6) : place]
            assert not batch["context"][row][len(context) :].any(), "zeros come last"


def test_labels_are_uniform_over_all_but_the_first(tiny):
    examples = NextItemExamples(tiny, [0, 4], negatives=0, seed=1)
    labels = np.array([examples.fetch([0])["label"][0] for _ in range(4000)])
    counts = np.bincount(labels, minlength=6)
    assert counts[1] == 0 and abs(counts[2:] - 1000).max() < 150


def test_users_of_one_event_have_a_label_without_context_and_of_none_have_neither(tiny):
    batch = NextItemExamples(tiny, history=3, negatives=0).fetch(np.arange(5))
    for user in np.flatnonzero(tiny.lengths < 2):
        assert batch["label"][user] == (tiny[user][0] if len(tiny[user]) else 0) and not batch["context"][user].any()
    assert sorted(tiny.lengths)[:2] == [0, 1]


def test_with_every_place_a_window_of_items_and_what_follows_each(small):
    users = np.array([5, 17, 1200, 44])
    examples, starts = NextItemExamples(small, users, history=6, negatives=0, seed=0, every_place=True), set()
    for _ in range(40):
        batch = examples.fetch([0, 2, 3])
        assert {name: array.dtype.name for name, array in batch.items()} == dict.fromkeys(batch, "int32")
        for row, user in enumerate(users[[0, 2, 3]]):
            timeline, context = small[user].tolist(), context_of(batch["context"][row])
            start = timeline.index(context[0])
            assert len(context) == min(6, len(timeline) - 1)
            assert timeline[start : start + len(context) + 1] == [*context, batch["label"][row][len(context) - 1]]
            assert context_of(batch["label"][row]) == timeline[start + 1 : start + len(context) + 1]
            assert not batch["label"][row][len(context) :].any() and not batch["context"][row][len(context) :].any()
            starts.add((user, start))
    assert len(starts) > 10, "windows stand at random places"


def test_windows_of_short_histories_reach_every_event_and_nobody_elses(tiny):
    examples, seen = NextItemExamples(tiny, history=2, negatives=0, seed=0, every_place=True), set()
    for _ in range(60):
        batch = examples.fetch(np.arange(5))
        seen |= {(user, *batch["context"][user].tolist(), *batch["label"][user].tolist()) for user in range(5)}
    assert seen == {
        (0, 1, 2, 2, 3), (0, 2, 3, 3, 4), (0, 3, 4, 4, 5), (1, 0, 0, 0, 0), (2, 0, 0, 0, 0), (3, 2, 0, 4, 0),
        (4, 1, 2, 2, 3),
    }  # fmt: skip
    assert {name: array.shape for name, array in examples.fetch([]).items()} == {"context": (0, 2), "label": (0, 2)}


def test_a_label_that_the_window_has_had_may_be_left_out():
    rows = {"u": [0] * 7, "i": [4, 5, 4, 4, 6, 5, 7], "t": range(7)}
    log = Interactions.read(rows, user="u", item="i", time="t", items=[4, 5, 6, 7])
    for repeats, labels in ((True, [2, 1, 1, 3, 2, 4]), (False, [2, 0, 0, 3, 0, 4])):
        examples = NextItemExamples(log, history=6, negatives=0, seed=0, every_place=True, repeats=repeats)
        assert examples.fetch([0])["label"][0].tolist() == labels


def test_negatives_are_distinct_fresh_and_the_whole_catalogue(small):
    examples = NextItemExamples(small, negatives=1500, seed=0)
    drawn = [examples.shared()["negatives"] for _ in range(30)]
    assert all(len(np.unique(negatives)) == 1500 for negatives in drawn)
    assert drawn[0].tolist() != drawn[1].tolist()
    counts = np.bincount(np.concatenate(drawn), minlength=2001)
    assert counts[0] == 0 and counts[1:].min() >= 8
    everything = NextItemExamples(small, negatives=2000).shared()["negatives"]
    assert sorted(everything) == list(range(1, 2001))


def test_negatives_by_released_counts_have_their_chances_beside_them(small):
    counts = np.zeros(small.num_items)
    counts[6] = counts[90] = 50.0
    examples = NextItemExamples(small, negatives=100, seed=0, released_counts=counts)
    for _ in range(20):
        drawn = examples.shared()
        assert len(set(drawn["negatives"].tolist())) == 100 and {7, 91} <= set(drawn["negatives"].tolist())
        popular = np.isin(drawn["negatives"], [7, 91])
        np.testing.assert_allclose(drawn["expected"], np.where(popular, 1.0, 98 / (small.num_items - 2)), rtol=1e-6)
    assert NextItemExamples(small, negatives=0, released_counts=counts).shared() == {}
    with pytest.raises(ValueError, match="released_counts must be"):
        NextItemExamples(small, negatives=100, released_counts=counts[1:])


def test_without_a_seed_examples_do_not_repeat(small):
    first, second = (NextItemExamples(small).fetch(np.arange(200))["label"].tolist() for _ in range(2))
    assert first != second


def test_fixed_examples_are_fixed_and_depend_on_the_seed(small):
    _, test = small.split_users(0.8)
    examples = NextItemExamples(small, test, negatives=0)
    fixed = examples.fixed()
    assert fixed["context"].shape == (600, 20) and set(fixed) == {"context", "label"}
    assert NextItemExamples(small, test).fixed()["label"].tolist() == fixed["label"].tolist()
    assert examples.fixed(seed=1)["label"].tolist() != fixed["label"].tolist()


def test_examples_pass_through_poisson_batches(small):
    train, _ = small.split_users(0.8)
    examples = NextItemExamples(small, train, negatives=40)
    batches = PoissonSampling(len(examples), 64, unit="user").batches(examples.fetch, shared=examples.shared)
    assert batches.element_spec.batch["context"].shape.as_list() == [None, 20]
    assert batches.element_spec.batch["negatives"].shape.as_list() == [40]
    sizes = [len(drawn.batch["label"]) for drawn in batches.take(20)]
    assert len(set(sizes)) > 5 and 40 < np.mean(sizes) < 90


def test_examples_that_cannot_be_are_refused(tiny):
    with pytest.raises(ValueError, match="negatives must be between 0 and the 5 items"):
        NextItemExamples(tiny, [0], negatives=6)
    with pytest.raises(ValueError, match="a user twice"):
        NextItemExamples(tiny, [0, 0], negatives=2)
    with pytest.raises(ValueError, match="positions from 0 to 4"):
        NextItemExamples(tiny, [5], negatives=2)
    with pytest.raises(ValueError, match="history must be at least 1"):
        NextItemExamples(tiny, [0], history=0, negatives=2)
