"""The ablations' training by the package itself: `TwoTower` under `DPSGD`, on batches that prove how they were drawn.

Every step's weights are released, noise and all, so that their average costs nothing.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from experiments.spectral.baskets import Array, Baskets, Budget, Head, Recipe, answers
from experiments.spectral.methods import Answer, Problem
from tfdp_rec import DPSGD
from tfdp_rec.models import TwoTower
from tfdp_rec.optimizers import Adam
from tfdp_rec.private_plan import PrivatePlan


@keras.saving.register_keras_serializable(package="tfdp_rec_experiments")
class BasketTower(TwoTower):
    """`TwoTower` whose examples want several items, and whose rows are weighed."""

    shared_inputs = ("candidates", "correction")
    recipe = Recipe()
    of_items: Any = None
    of_context: Any = None

    def weigh(self, recipe: Recipe, head: Head) -> BasketTower:
        """Takes a recipe and the head's weights; row 0 is padding."""
        self.recipe = recipe
        self.of_items = tf.pad(tf.constant(head.weights(recipe.item_power)), [[1, 0]])
        self.of_context = tf.pad(tf.constant(head.weights(recipe.context_power)), [[1, 0]])
        return self

    def encode(self, context: tf.Tensor) -> tf.Tensor:
        """Queries from items of the head."""
        if self.of_context is None:
            return super().encode(context)
        weights = tf.gather(self.of_context, context)[:, :, None]
        squares = tf.reduce_sum(tf.square(weights), axis=1)
        query = tf.reduce_sum(self.context_table(context) * weights, axis=1) * tf.math.rsqrt(squares + 1e-12)
        if self.recipe.unit:
            query *= tf.math.rsqrt(tf.reduce_sum(tf.square(query), axis=1, keepdims=True) + 1e-12)
        return self.recipe.temperature * query

    def per_example_loss(self, data: dict[str, tf.Tensor], training: bool = True) -> tf.Tensor:
        """Cross-entropy of all that an example wants."""
        label, others = tf.cast(data["label"], tf.int64), tf.cast(data["candidates"], tf.int64)
        logits = self.scores(self.encode(data["context"]), label, others) * _own_first(self.of_items, label, others)
        logits += _own_first(self._log_prior, label, others) + data["correction"]
        wanted = data["wanted"]
        whole = tf.reduce_sum(wanted, axis=1) * tf.reduce_logsumexp(logits, axis=1)
        return whole - tf.reduce_sum(wanted * logits, axis=1)


def _own_first(values: tf.Tensor, label: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    own, theirs = tf.gather(values, label)[:, None], tf.gather(values, others)
    return tf.concat([own, tf.broadcast_to(theirs, [tf.shape(label)[0], tf.size(others)])], axis=1)


class Averages(keras.callbacks.Callback):
    """The mean of both tables after the last steps, each released with its noise.

    Args:
        first: the first step that counts, from 0.
    """

    def __init__(self, first: int):
        super().__init__()
        self.first, self.made = first, 0
        self.total: list[Any] = [0.0, 0.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.made >= self.first:
            self.total = [whole + table for whole, table in zip(self.total, tables_of(self.model))]
        self.made += 1

    @property
    def tables(self) -> list[Array]:
        """The means of c and e, without padding."""
        return [whole / (self.made - self.first) for whole in self.total]


def tables_of(model: TwoTower) -> list[Array]:
    """c and e as they are, without padding."""
    held = dict(zip([weight.path for weight in model.weights], model.get_weights()))
    return [held["context/embeddings"][1:], held["label/embeddings"][1:]]


def new_model(recipe: Recipe, head: Head, seed: int) -> BasketTower:
    """Untrained."""
    keras.utils.set_random_seed(seed)
    numbers = range(1, len(head.places) + 1)
    return BasketTower(numbers, recipe.width, 0, head.counts, 1, ks=(1,)).weigh(recipe, head)


def optimizer(recipe: Recipe, **settings: Any) -> DPSGD:
    """Of a recipe.

    Args:
        recipe: for the rate and what becomes of gradients.
        **settings: clip, noise and batch size, or a plan.
    """
    rate = keras.optimizers.schedules.PolynomialDecay(recipe.rate, recipe.steps, 0.0) if recipe.decay else recipe.rate
    return DPSGD(rate, momentum=recipe.momentum, table_rule=Adam() if recipe.adam else None, **settings)


def train(problem: Problem, recipe: Recipe, budget: Budget, seed: int) -> Answer:
    """Counts and trains within one budget: noise and draws from the operating system's entropy.

    Args:
        problem: whose counted users are the units.
        recipe: how.
        budget: its noise.
        seed: of the first weights, and of nothing else.
    """
    plan = PrivatePlan(
        sampling=budget.sampling, delta=budget.delta, steps=budget.steps, noise_multiplier=budget.noise,
        l2_norm_clip=recipe.clip, spent=budget.spent,
    )  # fmt: skip
    head = Head.of(problem, recipe.head, budget.counts)
    model, averages = new_model(recipe, head, seed), Averages(recipe.first_averaged)
    model.compile(optimizer(recipe, plan=plan))
    baskets = Baskets(problem.histories, head, recipe)
    batches = plan.batches(baskets.fetch, shared=baskets.shared)
    model.fit(batches, steps_per_epoch=recipe.steps, verbose=0, shuffle=False, callbacks=[plan.budget(), averages])
    return answers(problem, recipe, head, *averages.tables)
