"""What all days of a job may cost, and how that is shared by finding items, by the recommender, and by days.

Finding items is a Gaussian of noise multiplier σ_v and a threshold that fails with probability δ_ρ; private sums are
a Gaussian of σ_s on the same users. Together they are one Gaussian and one failure,

    σ⁻² = σ_v⁻² + σ_s⁻²,     ε = ε(Gaussian of σ, at δ − δ_ρ),     δ_ρ = δ/10.

Figures of the held-out users are one more Gaussian, which takes its σ_m⁻² from the same sum (`figures_noise`).

So σ is what ε and δ allow, σ_v is what the items' own ε allows, and σ_s is what is left: a quarter of ε by itself takes
about a twentieth of σ⁻². dp_accounting has the last word, and its grid makes σ a hair larger. Two-towers get the noise
that makes finding items, counting popularity and all steps together cost ε (`recommenders/training.py`). A training
upon sums has sums of its own, which with the items cost ε_items + 0.8 (ε − ε_items), and steps for the rest. Where the
sums leave unless training betters them (`--mechanism auto`), they have 0.98 of σ_s⁻², the choice 0.01, and the steps
what that leaves: a training that does not gain has made their noise 1% larger.

**Days.** A user may be in the log of every day, so that days add up: T of them are T Gaussians on that user, and T
failures. Each has the same share, σ_day⁻² = σ⁻²/T and δ_ρ/T, whatever the day brings; all T together cost ε.

**Days of a user.** Where a user's rows count on at most k days (`seats.py`), no user is in more than k such Gaussians,
whatever T is. So noise is that of k days, σ_day⁻² = σ⁻²/k and δ_ρ/k. The first k payments for a kind of release are
what any user can lose by it; those of further days are of other users or of seats that were not taken, and cost nothing
(`event_due`). Training steps draw from all users of a day, and all T days of them add up.

**Who decides.** The first day's ε, δ and number of days are written in the ledger before anything is paid. A later day
cannot change them: a budget that could be raised by the one it limits is none. What was spent is the total of the
ledger's entries as they stand, days that were cut off included.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import (
    ComposedDpEvent,
    DpEvent,
    FailingDpEvent,
    GaussianDpEvent,
    NoOpDpEvent,
    SelfComposedDpEvent,
)
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.claim.ledger import Chain, Ledger, Payment
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.job.recommenders import names
from tfdp_rec.sums import set_union
from tfdp_rec.sums.private_metrics import noise_of_metrics

LABEL = "budget of all days"
# Files of what is released before any training.
ITEMS, PRIOR, SUMS, PRETRAINING_SUMS = "items.parquet", "prior.npy", "recommender.npz", "begins_with.npz"
COMPARED_SUMS = "compared_with.npz"
LABELS = {
    ITEMS: set_union.LABEL, PRIOR: "popularity counts", SUMS: "private sums",
    PRETRAINING_SUMS: "private sums to train upon", COMPARED_SUMS: "private sums to better by training",
}  # fmt: skip
_OF_ITEMS = 0.25  # of ε, by itself
_FAILING = 0.1  # of δ
_BEFORE_TRAINING = 0.8  # of ε without that of items, for sums to train upon; a half is worse on real sessions
_TO_BETTER, _TO_COMPARE = 0.02, 0.01  # of the sums' σ⁻²: for steps and the choice, and for the choice of these
_LITTLE = 30.0  # with σ = √n / 30, n users asked, noise widens the interval of a mean of .1 by some 3%
_GRID = 1e-4  # of ε: what a further distribution may be rounded up by


def prior_noise(epsilon: float, delta: float) -> float:
    """σ of the popularity counts: at most a twenty-fifth of a two-tower's budget, in σ⁻², and never less than 4."""
    return max(4.0, 5.0 * noise_of_one_release(epsilon, delta))


def figures_noise(epsilon: float, delta: float, asked: int, cost: float | None = None) -> float | None:
    """σ of private figures of so many users, of this cost by themselves; None for none.

    By default they add a twentieth of ε, or less where that many users let their figures bear more noise.
    """
    if cost == 0 or not asked:
        return None
    return noise_of_one_release(cost, delta) if cost else max(noise_of_metrics(epsilon, delta), asked**0.5 / _LITTLE)


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the first day decides for all days, and the shares of one day that follow from it.

    Example:
        >>> budget = Budget(8.0, 1e-6)
        >>> budget.items, round(budget.sums, 3), round(epsilon_of(budget.all_days(budget.sums), 1e-6), 2)
        ((2.0, 2e-07), 0.68, 8.0)
        >>> month = Budget(8.0, 1e-6, days=30)
        >>> round(month.sums, 1), round(epsilon_of(month.all_days(month.sums), 1e-6), 2)
        (3.7, 8.0)
    """

    epsilon: float  # of all days together; never exceeded
    delta: float
    days: int = 1  # most that there may be, T
    public: bool = False  # whether the items are a public list
    items_epsilon: float | None = None  # of finding items on all days, by itself; a quarter of ε if None
    days_per_user: int | None = None  # most days on which a user's rows count, k; all if None
    metrics_noise: float | None = None  # σ of figures of the held-out users, on a single day; None for no figures

    @property
    def figures(self) -> list[DpEvent]:
        """The event of the figures of held-out users, if there are to be any."""
        return [] if self.metrics_noise is None else [GaussianDpEvent(self.metrics_noise)]

    @property
    def counted_days(self) -> int:
        """Number of days that one user can be in, k or T."""
        return min(self.days, self.days_per_user or self.days)

    @functools.cached_property
    def items(self) -> tuple[float, float] | None:
        """(ε, δ) for `private_items` on one day; None where the items are public."""
        if self.public:
            return None
        failing = _FAILING * self.delta
        days = self.counted_days
        if days == 1:
            return self._items_share, 2 * failing
        # One of so many equal releases that together cost this ε, and fail with that probability.
        noise = noise_of_one_release(self._items_share, failing) * days**0.5
        return epsilon_of(GaussianDpEvent(noise), failing / days), 2 * failing / days

    @property
    def _items_share(self) -> float:
        """ε of finding items on all days, by itself."""
        return _OF_ITEMS * self.epsilon if self.items_epsilon is None else self.items_epsilon

    @property
    def item_noise(self) -> float:
        """σ_v of finding items on one day, as `private_items` makes it of its (ε, δ)."""
        return math.inf if self.items is None else noise_of_one_release(self.items[0], self.items[1] / 2)

    @property
    def sums(self) -> float:
        """Noise multiplier σ_s of the sums of one day."""
        return _noise_of_sums(self)

    @property
    def pretraining_sums(self) -> float:
        """Noise multiplier of the sums of one day that a training goes on from."""
        of_items = 0.0 if self.public else self._items_share
        part = of_items + _BEFORE_TRAINING * (self.epsilon - of_items)
        items = None if self.public else of_items
        # Figures have their price from the other part, as steps have.
        return dataclasses.replace(self, epsilon=part, items_epsilon=items, metrics_noise=None).sums

    @property
    def comparison(self) -> DpEvent:
        """Event of the choice between sums and the training upon them, on users of its own."""
        return GaussianDpEvent(self.sums / _TO_COMPARE**0.5)

    def noise(self, file: str) -> float:
        """Noise multiplier of the release in a file, sums or popularity, of one day."""
        if file == PRIOR:
            return prior_noise(self.epsilon, self.delta) * self.counted_days**0.5
        if file == COMPARED_SUMS:
            return self.sums / (1 - _TO_BETTER) ** 0.5
        return self.pretraining_sums if file == PRETRAINING_SUMS else self.sums

    def releases(self, *files: str) -> dict[str, DpEvent]:
        """Events of one day's releases by the files that keep them: of found items, and of the files that are named."""
        events: dict[str, DpEvent] = {file: GaussianDpEvent(self.noise(file)) for file in files}
        if self.items is None:
            return events
        return {ITEMS: ComposedDpEvent([GaussianDpEvent(self.item_noise), FailingDpEvent(self.items[1] / 2)]), **events}

    def all_days(self, sums: float) -> DpEvent:
        """All days of one user, with sums of a noise multiplier, composed as a ledger composes its entries."""
        events = [*self.releases().values(), GaussianDpEvent(sums), *self.figures]
        return ComposedDpEvent([SelfComposedDpEvent(event, self.counted_days) for event in events])

    # In a ledger.

    def decide(self, ledger: Ledger) -> Budget:
        """The decision that stands in a ledger; this one, written there, if there is none."""
        if not ledger.notes(LABEL):
            ledger.note(LABEL, dataclasses.asdict(self))
        return Budget.read(ledger)

    @classmethod
    def read(cls, chain: Chain) -> Budget:
        """The first decision in a ledger: no later one counts."""
        notes = chain.notes(LABEL)
        if not notes:
            raise ValueError(
                f"{chain.path} does not say what all days together may cost, so that no day can be added: begin "
                "another run with --days."
            )
        return cls(**notes[0])

    def event_due(self, chain: Chain, event: DpEvent, label: str) -> DpEvent:
        """Event to pay for a release of users with seats: free once as many days are paid for as a user can have."""
        return event if self.costly_days(chain, label, 1) else NoOpDpEvent()

    def costly_days(self, chain: Chain, label: str, left: int) -> int:
        """On how many of the days that are left a kind of release costs something."""
        if self.days_per_user is None:
            return left
        paid = sum(each.label == label and not isinstance(each.event, NoOpDpEvent) for each in chain.paid)
        return min(left, max(0, self.counted_days - paid))

    def refuse_excess(self, ledger: Ledger, events: Sequence[DpEvent]) -> None:
        """Raises if paying for these events would pass what was decided."""
        after = ledger.epsilon(self.delta, more=[Payment(event) for event in events]) if events else 0.0
        if after > self.epsilon:
            spent = round_up(ledger.epsilon(self.delta)) if ledger.paid else 0.0
            days = "1 day" if self.days == 1 else f"{self.days} days"
            raise ValueError(
                f"{ledger.path} has spent epsilon = {spent:g} of the {self.epsilon:g} that the first day decided on "
                f"for {days} (--epsilon, --days), and this day would make it {round_up(after):g}: what is released "
                "can be served on, and nothing more is to be asked of these users."
            )

    # In a statement.

    def days_field(self, day: int, is_trained: bool) -> dict[str, str]:
        """The entry that is about days; empty for a single one."""
        if self.days == 1:
            return {}
        together = "as if each user were in all of them"
        users = f"added up {together}"
        if self.days_per_user is not None:
            users = f"of which a user's rows count on {self.days_per_user} at most, kept account of in a private list"
            if is_trained:
                users += f", in all but training steps, which add up {together}"
        return {
            "Days": f"{day} so far, of at most {self.days}, {users}; never above epsilon = "
            f"{round_up(self.epsilon):g}, as the first day decided. What follows is of the last of them"
        }  # fmt: skip

    def public_numbers(self, users: int) -> str:
        """What of the users is public."""
        counted = "the number of users of each day" if self.days > 1 else "the number of users"
        return f"{counted}, {users}, and which of them were held out, by a hash of their ids"


def release_file(name: str) -> str | None:
    """The file of what is released for a recommender alone, before any training; None if there is no such release."""
    of_sums = {names.spectral.name: SUMS, names.from_sums.name: PRETRAINING_SUMS, names.auto.name: COMPARED_SUMS}
    return PRIOR if names.is_two_tower(name) else of_sums.get(name)


def count_days(chain: Chain, file: str | None) -> int:
    """Number of days so far that have paid for the release in a file."""
    return 0 if file is None else sum(paid.label == LABELS[file] for paid in chain.paid)


@functools.cache
def _noise_of_sums(budget: Budget) -> float:
    aimed, delta = budget.epsilon, budget.delta if budget.public else (1 - _FAILING) * budget.delta
    while True:
        whole = noise_of_one_release(aimed, delta)
        left = whole**-2 / budget.counted_days - budget.item_noise**-2 - (budget.metrics_noise or math.inf) ** -2
        if left <= 0:
            raise ValueError(
                f"epsilon {budget.epsilon:g} has nothing left for private sums beside found items and figures: give "
                "less for these (--items-epsilon, --metrics-epsilon)."
            )
        sums = left**-0.5
        over = epsilon_of(budget.all_days(sums), budget.delta) - budget.epsilon
        if over <= 0:
            return sums
        aimed -= max(over, _GRID * min(1.0, budget.epsilon))
        if aimed <= 0:
            raise ValueError(f"epsilon {budget.epsilon:g} is too small to find the noise of private sums for it.")
