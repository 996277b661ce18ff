"""All strategies, whole or in parts, give the oracle's clipped sum; batches of no and of one example are batches."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_matches_oracle, dense_gradients, double_precision
from zoo import SIZE, ZOO, built, examples

from experiments.bench.baselines import STRATEGIES, clipped_sum_by
from tfdp_rec.clipping import clipped_sum


def by(strategy):
    return lambda *args, **options: clipped_sum_by(strategy, *args, **options)


BY_ALL = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(autouse=True, scope="module")
def float64():
    with double_precision():
        yield


@pytest.mark.fast_cases("mlp-bookkeeping", "two_tower-bookkeeping", "two_tower-ghost")
@BY_ALL
@pytest.mark.parametrize("name", ZOO)
def test_every_strategy_is_the_oracle(name, strategy):
    model, batch = built(name)
    assert_matches_oracle(model, batch, clip=1.5, take=by(strategy))


@pytest.mark.slow
@BY_ALL
@pytest.mark.parametrize("name", ["two_tower", "dlrm"])
@pytest.mark.parametrize("part", [1, 2, SIZE, SIZE + 3])
def test_parts_of_any_size_add_up_also_when_the_last_is_short(name, strategy, part):
    model, batch = built(name)
    assert_matches_oracle(model, batch, clip=1.5, take=by(strategy), microbatch_size=part)


@pytest.mark.slow
@BY_ALL
@pytest.mark.parametrize("part", [None, 2])
def test_batches_of_no_and_of_one_example(strategy, part):
    model, batch = built("two_tower")
    one = examples(batch, slice(0, 1), model.shared_inputs)
    assert_matches_oracle(model, one, clip=0.1, take=by(strategy), microbatch_size=part)
    none = examples(batch, slice(0, 0), model.shared_inputs)
    found = by(strategy)(model, none, 0.1, microbatch_size=part)
    assert found.norms.shape == [0] and found.losses.shape == [0]
    assert all(not np.any(g) for g in dense_gradients(model, found).values())


@pytest.mark.fast_cases("mlp")
@pytest.mark.parametrize("name", ["mlp", "text", "transformer", "gru"])
def test_no_examples_in_deeper_models(name):
    model, batch = built(name)
    found = clipped_sum(model, examples(batch, slice(0, 0)), 1.0, training=False)
    assert all(not np.any(g) for g in dense_gradients(model, found).values())


@pytest.mark.slow
@BY_ALL
def test_one_traced_function_serves_batches_of_every_size(strategy):
    model, batch = built("dlrm")
    spec = {k: tf.TensorSpec([None, *v.shape[1:]], v.dtype) for k, v in batch.items()}

    @tf.function(input_signature=[spec], autograph=False)
    def traced(data):
        found = by(strategy)(model, data, 1.5)
        return {path: tf.convert_to_tensor(g) for path, g in found.gradients.items()}, found.norms

    for size in (0, 1, 3, SIZE):
        part = {k: tf.constant(v[:size]) for k, v in batch.items()}
        gradients, norms = traced(part)
        expected = clipped_sum(model, part, 1.5, training=False)
        np.testing.assert_allclose(norms, expected.norms, rtol=1e-9)
        for path, gradient in dense_gradients(model, expected).items():
            np.testing.assert_allclose(gradients[path], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_reads_say_which_example_read_which_rows():
    model, batch = built("two_tower")
    for part in (None, 2):
        reads = clipped_sum(model, batch, 1.0, microbatch_size=part).reads
        context, label = (
            reads[v.path] for v in (model.parts[0].trainable_variables + model.parts[3].trainable_variables)
        )
        pairs = {(b, i) for b in range(SIZE) for i in batch["context"][b] if i}  # 0 is masked: it has no gradient
        assert set(zip(context.example.numpy(), context.ids.numpy())) == pairs
        assert list(zip(label.example.numpy(), label.ids.numpy())) == list(enumerate(batch["label"]))
        assert set(label.shared.numpy()) == set(batch["negatives"]) and context.shared.shape == [0]
