"""Examples kept apart by construction: what clipping uses of each, from a loss that was given that example alone.

Nothing here knows a rule of the reading. The loss and its gradients are taken inside `tf.vectorized_map` over single
examples, or, for a model that does not convert, in a loop over batches of one.
"""

import numpy as np
import tensorflow as tf

from tfdp_rec.clipping.batches import example_leaves, map_examples, tensors
from tfdp_rec.clipping.engine import SLACK, shared_inputs


def gradients_alone(model, batch, vectorised=True):
    """(losses `[batch]`, {variable path: each example's gradient `[batch, ...]`}), layers as in evaluation.

    Raises:
        ValueError: if the loss does not convert.
    """
    batch, shared, variables = tensors(batch), shared_inputs(model), model.trainable_variables

    def one(leaves):
        left = iter(leaves)
        example = map_examples(lambda _: next(left)[None], batch, shared)
        with tf.GradientTape() as tape:
            loss = model.per_example_loss(example, training=False)
        found = tape.gradient(loss, [v.value for v in variables], unconnected_gradients="zero")
        return loss[0], [tf.convert_to_tensor(g) for g in found]

    leaves = example_leaves(batch, shared)
    if vectorised:
        losses, found = tf.function(lambda given: tf.vectorized_map(one, given, fallback_to_while_loop=False))(leaves)
    else:
        alone = tf.function(one)
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
