"""What the sequence study's trainings depend on, and which of them it makes."""

from __future__ import annotations

import dataclasses

from tfdp_rec.settings import BETWEEN_0_AND_1, POSITIVE, option

POPULARITY, SUMS = "popularity", "sums"
SASREC, RECENT, UPON = "SASRec", "recent items", "recent items upon sums"  # the last two without a transformer
SASREC_UPON = "SASRec upon sums"
METHODS = (POPULARITY, SUMS, SASREC, RECENT, UPON, SASREC_UPON)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What one training depends on."""

    asked: int = option(10_000, "users whose next item is asked for, at most", POSITIVE)
    longest: int = option(30, "items of a generated user, at most", POSITIVE)
    history: int = option(20, "places of a training example", POSITIVE)
    width: int = option(32, "of the tables and of the transformer", POSITIVE)
    negatives: int = option(1000, "shared by a batch, half of them by popularity", POSITIVE)
    blocks: int = option(1, "of SASRec's transformer", POSITIVE)
    steps: int = option(800, "of a private training", POSITIVE)
    clip: float = option(0.05, "of a user's gradient, which is a mean over places", POSITIVE)
    share: float = option(0.04, "of the users in a private batch", BETWEEN_0_AND_1)
    largest_batch: int = option(8192, "of private batches", POSITIVE)
    alone_length: float = option(1.5, "of the noise in a row, which sets the rate of the tables", POSITIVE)
    upon_length: float = option(0.8, "the same upon sums", POSITIVE)
    largest_rate: float = option(100.0, "of the tables, times the clip, at most", POSITIVE)
    dense_rate: float = option(1e-3, "of Adam, for what is no table", POSITIVE)
    adam_rate: float = option(2e-3, "without privacy", POSITIVE)
    adam_epochs: int = option(100, "without privacy, at most adam_steps", POSITIVE)
    adam_steps: int = option(4000, "of 512 users without privacy, at most", POSITIVE)
    sums_share: float = option(0.8, "of ε for the sums that a training goes on from", BETWEEN_0_AND_1)

    def batch(self, users: int) -> int:
        """The expected number of users in a private batch."""
        return max(1, min(round(self.share * users), self.largest_batch))


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which trainings the study makes."""

    users: tuple[int, ...] = option((1000, 10_000, 100_000, 1_000_000), "numbers of generated users", POSITIVE)
    epsilons: tuple[float, ...] = option((1.0, 3.0, 8.0), "of each method; beside them, none", POSITIVE)
    methods: tuple[str, ...] = option(METHODS, "to measure", choices=METHODS, metavar="NAME")
    seeds: int = option(1, "of weights, batches and noise", POSITIVE)
