"""The private part of `SpectralRecommender.fit`: users are read, and their counts and pairs released, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.mechanism.noise.words import WordSource
from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.spectral import order, rules
from tfdp_rec.spectral.pair_sums import pair_sums
from tfdp_rec.spectral.release import Release
from tfdp_rec.spectral.scores import Estimates
from tfdp_rec.sums.counts import private_counts
from tfdp_rec.sums.fixed_point import ONE, release_pairs, release_sums


@dataclasses.dataclass(frozen=True, eq=False)
class Counting:
    """What one fit counts, with which noise; `before` is the sum of earlier releases, to which its own are added."""

    catalogue: Catalogue
    noise_multiplier: float  # of the one Gaussian that all of it costs
    delta: float
    size: rules.Size
    ordered: bool | None  # None where the users vote
    users_private: bool
    before: Release
    private: bool
    words: WordSource

    def number_of(self, users: int) -> int:
        """The number of users that may be known: the true one, or one with noise.

        Raises:
            ValueError: There is no user, or δ is too large for so few users.
        """
        if self.users_private:  # nothing may be refused by it
            noisy = release_sums(np.array([users * ONE]), self.noise_multiplier / rules.USERS**0.5, self.words)
            return max(1, round(float(noisy[0])))
        if not users:
            raise ValueError("There is no user in the histories; the number of users is public and must be at least 1.")
        if self.delta > 1 / users:
            raise ValueError(
                f"delta = {self.delta:g} is above 1 / {users} users: a mechanism that publishes one user's whole "
                "history would still meet it. Choose a smaller delta."
            )
        return users

    def split_for(self, users: int) -> rules.Split:
        """The noise of counts and of pairs."""
        left = 1 - rules.USERS if self.users_private else 1.0
        return rules.Split.from_budget(self.noise_multiplier / left**0.5, users, len(self.catalogue))

    def release(self, source: Any, users: int, say: Callable[[str], None]) -> tuple[Release, order.OrderVote | None]:
        """The sum of all releases, and the vote if the users were asked."""
        split = self.split_for(users)
        say(f"counting {len(self.catalogue)} items of {users} users")
        counts, _ = private_counts(source, self.catalogue, noise_multiplier=split.counts, words=self.words)
        counted = self.before.add_counts(counts, split.counts, users, self.private, self.noise_multiplier)
        head = self._head(counted, counted.noise_with(split.gram), self.ordered is not False)
        say(f"counting pairs of {len(head)} items")
        if self.ordered is not None:
            total = pair_sums(source, self.catalogue, head, self.ordered)
            return counted.add_pairs(head, self._add_noise(total, split.gram), split.gram, bool(self.ordered)), None
        return self._release_by_vote(source, users, counted, head, split.gram)

    def _head(self, counted: Release, sigma: float, ordered: bool) -> NDArray[np.int64]:
        return rules.head_of(counted.counts, counted.users, sigma, self.size, ordered)

    def _add_noise(self, total: NDArray[Any], sigma: float) -> NDArray[np.float32]:
        return release_pairs(total, sigma, self.words)

    def _release_by_vote(
        self, source: Any, users: int, counted: Release, head: NDArray[np.int64], sigma: float
    ) -> tuple[Release, order.OrderVote]:
        """Pairs in order with a part of the budget; by the vote more of them, or any pairs, with the rest."""
        total = pair_sums(source, self.catalogue, head, ordered=True)
        first = self._add_noise(total, sigma / order.FIRST**0.5)
        vote = self._vote(source, users, counted, head, first, sigma)
        noise = sigma / order.REST**0.5
        if not vote.ordered:
            head = self._head(counted, noise, ordered=False)
            pairs = self._add_noise(pair_sums(source, self.catalogue, head, ordered=False), noise)
        else:
            second, both = self._add_noise(total, noise), order.FIRST + order.REST
            first *= order.FIRST / both
            second *= order.REST / both
            pairs, noise = np.add(first, second, out=first), sigma / both**0.5
        made = counted.add_pairs(head, pairs, noise, vote.ordered)
        return dataclasses.replace(made, votes=vote.votes, votes_noise=vote.noise), vote

    def _vote(
        self, source: Any, users: int, counted: Release, head: NDArray[np.int64], first: NDArray[np.float32],
        sigma: float,
    ) -> order.OrderVote:  # fmt: skip
        """The vote, by the items of the head whose rows stand out of the noise of the first release."""
        noise = sigma / order.FIRST**0.5
        few = head[: min(len(rules.head_of(counted.counts, counted.users, noise, ordered=True)), order.MOST_HEAD)]
        alone = counted.add_pairs(few, np.ascontiguousarray(first[: len(few), : len(few)]), noise, ordered=True)
        found = Estimates.of(alone)
        own = found.prior[few] - found.overlap
        return order.vote(source, users, self.catalogue, few, found.weights, own, sigma, self.words)
