"""The planted graph: a function of (seed, individual) alone, learnable, and bounded in memory."""

import tracemalloc

import numpy as np
import pytest

from experiments.generated.knowledge_graph import FEATURES, SyntheticKG

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
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch["label"].max() > 1_000_000
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
