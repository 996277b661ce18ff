"""Audits with the worst canaries known, end to end: a step of training, and a bet on who was in the batch.

A canary here is an example made to break the clip in floating point (`docs/privacy-floating-point.md`): its
gradient is two
huge parts that cancel, so that its norm is nothing and its weight one; added up, the parts wipe out what they
meet. Each
row (or feature) is a trial of its own: some other examples' gradients point one way there, half of the rows
get a canary
too, and the released value says which, if it can. From how often the bet is right follows a lower bound on ε.

With the code as it is the bound stays below the claim; with the repair taken out it is far above, so the audit
has teeth.
"""

import functools

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import rdp
from keras import layers
from scipy import stats

import tfdp_rec
from tfdp_rec.core.sensitivity import engine, factors, float_sums

TRIALS, OTHERS, HUGE, DELTA, SIGMA = 100, 70, np.float32(1e12), 1e-6, 6.0


class Given(tfdp_rec.PrivateTraining, keras.Model):
    """One layer, and a loss whose gradient with respect to the layer's output is the batch's `target`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def per_example_loss(self, data, training=True):
        output = self.layer(data["x"])
        return tf.reduce_sum(data["target"] * output, axis=list(range(1, output.shape.rank)))


POSITIONS, UNITS = 8, 4  # more than used, so that no kernel for a special case adds up what cancels first


def lookups():
    """Trial i is row i of a table; everybody reads one row, at every position."""
    model = Given(layers.Embedding(2 * TRIALS, UNITS, embeddings_initializer=keras.initializers.Constant(0.7)))
    return model, lambda rows: np.repeat(np.asarray(rows)[:, None], POSITIONS, axis=1)


def positions():
    """Trial i is feature i of a dense layer on several positions."""
    model = Given(layers.Dense(UNITS, use_bias=False, kernel_initializer="zeros"))
    return model, lambda features: np.repeat(np.eye(2 * TRIALS, dtype="float32")[features][:, None], POSITIONS, axis=1)


def batch(inputs):
    """Trial after trial: most of its others, in the first half of the trials a canary, the rest of its others."""
    trials = np.arange(2 * TRIALS)
    who = np.concatenate([np.repeat(trials, OTHERS), trials[:TRIALS]])
    rank = np.concatenate([np.tile(np.arange(OTHERS), 2 * TRIALS), np.full(TRIALS, OTHERS - 9.5)])
    target = np.zeros([len(who), POSITIONS, UNITS], "float32")
    target[:, [0, -1], 0] = 0.5
    target[-TRIALS:, 0, 0], target[-TRIALS:, -1, 0] = HUGE, -HUGE
    order = np.lexsort((rank, who))
    return {"x": inputs(who[order]), "target": target[order]}


MECHANISMS = {
    "DPSGD": tfdp_rec.DPSGD,
    "LazyDPSGD": tfdp_rec.LazyDPSGD,
    "AdaFEST": tfdp_rec.AdaFEST,
}


def values_after_a_step(kind, make):
    model, inputs = make()
    more = {"contribution_clip": 1.0, "contribution_noise_multiplier": SIGMA, "threshold": 1.0}
    more = more if kind == "AdaFEST" else {}
    optimizer = MECHANISMS[kind](1.0, l2_norm_clip=1.0, noise_multiplier=SIGMA, expected_batch_size=1, **more)
    model.compile(optimizer)
    model.train_on_batch(batch(inputs))
    return model.get_weights()[0][:, 0], optimizer.dp_event()


def lower_bound(values):
    """What ε must at least be, with confidence 1 − 1e-6, from the best of some thresholds on either side."""
    with_canary, without = values[:TRIALS], values[TRIALS:]
    best = 0.0
    thresholds = np.quantile(without, np.linspace(0.02, 0.98, 25))
    each = 1e-6 / (4 * len(thresholds))
    for threshold in thresholds:
        for side in (1, -1):
            hits = np.sum(side * with_canary > side * threshold)
            alarms = np.sum(side * without > side * threshold)
            low = stats.beta.ppf(each, hits, TRIALS - hits + 1) if hits else 0.0
            high = stats.beta.ppf(1 - each, alarms + 1, TRIALS - alarms) if alarms < TRIALS else 1.0
            best = max(best, np.log(max(low - DELTA, 1e-12) / high))
    return best


def claimed(event):
    accountant = rdp.RdpAccountant()
    accountant.compose(dp_accounting.ComposedDpEvent([event]))
    return accountant.get_epsilon(DELTA)


CASES = [("DPSGD", lookups), ("LazyDPSGD", lookups), ("AdaFEST", lookups), ("DPSGD", positions)]


@pytest.mark.slow_cases("DPSGD-lookups")
@pytest.mark.parametrize("kind, make", CASES)
def test_the_bound_stays_below_the_claim(kind, make):
    values, event = values_after_a_step(kind, make)
    assert lower_bound(values) < claimed(event)


# The clip is the same for all mechanisms, so two stand for it by default.
TEETH = [case if case[0] == "DPSGD" else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]


@pytest.mark.parametrize("kind, make", TEETH)
def test_it_is_above_the_claim_when_the_repair_is_taken_out(kind, make, monkeypatch):
    """Norms of what cancelled, sums of what did not: the code as it was."""
    repaired = factors.Rows.sums.func

    def norms(collected):
        ((path, (own,)),) = collected.items()
        formed = repaired(own) if isinstance(own, factors.Rows) else own._form()
        norm = tf.sqrt(tf.reduce_sum(tf.square(formed), axis=[1, 2]))
        return engine.Measured(norm, norm, {path: norm.dtype})

    def rows(several, depth):
        ((ids, values, weights, _),) = several
        distinct, place = tf.unique(ids)
        return [(distinct, tf.math.unsorted_segment_sum(weights[:, None] * values, place, tf.size(distinct)))]

    def products(x, g, way):
        """xᵀ g for rows of x that are unit vectors, one term after another, whatever the threads do."""
        return tf.math.unsorted_segment_sum(g, tf.argmax(x, axis=1), tf.shape(x)[1])

    monkeypatch.setattr(engine, "measure", norms)
    monkeypatch.setattr(factors.Rows, "sums", functools.cached_property(lambda self: self.g))
    factors.Rows.sums.__set_name__(factors.Rows, "sums")
    monkeypatch.setattr(float_sums, "rows", rows)
    monkeypatch.setattr(float_sums, "products", products)
    values, event = values_after_a_step(kind, make)
    assert lower_bound(values) > claimed(event)
