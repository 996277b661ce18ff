"""(ε, δ) of a training, from its mechanism's event, its sampling, and the number of its steps.

An optimizer's `dp_event()` is the effect of one step on its batch; the sampling scheme turns it into the cost for a
unit (`tfdp_rec.core.claim.schemes`); dp_accounting composes. Two accountants:

- **pld** convolves privacy loss distributions numerically. Its ε is an upper bound, tight up to the width of its grid.
- **rdp** adds Rényi divergences D_α(P‖Q) = 1/(α-1) log E_Q[(P/Q)^α] over the steps and converts at the end,
  ε = min_α D_α + log(1/δ)/(α-1) + ... . Its ε is a little larger than pld's, and very fast.

The entries (`entries.py`) that are priced are those of the models that are followed, or, with a ledger, those of the
ledger alone.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import dp_accounting
from dp_accounting import DpEvent

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.composition import (
    check_epsilon,
    check_supported,
    epsilon_of,
    most_steps,
    searches,
    valid_count,
)
from tfdp_rec.core.claim.entries import Entries, Entry, Use
from tfdp_rec.core.claim.filters import PrivacyFilter
from tfdp_rec.core.claim.ledger import Ledger
from tfdp_rec.core.claim.schemes import Sampling
from tfdp_rec.core.claim.spending import Spending, refuse_unpayable
from tfdp_rec.core.claim.statement import Statement, statement
from tfdp_rec.core.ground.files import Path
from tfdp_rec.core.ground.refused import refuse_no_number

_ROUGH = 8.0  # factor on pld's grid


class Accountant:
    """The cost of a private training: of the steps of the models that it follows, and of other uses of the data.

    - ε is dp_accounting's for the same event.
    - A mechanism without a guarantee gives ε = ∞, and so does one without noise.
    - ε never falls as steps are made.
    - Steps on batches that no sampling drew, with a seed, or with test noise make ε infinite. Those that a model's
      history does not describe make it raise `Unaccounted`.
    - A copy by `copy.deepcopy` is the accountant itself, so that copied callbacks share it.

    Args:
        event: Event of one step on its batch: `model.optimizer.dp_event()`.
        sampling: Sampling scheme: the object whose `batches` the model is trained on.
        delta: Probability δ, at most 1 / sampling.num_units.
        accountant: "pld" or "rdp".
        allow_large_delta: Whether to accept δ above 1 / num_units, which a mechanism that publishes one unit's data
            whole would still meet.
        ledger: File, or `Ledger`, in which everything is paid for before it is done (docs/ledger.md). All that it holds
            already counts, and the models' histories are checked against it.

    Raises:
        TypeError: `sampling` is no sampling scheme, or `event` is no event.
        ValueError: δ or the accountant is out of range, or the accountant cannot account for the event.

    Example:
        >>> from tfdp_rec.privacy import PoissonSampling
        >>> sampling = PoissonSampling(num_units=110_794, expected_batch_size=1024, unit="user")
        >>> accountant = Accountant(dp_accounting.GaussianDpEvent(1.0), sampling, delta=1e-6, accountant="rdp")
        >>> round(accountant.epsilon(steps=2000), 3)
        2.993
        >>> accountant.max_steps(target_epsilon=3.0)
        2010
    """

    def __init__(
        self, event: DpEvent, sampling: Sampling, delta: float, accountant: str = "pld",
        allow_large_delta: bool = False, ledger: Path | Ledger | None = None,
    ):
        if not isinstance(sampling, Sampling):
            raise TypeError(
                f"sampling must be a scheme such as tfdp_rec.data.PoissonSampling, got {sampling!r}: how "
                "units come into batches decides what a step costs."
            )
        if accountant not in ("pld", "rdp"):
            raise ValueError(f'accountant must be "pld" or "rdp", got {accountant!r}.')
        self.sampling = sampling
        self.delta = _valid_delta(delta, sampling.num_units, allow_large_delta)
        self.accountant = accountant
        self.event = event
        self._epsilons, self._most = dict[str, float](), dict[Any, int]()
        self.spending = Spending(sampling)
        self._check(event)
        if ledger is not None:
            refuse_unpayable(event, sampling)
            self.spending = Spending(sampling, ledger)
            try:
                self._check(event)
            except ValueError:
                if self.spending.owned:
                    self.close()
                raise

    def __copy__(self) -> Accountant:
        return self

    def __deepcopy__(self, memo: Any) -> Accountant:
        return self  # what copied callbacks spend is spent here

    # What is counted.

    def set_event(self, event: DpEvent) -> None:
        """Sets the event of the steps to come, for forecasts and payments."""
        if event != self.event:
            self._check(event)
            self.event = event

    def follow(self, model: Any) -> None:
        """Accounts for all steps of a private `model`, or of an optimizer, those made and those to come.

        `PrivacyBudget` and `PrivatePlan` call this. A model without a privacy history is refused.
        """
        self.spending.follow(model)

    @property
    def entries(self) -> Entries:
        """All that was spent: what the ledger holds, less steps that are still ahead; without one, what is carried."""
        return self.spending.entries(self.event)

    def _own(self) -> list[Entry]:
        # Entries of steps under this sampling, in order.
        mine = self.sampling.get_state()
        return [entry for entry in self.entries if not entry.label and entry.sampling == mine]

    @property
    def steps(self) -> int:
        """Number of steps begun so far under this sampling."""
        return sum(entry.steps for entry in self._own())

    @property
    def missing_steps(self) -> int:
        """Number of steps that are paid for and that no followed model has, such as those that a crash took."""
        mine = self.sampling.get_state()
        return self.steps - sum(e.steps for e in self.spending.history if not e.label and e.sampling == mine)

    @property
    def void(self) -> str:
        """Reason why there is no guarantee, such as sampling or noise that can be repeated; empty if there is one."""
        return " and ".join(dict.fromkeys(entry.void for entry in self.spending.history if entry.void))

    @property
    def limit(self) -> PrivacyFilter | None:
        """The ledger's privacy filter, if it has one: the claim is then its budget, however much of it is used."""
        return self.spending.payments.limit

    @property
    def spent_besides(self) -> list[tuple[DpEvent, str]]:
        """(event, label) of every expense but the steps under this sampling."""
        entries, mine, runs = self.entries, self.sampling.get_state(), dict[str, list[Entry]]()
        found = entries.uses
        for entry in entries:
            if not entry.label and entry.sampling != mine:
                runs.setdefault(json.dumps(entry.sampling), []).append(entry)
        for state, several in runs.items():
            steps, told = sum(entry.steps for entry in several), json.loads(state)
            if told is None:
                found.append((dp_accounting.NonPrivateDpEvent(), f"{steps} steps on batches that no sampling drew"))
                continue
            sampling = Sampling.from_state(told)
            event = sampling.compose_history([(entry.event, entry.steps) for entry in several])
            found.append((event, f"{steps} steps under another sampling ({sampling.describe()})"))
        return found

    # Its cost.

    def runs(self, steps: int | None = None) -> list[tuple[DpEvent, int]]:
        """(event, steps) pairs of the first `steps` steps: those made, then more of the present event."""
        own = self._own()
        left = sum(entry.steps for entry in own) if steps is None else valid_count("steps", steps)
        runs: list[tuple[DpEvent, int]] = []
        further = [(self.event, left)] if left else []
        for event, count in [*((entry.event, entry.steps) for entry in own), *further]:
            taken = min(count, left)
            left -= taken
            if taken and runs and runs[-1][0] == event:
                runs[-1] = (event, runs[-1][1] + taken)
            elif taken or not count:  # a plan that is paid for counts, even without a step
                runs.append((event, taken))
        return runs

    def dp_event(self, steps: int | None = None) -> DpEvent:
        """All uses of the data as one dp_accounting event, after a number of steps as in `epsilon`."""
        self.spending.refuse()
        runs = self.runs(steps)
        trained = [self.sampling.compose_history(runs)] if runs else []
        return dp_accounting.ComposedDpEvent([event for event, _ in self.spent_besides] + trained)

    def epsilon(self, steps: int | None = None) -> float:
        """ε at δ after `steps` steps in all, by default those made.

        Fewer steps look back, more are forecast with the present event. Under a filter ε is the budget's, or infinite
        for more steps than fit. `Unaccounted` is raised as by `refuse`.
        """
        return self._epsilon(steps, self.accountant)

    def rough_epsilon(self) -> float:
        """A looser bound on ε so far, in an eighth of the time: after 20,000 steps 4 in 10,000 above it."""
        return self._epsilon(None, self.accountant, _ROUGH if self.accountant == "pld" else 1.0)

    def max_steps(self, target_epsilon: float, enough: int | None = None) -> int:
        """The largest number of steps in all, those made included, that keeps ε at most `target_epsilon`.

        It is at most 10^9, and the number of steps made if these cost more already. With `enough`, the search is left
        out where so many fit.
        """
        check_epsilon(target_epsilon)
        if self.void or not events.is_private(self.event):
            return self.steps
        if enough is not None and enough >= self.steps and self.epsilon(enough) <= target_epsilon:
            return enough
        runs = self.runs()
        before = runs[:-1] if runs and runs[-1][0] == self.event else runs
        parts = [(self.event, 0), *before, *self.spent_besides]
        basis = json.dumps([target_epsilon, self.delta, [(events.to_json(event), other) for event, other in parts]])
        if self._most.get(basis, -1) >= self.steps:  # nothing but more of the same was made since
            return self._most[basis]
        if self.epsilon() > target_epsilon:
            return self.steps
        most = self.steps
        # A quick search first; a closer one begins at its answer, unless that is too much by the closer price.
        for accountant, coarser in searches(self.dp_event(self.steps + 1), self.accountant):
            epsilon = functools.partial(self._epsilon, accountant=accountant, coarser=coarser)
            most = most_steps(epsilon, target_epsilon, most if epsilon(most) <= target_epsilon else self.steps)
        self._most[basis] = most
        return most

    def spend(self, event: DpEvent, label: str, id: str = "", unit: str = "") -> None:
        """Counts one other use of the units' data, such as a count of popularity.

        Args:
            event: Event of the whole use, without sampling.
            label: Name of the use in the statement.
            id: Id of the use, under which it is counted, and paid for, once; by default a new one.
            unit: What it protects, if that is to be in the history of a model that carries it (`Use`).

        Example:
            >>> from tfdp_rec.privacy import PoissonSampling
            >>> accountant = Accountant(dp_accounting.GaussianDpEvent(1.0), PoissonSampling(1000, 10), delta=1e-4)
            >>> accountant.spend(dp_accounting.GaussianDpEvent(20.0), "popularity counts")
            >>> 0 < accountant.epsilon() < 0.2
            True
        """
        events.to_json(event)
        check_supported(event, self.accountant)
        self.spending.spend(Use(event, label, id, unit))

    def give_back_rest(self) -> None:
        """Gives back the steps that were paid for in the ledger and will not be made."""
        self.spending.give_back_rest()

    def close(self) -> None:
        """Gives back unused payments and releases the ledger for other processes; ε and statement stay available."""
        self.give_back_rest()
        if self.spending.payments.ledger is not None:
            self.spending.payments.ledger.close()

    # Its statement.

    def statement(self, steps: int | None = None) -> Statement:
        """The guarantee in words, after `steps` steps; by default those made.

        Raises `BrokenLedger` if the ledger was removed or replaced while it was open.
        """
        ledger = self.spending.payments.words()  # before all else: it may be gone
        after = self.steps if steps is None else steps
        return statement(
            sampling=self.sampling, epsilon=self.epsilon(after), delta=self.delta, whole=self.dp_event(after),
            runs=self.runs(after), besides=self.spent_besides, ordinary=self.spending.history.ordinary, void=self.void,
            made=self.steps > 0, ledger=ledger, limit=self.limit,
            accountant=self.accountant,
        )  # fmt: skip

    def _epsilon(self, steps: int | None, accountant: str, coarser: float = 1.0) -> float:
        event = self.dp_event(steps)
        if self.void:
            return math.inf
        if self.limit is not None:
            return self.limit.claim(self.delta) if self.limit.admits(event) else math.inf
        key = f"{accountant} {coarser} {self.delta} {json.dumps(events.to_json(event))}"
        if key not in self._epsilons:
            self._epsilons[key] = epsilon_of(event, self.delta, accountant, coarser)
        return self._epsilons[key]

    def _check(self, event: DpEvent) -> None:
        if not isinstance(event, DpEvent):
            raise TypeError(f"event must be a dp_accounting.DpEvent, such as optimizer.dp_event(); got {event!r}.")
        events.to_json(event)
        step = self.sampling.compose_history([(event, 1)])
        check_supported(step, self.accountant)
        if self.limit is not None:
            self.limit.refuse_unpriced(step)
            if self.delta < self.limit.delta:
                raise ValueError(
                    f"The ledger is {self.limit}: it claims nothing at delta = {self.delta:g}. Use delta="
                    f"{self.limit.delta:g}."
                )


def _valid_delta(delta: float, num_units: int, allow_large: bool) -> float:
    refuse_no_number("delta", delta)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be above 0 and below 1, got {delta!r}.")
    if delta > 1 / num_units and not allow_large:
        raise ValueError(
            f"delta = {delta:g} is above 1 / num_units = {1 / num_units:.3g}: a mechanism that publishes one "
            "unit's data whole would still meet it. Choose a smaller delta, or pass allow_large_delta=True."
        )
    return float(delta)

