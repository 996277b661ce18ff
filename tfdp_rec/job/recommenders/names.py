"""The recommenders that a job can make: a line of its report each. Nothing here needs TensorFlow.

**What is released** is decided by names alone, before the data are looked at: the first of `PREFERRED` that is made,
unless `--export` names another. Choosing the one that tested best would be a choice by private data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfdp_rec import mechanisms
from tfdp_rec.mechanisms import Mechanism


@dataclasses.dataclass(frozen=True)
class ReportedRecommender:
    """A recommender that is no two-tower, with the attributes of a `Mechanism` that a report reads."""

    name: str
    label: str
    colour: str
    claims_epsilon: bool


Recommender = ReportedRecommender | Mechanism

popularity = ReportedRecommender("popularity", "popularity (exact counts)", "#999999", claims_epsilon=False)
dp_popularity = ReportedRecommender("dp-popularity", "DP popularity", "#bcbd22", claims_epsilon=True)
"""These two are always tested; the second is the prior of two-towers, or the counts of private sums."""

spectral = ReportedRecommender("spectral", "SpectralRecommender", "#6a3d9a", claims_epsilon=True)
exact = ReportedRecommender("spectral-exact", "spectral, no noise (no privacy)", "#cab2d6", claims_epsilon=False)
"""The same arithmetic without its noise: what that costs."""

from_sums = ReportedRecommender("upon-sums", "LazyDPSGD upon sums", "#b15928", claims_epsilon=True)
"""A model of the latest items, which begins with the answers of private sums and is trained to better them."""

auto = ReportedRecommender("auto", "sums, or trained upon them", "#1f78b4", claims_epsilon=True)
"""Private sums, a training upon them, and a private choice between the two; spectral alone where that cannot gain."""

UPON_SUMS = (from_sums.name, auto.name)

adam = Mechanism("adam", "Adam", "keras.optimizers", "none", "#222222", claims_epsilon=False, says="Adam (no privacy)")
"""The two-tower trained as well as we can: what the private ones are compared with."""

PEERS = (adam, mechanisms.sgd)  # two-towers without privacy
IN_ORDER = (mechanisms.lazy_dp_ftrl, mechanisms.dp_ftrl)  # their noise is planned for data in one order
PREFERRED: tuple[Recommender, ...] = (
    spectral, auto, from_sums, mechanisms.lazy_dp_ftrl, mechanisms.lazy_dp_sgd, mechanisms.dp_ftrl, mechanisms.dp_sgd,
)  # fmt: skip
_MADE: tuple[Recommender, ...] = (spectral, exact, auto, from_sums, *PEERS, *mechanisms.COMMON, *IN_ORDER)
_BY_NAME = {each.name: each for each in (popularity, dp_popularity, *_MADE)}
NAMES = tuple(each.name for each in _MADE)
"""What can be asked for."""
USUAL = tuple(each.name for each in (spectral, exact, adam, mechanisms.lazy_dp_sgd))
"""What is made of data to compare on. DPSGD learns what LazyDPSGD does, EANA promises nothing, SGD learns less than
Adam, and each of them takes minutes."""


def look_up(name: str) -> Recommender:
    """The recommender of that name.

    Example:
        >>> look_up("spectral").label, look_up("lazydpsgd").claims_epsilon
        ('SpectralRecommender', True)
    """
    if name not in _BY_NAME:
        raise ValueError(f"There is no recommender {name!r}; there are {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]


def is_two_tower(name: str) -> bool:
    """Whether it is trained, from the popularity prior on."""
    return isinstance(look_up(name), Mechanism)


def is_trained(name: str) -> bool:
    """Whether steps are made for it: a two-tower, or what is trained upon sums."""
    return is_two_tower(name) or name in UPON_SUMS


def is_planned(name: str) -> bool:
    """Whether its noise is planned for users in one order."""
    return name in mechanisms.names(IN_ORDER)


def replace_unfit(names: Iterable[str], on_servers: bool, in_order: bool) -> tuple[str, ...]:
    """The names, with another for each that parameter servers cannot train, or that gains nothing from an order.

    Example:
        >>> replace_unfit(["spectral", "adam", "lazydpsgd"], on_servers=True, in_order=False)
        ('spectral', 'sgd', 'lazydpsgd')
    """
    other = {adam.name: mechanisms.sgd.name} if on_servers else {}  # no server keeps Adam's state
    other |= {mechanisms.lazy_dp_sgd.name: mechanisms.lazy_dp_ftrl.name} if in_order else {}
    return tuple(other.get(name, name) for name in names)


def choose_released(names: Sequence[str], asked: str | None = None) -> str:
    """The one of those made that leaves the run.

    Example:
        >>> [choose_released(made) for made in (["lazydpsgd", "eana"], ["dpsgd", "spectral"], ["adam", "eana"])]
        ['lazydpsgd', 'spectral', 'adam']
    """
    if asked is not None and asked not in names:
        raise ValueError(f"--export {asked} is not among those that are made ({', '.join(names)}): add --mechanism.")
    return asked or next((each.name for each in PREFERRED if each.name in names), names[0])
