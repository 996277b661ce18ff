"""The sum of a batch that devices share: the oracle's, whichever the batch's size, and no less private."""

import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_matches_oracle, dense_gradients, double_precision
from zoo import SIZE, built, examples

from experiments.removal.__main__ import batch_of, removals
from tfdp_rec.clipping import ClippedSum, Clipping, on_devices
from tfdp_rec.core.ground.graph_checks import is_check
from tfdp_rec.core.sensitivity import float_sums
from tfdp_rec.core.sensitivity.batches import hide_batch_axis, tensors
from tfdp_rec.core.sensitivity.engine import Graph, shared_inputs

HERE = "CPU:0"


def shared_sum(model, number, clip, microbatch_size=None):
    """(batch, present) -> the clipped sum by so many devices, all of them this one; traced once."""
    loss, shared = functools.partial(model.per_example_loss, training=False), shared_inputs(model)

    def run(batch, present):
        clipping = Clipping(model, loss, tf.constant(clip), present=present)
        devices = number * [HERE]
        return on_devices(clipping, hide_batch_axis(batch, shared), devices, microbatch_size=microbatch_size), None

    graph = Graph(run, shared)
    size = lambda batch: len(tf.nest.flatten({k: v for k, v in batch.items() if k not in shared})[0])  # noqa: E731
    return lambda batch, present=None: graph(
        tensors(batch), tf.constant(np.ones(size(batch), bool) if present is None else present)
    )[0]


def by(number):
    """As `clipped_sum`, by so many devices."""
    return lambda model, batch, clip, **options: shared_sum(model, number, clip, **options)(batch)


class TestAsExact:
    @pytest.fixture(autouse=True, scope="class")
    def float64(self):
        with double_precision():
            yield

    @pytest.mark.slow
    @pytest.mark.fast_cases("mlp-None", "mlp-2")
    @pytest.mark.parametrize("microbatch_size", [None, 2])
    @pytest.mark.parametrize("name", ["mlp", "two_tower", "dlrm", "gru"])
    def test_shares_add_up_to_the_oracles_sum(self, name, microbatch_size):
        model, batch = built(name)
        assert_matches_oracle(model, batch, clip=1.5, take=by(3), microbatch_size=microbatch_size)

    @pytest.mark.slow
    def test_batches_of_fewer_examples_than_devices_and_rows_without_data(self):
        model, batch = built("two_tower")
        alone, shared = shared_sum(model, 1, 0.1), shared_sum(model, 4, 0.1)
        cases = [np.arange(SIZE) != absent for absent in range(SIZE)] + [np.arange(SIZE) < few for few in range(3)]
        for present in cases:
            chosen = examples(batch, present, model.shared_inputs)
            expected = dense_gradients(model, alone(chosen))
            for found in (shared(chosen), shared(batch, present)):
                assert found.norms.shape == found.losses.shape == [present.sum()]
                for path, gradient in dense_gradients(model, found).items():
                    np.testing.assert_allclose(gradient, expected[path], rtol=1e-9, atol=1e-12)

    @pytest.mark.slow
    def test_reads_number_the_examples_of_the_whole_batch(self):
        model, batch = built("two_tower")
        reads = by(3)(model, batch, 1.0).reads
        label = reads[model.parts[3].trainable_variables[0].path]
        assert list(zip(label.example.numpy(), label.ids.numpy())) == list(enumerate(batch["label"]))


@pytest.mark.fast_cases("ordinary-2", "drifting-17", "equal-4096")
@pytest.mark.parametrize("size", [2, 3, 17, 4096, 16_384])
@pytest.mark.parametrize("kind", ["ordinary", "equal", "drifting"])
def test_no_example_moves_the_sum_of_two_devices_by_more_than_the_clip(kind, size):
    """Also where the others change their devices, as no neighbours do."""
    removal = removals("float32", "float32", devices=2 * [HERE])
    assert max(removal(batch_of(kind, size, seed)) for seed in range(2)) <= 1


def test_devices_share_the_slack(monkeypatch):
    """The errors of their sums add up in the whole sum."""
    slacks, own = [], float_sums.Depth.from_slack
    monkeypatch.setattr(float_sums.Depth, "from_slack", lambda slack, *rest: slacks.append(slack) or own(slack, *rest))
    model, batch = built("mlp")

    def slacks_of(number):
        @tf.function(autograph=False)
        def sums():
            slacks.clear()
            by(number)(model, batch, 1.0)
            return list(slacks)

        return np.array(sums())

    np.testing.assert_allclose(3 * slacks_of(3), 3 * list(slacks_of(1)), rtol=1e-6)


@pytest.mark.parametrize("number, microbatch_size", [(1, 1), (2, None), (2, 1), (3, 2)])
@pytest.mark.parametrize("whole", [True, False], ids=["dense", "rows"])
def test_a_sum_of_parts_is_rounded_once_and_once_more_where_it_is_scaled(number, microbatch_size, whole):
    """The slack pays for two roundings of the whole: of parts on devices there were three."""
    parts, ids = np.random.default_rng(0).uniform(0.5, 1, [6, 50_000]).astype("float32"), tf.constant([3], tf.int64)

    def sum_of(clipping, piece, share):
        exact = tf.reduce_sum(tf.cast(piece, tf.float64), axis=0)  # of six parts, each of which is a float32 number
        found = tf.cast(exact, tf.float32)
        gradient = found if whole else tf.IndexedSlices(found[None], ids)
        return ClippedSum({"w": gradient}, piece[:, 0], clipping.l2_norm_clip, piece[:, 0])

    model = built("mlp")[0]

    def run(batch):
        clipping = Clipping(model, None, tf.constant(1.0))
        return on_devices(clipping, batch, number * [HERE], sum_of, microbatch_size), None

    found, exact = Graph(run)(tf.constant(parts))[0], parts.astype(np.float64).sum(axis=0)
    third = np.float64(np.float32(1 / 3))
    for made, of, most in ((found.gradients["w"], exact, 1), (found.scaled("w", tf.constant(1 / 3)), third * exact, 2)):
        values = made.values[0] if isinstance(made, tf.IndexedSlices) else made
        roundings = np.abs(np.float64(values) - of) / of * 2.0**24
        own = 0 if microbatch_size == 1 else 1  # of a part of several examples
        assert roundings.max() <= (most + own) * (1 + 1e-6)


@pytest.mark.slow
def test_parts_on_devices_share_the_slack_of_their_device():
    model, batch = built("mlp")
    seen = set()

    def sum_of(clipping, examples, share):
        found = clipping.sum(examples, share)
        note = lambda parts, size, norms: seen.add((int(parts), int(size))) or norms  # noqa: E731
        norms = tf.numpy_function(note, [share.parts, share.examples, found.norms], found.norms.dtype)
        return dataclasses.replace(found, norms=tf.ensure_shape(norms, [None]))

    def run(batch):
        clipping = Clipping(model, functools.partial(model.per_example_loss, training=False), tf.constant(1.0))
        return on_devices(clipping, batch, 3 * [HERE], sum_of, 1), None

    Graph(run)(tensors(batch))
    sizes = [SIZE * (number + 1) // 3 - SIZE * number // 3 for number in range(3)]
    assert seen == {(3 * size, SIZE) for size in sizes}


@pytest.mark.slow
def test_what_waits_for_the_norms_waits_for_the_checks_of_all_devices():
    """They are not checked in the order of the graph, by which all else would wait for them."""
    model, batch = built("two_tower")
    loss, shared, found = functools.partial(model.per_example_loss, training=False), shared_inputs(model), {}

    def run(batch):
        clipped = on_devices(Clipping(model, loss, tf.constant(1.0)), hide_batch_axis(batch, shared), 2 * [HERE])
        seen, todo = set(), [clipped.norms.op]
        while todo:
            one = todo.pop()
            new = {*(tensor.op for tensor in one.inputs), *one.control_inputs} - seen
            seen |= new
            todo += new
        of_graph = clipped.norms.graph.get_operations()
        found["checks"] = {each for each in of_graph if is_check(each) and each.type == "DeepCopy"}
        found["missing"] = found["checks"] - seen
        return clipped, None

    Graph(run, shared)(tensors(batch))
    assert len(found["checks"]) > 8 and not found["missing"]
