"""Who is compared in a run of the main job: a line of its report each. Nothing here needs TensorFlow.

**What is released** is decided by names alone, before anybody looks at the data: the first of `PREFERRED` that takes
part, unless `--export` says another. To choose the one that tested best would be to choose by private data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from tfdp_rec import mechanisms
from tfdp_rec.mechanisms import Mechanism


@dataclasses.dataclass(frozen=True)
class Contestant:
    """Who is no two-tower: what a `Mechanism` says of those, as far as the report asks.

    Attributes:
        name: on the command line and in files.
        label: in tables, plots and on the screen.
        colour: in plots.
        claims_epsilon: whether what it lets out has a guarantee.
    """

    name: str
    label: str
    colour: str
    claims_epsilon: bool


popularity = Contestant("popularity", "popularity (exact counts)", "#999999", claims_epsilon=False)
dp_popularity = Contestant("dp-popularity", "DP popularity", "#bcbd22", claims_epsilon=True)
"""These two always take part; the second is the prior that all two-towers start from."""

spectral = Contestant("spectral", "SpectralRecommender", "#6a3d9a", claims_epsilon=True)
exact = Contestant("spectral-exact", "spectral, no noise (no privacy)", "#cab2d6", claims_epsilon=False)
"""The same arithmetic without its noise: what that costs."""

adam = Mechanism("adam", "Adam", "keras.optimizers", "none", "#222222", claims_epsilon=False, says="Adam (no privacy)")
"""The two-tower trained as well as we can: what the private ones are to be held against."""

PEERS = (adam, mechanisms.sgd)  # two-towers without privacy
IN_ORDER = (mechanisms.lazy_dp_ftrl, mechanisms.dp_ftrl)  # their noise is planned for data in one order
PREFERRED: tuple[Contestant | Mechanism, ...] = (
    spectral, mechanisms.lazy_dp_ftrl, mechanisms.lazy_dp_sgd, mechanisms.dp_ftrl, mechanisms.dp_sgd,
)  # fmt: skip
_MADE: tuple[Contestant | Mechanism, ...] = (spectral, exact, *PEERS, *mechanisms.COMMON, *IN_ORDER)
NAMES = tuple(each.name for each in _MADE)
"""What can be asked for."""
USUAL = tuple(each.name for each in (spectral, exact, adam, mechanisms.lazy_dp_sgd))
"""Who takes part unless others are asked for. DPSGD learns what LazyDPSGD does, EANA promises nothing, SGD learns less
than Adam, and each of them takes minutes."""


def named(name: str) -> Contestant | Mechanism:
    """The contestant of that name.

    Raises:
        ValueError: there is none.

    Example:
        >>> named("spectral").label, named("lazydpsgd").claims_epsilon
        ('SpectralRecommender', True)
    """
    found = {each.name: each for each in (popularity, dp_popularity, *_MADE)}
    if name not in found:
        raise ValueError(f"There is no contestant {name!r}; there are {', '.join(found)}.")
    return found[name]


def is_two_tower(name: str) -> bool:
    """Whether it is trained, from the popularity prior on."""
    return isinstance(named(name), Mechanism)


def on_servers(names: Iterable[str]) -> tuple[str, ...]:
    """Those of some that a cluster can train, or that need no training; SGD for Adam, whose state no server keeps.

    Args:
        names: of contestants.

    Example:
        >>> on_servers(["spectral", "adam", "lazydpsgd"])
        ('spectral', 'sgd', 'lazydpsgd')
    """
    return tuple(mechanisms.sgd.name if name == adam.name else name for name in names)


def in_one_order(names: Iterable[str]) -> tuple[str, ...]:
    """Those of some, with LazyDPFTRL for LazyDPSGD, which has nothing of an order.

    Args:
        names: of contestants.

    Example:
        >>> in_one_order(["spectral", "lazydpsgd"])
        ('spectral', 'lazydpftrl')
    """
    other = {mechanisms.lazy_dp_sgd.name: mechanisms.lazy_dp_ftrl.name}
    return tuple(other.get(name, name) for name in names)


def refuse_unkept(names: Iterable[str]) -> None:
    """Raises for a two-tower whose steps in one order no ledger pays for: independent noise costs what epochs cost.

    Args:
        names: of contestants.

    Raises:
        ValueError: for one.
    """
    for name in names:
        if is_two_tower(name) and named(name).claims_epsilon and name not in mechanisms.names(IN_ORDER):
            planned = " or ".join(mechanisms.names(IN_ORDER))
            raise ValueError(
                f"--sampling shuffled keeps checkpoints of planned noise alone, which a ledger can pay for: {name} has "
                f"noise of its own in each step. Take --mechanism {planned}, or leave out --checkpoint."
            )


def released(names: Sequence[str], asked: str | None = None) -> str:
    """Which of those that take part is let out of the run.

    Args:
        names: of those.
        asked: the one that was asked for, if one was.

    Raises:
        ValueError: that one does not take part.

    Example:
        >>> released(["lazydpsgd", "eana"]), released(["dpsgd", "spectral"]), released(["adam", "eana"])
        ('lazydpsgd', 'spectral', 'adam')
    """
    if asked is not None and asked not in names:
        raise ValueError(f"--export {asked} is not among those that take part ({', '.join(names)}): add --mechanism.")
    return asked or next((each.name for each in PREFERRED if each.name in names), names[0])
