"""Whether the order of histories tells what comes next: decided under differential privacy, before all else is spent.

Near pairs (`pair_sums.py`) are far better than pairs of any two items where order matters, and worse where times are
arbitrary. So, of σ_g⁻², the share of the pairs,

    1/10    pays for a first release of the near pairs,
    1/100   for a vote: for each of about 2¹³ users, drawn at random, a recommender of the first release, of 3,000
            items at most, ranks these for the user's last new item, after the 20 items before it weighed by recency
            and weighed alike. The vote is +1 or -1, for the better rank; 0 if neither is below 50, or without such an
            item: sensitivity 1.
    the rest, for the near pairs, if the noisy sum is above -2 of its standard deviations, and for any pairs else.

The first release is added to the second one of near pairs, each weighed by its share, so that nothing of it is lost:
where order is kept, the decision costs a hundredth of σ_g⁻². In doubt it is for order. Times were given for a reason,
and where noise hides the votes, order gains more where it matters than it loses elsewhere. The exponent of recency is
then ½, and 1 where the sum is above 2 standard deviations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from tfdp_rec.core.mechanism.noise.words import WordSource
from tfdp_rec.datasets.log import Catalogue, InParts, Part
from tfdp_rec.spectral.release import Release
from tfdp_rec.sums.fixed_point import ONE, release_sums
from tfdp_rec.sums.total import Cells, Draw, Summand, total

FIRST, VOTES = 0.10, 0.01  # shares of σ_g⁻²
REST = 1 - FIRST - VOTES
MOST_HEAD = 3000  # of the first release: it is denoised for the vote alone
_JUDGES, _TOLD, _AMONG, _SURE = 2**13, 20, 50, 2.0
_AT_ONCE = 2**22  # scores


@dataclasses.dataclass(frozen=True)
class OrderVote:
    """A noisy sum of votes for (+) or against (-) the order of histories.

    Attributes:
        votes: Sum of the votes, with noise.
        noise: Standard deviation of its noise.
    """

    votes: float
    noise: float

    @classmethod
    def of(cls, release: Release) -> OrderVote | None:
        """The vote in a release, if there was one."""
        return cls(release.votes, release.votes_noise) if release.votes_noise else None

    @property
    def ordered(self) -> bool:
        """Whether order is believed in."""
        return self.votes > -_SURE * self.noise

    @property
    def recency(self) -> float:
        """The exponent of the weights of a history: 1 for order that is sure, ½ in doubt, 0 without order."""
        return 1.0 if self.votes > _SURE * self.noise else 0.5 if self.ordered else 0.0

    def __str__(self) -> str:
        share = VOTES if self.ordered else FIRST + VOTES
        return (
            f"by a private vote of users on order: {self.votes:+.0f}, with noise of {self.noise:.3g}; the vote took "
            f"{share:.0%} of the budget of pairs, and recency has the exponent {self.recency:g}"
        )


def vote(
    histories: InParts, num_users: float, catalogue: Catalogue, head: NDArray[np.int64], weights: NDArray[np.float32],
    prior: NDArray[np.float32], sigma: float, words: WordSource,
) -> OrderVote:
    """The vote, by a recommender of the head: its weights between items, and its prior; `sigma` is σ_g."""
    noise = sigma / VOTES**0.5
    votes = ballots(histories, _JUDGES / num_users, catalogue, head, weights, prior)
    return OrderVote(float(release_sums(np.array([votes * ONE]), noise, words)[0]), noise)


def ballots(
    histories: InParts, share: float, catalogue: Catalogue, head: NDArray[np.int64], weights: NDArray[np.float32],
    prior: NDArray[np.float32],
) -> int:
    """Sum of the votes of a share of the users. It has no noise and must not be released."""
    position = np.full(len(catalogue), -1)
    position[head] = np.arange(len(head))
    cast = functools.partial(_cast, weights=weights, prior=prior)
    asked = functools.partial(_select_judges, position=position, share=share)
    return int(total(histories, catalogue, Summand(cast, 1, asked, in_order=True))[0])


def _select_judges(part: Part, draw: Draw, position: NDArray[np.int64], share: float) -> Iterator[Part]:
    """The users that are asked, drawn whatever they have, by places of the head."""
    chosen = draw(np.ones(part.num_users, np.int64)) / 2.0**64 < share
    rows, numbered = chosen[part.users], np.cumsum(chosen) - 1
    yield Part(int(chosen.sum()), numbered[part.users[rows]], position[part.places[rows]])


def _cast(part: Part, weights: NDArray[np.float32], prior: NDArray[np.float32]) -> Cells:
    return np.zeros(1, np.int64), _ballots(part, weights, prior).sum(keepdims=True)


def _ballots(part: Part, weights: NDArray[np.float32], prior: NDArray[np.float32]) -> NDArray[np.int64]:
    """Votes of some users, by places of the head, -1 for other items."""
    size, ends = len(prior), np.cumsum(part.lengths)
    some = np.flatnonzero(part.lengths > 1)
    last = part.places[ends[some] - 1]
    age = ends[part.users] - 2 - np.arange(len(part.users))  # in the history before the last item
    before = (age >= 0) & (age < _TOLD) & (part.places >= 0)
    users, places, age = part.users[before], part.places[before], age[before]
    told = np.clip(part.lengths - 1, 0, _TOLD)
    mean = np.divide(_harmonic(told), told, out=np.ones(len(told)), where=told > 0)
    shape = (part.num_users, size)
    alike = sparse.csr_matrix((np.ones(len(users), np.float32), (users, places)), shape)
    recent = sparse.csr_matrix(((1 / (1.0 + age) / mean[users]).astype(np.float32), (users, places)), shape)
    votes = np.zeros(len(some), np.int64)
    at_once = max(1, _AT_ONCE // size)
    for begin in range(0, len(some), at_once):
        asked, item = some[begin : begin + at_once], last[begin : begin + at_once]
        had = alike[asked].toarray() > 0
        ranks = [_ranks(prior + held[asked] @ weights, had, np.maximum(item, 0)) for held in (recent, alike)]
        counts = (item >= 0) & (np.minimum(*ranks) < _AMONG)
        votes[begin : begin + at_once] = np.where(counts, np.sign(ranks[1] - ranks[0]), 0)
    return votes


def _harmonic(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Σ_{i<d} 1/(1 + i) of each d."""
    return np.concatenate([[0.0], np.cumsum(1 / np.arange(1.0, lengths.max(initial=0) + 1))])[np.maximum(lengths, 0)]


def _ranks(scores: NDArray[np.float32], had: NDArray[np.bool_], item: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank, from 0, of an item of each row among those that the row has not had."""
    own = np.take_along_axis(scores, item[:, None], axis=1)
    return ((scores > own) & ~had).sum(axis=1)
