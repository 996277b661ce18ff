"""ε at δ of one event, however it is composed: by dp_accounting, or by profiles where an event is of ours."""

from __future__ import annotations

import math

import dp_accounting
from dp_accounting import DpEvent

from tfdp_rec.privacy import events, profiles

_PLD_GRID = 1e-4  # dp_accounting's default width
_PLD_FINE_UP_TO = 50.0  # beyond this ε the grid widens in proportion, or it would fill the memory
_PLD_UP_TO = 1000.0  # and beyond this one, no guarantee worth the name, rdp's bound is good enough


def epsilon_of(event: DpEvent, delta: float, accountant: str = "pld") -> float:
    """ε at δ of one (composed) event by dp_accounting; infinite where a part has no guarantee.

    Raises:
        ValueError: an event that is unknown, or that the accountant cannot account for.

    Example:
        >>> epsilon_of(dp_accounting.NonPrivateDpEvent(), delta=1e-6)
        inf
    """
    events.to_json(event)
    if not events.is_private(event):
        return math.inf
    if profiles.is_release(event):
        return profiles.composed_epsilon(profiles.releases_of(event), delta)
    check_supported(event, accountant)
    by_rdp = 0.0
    if quickest(event, accountant) == "rdp":
        by_rdp = float(_fresh("rdp").compose(event).get_epsilon(delta))
    if accountant == "rdp" or by_rdp > _PLD_UP_TO:
        return by_rdp
    grid = _PLD_GRID * max(1.0, by_rdp / _PLD_FINE_UP_TO)
    return float(_fresh("pld", grid).compose(event).get_epsilon(delta))


def quickest(event: DpEvent, accountant: str) -> str:
    """rdp where it can account for the event, and bound what pld will say; else the accountant itself."""
    return "rdp" if _fresh("rdp").supports(event) else accountant


def check_supported(event: DpEvent, accountant: str) -> None:
    """Raises for an event that an accountant cannot account for.

    Raises:
        ValueError: naming the other accountant.
    """
    if events.is_private(event) and not _fresh(accountant).supports(event):
        raise ValueError(
            f"The {accountant} accountant cannot account for {events.in_words(event)}; try "
            f'accountant="{"rdp" if accountant == "pld" else "pld"}".'
        )


def _fresh(accountant: str, grid: float = _PLD_GRID) -> dp_accounting.PrivacyAccountant:
    if accountant == "rdp":
        return dp_accounting.rdp.RdpAccountant()
    return dp_accounting.pld.PLDAccountant(value_discretization_interval=grid)
