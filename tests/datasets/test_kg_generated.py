"""The planted graph: a function of (seed, individual) alone, learnable, and bounded in memory."""

import tracemalloc

import numpy as np
import pytest

from tfdp_rec.datasets.kg.files import FEATURES, TimelineStore, Vocabulary, read_timelines, write_timelines
from tfdp_rec.datasets.kg.generated import SyntheticKG

KG = SyntheticKG(num_individuals=5000, vocabulary_size=20_000, num_topics=20)


def test_an_individual_does_not_depend_on_the_batch():
    alone, lengths = KG.walk([17])
    among, all_lengths = KG.walk(np.arange(30))
    np.testing.assert_array_equal(alone[0], among[17])
    assert lengths[0] == all_lengths[17]
    same = SyntheticKG(num_individuals=5000, vocabulary_size=20_000, num_topics=20)
    np.testing.assert_array_equal(same.walk([17])[0], alone)
    other = SyntheticKG(num_individuals=5000, vocabulary_size=20_000, num_topics=20, seed=1)
    assert not np.array_equal(other.walk([17])[0], alone)


def test_examples_have_the_documented_shapes_and_ranges():
    batch = KG.fetch(np.arange(200), seed=0)
    for feature in FEATURES:
        assert batch[feature].shape == (200, 20, KG.values_per_activity[feature])
        assert batch[feature].min() >= 0 and batch[feature].max() <= 20_000
    assert batch["label"].min() >= 1 and batch["label"].max() <= 20_000
    filled = (batch["entities"][:, :, 0] > 0).sum(axis=1)
    assert filled.min() == 1 and filled.max() == 20  # every example has a context, of very different length
    assert np.all(np.diff(batch["entities"][:, :, 0] > 0, axis=1).astype(int) <= 1)
    assert KG.fetch([])["entities"].shape == (0, 20, 2)


def test_reading_the_written_timelines_gives_the_same_examples(tmp_path):
    """The named form, through a file and a vocabulary, and the direct form agree on the same walk."""
    path = write_timelines(KG.timelines(0, 40, chunk=7), tmp_path / "kg.jsonl")
    terms = {f: Vocabulary(tuple(f"{f[0]}{n}" for n in range(1, 20_001))) for f in FEATURES}
    store = TimelineStore(read_timelines(path), terms, values_per_activity=KG.values_per_activity)
    assert store.num_individuals == 40
    walk, lengths = KG.walk(np.arange(40))
    for seed in range(5):
        batch = store.fetch(np.arange(40), seed=seed)
        for row in range(40):
            context = batch["entities"][row, :, 0]
            context = context[context > 0][::-1] - 1
            starts = [p for p in range(1, lengths[row]) if 1 + walk[row, p] == batch["label"][row]
                      and np.array_equal(walk[row, max(0, p - 20) : p], context)]  # fmt: skip
            neighbour_labels = batch["label"][row] - 1 not in walk[row, : lengths[row]]
            assert (
                starts or neighbour_labels or _label_is_a_shown_neighbour(walk[row], context, batch["label"][row] - 1)
            )


def _label_is_a_shown_neighbour(walk, context, label):
    ends = [p for p in range(1, walk.size) if np.array_equal(walk[max(0, p - 20) : p], context)]
    return any(KG.neighbour(walk[p : p + 1], np.zeros(1, np.int64))[0] == label for p in ends)


def test_walks_follow_edges_and_topics():
    walk, lengths = KG.walk(np.arange(4000))
    before, after = walk[:, 3], walk[:, 4]
    edges = np.stack([KG.neighbour(before, np.full(4000, k)) for k in range(8)], axis=1)
    along = np.mean(np.any(edges == after[:, None], axis=1))
    assert 0.5 <= along < 0.7  # half the moves, and some popular jumps that are neighbours too
    assert np.mean(before % 20 == after % 20) > 0.6
    assert np.array_equal(edges % 20, np.repeat((before % 20)[:, None], 8, axis=1))
    assert lengths.min() == 2 and lengths.max() == 40


def test_popularity_is_skewed_but_not_swallowed():
    labels = KG.fetch(np.arange(5000), seed=1)["label"]
    share = np.sort(np.bincount(labels))[::-1][:10].sum() / labels.size
    assert 0.02 < share < 0.35


def test_any_vocabulary_size_in_bounded_memory():
    huge = SyntheticKG(num_individuals=10**9, vocabulary_size=5_000_000)
    tracemalloc.start()
    batch = huge.fetch(np.array([0, 10**9 - 1, *range(2000)]), seed=0)
    for timeline in huge.timelines(10**8, 10**8 + 3000, chunk=500):
        last = timeline
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch["label"].max() > 1_000_000 and len(last.activities) >= 2
    assert peak < 60e6


def test_bad_arguments_are_refused():
    for change, words in [({"num_individuals": 0}, "num_individuals"), ({"num_topics": 1}, "num_topics"),
                          ({"vocabulary_size": 100}, "num_topics"), ({"context_length": 0}, "context_length"),
                          ({"max_activities": 1}, "max_activities")]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            SyntheticKG(**{"num_individuals": 10, **change})
    for individuals in ([5000], [-1], [[0]]):
        with pytest.raises(IndexError, match="indices"):
            KG.fetch(individuals)
