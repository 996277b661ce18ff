"""How one budget is shared by the items that are found and by the sums over users, and by days.

Finding items is a Gaussian of noise multiplier σ_v and a threshold that fails with probability δ_ρ; the recommender is
a Gaussian of σ_s on the same users. Together they are one Gaussian and one failure,

    σ⁻² = σ_v⁻² + σ_s⁻²,     ε = ε(Gaussian of σ, at δ − δ_ρ),     δ_ρ = δ/10.

So σ is what ε and δ allow, σ_v is what the items' own ε allows, and σ_s is what is left: a quarter of ε by itself takes
about a twentieth of σ⁻². dp_accounting has the last word, and its grid makes σ a hair larger.

**Days.** A user may be in the log of every day, so that days add up: T of them are T Gaussians on that user, and T
failures. Each has the same share, σ_day⁻² = σ⁻²/T and δ_ρ/T, whatever the day brings; all T together cost ε.
"""

from __future__ import annotations

import dataclasses

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, SelfComposedDpEvent

from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.pricing.events import FailingDpEvent
from tfdp_rec.pricing.gaussian_release import noise_of_one_release

_OF_ITEMS = 0.25  # of ε, by itself
_FAILING = 0.1  # of δ
_GRID = 1e-4  # of ε: what a further distribution may be rounded up by


@dataclasses.dataclass(frozen=True)
class Budget:
    """What each release may cost.

    Attributes:
        epsilon: of all days together.
        delta: δ of all days together.
        items: (ε, δ) for `private_items` on one day; None where the items are public.
        sums: σ_s of one day.
        days: T.
    """

    epsilon: float
    delta: float
    items: tuple[float, float] | None
    sums: float
    days: int = 1

    @classmethod
    def of(
        cls, epsilon: float, delta: float, public: bool, items_epsilon: float | None = None, days: int = 1
    ) -> Budget:
        """The shares.

        Args:
            epsilon: of all together; never exceeded.
            delta: δ of all together.
            public: the items are; nothing is spent on them.
            items_epsilon: what finding them on all days costs by itself; a quarter, if left out.
            days: T.

        Example:
            >>> budget = Budget.of(8.0, 1e-6, public=False)
            >>> budget.items, round(budget.sums, 3), round(epsilon_of(budget.event, 1e-6), 2)
            ((2.0, 2e-07), 0.68, 8.0)
            >>> month = Budget.of(8.0, 1e-6, public=False, days=30)
            >>> round(month.sums, 2), round(epsilon_of(month.event, 1e-6), 2)
            (3.73, 8.0)
        """
        failing, of_items = _FAILING * delta, _OF_ITEMS * epsilon if items_epsilon is None else items_epsilon
        items = None if public else _of_one_day(of_items, failing, days)
        found = 0.0 if items is None else _noise_of(items) ** -2
        aimed = epsilon
        while True:
            whole = noise_of_one_release(aimed, delta if public else delta - failing)
            budget = cls(epsilon, delta, items, (whole**-2 / days - found) ** -0.5, days)
            over = epsilon_of(budget.event, delta) - epsilon
            if over <= 0:
                return budget
            aimed -= max(over, _GRID)

    @property
    def events(self) -> list[DpEvent]:
        """What each release of a day is, in their order."""
        sums = GaussianDpEvent(self.sums)
        if self.items is None:
            return [sums]
        found = GaussianDpEvent(_noise_of(self.items))
        return [ComposedDpEvent([found, FailingDpEvent(self.items[1] / 2)]), sums]

    @property
    def event(self) -> DpEvent:
        """All of it, on all days, composed as a ledger composes its entries."""
        return ComposedDpEvent([SelfComposedDpEvent(event, self.days) for event in self.events])


def _of_one_day(epsilon: float, failing: float, days: int) -> tuple[float, float]:
    """(ε, δ) of one of so many equal releases that together cost ε, and fail with that probability."""
    if days == 1:
        return epsilon, 2 * failing
    noise = noise_of_one_release(epsilon, failing) * days**0.5
    return epsilon_of(GaussianDpEvent(noise), failing / days), 2 * failing / days


def _noise_of(items: tuple[float, float]) -> float:
    """As `private_items` finds it."""
    epsilon, delta = items
    return noise_of_one_release(epsilon, delta / 2)
