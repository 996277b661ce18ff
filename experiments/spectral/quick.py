"""The ablations' training on plain arrays, without a graph to trace: seconds become tenths of one.

For an example with d = ∂loss/∂logit (summed by item, times a), query q and bag gradient g = ∂loss/∂bag, the gradients
are d qᵀ for e and b gᵀ/√(Σ b²) for c, so that

    norm² = |d|² |q|² + |g|²,    clipped sums  Dᵀ(f Q)  and  Xᵀ(f G / √Σ b²),    f = min(1, C / (1 + s) / norm),

s being what the package's clip leaves to rounding.

Draws and noise are NumPy's: for study, not for release. `towers.py` has the same training by the package's `DPSGD`, and
a test compares steps of both number for number.
"""

from __future__ import annotations

import numpy as np

from experiments.spectral.baskets import Array, Baskets, Budget, Features, Head, Recipe, answers, queries
from experiments.spectral.methods import Answer, Problem
from tfdp_rec.clipping.engine import SLACK


def train(problem: Problem, recipe: Recipe, budget: Budget, seed: int) -> Answer:
    """Counts and trains.

    Args:
        problem: whose counted users are the units.
        recipe: how.
        budget: its noise.
        seed: of the first weights.
    """
    rng, users = np.random.default_rng(), len(problem.histories)
    head = Head.of(problem, recipe.head, budget.counts)
    baskets, first = Baskets(problem.histories, head, recipe), np.random.default_rng(seed)
    context = first.normal(size=(baskets.size, recipe.width)) * recipe.width**-0.5
    tables = [context.astype(np.float32), np.zeros_like(context, np.float32)]
    stepped, total = Stepped(recipe, tables), [np.zeros_like(table) for table in tables]
    for step in range(recipe.steps):
        drawn = np.flatnonzero(rng.random(users) < recipe.sampled)
        sums = clipped_sums(recipe, head, tables, baskets.fetch(drawn), baskets.shared())
        noise = [budget.noise * recipe.clip * rng.standard_normal(table.shape, np.float32) for table in tables]
        stepped.by([(found + each) / (recipe.sampled * users) for found, each in zip(sums, noise)], step)
        if step >= recipe.first_averaged:
            total = [whole + table for whole, table in zip(total, tables)]
    context, items = (whole / (recipe.steps - recipe.first_averaged) for whole in total)
    return answers(problem, recipe, head, context, items)


def clipped_sums(recipe: Recipe, head: Head, tables: list[Array], examples: Features, shared: Features) -> list[Array]:
    """Of the gradients of both tables.

    Args:
        recipe: of the loss and the clip.
        head: of the weights.
        tables: c and e.
        examples: of `Baskets.fetch`.
        shared: of `Baskets.shared`.
    """
    weighed = _in_columns(examples["context"], head.weights(recipe.context_power), len(head.places))
    query, roots, lengths = queries(recipe, weighed, tables[0])
    by_logit = _gradient_of_logits(recipe, head, query @ tables[1].T, examples, shared)
    by_logit = by_logit * head.weights(recipe.item_power)
    by_query = recipe.temperature * (by_logit @ tables[1])
    if recipe.unit:
        along = query / recipe.temperature
        by_query = (by_query - (by_query * along).sum(axis=1, keepdims=True) * along) / lengths
    told = np.square(weighed).sum(axis=1, keepdims=True) > 0
    squares = np.square(by_logit).sum(axis=1, keepdims=True) * np.square(query).sum(axis=1, keepdims=True)
    norms = np.sqrt(squares + told * np.square(by_query).sum(axis=1, keepdims=True))
    factors = np.minimum(1, recipe.clip / (1 + SLACK) / np.maximum(norms, 1e-12))
    return [weighed.T @ (factors * by_query / roots), by_logit.T @ (factors * query)]


def _gradient_of_logits(recipe: Recipe, head: Head, products: Array, examples: Features, shared: Features) -> Array:
    """softmax − wanted, summed by item, `[batch, head]`."""
    logits = products * head.weights(recipe.item_power) + head.log_prior()
    wanted = examples["wanted"]
    if recipe.candidates is None:
        return wanted.sum(axis=1, keepdims=True) * _softmax(logits) - wanted[:, 1:]
    rows, label, others = np.arange(len(logits)), examples["label"], shared["candidates"]
    some = np.concatenate([logits[rows, label - 1][:, None], logits[:, others - 1]], axis=1) + shared["correction"]
    some[:, 1:][label[:, None] == others] = -np.inf
    found = wanted.sum(axis=1, keepdims=True) * _softmax(some) - wanted
    by_item = found[:, 1:] @ (others[:, None] - 1 == np.arange(len(head.places))).astype(np.float32)
    by_item[rows, label - 1] += found[:, 0]  # nothing, where there is no label
    return by_item


def _softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def _in_columns(numbers: Array, weights: Array, size: int) -> Array:
    found = np.zeros([len(numbers), size + 1], np.float32)
    found[np.arange(len(numbers))[:, None], numbers] = 1
    return found[:, 1:] * weights


class Stepped:
    """Tables under SGD or Adam.

    Args:
        recipe: which.
        tables: changed in place.
    """

    def __init__(self, recipe: Recipe, tables: list[Array]):
        self.recipe, self.tables = recipe, tables
        self.means, self.squares = ([np.zeros_like(table) for table in tables] for _ in range(2))

    def by(self, gradients: list[Array], step: int) -> None:
        """A step, counted from 0, by noisy means."""
        for table, mean, square, gradient in zip(self.tables, self.means, self.squares, gradients):
            table -= self._move(mean, square, gradient, step)

    def _move(self, mean: Array, square: Array, gradient: Array, step: int) -> Array:
        rate = self.recipe.rate_at(step)
        if not self.recipe.adam:
            mean[:] = self.recipe.momentum * mean + rate * gradient
            return mean
        mean[:] = 0.9 * mean + 0.1 * gradient
        square[:] = 0.999 * square + 0.001 * gradient**2
        return rate * (mean / (1 - 0.9 ** (step + 1))) / (np.sqrt(square / (1 - 0.999 ** (step + 1))) + 1e-10)
