"""Faults of floating point that once broke the claim, each as it was found: removal must stay within the clip.

*Removal* is ‖clipped sum(D) − clipped sum(D − x)‖, both as computed. `test_adversary.py` searches for more of the kind.
"""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, dense_gradients, sums_of
from keras import layers
from zoo import examples

import tfdp_rec
from tfdp_rec.clipping import Clipping, Outer, PerExample, Rows, Scores, clipped_sum
from tfdp_rec.core.sensitivity import cross_terms, engine, factors, float_sums
from tfdp_rec.core.sensitivity.cross_terms import CANCELLING, measure
from tfdp_rec.core.sensitivity.engine import SLACK, Graph, Share, clip

HUGE = np.float32(1e12)


class PerPosition(Scored):
    """A model whose output is multiplied by the batch's `target`: gradients are what the test says they are."""

    def per_example_loss(self, data, training=True):
        output = self.forward(self.parts, data)
        return tf.reduce_sum(tf.cast(data["target"], output.dtype) * output, axis=list(range(1, output.shape.rank)))


clipped_by = functools.cache(sums_of)  # traced once a model


def removal(model, batch, out, clip=1.0, **options):
    """‖computed(D) − computed(D without example `out`)‖, in float64."""
    size = len(next(v for k, v in batch.items() if k not in model.shared_inputs))
    rest = [i for i in range(size) if i != out]
    model.per_example_loss(batch)
    clipped = clipped_by(model, clip, **options)
    whole, fewer = (
        dense_gradients(model, clipped(examples(batch, at, model.shared_inputs))) for at in (list(range(size)), rest)
    )
    return np.sqrt(sum(np.sum((whole[path] - fewer[path]) ** 2) for path in whole))


def embedding(rows=5, width=2):
    return PerPosition([layers.Embedding(rows, width)], lambda p, b: p[0](b["ids"]))


def dense(units=1, **options):
    return PerPosition([layers.Dense(units, use_bias=False, **options)], lambda p, b: p[0](b["x"]))


def test_an_id_read_twice_with_opposite_gradients():
    """Norm 0 and weight 1 by the norm of the summed row; summed one by one, its halves erased whatever they met."""
    rng = np.random.default_rng(0)
    others = rng.normal(size=[9, 2, 2])
    batch = {
        "ids": np.full([10, 2], 3),
        "target": np.concatenate([others[:4], [[[HUGE] * 2, [-HUGE] * 2]], others[4:]]).astype("float32"),
    }
    assert removal(embedding(), batch, 4) <= 1


@pytest.mark.fast_cases("sizes0")
@pytest.mark.parametrize("sizes", [(1, 3), (8, 3), (64, 2000)])
def test_positions_that_cancel(sizes):
    """`Dense(1, use_bias=False)` on [B, 2, 3]: removal was 922 at C = 1 with 1,001 users. Also where the norm comes
    from Gram matrices and not from the formed gradient.
    """
    units, width = sizes
    size = 1001 if width == 3 else 60
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=[size, 2, width]), rng.normal(size=[size, 2, units])
    x[7], target[7] = 1.0, HUGE
    target[7, 1] = -HUGE
    batch = {"x": x.astype("float32"), "target": target.astype("float32")}
    assert removal(dense(units), batch, 7) <= 1


def cancelling(positions, width, residue, seed):
    """Positions in pairs that cancel but for a share `residue`, and the exact norms of their gradients."""
    rng = np.random.default_rng(seed)
    x, g = (rng.normal(size=[200, positions // 2, width]).astype("float32") for _ in "xg")
    other = (g * (residue * rng.normal(size=[200, 1, 1]) - 1)).astype("float32")
    x, g = np.concatenate([x, x], axis=1), np.concatenate([g, other], axis=1)
    exact = np.linalg.norm(np.einsum("bti,bto->bio", x.astype("float64"), g.astype("float64")), axis=(1, 2))
    return Outer(tf.constant(x), tf.constant(g), lambda formed: formed), exact


@pytest.mark.parametrize("residue", [0.0, 1e-7, 1e-4, 1.0])
@pytest.mark.parametrize("positions, width", [(2, 3), (2, 40), (16, 40), (64, 8)])  # by Gram matrices, and formed
def test_a_norm_is_never_below_the_true_one(positions, width, residue):
    """Before any floor: what it may have lost by cancelling is added, else half of these come out too small."""
    factor, exact = cancelling(positions, width, residue, seed=positions + width)
    assert np.all(factor.norm().numpy().astype("float64") >= exact * (1 - 1e-12))


def test_what_cancels_is_clipped_by_its_parts():
    """The sum's rounding is a share of the parts: a gradient 256 times smaller than they counts as that large."""
    factor, exact = cancelling(4, 6, 1e-6, seed=0)
    norm, reach = measure([factor])
    assert np.all(exact < reach / CANCELLING / 10)
    np.testing.assert_array_less(reach / CANCELLING * (1 - 1e-6), norm)


@pytest.mark.parametrize("positions", [False, True])
def test_squares_that_underflow(positions):
    """|x|²|g|² with x = 1e-19 was norm 0, and the contribution 180 C."""
    model = dense(2)
    for small, large in ((1e-19, 180e19), (1e-25, 1e27), (1e-37, 1e37)):
        x, target = np.full([3, 4], small), np.full([3, 2], large)
        x[1:], target[1:] = 0.1, 0.1
        if positions:
            x, target = np.stack([x, x * 0.5], axis=1), np.stack([target, target], axis=1)
        batch = {"x": x.astype("float32"), "target": target.astype("float32")}
        assert removal(model, batch, 0) <= 1, (small, large)


def test_a_length_whose_squares_are_no_numbers_is_not_nothing():
    """|x| = 2e-20 and |g| = 1.4e18: the gradient is 0.028 long, and weighed as 0 it would be any number of clips."""
    tiny, huge = tf.fill([3, 4], 1e-20), tf.fill([3, 2], 1e18)
    several = [Outer(tiny, huge, lambda formed: formed), Scores(tf.constant([0, 1, 2, 3]), tiny, huge, [5, 2])]
    for factor in several:
        assert np.all(factor.norm().numpy() >= np.sqrt(8) * 1e-2)


def test_gradients_of_any_size():
    model = embedding()
    for size in (1e-30, 1e-19, 1e19, 1e30):
        rng = np.random.default_rng(2)
        target = rng.normal(size=[4, 2, 2])
        target[0] *= size
        batch = {"ids": rng.integers(0, 5, [4, 2]), "target": target.astype("float32")}
        assert removal(model, batch, 0) <= 1, size


def scores(**options):
    parts = [layers.Dense(2, use_bias=False), tfdp_rec.CandidateScores(6, 2, **options)]
    model = PerPosition(parts, lambda p, b: p[1](p[0](b["x"]), b["label"], b["negatives"]))
    model.shared_inputs = ("negatives",)
    return model


@pytest.mark.fast_cases("a candidate that is the positive")
@pytest.mark.parametrize("what", ["a candidate drawn twice", "a candidate that is the positive"])
def test_candidates_that_cancel(what):
    rng = np.random.default_rng(3)
    target = rng.normal(size=[6, 4])
    negatives = np.array([2, 2, 1]) if what == "a candidate drawn twice" else np.array([4, 2, 1])
    first, second = (1, 2) if what == "a candidate drawn twice" else (0, 1)
    target[0] = 0
    target[0, first], target[0, second] = HUGE, -HUGE
    batch = {
        "x": rng.normal(size=[6, 3]).astype("float32"), "label": np.array([4, 1, 2, 4, 2, 0]),
        "negatives": negatives, "target": target.astype("float32"),
    }  # fmt: skip
    model = scores(remove_accidental_hits=False)
    model.per_example_loss(batch)
    model.parts[0].trainable = False
    assert removal(model, batch, 0) <= 1


def test_a_tied_table_whose_readings_cancel():
    """Read by row and, as logits, whole: the two gradients of one row, far larger than their sum."""
    table = layers.ReversibleEmbedding(4, 2)

    def forward(p, b):
        query = tf.cast(b["query"], tf.float32)
        logits = p[0](query, reverse=True)
        return tf.concat([p[0](b["ids"]), logits], axis=1)

    target = np.zeros([5, 6])
    target[:, :2] = np.random.default_rng(4).normal(size=[5, 2])
    target[0, :2], target[0, 2 + 1] = HUGE, -HUGE
    batch = {
        "ids": np.array([1, 1, 1, 2, 1]), "query": np.ones([5, 2], "float32"), "target": target.astype("float32"),
    }  # fmt: skip
    assert removal(PerPosition([table], forward), batch, 0) <= 1


def parts_that_cancel(size, seed):
    """A value for each of `size` examples, 128 times what is left of it, and the share of it that cancels it."""
    rng = np.random.default_rng(seed)
    some = np.arange(size) < 20  # these differ a little from the others, so that roundings do not line up by chance
    near = lambda value: value * np.where(some, 1 + 1e-3 * rng.random(size), 1)  # noqa: E731
    large, left = near(np.full(size, 1e4)), near(np.full(size, 1 - 1 / 128.5))
    return [tf.constant(each.astype("float32")) for each in (large, -large * left, left)]


def factor_that_cancels(kind, value, left):
    """A factor of a table `[2, 3]`, of that value for each example."""
    ones, d = tf.ones([tf.size(value), 3]), tf.stack([value, tf.zeros_like(value)], axis=1)
    if kind == "rows":
        return Rows(tf.zeros([tf.size(value), 1], tf.int64), value[:, None, None] * ones[:, None], [2, 3])
    if kind == "logits":
        return Outer(d, ones, lambda formed: formed)
    if kind == "formed":
        return PerExample(d[:, :, None] * ones[:, None, :])
    if kind == "positions":  # the two terms of an example cancel within one factor
        d, ones = tf.stack([d, -d * left[:, None]], axis=1), tf.stack([ones, ones], axis=1)
    return Scores(tf.constant([0, 1]), d, ones, [2, 3])


@pytest.mark.fast_cases("kinds0", "kinds3", "kinds5")
@pytest.mark.parametrize(
    "kinds",
    [
        ("rows", "scores"), ("scores", "rows"), ("rows", "logits"), ("scores", "scores"), ("logits", "formed"),
        ("positions",),
    ],
)  # fmt: skip
def test_factors_of_one_variable_that_cancel(kinds):
    """Each factor's sum was rounded to float32 before they were added: removal was 1.73 C at 65,536 examples."""

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)] * 4)
    def summed(large, taken, left, counts):
        several = [factor_that_cancels(kind, value * counts, left) for kind, value in zip(kinds, (large, taken))]
        clipped = engine.clip({"v": cross_terms.merge(several)}, tf.zeros_like(counts), tf.constant(1.0))
        return tf.convert_to_tensor(clipped.gradients["v"])

    for size in (2000, 16_384, 65_536):
        fewer = tf.constant([0.0] + [1.0] * (size - 1))
        for seed in range(6):
            parts = parts_that_cancel(size, seed)
            whole = summed(*parts, tf.ones([size])).numpy().astype("float64")
            assert np.linalg.norm(whole - summed(*parts, fewer).numpy()) <= 1


def test_many_small_errors_in_one_direction():
    """1,500 equal contributions, each rounded the same way as it is added; the first one moves all the roundings."""
    x = np.full([1500, 1], 1.0)
    target = np.full([1500, 1], 0.97)
    x[0], target[0] = 1.0, 3e-5
    batch = {"x": x.astype("float32"), "target": target.astype("float32")}
    assert removal(dense(), batch, 0) <= 1
    everyone = {"ids": np.zeros([1500, 1], int), "target": np.repeat(target[:, None], 2, axis=2).astype("float32")}
    assert removal(embedding(), everyone, 0) <= 1


def drifting(size):
    """Half of the terms add up to a power of two, above which the rest are rounded up; the first keeps it below."""
    half = size // 2
    step = half * 0.5 * 2.0**-23  # between float32 numbers above it
    terms = np.zeros([size, 1])
    terms[1 : half + 1], terms[half + 1 :: 2], terms[half + 2 :: 2], terms[0] = 0.5, 0.6 * step, -0.4 * step, -0.25
    return terms


def beside_a_dense(dtype, table=None):
    """A row that all examples read, and a dense layer of another type."""
    parts = [layers.Embedding(5, 1, dtype=table), layers.Dense(1, use_bias=False, dtype=dtype)]
    wide = "float64" if "float64" in (dtype, table) else "float32"
    output = lambda p, b: tf.concat([tf.cast(v, wide) for v in (p[0](b["ids"])[:, 0], p[1](b["x"]))], 1)  # noqa: E731
    return PerPosition(parts, output)


@pytest.mark.slow_cases("float64-None")
@pytest.mark.parametrize(
    "dtype, table", [("float64", None), ("float64", "mixed_bfloat16"), ("mixed_bfloat16", "float64"), ("float32", None)]
)
def test_the_type_of_one_sum_does_not_decide_how_another_is_made(dtype, table):
    """A float64 layer beside a float32 table had the table's rows added up as if they were float64: 2.2 and 32 C."""
    model = beside_a_dense(dtype, table)
    for size in (16_384, 65_536):
        target = np.concatenate([drifting(size), np.ones([size, 1])], axis=1).astype("float32")
        batch = {"ids": np.zeros([size, 1], int), "x": np.full([size, 1], 1e-9), "target": target}
        assert removal(model, batch, 0) <= 1


def test_a_model_of_several_types_is_clipped_over_all_of_it():
    """Norms are taken over all variables together, whatever their types: 12 and 5 make 13."""
    batch = {"ids": np.zeros([2, 1], int), "x": np.ones([2, 1]), "target": np.array([[12, 5], [5, 12]], "float32")}
    model = beside_a_dense("float64")
    model.per_example_loss(batch)
    found = clipped_sum(model, batch, 1.3 * (1 + SLACK))
    np.testing.assert_allclose(found.norms, [13, 13], rtol=1e-5)
    for gradient in dense_gradients(model, found).values():
        np.testing.assert_allclose(gradient.sum(), 1.7, rtol=1e-5)


U = float_sums.unit(tf.float32)


def way_by(rows, slack=1 / 32, reach=None):
    """How a product over so many rows is cut: (numbers of pieces, their length, whether the rest is in float64)."""
    reach = tf.constant(float(rows) if reach is None else reach)
    way = float_sums.Depth.from_slack(tf.constant(slack), reach, tf.constant(rows), tf.float32).way
    number, laid_out = int(way.number), float_sums._LAID_OUT
    if number < len(laid_out):
        return laid_out[number], -(-rows // laid_out[number]), False
    return -(-rows // int(way.size)) if number == len(laid_out) else 0, int(way.size), True


def lost_at_most(rows, pieces, length, in_float64):
    """By how much the errors of two sums may differ, of rows as long as the clip, one of which differs, in chains."""
    after = 5 if in_float64 else pieces - 1
    return 2 * U * (1 + 2.0**-13) * (1 + (length + after) * U) * (np.sqrt(length) * in_chain(length) + rows * after)


def in_chain(length):
    """The root of the sum of squares of the roundings that a chain's terms go through, that of products included."""
    additions = np.concatenate([[length - 1], np.arange(length - 1, 0, -1)])
    return np.sqrt(np.sum((additions + 1.0) ** 2))


@pytest.mark.parametrize("slack", [1 / 32, 1 / 32 / 2**0.5, 1 / 128])
@pytest.mark.parametrize("rows", [16, 640, 672, 1024, 2048, 4096, 8192, 16_384, 30_000])
def test_a_sum_over_many_examples_is_cut_by_their_number(rows, slack):
    """So that errors that one row may change are within the slack; with fewer pieces they would not be."""
    pieces, length, in_float64 = way_by(rows, slack)
    assert (pieces, length, in_float64) == way_by(rows, slack, reach=1.0)  # whatever the data are
    if not pieces:  # in float64 at once: pieces of eight rows would be too long
        assert lost_at_most(rows, rows // 8, 8, True) > slack
        return
    assert lost_at_most(rows, pieces, length, in_float64) <= slack
    longer = float_sums._LAID_OUT[: float_sums._LAID_OUT.index(pieces)] if not in_float64 else float_sums._LAID_OUT
    assert all(lost_at_most(rows, other, -(-rows // other), False) > 0.98 * slack for other in longer)
    assert not in_float64 or lost_at_most(rows, pieces, length + 8, True) > slack


@pytest.mark.parametrize("rows", [600, 656, 1024, 1312, 2048, 2560, 4096, 5000])
def test_a_way_is_taken_from_where_its_errors_fit(rows):
    """To a share of a thousand, by the errors of chains."""
    for number, pieces in enumerate(float_sums._LAID_OUT):
        length = -(-rows // pieces)
        needed = np.sqrt(length) * in_chain(length) + rows * (pieces - 1)
        first = lambda roundings: int(float_sums.Way.cut_by_place(tf.constant(rows), roundings, tf.float32).number)  # noqa: E731
        assert first(tf.constant(0.999 * needed, tf.float32)) != number
        assert first(tf.constant(1.001 * needed + 0.8 * length, tf.float32)) <= number
    assert float_sums._SPARE * (1 + 2.0**-13) ** 2 <= 1 + U


@pytest.mark.parametrize("slack", [1 / 32, 1 / 128])
@pytest.mark.parametrize("rows", [17, 1024, 4096, 65_536])
def test_rows_of_tables_stand_as_often_as_the_slack_allows(rows, slack):
    """Each id in a chain of its own, all examples in all of them."""
    depth = float_sums.Depth.from_slack(tf.constant(slack), tf.constant(1e9), tf.constant(rows), tf.float32)
    often = int(depth.rows)

    def lost(times):
        return 2 * U * (1 + 2.0**-13) * (1 + times * U) * np.sqrt(rows) * in_chain(times)

    assert lost(often) <= slack < lost(often + 4 + often // 50)
    assert 2 * U * rows <= slack  # an id that stands more often is rounded once


def test_one_depth_for_all_counts_the_errors_of_all_pieces():
    """Factors of one variable are cut by the data, which is another way for a neighbour."""
    way = float_sums.Depth.of(tf.constant(40.0), tf.constant(4096), tf.float32).way
    assert [int(part) for part in way] == [len(float_sums._LAID_OUT), 35]


def test_positions_are_cut_by_what_they_cancel():
    """However few pieces the number of examples asks for."""
    x = tf.constant(drifting(4096).reshape([2048, 2, 1]), tf.float32)
    factor = Outer(x, tf.ones([2048, 2, 1]), lambda formed: formed)
    way = float_sums.Way(tf.constant(0), tf.constant(4096))
    depth = float_sums.Depth(tf.constant(1e9), tf.constant(14.0), way)
    found = factor.weighted_sum(tf.ones([2048]), depth).numpy()[0, 0]
    exact, sizes = (float(tf.reduce_sum(tf.cast(each, tf.float64))) for each in (x, tf.abs(x)))
    assert abs(found - exact) <= 15 * U * sizes < abs(np.add.accumulate(x.numpy().reshape(-1))[-1] - exact)


def test_sums_that_are_bounded_in_different_ways_share_the_slack(monkeypatch):
    """Examples outside the one piece of a product may spend all of their norm in a table, and those in it nothing."""
    slacks, own = [], float_sums.Depth.from_slack
    monkeypatch.setattr(float_sums.Depth, "from_slack", lambda slack, *rest: slacks.append(slack) or own(slack, *rest))
    ids, x, g = tf.zeros([3, 1], tf.int64), tf.ones([3, 2, 4]), tf.ones([3, 2, 5])
    table, product = Rows(ids, tf.ones([3, 1, 2]), [7, 2]), Outer(x[:, 0], g[:, 0], lambda formed: formed)
    positions, formed = Outer(x, g, lambda formed: formed), PerExample(tf.ones([3, 4]))

    def slack_of(*several):
        slacks.clear()
        clip({str(number): [factor] for number, factor in enumerate(several)}, tf.ones([3]), tf.constant(1.0))
        return slacks[0]

    graphs = [tf.function(functools.partial(slack_of, *each), autograph=False) for each in (
        [product, formed], [table], [product, table], [positions], [product, positions, formed],
        [product, table, positions],
    )]  # fmt: skip
    whole, *others = [float(graph()) for graph in graphs]
    np.testing.assert_allclose(others, [whole / n**0.5 for n in (1, 2, 1, 2, 3)], rtol=1e-6)


@pytest.mark.parametrize("size", [640, 1312, 4096])
def test_a_sum_that_hovers_at_a_power_of_two_moves_by_no_more_than_the_clip(size):
    """One example keeps a piece above it, where the last bits of all others are rounded up: the worst that is known."""
    _, length, _ = way_by(size)
    top, power, climbing = 0.9695, 256.0, 264
    values = np.zeros([size, 1], np.float32)
    values[0], values[1 : climbing + 1] = top, np.floor(power / climbing * 4096) / 4096  # added up without rounding
    values[climbing + 1 : length] = 0.749 * power * 2.0**-23
    summed = Graph(lambda formed: (clip({"v": [PerExample(formed)]}, formed[:, 0], tf.constant(1.0)), None))

    def total(x):
        return np.float64(summed(tf.constant(x))[0].gradients["v"].numpy())

    assert float(values[1 : climbing + 1].sum(dtype=np.float64)) < power < float(values[: climbing + 1].sum()) - 0.9

    without = values.copy()
    without[0] = 0
    moved = np.linalg.norm(total(values) - total(without))
    assert 0.973 < moved <= 1  # 1 / (1 + SLACK) is 0.9697


def test_a_row_that_does_not_count_adds_nothing_at_all():
    """A copy of an example in another piece of a sum would change the errors there, too, however small it is."""
    counted, nothing = tf.constant([True, False]), tf.constant([[0.0], [2.0**-40]])

    @tf.function(autograph=False)
    def summed(formed):
        return clip({"v": [PerExample(formed)]}, formed[:, 0], tf.constant(1.0), counted=counted).gradients["v"]

    assert summed(nothing).numpy() == 0 and summed(tf.constant([[0.25], [np.inf]])).numpy() == 0.25


def test_no_way_has_room_where_none_is_left():
    assert [way_by(rows, slack)[0] for rows, slack in ((4096, -1.0), (65_536, 1 / 64), (4096, float("nan")))] == [0] * 3


def test_beside_a_gpu_errors_of_all_pieces_count(monkeypatch):
    """That products of equal numbers are equal was not tried there."""
    monkeypatch.setattr(float_sums, "has_gpu", lambda: True)
    slack, rows = tf.constant(1 / 32), tf.constant(4096)
    depth = float_sums.Depth.from_slack(slack, tf.constant(4096.0), rows, tf.float32)
    assert [int(part) for part in depth.way] == [len(float_sums._LAID_OUT), 100]


@pytest.mark.parametrize("size", [656, 2048, 4096, 16_384])
def test_what_one_row_changes_in_a_product_is_within_the_slack(size):
    """Where a batch, or each of its pieces, drifts above a power of two; one chain of additions is far from it."""
    pieces, length, in_float64 = way_by(size)
    rng, slack = np.random.default_rng(0), 1 / 32
    alike = np.tile(drifting(length), [pieces, 1])[:size]
    terms = np.concatenate([drifting(size), alike, rng.normal(size=[size, 5]) / 5], axis=1)
    values, others = terms.astype("float32"), terms.astype("float32")
    others[0] = 0
    way = float_sums.Depth.from_slack(tf.constant(slack), tf.constant(float(size)), tf.constant(size), tf.float32).way
    ones = np.ones([size, 1], "float32")

    def error(x):
        found = float_sums.products(tf.constant(x), tf.constant(ones), way)
        return found.numpy() - x.astype(np.float64).sum(0)[:, None]

    changed = np.linalg.norm(error(values) - error(others))
    assert changed <= lost_at_most(size, pieces, length, in_float64) <= slack
    chains = [np.add.accumulate(x[:, 0])[-1] - x[:, 0].astype(np.float64).sum() for x in (values, others)]
    assert size < 4096 or abs(chains[0] - chains[1]) > slack


@pytest.mark.parametrize("runs", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_products_of_equal_numbers_are_equal_whatever_else_runs(runs):
    """What lets equal pieces have equal errors: other threads multiply, too, and other rows are other numbers."""
    rng, busy = np.random.default_rng(1), threading.Event()
    shapes = [(512, 128, 128), (640, 1, 300), (512, 13, 512), (656, 257, 64), (500, 33, 1)]
    pairs = [[tf.constant(rng.normal(size=[rows, n]), tf.float32) for n in sides] for rows, *sides in shapes]
    two = tf.function(lambda x, g: tf.matmul(x, g, transpose_a=True), autograph=False)
    first = [two(*pair).numpy().tobytes() for pair in pairs]

    def load():
        others = [tf.random.normal([700, 300]) for _ in range(2)]
        while not busy.is_set():
            two(*others)

    threads = [threading.Thread(target=load) for _ in range(5)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(runs):
            assert [two(*(tf.identity(side) for side in pair)).numpy().tobytes() for pair in pairs] == first
    finally:
        busy.set()
        for thread in threads:
            thread.join()


def test_norms_of_several_are_those_of_each():
    one, seven, many = (tf.random.normal([5, size]) for size in (1, 7, 300))
    each = tf.stack([factors.length(tensor) for tensor in (one, seven, many)], axis=1)
    exact = np.stack([np.linalg.norm(np.float64(t), axis=1) for t in (one, seven, many)], axis=1)
    assert np.all(each > exact)
    found = factors.norms([(seven, many), (one,), (seven,), (many, seven), (many,)])
    np.testing.assert_array_equal(found[:, :3], each)
    for product in (found[:, 3], found[:, 4]):  # rounded up once more
        assert np.all(product > exact[:, 1] * exact[:, 2])
        np.testing.assert_allclose(product, each[:, 1] * each[:, 2], rtol=1e-6)


def test_norms_beside_a_gpu_are_those_of_each(monkeypatch):
    """They are found together by length; a user's rule may lose lengths."""
    sides = [tf.random.normal([5, size]) for size in (7, 3, 7, 4, 3)]
    specs = [tf.TensorSpec([None, None if place in (3, 4) else side.shape[1]]) for place, side in enumerate(sides)]
    several = tf.function(lambda *each: factors.norms([(side,) for side in each]), input_signature=specs)
    alone = several(*sides)
    monkeypatch.setattr(factors, "has_gpu", lambda: True)
    together = tf.function(several.python_function, input_signature=specs)
    np.testing.assert_array_equal(together(*sides), alone)


def test_few_examples_of_huge_parts_are_not_added_up_deeper_than_the_bound_holds():
    """D additions lose D (1 + D u) u, not D u: at D = 10⁵ that is more than the slack."""
    u = float_sums.unit(tf.float32)
    for reach in (0.5, 1.0, 3.0, 100.0):
        slack, examples = tf.constant(1 / 32), tf.constant(1 << 16)
        parts = float_sums.Depth.from_slack(slack, tf.constant(reach), examples, tf.float32).parts
        depth = float(parts) + 3
        assert 0.9 / 32 <= 2 * u * depth * (1 + depth * u) * max(reach, 1.0) <= 1 / 32


def product(x, g, depth, multiply=float_sums.products):
    x = tf.constant(x)
    return multiply(x, tf.constant(g), float_sums.Way.of(tf.shape(x)[0], tf.constant(depth), x.dtype))


@pytest.mark.parametrize("depth", [14.0, 40.0, 63.9, 126.0, 500.0])
def test_a_product_is_as_exact_as_its_depth_says(depth):
    """Terms that drift in one direction, in 4,096 rows, against exact sums; one chain of additions is far from it."""
    terms, u = drifting(4096).astype(np.float32), float_sums.unit(tf.float32)
    values = np.concatenate([terms, np.random.default_rng(0).normal(size=[4096, 40]).astype(np.float32)], axis=1)
    ones = np.ones([4096, 3], np.float32)
    exact, sizes = values.astype(np.float64).sum(0)[:, None], np.abs(values.astype(np.float64)).sum(0)[:, None]
    error = np.abs(product(values, ones, depth).numpy() - exact)
    assert (error <= u * (np.floor(depth) + 1) * sizes).all()
    chain = np.add.accumulate(terms[:, 0])[-1]
    assert abs(chain - exact[0, 0]) > u * 150 * sizes[0, 0]


@pytest.mark.parametrize("depth, longest", [(13.0, 8), (40.0, 35), (63.9, 58)])
def test_a_piece_leaves_room_for_the_roundings_after_it(monkeypatch, depth, longest):
    """Four more additions in float32, and those in float64 as one."""
    multiply, own, lengths = tf.matmul, float_sums._products.__wrapped__, []

    def spied(x, g, **options):
        lengths.append(int(x.shape[0]))
        return multiply(x, g, **options)

    monkeypatch.setattr(tf, "matmul", spied)
    monkeypatch.setattr(float_sums, "wrap_in_call", lambda branch: branch)
    product(np.ones([4096, 2], "f"), np.ones([4096, 1], "f"), depth, lambda x, g, way: own(x, g, *way))
    assert max(lengths) == longest == int(depth) - 5 and sum(lengths) == 4096


@pytest.mark.parametrize("capabilities, alone", [([], False), ([(9, 0)], True), ([(9, 0), (8, 6)], False)])
def test_a_long_product_is_made_in_float64_at_once_on_gpus_that_are_fast_at_it(monkeypatch, capabilities, alone):
    """A loop of 60 small products takes an H200 forty times as long as one; most GPUs have few units for float64."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(capabilities) if kind == "GPU" else [])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": gpu})
    number = lambda terms, depth: int(float_sums.Way.of(tf.constant(terms), tf.constant(depth), tf.float32).number)  # noqa: E731
    in_pieces, in_float64 = len(float_sums._LAID_OUT), len(float_sums._LAID_OUT) + 1
    assert number(16_384, 60.0) == (in_float64 if alone else in_pieces)
    assert number(2048, 200.0) == float_sums._LAID_OUT.index(16) and number(4096, 3.0) == in_float64


def test_pieces_are_added_up_in_float64():
    terms = np.zeros([4096, 1], np.float32)
    terms[0], terms[40::40] = 2.0**24, 0.5  # each lost, one by one, in float32
    found = product(terms, np.ones([4096, 1], "f"), 13.0)
    assert found.numpy()[0, 0] == np.float32(terms.astype(np.float64).sum()) > 2.0**24


@pytest.mark.parametrize("depth", [0.0, 3.0, float("nan"), float("-inf")])
def test_a_product_of_no_depth_is_made_in_float64(depth):
    terms = drifting(4096).astype(np.float32)
    found = product(terms, np.ones([4096, 1], "f"), depth)
    assert found.numpy()[0, 0] == np.float32(terms.astype(np.float64).sum())


def test_a_product_of_float64_has_one_way():
    x, g = (np.random.default_rng(seed).normal(size=[50, 3]) for seed in (0, 1))
    run = tf.function(lambda: product(x, g, 1.0), autograph=False).get_concrete_function()
    assert np.allclose(run(), x.T @ g, rtol=1e-13, atol=0)
    assert not [each.type for each in run.graph.get_operations() if "Case" in each.type or "Call" in each.type]


KERNELS = {
    "a Dense layer": (lambda: layers.Dense(1, use_bias=False), 16, 2, None),
    "a wide Dense layer": (lambda: layers.Dense(256, use_bias=False), 512, 2, None),
    "logits of a table, two examples": (lambda: layers.ReversibleEmbedding(16, 16), 16, 2, None),
    "logits of a table": (lambda: layers.ReversibleEmbedding(64, 64), 64, 16, None),
    "logits of a table, in parts": (lambda: layers.ReversibleEmbedding(64, 64), 64, 17, 16),
}


@pytest.mark.fast_cases("a wide Dense layer", "logits of a table, in parts")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kink_where_kernels_for_other_numbers_of_rows_differ(name):
    """The others' outputs lie on a ReLU's kink, between what a kernel gives for all rows and for one row less: removal
    was 1.6 C at 2 examples and 4.0 C at 16, of which 15 took the other branch.
    """
    made, width, size, part = KERNELS[name]
    layer = made()
    layer.build([None, width])
    call = (lambda v: layer(v, reverse=True)) if hasattr(layer, "embeddings") else layer
    run = tf.function(call, input_signature=[tf.TensorSpec([None, width])], autograph=False)
    model = PerPosition([layer], lambda p, b: tf.nn.relu(call(b["x"]) + b["offset"]))
    rng, others = np.random.default_rng(0), np.arange(size - 1)
    for _ in range(3):
        x = rng.normal(size=[size, width]).astype("float32")
        whole, fewer = run(x).numpy()[:-1], run(x[:-1]).numpy()
        column = (whole != fewer).argmax(axis=1)
        target, offset = np.zeros([2, size, whole.shape[1]], "float32")
        offset[:], offset[-1, 0], target[-1] = -1e6, 100, 10
        offset[others, column] = -np.minimum(whole, fewer)[others, column]
        target[others, column] = 10 * np.sign(fewer - whole)[others, column]
        batch = {"x": x, "offset": offset, "target": target}
        assert removal(model, batch, size - 1, microbatch_size=part) <= 1


def test_an_example_computed_twice_counts_once():
    """What is repeated up to a whole number of vectors is in no sum, no norm, no loss and no list of reads."""
    batch = {"ids": np.array([[1, 2], [3, 3], [4, 0]]), "target": np.ones([3, 2, 2], "float32")}
    model = embedding()
    model.per_example_loss(batch)
    found = clipped_sum(model, batch, 100.0)
    (path,) = found.gradients
    assert found.norms.shape == found.losses.shape == [3]
    assert np.asarray(found.reads[path].example).tolist() == [0, 0, 1, 1, 2, 2]
    assert np.asarray(found.reads[path].ids).tolist() == [1, 2, 3, 3, 4, 0]
    assert sorted(np.asarray(found.gradients[path].indices).tolist()) == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(dense_gradients(model, found)[path][:, 0], [1, 1, 1, 2, 1])


def test_an_example_whose_gradient_is_no_number_is_in_no_list_of_reads():
    batch = {"ids": np.array([[1, 2], [3, 3], [4, 0]]), "target": np.ones([3, 2, 2], "float32")}
    batch["target"][1] = np.nan
    model = embedding()
    model.per_example_loss(batch)
    found = clipped_sum(model, batch, 100.0)
    (path,) = found.gradients
    assert np.asarray(found.reads[path].example).tolist() == [0, 0, 2, 2]


def test_repeated_examples_have_no_gradient_so_that_none_is_silenced(monkeypatch):
    """All that it says would be looked at for infinities, which takes a pass over the inputs."""
    of_all, own = [], factors.silence
    monkeypatch.setattr(factors, "silence", lambda several, heard: of_all.append(heard) or own(several, heard))
    model, rows = dense(), {"x": tf.ones([3, 1]), "target": tf.ones([3, 1])}
    model.per_example_loss(rows)
    clipping = Clipping(model, model.per_example_loss, tf.constant(1.0))

    @tf.function(autograph=False)
    def weighed(batch):
        return clipping.sum(batch).gradients._weights, of_all.pop()

    weights, heard = weighed(rows)
    assert np.all(weights[:3]) and not np.any(weights[3:]) and np.all(heard)


def test_what_a_gradient_of_its_own_makes_of_nothing_is_not_counted_for_a_repeated_example():
    @tf.custom_gradient
    def always_one(output):
        return output, lambda upstream: tf.ones_like(upstream)

    model = PerPosition([layers.Dense(1, use_bias=False)], lambda p, b: always_one(p[0](b["x"])))
    rows = {"x": tf.ones([16, 1]), "target": tf.ones([16, 1])}
    model.per_example_loss(rows)
    clipping = Clipping(model, model.per_example_loss, tf.constant(1.0))
    found, _ = Graph(lambda batch: (clipping.sum(batch), None))({key: value[:3] for key, value in rows.items()})
    np.testing.assert_allclose(dense_gradients(model, found)[model.parts[0].kernel.path], 3 / (1 + SLACK), rtol=1e-5)


def test_rows_are_added_up_without_a_sparse_product_where_operations_are_to_be_deterministic(monkeypatch):
    """A GPU has none that is."""
    rng = np.random.default_rng(0)
    ids, values, weights = rng.integers(0, 7, 50), rng.normal(size=[50, 3]), rng.uniform(size=50)
    monkeypatch.setattr(float_sums, "is_deterministic", lambda: True)
    monkeypatch.setattr(float_sums, "_add_segments", float_sums._add_segments.__wrapped__)
    monkeypatch.setattr(tf.raw_ops, "SparseTensorDenseMatMul", None)
    terms = float_sums.Terms(*map(tf.constant, (ids, values, weights)))
    ((found, added),) = float_sums.rows([terms], tf.constant(1000.0))
    exact = np.stack([weights[ids == each] @ values[ids == each] for each in found.numpy()])
    np.testing.assert_allclose(added, exact, rtol=1e-12)


def test_a_row_that_very_many_read_is_added_up_no_deeper_than_allowed():
    """100,000 times 0.1, one after the other, is 9,998.6 in float32."""
    ids = tf.constant(np.r_[np.zeros(100_000), [7, 7]], tf.int64)
    values, weights = tf.fill([100_002, 2], 0.1), tf.ones([100_002])
    terms, other = float_sums.Terms(ids, values, weights), float_sums.Terms(ids[-3:], values[-3:], weights[-3:])
    tables = float_sums.rows([other, terms, other], tf.constant(1000.0))  # tables whose rows few read beside it
    tenth = np.float64(np.float32(0.1))
    for (found, added), most in zip(tables, (1, 100_000, 1), strict=True):
        exact = tenth * np.array([[most], [2]])
        assert found.numpy().tolist() == [0, 7]
        assert np.all(np.abs(added.numpy() - exact) <= 1000 * float_sums.unit(tf.float32) * exact)


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("part", [None, 3, 700])
def test_in_parts_too(part):
    rng = np.random.default_rng(5)
    size = 701
    target = rng.normal(size=[size, 2, 2])
    target[5] = [[HUGE] * 2, [-HUGE] * 2]
    batch = {"ids": np.full([size, 2], 3), "target": target.astype("float32")}
    assert removal(embedding(), batch, 5, microbatch_size=part) <= 1


@pytest.mark.slow
def test_microbatches_share_the_slack(monkeypatch):
    """The errors of their sums add up in the whole sum."""
    slacks, own, model = [], float_sums.Depth.from_slack, dense()
    monkeypatch.setattr(float_sums.Depth, "from_slack", lambda slack, *rest: slacks.append(slack) or own(slack, *rest))
    rows = {"x": tf.ones([12, 1]), "target": tf.ones([12, 1])}
    model.per_example_loss(rows)

    @tf.function
    def slack_of(part):
        slacks.clear()
        clipping = Clipping(model, model.per_example_loss, tf.constant(1.0))
        clipping.sum(rows, Share(part, tf.constant(12)))
        return slacks[0]

    np.testing.assert_allclose(slack_of(tf.constant(4)) * 4, slack_of(tf.constant(1)), rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_and_a_mask():
    """Norms came from one pass and the gradient from another; now there is one pass, and one strategy."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        parts = [layers.Dense(8), layers.Dropout(0.5, seed=1), layers.Dense(3)]
        model = PerPosition(parts, lambda p, b: p[2](p[1](p[0](b["x"]), training=True)))
        rng = np.random.default_rng(6)
        x = rng.normal(size=[9, 4]).astype("float32") * 1e3
        batch = {"x": x, "target": rng.normal(size=[9, 3]).astype("float32")}
        model.per_example_loss(batch)
        found = clipped_sum(model, batch, 1.0)  # the last example's mask does not depend on how many follow
        fewer = clipped_sum(model, {k: v[:0] for k, v in batch.items()}, 1.0)
        total = np.sqrt(sum(np.sum(g**2) for g in dense_gradients(model, found).values()))
        assert total <= 9 and all(not np.any(g) for g in dense_gradients(model, fewer).values())
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.parametrize("strategy", ["ghost", "anything"])
def test_one_strategy_is_offered(strategy):
    model, batch = dense(), {"x": np.ones([2, 3], "float32"), "target": np.ones([2, 1], "float32")}
    model.per_example_loss(batch)
    with pytest.raises(ValueError, match="bookkeeping"):
        clipped_sum(model, batch, 1.0, strategy=strategy)
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(inputs))
    mechanism = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2)
    with pytest.raises(TypeError, match="clipping_strategy"):
        model.compile(mechanism, "mse", clipping_strategy=strategy)


def test_pieces_are_short_enough_with_their_own_rounding():
    def enough(number, terms, depth):
        return bool(float_sums.short_enough(number, tf.constant(terms), tf.constant(depth)))

    assert [enough(n, 2048, 200.0) for n in (1, 8, 16, 128)] == [False, False, True, True]
    assert [enough(1, 100, d) for d in (101.0, 102.0, -3.0, float("nan"))] == [False, True, False, False]
