"""How one budget is shared by the items that are found and by the sums over users.

Finding items is a Gaussian of noise multiplier σ_v and a threshold that fails with probability δ_ρ; the recommender is
a Gaussian of σ_s on the same users. Together they are one Gaussian and one failure,

    σ⁻² = σ_v⁻² + σ_s⁻²,     ε = ε(Gaussian of σ, at δ − δ_ρ),     δ_ρ = δ/10.

So σ is what ε and δ allow, σ_v is what the items' own ε allows, and σ_s is what is left: a quarter of ε by itself takes
about a twentieth of σ⁻². dp_accounting has the last word, and its grid makes σ a hair larger.
"""

from __future__ import annotations

import dataclasses

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent

from tfdp_rec.privacy.composing import epsilon_of
from tfdp_rec.privacy.events import FailingDpEvent
from tfdp_rec.privacy.gaussian import noise_of_one_release

_OF_ITEMS = 0.25  # of ε, by itself
_FAILING = 0.1  # of δ
_GRID = 1e-4  # of ε: what a further distribution may be rounded up by


@dataclasses.dataclass(frozen=True)
class Budget:
    """What each release may cost.

    Attributes:
        epsilon: of all together.
        delta: δ of all together.
        items: (ε, δ) for `private_items`; None where the items are public.
        sums: σ_s.
    """

    epsilon: float
    delta: float
    items: tuple[float, float] | None
    sums: float

    @classmethod
    def of(cls, epsilon: float, delta: float, public: bool, items_epsilon: float | None = None) -> Budget:
        """The shares.

        Args:
            epsilon: of all together; never exceeded.
            delta: δ of all together.
            public: the items are; nothing is spent on them.
            items_epsilon: what finding them costs by itself; a quarter, if left out.

        Example:
            >>> budget = Budget.of(8.0, 1e-6, public=False)
            >>> budget.items, round(budget.sums, 3), round(epsilon_of(budget.event, 1e-6), 2)
            ((2.0, 2e-07), 0.68, 8.0)
        """
        if public:
            return cls(epsilon, delta, None, noise_of_one_release(epsilon, delta))
        failing, of_items = _FAILING * delta, _OF_ITEMS * epsilon if items_epsilon is None else items_epsilon
        items = noise_of_one_release(of_items, failing)
        aimed = epsilon
        while True:
            whole = noise_of_one_release(aimed, delta - failing)
            budget = cls(epsilon, delta, (of_items, 2 * failing), (whole**-2 - items**-2) ** -0.5)
            over = epsilon_of(budget.event, delta) - epsilon
            if over <= 0:
                return budget
            aimed -= max(over, _GRID)

    @property
    def events(self) -> list[DpEvent]:
        """What each release is, in their order."""
        sums = GaussianDpEvent(self.sums)
        if self.items is None:
            return [sums]
        epsilon, delta = self.items
        found = GaussianDpEvent(noise_of_one_release(epsilon, delta / 2))
        return [ComposedDpEvent([found, FailingDpEvent(delta / 2)]), sums]

    @property
    def event(self) -> DpEvent:
        """All of it."""
        return ComposedDpEvent(self.events)
