"""What the ablations train on and with: recipes, what was counted, and the examples that users give.

Counts come first, under differential privacy, and take a share of the budget; what follows from them (the head, the
prior, all weights below) is post-processing. A user who is drawn gives one example, clipped as a whole:

    wanted     k of the user's items of the head, drawn anew each time, each 1/k
    context    the user's other items of the head, `history` of them at most
    query      q = t Σ b_i c_i / √(Σ b_i²) over the context; of one length, t q / |q|, if asked for
    logits     a_j q · e_j + log prior_j
    loss       −Σ_j wanted_j log softmax_j, over the head or over drawn candidates (k = 1), corrected for the draw

a and b are powers of the counts: a row that is scaled has its gradient scaled before the clip and its noise after it.
Who has nothing in the head gives an example without loss, so that the number of units stays the number of users.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent
from numpy.typing import NDArray

from experiments.spectral.methods import Answer, Problem, by_head
from tfdp_rec.privacy import Accountant, PoissonSampling, calibrate_noise, noise_of_one_release, private_counts
from tfdp_rec.spectral import Histories

LABEL = "popularity counts"
MASKED = -1e9
Array = NDArray[Any]
Features = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a two-tower is trained.

    Attributes:
        head: most items with rows; None for the whole catalogue.
        labels: k, at most so many items wanted of an example, and at most half of what a user has of the head.
        history: most items of context.
        sampled: q, the chance of a user to be in a batch.
        steps: T.
        clip: C.
        path: Σ_t η_t C / (1 − momentum), how far weights go at most when all examples agree.
        width: of both tables.
        decay: whether η falls to nothing in a straight line.
        averaged: the last such share of the steps' weights is averaged.
        momentum: of SGD.
        temperature: t.
        unit: whether queries have one length.
        item_power: a = (count / mean count)^item_power, scaled.
        context_power: b likewise.
        candidates: drawn for a batch; None for the whole head.
        by_count: whether half of them are drawn by the counts.
        adam: whether tables take Adam's steps; η is then path / T, whatever C.
        share: what the counts take of σ⁻² of one release that cost the budget.
    """

    head: int | None = None
    labels: int = 1
    history: int = 20
    sampled: float = 0.25
    steps: int = 30
    clip: float = 1.0
    path: float = 20.0
    width: int = 32
    decay: bool = False
    averaged: float = 0.0
    momentum: float = 0.0
    temperature: float = 1.0
    unit: bool = False
    item_power: float = 0.0
    context_power: float = 0.0
    candidates: int | None = None
    by_count: bool = False
    adam: bool = False
    share: float = 1 / 9

    @property
    def rate(self) -> float:
        """η of the first step."""
        even = self.path / self.steps * (2 if self.decay else 1)
        return even if self.adam else even * (1 - self.momentum) / self.clip

    def rate_at(self, step: int) -> float:
        """η of a step, counted from 0."""
        return self.rate * (1 - step / self.steps if self.decay else 1)

    @property
    def first_averaged(self) -> int:
        """The first step, counted from 0, whose weights count."""
        return min(self.steps - round(self.averaged * self.steps), self.steps - 1)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a training costs and the noise that makes it so.

    Attributes:
        sampling: of the users.
        counts: σ of the counts.
        noise: σ of a step.
        steps: T.
        delta: δ.
    """

    sampling: PoissonSampling
    counts: float
    noise: float
    steps: int
    delta: float

    @classmethod
    def of(cls, recipe: Recipe, users: int, epsilon: float, delta: float) -> Budget:
        """The least noise beside that of the counts."""
        sampling = PoissonSampling(users, recipe.sampled * users, unit="user")
        return cls(sampling, *_noises(epsilon, delta, recipe.share, recipe.sampled, recipe.steps), recipe.steps, delta)

    @property
    def spent(self) -> list[tuple[DpEvent, str]]:
        """Beside the steps."""
        return [(GaussianDpEvent(self.counts), LABEL)]

    @property
    def epsilon(self) -> float:
        """Of counts and steps, by the accountant."""
        accountant = Accountant(GaussianDpEvent(self.noise), self.sampling, self.delta)
        for event, label in self.spent:
            accountant.spend(event, label)
        return accountant.epsilon(self.steps)


@functools.cache
def _noises(epsilon: float, delta: float, share: float, sampled: float, steps: int) -> tuple[float, float]:
    """σ of the counts and of a step; of how many users there are, they depend on q alone."""
    counts = noise_of_one_release(epsilon, delta) / share**0.5
    many, spent = 1 << 16, [(GaussianDpEvent(counts), LABEL)]
    return counts, calibrate_noise(epsilon, delta, PoissonSampling(many, sampled * many), steps, spent=spent)


@dataclasses.dataclass(frozen=True)
class Head:
    """What was counted, and what follows from it.

    Attributes:
        places: of the head's items in the catalogue, rising.
        prior: of every item of the catalogue, positive.
    """

    places: NDArray[np.int64]
    prior: NDArray[np.float64]

    @classmethod
    def of(cls, problem: Problem, size: int | None, sigma: float) -> Head:
        """Counts, once."""
        counts = private_counts(problem.histories, problem.catalogue, noise_multiplier=sigma).values
        best = np.argsort(-counts, kind="stable")[: size or len(counts)]
        return cls(np.sort(best), np.maximum(counts, 0.5 * sigma))

    @property
    def counts(self) -> NDArray[np.float64]:
        """Of the head's items."""
        return self.prior[self.places]

    def weights(self, power: float) -> NDArray[np.float32]:
        """(count / mean)^power of the head's items, of mean square 1 over what users have."""
        raised = (self.counts / self.counts.mean()) ** power
        return (raised / np.sqrt(np.average(raised**2, weights=self.counts))).astype(np.float32)

    def log_prior(self) -> NDArray[np.float32]:
        """Of the head's items, among themselves."""
        return np.log(self.counts / self.counts.sum()).astype(np.float32)


class Baskets:
    """Examples of users: `fetch` and `shared`, as a sampling's `batches` asks for them.

    Args:
        histories: of the users, ids being places + 1.
        head: whose items count, numbered from 1.
        recipe: how many are wanted, and how many are told.
    """

    def __init__(self, histories: Histories, head: Head, recipe: Recipe):
        number = np.zeros(len(head.prior) + 1, np.int64)
        number[head.places + 1] = np.arange(1, len(head.places) + 1)
        users = np.split(number[histories.numbers], histories.offsets[1:-1])
        self.users = [np.unique(items[items > 0]) for items in users]
        self.recipe, self.size = recipe, len(head.places)
        self.history = min(recipe.history, self.size)
        shares = head.counts / head.counts.sum()
        self.shares = 0.5 * shares + 0.5 / self.size if recipe.by_count else np.full(self.size, 1 / self.size)
        self._rng = np.random.default_rng()

    def fetch(self, indices: NDArray[np.int64]) -> Features:
        """One example of each user."""
        every = self.recipe.candidates is None
        context = np.zeros([len(indices), self.history], np.int32)
        label = np.zeros(len(indices), np.int32)
        wanted = np.zeros([len(indices), 1 + (self.recipe.candidates or self.size)], np.float32)
        for row, user in enumerate(indices):
            mixed = self._rng.permutation(self.users[user])
            labels = min(self.recipe.labels, max(len(mixed) // 2, 1), len(mixed))
            told = mixed[labels : labels + self.history]
            context[row, : len(told)] = told
            if labels:
                label[row] = 0 if every else mixed[0]
                wanted[row, mixed[:labels] if every else 0] = 1 / labels
        return {"context": context, "label": label, "wanted": wanted}

    def shared(self) -> Features:
        """The candidates of a batch, and what their logits are corrected by; the first place is the label's own."""
        drawn = self.recipe.candidates
        if drawn is None:
            found, correction = np.arange(self.size), np.concatenate([[MASKED], np.zeros(self.size)])
        else:
            found = self._rng.choice(self.size, drawn, p=self.shares)
            correction = np.concatenate([[0.0], -np.log(drawn * self.shares[found])])
        return {"candidates": (found + 1).astype(np.int32), "correction": correction.astype(np.float32)}


def answers(problem: Problem, recipe: Recipe, head: Head, context: Array, items: Array) -> Answer:
    """Answers by released tables: the head by both towers and the prior, the rest by the prior.

    Args:
        problem: whose catalogue it is.
        recipe: by which they were trained.
        head: whose rows they are.
        context: the table c.
        items: the table e.
    """
    of_context, weighed = head.weights(recipe.context_power), items * head.weights(recipe.item_power)[:, None]

    def score(has: Any) -> Array:
        return queries(recipe, has[:, head.places].toarray() * of_context, context)[0] @ weighed.T

    return by_head(problem, head.places, score, np.log(head.prior / head.counts.sum()))


def queries(recipe: Recipe, weighed: Array, context: Array) -> tuple[Array, Array, Array]:
    """Queries of rows of weights over the head; what bags were divided by, and queries.

    Args:
        recipe: for their length.
        weighed: `[users, head]`, b_i where the user has it.
        context: the table c.
    """
    roots = np.sqrt(np.maximum(np.square(weighed).sum(axis=1, keepdims=True), 1e-12))
    bags = weighed @ context / roots
    lengths = np.sqrt(np.square(bags).sum(axis=1, keepdims=True) + 1e-12) if recipe.unit else np.ones_like(roots)
    return recipe.temperature * bags / lengths, roots, lengths
