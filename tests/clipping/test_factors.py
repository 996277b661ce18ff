"""Factors against gradients formed in full: norms, weighted sums, and inner products of every pair of kinds."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_rec.core.sensitivity import cross_terms, factors
from tfdp_rec.core.sensitivity.float_sums import Depth

quickly = settings(max_examples=25, deadline=None, derandomize=True)
ROWS, WIDTH = 7, 3  # every factor here is of one variable of this shape
DEPTH = Depth.of(tf.constant(1e9, tf.float64), tf.constant(5), tf.float64)


def as_is(matrix):
    return matrix


def rows(rng, batch, length, ids=None):
    ids = rng.integers(0, ROWS, size=[batch, length]) if ids is None else ids
    g = rng.normal(size=[batch, length, WIDTH])
    formed = np.zeros([batch, ROWS, WIDTH])
    for b, t in itertools.product(range(batch), range(length)):
        formed[b, ids[b, t]] += g[b, t]
    return factors.Rows(tf.constant(ids), tf.constant(g), [ROWS, WIDTH]), formed


def outer(rng, batch, length):
    x, g = rng.normal(size=[batch, length, ROWS]), rng.normal(size=[batch, length, WIDTH])
    return factors.Outer(tf.constant(x), tf.constant(g), as_is), np.einsum("bti,bto->bio", x, g)


def scores(rng, batch, length, ids=None, silent=()):
    ids = rng.integers(0, ROWS, size=[length]) if ids is None else np.array(ids)
    d, q = rng.normal(size=[batch, length]), rng.normal(size=[batch, WIDTH])
    d[:, list(silent)] = 0
    formed = np.zeros([batch, ROWS, WIDTH])
    for b, s in itertools.product(range(batch), range(length)):
        formed[b, ids[s]] += d[b, s] * q[b]
    return factors.Scores(tf.constant(ids), tf.constant(d), tf.constant(q), [ROWS, WIDTH]), formed


def scores_of_positions(rng, batch, length, ids=None):
    """Of three queries an example."""
    ids = rng.integers(0, ROWS, size=[length]) if ids is None else np.array(ids)
    d, q = rng.normal(size=[batch, 3, length]), rng.normal(size=[batch, 3, WIDTH])
    formed = np.zeros([batch, ROWS, WIDTH])
    for b, t, s in itertools.product(range(batch), range(3), range(length)):
        formed[b, ids[s]] += d[b, t, s] * q[b, t]
    return factors.Scores(tf.constant(ids), tf.constant(d), tf.constant(q), [ROWS, WIDTH]), formed


def bag(rng, batch, length):
    """Of rows that each example adds up; some coefficients cancel."""
    ids, c = rng.integers(0, ROWS, [batch, length]), rng.normal(size=[batch, length])
    q = rng.normal(size=[batch, WIDTH])
    c[:, 1::2] = -c[:, : length - 1 : 2] if length > 1 and rng.random() < 0.3 else c[:, 1::2]
    formed = np.zeros([batch, ROWS, WIDTH])
    for b, t in itertools.product(range(batch), range(length)):
        formed[b, ids[b, t]] += c[b, t] * q[b]
    return factors.BagRows(tf.constant(ids), tf.constant(c), tf.constant(q), [ROWS, WIDTH]), formed


def per_example(rng, batch, length):
    values = rng.normal(size=[batch, ROWS, WIDTH])
    return factors.PerExample(tf.constant(values)), values


KINDS = {
    "rows": rows, "bag": bag, "outer": outer, "scores": scores, "positions": scores_of_positions,
    "per_example": per_example,
}  # fmt: skip
batches, lengths, seeds = st.integers(0, 5), st.integers(0, 6), st.integers(0, 2**31)


def check(several, formed):
    weights = np.random.default_rng(1).uniform(0.1, 1.0, size=len(formed))
    merged = cross_terms.merge(several)
    norm, reach = cross_terms.measure(merged)
    exact = np.sqrt(np.sum(formed**2, axis=(1, 2)))
    np.testing.assert_allclose(norm, exact, rtol=1e-9, atol=1e-9)
    assert np.all(norm >= exact * (1 - 1e-12)) and np.all(reach >= norm * (1 - 1e-12) - 1e-12)
    found = cross_terms.weighted_sum(merged, tf.constant(weights), DEPTH)
    found = tf.convert_to_tensor(found) if isinstance(found, tf.IndexedSlices) else found
    np.testing.assert_allclose(found, np.einsum("b,bij->ij", weights, formed), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("silent", [(), (3,), (2, 3), (0, 1)])
@pytest.mark.parametrize("ids", [(1, 1, 4, 0), (1, 4, 1, 1), (1, 4, 0, 1), (4, 1, 1, 0)])
def test_repeated_candidates_are_added_up_wherever_they_stand_and_whichever_have_no_gradient(ids, silent):
    factor, formed = scores(np.random.default_rng(2), 5, 4, ids, silent)
    check([factor], formed)


@pytest.mark.slow_cases("scores")
@pytest.mark.parametrize("kind", KINDS)
@quickly
@given(batch=batches, first=lengths, second=lengths, seed=seeds)
def test_one_kind_read_twice_is_one_gradient(kind, batch, first, second, seed):
    rng = np.random.default_rng(seed)
    a, formed_a = KINDS[kind](rng, batch, first)
    b, formed_b = KINDS[kind](rng, batch, second)
    check([a], formed_a)
    check([a, b], formed_a + formed_b)


@pytest.mark.fast_cases("rows-outer", "outer-per_example", "bag-scores")
@pytest.mark.parametrize(
    "one, other",
    [
        ("rows", "outer"), ("rows", "scores"), ("rows", "positions"), ("scores", "positions"), ("outer", "per_example"),
        ("bag", "rows"), ("bag", "outer"), ("bag", "scores"),
    ],
)  # fmt: skip
@quickly
@given(batch=batches, first=lengths, second=lengths, seed=seeds)
def test_two_kinds_add_twice_their_inner_product(one, other, batch, first, second, seed):
    rng = np.random.default_rng(seed)
    a, formed_a = KINDS[one](rng, batch, first)
    b, formed_b = KINDS[other](rng, batch, second)
    check([a, b], formed_a + formed_b)
    check([b, a], formed_a + formed_b)


@pytest.mark.parametrize("one, other", [("rows", "per_example"), ("scores", "per_example"), ("scores", "outer")])
def test_a_table_is_never_formed(one, other):
    rng = np.random.default_rng(0)
    with pytest.raises(NotImplementedError, match="[Rr]egister a rule"):
        cross_terms.measure(cross_terms.merge([KINDS[one](rng, 2, 3)[0], KINDS[other](rng, 2, 3)[0]]))


@quickly
@given(batch=st.integers(1, 4), length=st.integers(1, 9), distinct=st.integers(1, 3), seed=seeds)
def test_repeated_ids_are_summed_before_squaring(batch, length, distinct, seed):
    rng = np.random.default_rng(seed)
    factor, formed = rows(rng, batch, length, rng.integers(0, distinct, size=[batch, length]))
    check([factor], formed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_of_zero_wins_over_what_is_not_finite(kind, bad):
    rng = np.random.default_rng(3)
    factor, formed = KINDS[kind](rng, 3, 2)
    held = getattr(factor, "outer", factor)
    for name in ("g", "q", "x", "values"):
        if hasattr(held, name):
            value = getattr(held, name).numpy()
            value[1] = bad
            setattr(held, name, tf.constant(value))
    weights = tf.constant([0.5, 0.0, 2.0], tf.float64)
    found = cross_terms.weighted_sum(factors.silence([factor], tf.not_equal(weights, 0)), weights, DEPTH)
    found = tf.convert_to_tensor(found) if isinstance(found, tf.IndexedSlices) else found
    np.testing.assert_allclose(found, 0.5 * formed[0] + 2.0 * formed[2], rtol=1e-12)


def test_positions_that_cancel_are_clipped_by_their_sizes():
    """The gradient is zero; its terms, whose roundings count, are not."""
    d, q = np.array([[[3.0, 4.0], [-3.0, -4.0]]]), np.array([[[6.0, 0.0, 8.0]] * 2])
    factor = factors.Scores(tf.constant([1, 4]), tf.constant(d), tf.constant(q), [ROWS, WIDTH])
    norm, reach = cross_terms.measure([factor])
    assert reach.numpy() == pytest.approx(2 * 5 * 10) and norm.numpy() >= 100 / cross_terms.CANCELLING
    assert factor.terms.numpy() == 2 and not factor.whole


def exact_norms(*parts):
    return np.linalg.norm(sum(parts).reshape(len(parts[0]), -1), axis=1)


def test_a_norm_left_by_large_terms_that_cancel_is_not_too_small():
    """In float32, Gram matrices of these lose all digits; an example let through with its norm in doubt is a leak."""
    rng = np.random.default_rng(7)
    x, g = rng.normal(size=[400, 1, 300]), 1e4 * rng.normal(size=[400, 1, 200])
    x = np.concatenate([x, x + 1e-5 * rng.normal(size=x.shape)], axis=1).astype("float32")
    g = np.concatenate([g, -g], axis=1).astype("float32")
    exact = exact_norms(*(np.einsum("bi,bo->bio", x[:, t].astype(float), g[:, t].astype(float)) for t in range(2)))
    factor = factors.Outer(tf.constant(x), tf.constant(g), as_is)
    naive = np.sum(np.einsum("bti,bsi->bts", x, x) * np.einsum("bto,bso->bts", g, g), axis=(1, 2))
    assert np.any(naive < exact**2 / 2)  # the danger is there
    assert np.all(factor._gram_norm() >= exact)


def test_rounding_up_costs_next_to_nothing_where_nothing_cancels():
    rng = np.random.default_rng(8)
    x, g = rng.normal(size=[50, 32, 300]).astype("float32"), rng.normal(size=[50, 32, 200]).astype("float32")
    factor = factors.Outer(tf.constant(x), tf.constant(g), as_is)
    exact = np.linalg.norm(np.einsum("bti,bto->bio", x, g).reshape(50, -1), axis=1)
    found = factor._gram_norm().numpy()
    assert np.all(found >= exact) and np.all(found <= exact * (1 + 2e-3))


def test_two_kinds_that_cancel_are_not_too_small():
    """A table read by row whose gradient the logits of the same table undo."""
    rng = np.random.default_rng(9)
    ids, g = rng.integers(0, ROWS, size=[300, 1]), 1e4 * rng.normal(size=[300, 1, WIDTH]).astype("float32")
    one_hot = np.eye(ROWS, dtype="float32")[ids]
    undone = -g * (1 + 1e-5 * rng.normal(size=g.shape).astype("float32"))
    row = factors.Rows(tf.constant(ids), tf.constant(g), [ROWS, WIDTH])
    other = factors.Outer(tf.constant(one_hot), tf.constant(undone), as_is)
    exact = np.linalg.norm((g.astype(float) + undone.astype(float))[:, 0], axis=1)
    assert np.all(cross_terms.measure([row, other])[0] >= exact)


def test_a_length_by_which_lost_bits_of_a_weight_would_count_is_infinite():
    sides = tf.constant([[2.0**59, 0.0], [2.0**61, 0.0], [-(2.0**120), 1.0]])
    assert np.isfinite(factors.length(sides)).tolist() == [True, False, False]
    bags = factors.BagRows(tf.zeros([3, 1], tf.int64), tf.fill([3, 1], 2.0**-100), sides, [ROWS, 2])
    assert np.isfinite(cross_terms.measure([bags])[0]).tolist() == [True, False, False]


def test_norms_of_bfloat16_tensors_are_float32():
    x = tf.cast(tf.random.stateless_normal([4, 5, 8], [1, 2]), tf.bfloat16)
    factor = factors.Outer(x, x, as_is)
    exact = np.einsum("bti,bto->bio", *[np.asarray(tf.cast(x, tf.float64))] * 2)
    assert factor.norm().dtype == tf.float32
    np.testing.assert_allclose(factor.norm(), np.sqrt(np.sum(exact**2, axis=(1, 2))), rtol=1e-4)


def test_memory_of_a_long_bag_grows_with_the_bag_and_not_its_square():
    """A bag of 10,000 ids has 100 million pairs; no tensor of the traced norm comes near."""
    batch, length = 4, 10_000
    rng = np.random.default_rng(5)
    ids, g = rng.integers(0, 50, size=[batch, length]), rng.normal(size=[batch, length, 2])

    @tf.function
    def norm(ids, g):
        return factors.Rows(ids, g, [50, 2]).norm()

    graph = norm.get_concrete_function(tf.constant(ids), tf.constant(g)).graph
    static = [t.shape.num_elements() or 0 for o in graph.get_operations() for t in o.outputs]
    assert max(static) <= 2 * batch * length
    formed = np.zeros([batch, 50, 2])
    np.add.at(formed, (np.arange(batch)[:, None], ids), g)
    np.testing.assert_allclose(norm(ids, g), np.sqrt(np.sum(formed**2, axis=(1, 2))), rtol=1e-9)
