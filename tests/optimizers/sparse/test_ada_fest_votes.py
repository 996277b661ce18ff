"""AdaFEST's first look at a batch, where its clip is not 1: the counts' noise is σ₁ C₁, and the vote's bound is C₁."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdp_rec.clipping import ClippedSum, Reads
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import AdaFEST

ROWS = 20_000


def moved(contribution_clip, noise, threshold, readers=(), seed=3):
    """Which rows one step moves, when example i reads row `readers[i]`."""
    table = keras.Variable(np.zeros([ROWS, 1], "float32"), name="table")
    optimizer = AdaFEST(
        0.5, l2_norm_clip=1.0, noise_multiplier=1.0, contribution_clip=contribution_clip, threshold=threshold,
        contribution_noise_multiplier=noise, expected_batch_size=10.0, noise=KeyedNoise(seed),
    )  # fmt: skip
    rows = tf.constant(np.asarray(readers, np.int64))
    slices = tf.IndexedSlices(tf.zeros([len(readers), 1]), rows)
    reads = Reads(tf.range(len(readers), dtype=tf.int64), rows, tf.zeros([0], tf.int64))
    optimizer.build([table], {table.path: None})
    optimizer.apply(
        ClippedSum({table.path: slices}, tf.zeros([0]), tf.constant(1.0), tf.zeros([0]), {table.path: reads})
    )
    return np.array(table)[:, 0] != 0


@pytest.mark.parametrize("contribution_clip", [0.25, 4.0])
def test_the_counts_noise_grows_with_their_clip(contribution_clip):
    """Rows nobody read pass by noise alone: Pr[σ₁ C₁ N > τ]."""
    noise, threshold = 2.0, 2.0 * contribution_clip
    through = int(moved(contribution_clip, noise, threshold).sum())
    assert stats.binomtest(through, ROWS, stats.norm.sf(threshold / (noise * contribution_clip))).pvalue > 1e-6
    for wrong in (noise, contribution_clip, noise * contribution_clip * 1.1, noise * contribution_clip / 1.1):
        assert stats.binomtest(through, ROWS, stats.norm.sf(threshold / wrong)).pvalue < 1e-6


@pytest.mark.parametrize("contribution_clip, vote", [(0.25, 0.25), (4.0, 1.0)])
def test_a_vote_counts_as_much_as_the_clip_lets_it(contribution_clip, vote):
    """One example that reads one row adds min(1, C₁)."""
    for threshold, passes in ((0.99 * vote, True), (1.01 * vote, False)):
        assert moved(contribution_clip, 1e-9, threshold, readers=[7])[7] == passes
