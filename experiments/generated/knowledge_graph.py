"""Activity timelines over a planted knowledge graph, at any vocabulary size, in bounded memory.

Everything is a hash of (seed, individual, position), so any individual can be made at any time without
making the others: nothing of the vocabulary's or the population's size is ever stored.

The graph. Entity e (0-based) lies in topic e mod K at rank ⌊e / K⌋ of it. Popularity within a topic falls as
(rank + r₀)^−a. Each entity has 8 edges to entities of its own topic, the k-th of which is found by hashing
(e, k) into that same popularity law. An individual follows 2 of the K topics. At each position, in order of
time, it moves

    along one of the 8 edges of where it stands      with probability 0.5
    to a popular entity of one of its topics         with probability 0.4
    to a popular entity of any topic                 with probability 0.1.

An activity shows its entity and sometimes one neighbour; unigrams are words of the topic and of the entity,
bigrams hash pairs of them. So a context shows the topics (learned quickly, from all three features) and the
last entity (learned where it was seen often).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from experiments.generated.drawing import GOLDEN, mixed, zipf_ranks
from tfdp_rec.models.kg_entity import FEATURES

Ids = NDArray[np.int64]
_EDGES, _TOPICS_EACH = 8, 2
_ALONG_EDGE, _OWN_TOPIC = 0.5, 0.9  # cumulative
_VALUES = {"entities": 2, "unigrams": 4, "bigrams": 2}


@dataclass(frozen=True)
class SyntheticKG:
    """A population of individuals whose timelines are made on demand.

    Attributes:
        num_individuals: Number of individuals.
        vocabulary_size: Number of entities, and of unigrams and bigrams; ids run from 1, 0 is padding.
        num_topics: Number of topics K.
        context_length: Number of activities in a context.
        max_activities: Length of the longest timeline; lengths are between 2 and this.
        seed: Seed of the graph and the population.

    Example:
        >>> kg = SyntheticKG(num_individuals=1000, vocabulary_size=5_000_000)
        >>> batch = kg.fetch([3, 999], seed=0)
        >>> batch["entities"].shape, batch["label"].shape
        ((2, 20, 2), (2,))
    """

    num_individuals: int
    vocabulary_size: int = 100_000
    num_topics: int = 50
    context_length: int = 20
    max_activities: int = 40
    seed: int = 0
    _ranks: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        if self.num_individuals < 1:
            raise ValueError(f"num_individuals must be at least 1, got {self.num_individuals}.")
        if not 2 <= self.num_topics <= self.vocabulary_size // 10:
            raise ValueError(
                "num_topics must be at least 2 and leave 10 entities a topic, "
                f"got {self.num_topics} for {self.vocabulary_size:,} entities."
            )
        if self.context_length < 1 or self.max_activities < 2:
            raise ValueError(
                "context_length must be at least 1 and max_activities at least 2, "
                f"got {self.context_length} and {self.max_activities}."
            )
        object.__setattr__(self, "_ranks", self.vocabulary_size // self.num_topics)

    @property
    def values_per_activity(self) -> dict[str, int]:
        """The most values an activity has, for each feature."""
        return dict(_VALUES)

    def fetch(self, individuals: ArrayLike, seed: int | None = None) -> dict[str, NDArray[Any]]:
        """One example for each individual: a random activity's entity as label, what came before as context.

        Args:
            individuals: Indices [batch] below `num_individuals`; may be empty.
            seed: Seed of the choice of label positions; without it the system's entropy decides.

        Returns:
            `entities`, `unigrams`, `bigrams` [batch, context_length, values], newest first, padded with 0;
            `label` [batch], an entity id.
        """
        chosen = self._checked(individuals)
        walk, lengths = self.walk(chosen)
        position = 1 + np.random.default_rng(seed).integers(0, lengths - 1)
        rows = np.arange(chosen.size)
        starts = np.zeros_like(position)
        window, present = pad_window(starts, position, self.context_length)
        batch: dict[str, NDArray[Any]] = {}
        shown = self.shown(walk, chosen)
        for feature in FEATURES:
            values = shown[feature][rows[:, None], window]
            batch[feature] = np.where(present[:, :, None], values, 0).astype(np.int32)
        batch["label"] = (1 + walk[rows, position]).astype(np.int64)
        return batch

    def walk(self, individuals: ArrayLike) -> tuple[Ids, Ids]:
        """[batch, max_activities] entities (0-based) of each individual in order of time, and the lengths."""
        chosen = self._checked(individuals)
        lengths = 2 + (self._uniform(chosen, 1) * (self.max_activities - 1)).astype(np.int64)
        topics = self._hash(chosen[:, None], 2, np.arange(_TOPICS_EACH)) % np.uint64(self.num_topics)
        topics = topics.astype(np.int64)
        walk = np.empty((chosen.size, self.max_activities), np.int64)
        # Position by position, since a step along an edge needs where the walk stands; all individuals at once.
        for position in range(self.max_activities):
            kind, pick, rank = (self._uniform(chosen, 3 + k, position) for k in range(3))
            own = topics[np.arange(chosen.size), (pick * _TOPICS_EACH).astype(np.int64)]
            anywhere = (self._uniform(chosen, 6, position) * self.num_topics).astype(np.int64)
            topic = np.where(kind < _OWN_TOPIC, own, anywhere)
            jump = topic + self.num_topics * self._rank(rank)
            along = self.neighbour(walk[:, position - 1], (pick * _EDGES).astype(np.int64)) if position else jump
            walk[:, position] = np.where((kind < _ALONG_EDGE) & (position > 0), along, jump)
        return walk, lengths

    def neighbour(self, entity: Ids, edge: Ids) -> Ids:
        """Where the `edge`-th of an entity's 8 edges leads (0-based ids)."""
        rank = self._rank(self._uniform(entity, 7, edge))
        return np.asarray(entity % self.num_topics + self.num_topics * rank)

    def _rank(self, uniform: NDArray[np.float64]) -> Ids:
        """Inverse of a popularity law that falls as (rank + r₀)^−1.2, with r₀ = 5."""
        return zipf_ranks(uniform, self._ranks, exponent=1.2, shift=5.0)

    def shown(self, walk: Ids, individuals: Ids) -> dict[str, Ids]:
        """[batch, positions, values] 1-based ids of each feature of the entities walked through."""
        position = np.arange(walk.shape[1])
        topic = walk % self.num_topics
        with_neighbour = self._uniform(individuals[:, None], 8, position) < 0.5
        neighbour = self.neighbour(walk, np.zeros_like(walk))
        words = [
            topic + self.num_topics * self._rank(self._uniform(walk, 9)),
            topic,
            np.asarray(self._hash(walk, 10) % np.uint64(self.vocabulary_size), np.int64),
            np.asarray(self._hash(walk, 11) % np.uint64(min(self.vocabulary_size, 1000)), np.int64),
        ]
        pairs = [self._hash(words[0], 12), self._hash(words[2], 13)]
        return {
            "entities": np.stack([1 + walk, np.where(with_neighbour, 1 + neighbour, 0)], axis=-1),
            "unigrams": 1 + np.stack(words, axis=-1),
            "bigrams": 1 + np.stack([(p % np.uint64(self.vocabulary_size)).astype(np.int64) for p in pairs], -1),
        }

    def _uniform(self, *keys: Any) -> NDArray[np.float64]:
        return np.asarray(self._hash(*keys) >> np.uint64(11)) * 2.0**-53

    def _hash(self, *keys: Any) -> NDArray[np.uint64]:
        """splitmix64 over the seed and the keys, broadcast against each other."""
        state: Any = np.uint64(self.seed & (2**64 - 1))
        with np.errstate(over="ignore"):
            for key in keys:
                state = mixed(state ^ mixed(np.asarray(key).astype(np.uint64) + np.uint64(GOLDEN)))
        return np.asarray(state)

    def _checked(self, individuals: ArrayLike) -> Ids:
        chosen = np.asarray(individuals, dtype=np.int64)
        if chosen.ndim != 1 or np.any((chosen < 0) | (chosen >= self.num_individuals)):
            raise IndexError(f"Individuals must be a list of indices in [0, {self.num_individuals:,}).")
        return chosen


def pad_window(
    starts: NDArray[np.int64], ends: NDArray[np.int64], length: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions [batch, length] of what comes before `ends`, newest first, and whether they are in the timeline."""
    window = ends[:, None] - 1 - np.arange(length)
    return np.maximum(window, starts[:, None]), window >= starts[:, None]
