"""Examples kept apart by construction: what clipping uses of each, from a loss that was given that example alone.

Nothing here knows a rule of the reading. The loss and its gradients are taken inside `tf.vectorized_map` over single
examples, or, for a model that does not convert, in a loop over batches of one. Random layers do as in evaluation, and
drawn negatives are always the same ones: noise would differ between the two.
"""

import contextlib
import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.clipping import Negatives, clipped_sum
from tfdp_rec.core.ground.keras_internals import layers_within
from tfdp_rec.core.sensitivity.batches import example_leaves, map_examples, tensors
from tfdp_rec.core.sensitivity.engine import SLACK, shared_inputs
from tfdp_rec.training.numeric_checks import disable_randomness


def assert_clipped_alone(model, batch, clip=0.7, rtol=1e-6):
    """Losses, norms and clipped sum are those of examples alone.

    Returns:
        Whether the loss converted, so that the examples were kept apart by `tf.vectorized_map`.
    """
    with without_noise(model):
        vectorised = not crashes(model)
        try:
            losses, gradients = gradients_alone(model, batch, vectorised)
        except (ValueError, TypeError, NotImplementedError):
            vectorised = False
            losses, gradients = gradients_alone(model, batch, vectorised)
        found = clipped_sum(model, batch, clip)
    norms, sums = clipped_alone(gradients, clip)
    np.testing.assert_allclose(found.losses, losses, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(found.norms, norms, rtol=10 * rtol, atol=rtol)
    for variable in model.trainable_variables:
        of_all = tf.convert_to_tensor(found.gradients[variable.path])
        np.testing.assert_allclose(of_all, sums[variable.path], rtol=10 * rtol, atol=rtol, err_msg=variable.path)
    return vectorised


def crashes(model):
    """Whether TensorFlow 2.21 ends the process over a vectorised loss: attention, under oneDNN's own kernels."""
    attends = any(isinstance(layer, keras.layers.MultiHeadAttention) for layer in layers_within(model))
    return attends and os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0"


@contextlib.contextmanager
def without_noise(model):
    """Random layers as in evaluation, the same negatives at every draw, and tables readable by all that reads them."""
    always = lambda drawn: tf.range(drawn.number, dtype=tf.int64) % drawn.catalogue  # noqa: E731
    if hasattr(model, "settle"):
        model.settle()
    with disable_randomness(model), mock.patch.object(Negatives, "draw", always):
        yield


def gradients_alone(model, batch, vectorised=True):
    """(losses `[batch]`, {variable path: each example's gradient `[batch, ...]`}), as in training.

    Raises:
        ValueError: if the loss does not convert.
    """
    batch, shared, variables = tensors(batch), shared_inputs(model), model.trainable_variables

    def one(leaves):
        left = iter(leaves)
        example = map_examples(lambda _: next(left)[None], batch, shared)
        with tf.GradientTape() as tape:
            loss = model.per_example_loss(example, training=True)
        found = tape.gradient(loss, [v.value for v in variables], unconnected_gradients="zero")
        return loss[0], [tf.convert_to_tensor(g) for g in found]

    leaves = example_leaves(batch, shared)
    if vectorised:
        several = lambda given: tf.vectorized_map(one, given, fallback_to_while_loop=False)  # noqa: E731
        losses, found = tf.function(several, autograph=False)(leaves)
    else:
        alone = tf.function(one, autograph=False)
        each = [alone([leaf[number] for leaf in leaves]) for number in range(len(leaves[0]))]
        losses, found = tf.stack([loss for loss, _ in each]), [tf.stack(g) for g in zip(*(g for _, g in each))]
    return np.asarray(losses, np.float64), {v.path: np.asarray(g, np.float64) for v, g in zip(variables, found)}


def clipped_alone(gradients, clip):
    """(norms, {variable path: Σ of scaled gradients}); rounding has its share of the clip."""
    flat = [g.reshape([len(g), -1]) for g in gradients.values()]
    norms = np.sqrt(sum(np.sum(np.square(g), axis=1) for g in flat))
    bound = clip / (1 + SLACK)
    weights = bound / np.maximum(norms, bound)
    return norms, {path: np.tensordot(weights, g, 1) for path, g in gradients.items()}
