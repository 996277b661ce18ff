"""What the news study's trainings depend on, and which of them it makes."""

from __future__ import annotations

import dataclasses
import math

from tfdp_rec.federated.settings import ENCODERS
from tfdp_rec.settings import POSITIVE, option

METHODS = (
    "untrained",
    "centralized",
    "fedrec",
    "dp-fedrec",
    "published",
    "corrected",
    "corrected+user",
    "corrected+consented",
    "corrected+public",
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the study; `epsilons` and `bases` are the further points of Figures 6 and 7, of one seed;
    `limited_epsilon` is that of an answer where clients answer seldom.
    """

    users: int = 20_000
    news: int = 3000
    dim: int = 64
    rounds: int = option(1000, "of each training", POSITIVE)
    cohort: int = 128
    seeds: int = option(3, "trainings of each cell", POSITIVE)
    encoders: tuple[str, ...] = option(ENCODERS, "of the news", choices=ENCODERS, metavar="NAME")
    consented: float = 0.05
    epsilons: tuple[float, ...] = (1.0, 5.0, 20.0, math.inf)
    bases: tuple[int, ...] = (2, 3, 10)
    limited_epsilon: float = 8.0

    @property
    def most_answers(self) -> int:
        """Answers of a client if all answer equally often, rounded up, and one more where a cohort needs it."""
        return math.ceil((self.rounds * self.cohort + self.cohort) / self.users)

    def shaping(self) -> dict[str, float]:
        """What every cell depends on; encoders, seeds and points of figures may be added later."""
        return {name: getattr(self, name) for name in ("users", "news", "dim", "rounds", "cohort", "consented")}


QUICK = Sizes(
    users=2000, news=600, dim=32, rounds=100, cohort=64, seeds=1, epsilons=(1.0, math.inf), bases=(2, 10)
)
