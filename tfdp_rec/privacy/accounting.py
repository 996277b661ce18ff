"""How much privacy training has cost: (ε, δ) from a mechanism's event, its sampling, and the steps taken.

An optimizer's `dp_event()` says what one step does to its batch; the sampling scheme says what that costs a
unit (see `tfdp_rec.privacy.sampling`); dp_accounting composes. Two accountants:

- **pld** numerically convolves the privacy loss distribution. Tight: its ε is an upper bound within the width
  of its grid.
- **rdp** adds Rényi divergences D_α(P‖Q) = 1/(α-1) log E_Q[(P/Q)^α] over the steps and converts at the end,
  ε = min_α D_α + log(1/δ)/(α-1) + ... . A little larger than pld, and very fast.

The steps may change their noise on the way (`record` a different event), as long as the changes do not depend
on the data, and whatever else looks at the data once goes in by `spend`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import dp_accounting
from dp_accounting import DpEvent, GaussianDpEvent
from scipy import optimize

from tfdp_rec.privacy import events
from tfdp_rec.privacy.statement import statement

_PLD_GRID = 1e-4  # dp_accounting's default width
_PLD_FINE_UP_TO = 50.0  # beyond this ε the grid widens in proportion, or it would fill the memory
_PLD_UP_TO = 1000.0  # and beyond this one, no guarantee worth the name, rdp's bound is good enough
_MOST_STEPS = 10**9


@runtime_checkable
class SamplingScheme(Protocol):
    """What accounting needs of a sampling; `tfdp_rec.data.PoissonSampling` and `ShuffledEpochs` have it."""

    num_units: int
    unit: str
    adjacency: str
    batches_drawn: int

    def compose_history(self, runs: list[tuple[DpEvent, int]]) -> DpEvent: ...  # noqa: D102
    def describe(self) -> str: ...  # noqa: D102
    def get_state(self) -> dict[str, Any]: ...  # noqa: D102
    def set_state(self, state: dict[str, Any]) -> None: ...  # noqa: D102


class Accountant:
    """Counts the steps of a private training and what they cost.

    - ε is dp_accounting's for the same event.
    - A mechanism without a guarantee gives ε = ∞, and so does one without noise.
    - ε never falls as steps are recorded.

    Args:
      event: what one step does to its batch: `model.optimizer.dp_event()`.
      sampling: how the batches are drawn: the very object whose `batches` the model is trained on.
      delta: δ, at most 1 / sampling.num_units.
      accountant: "pld" or "rdp".
      allow_large_delta: accept δ above 1 / num_units, where publishing one unit's data whole would still
        qualify.

    Raises:
      TypeError: sampling or event is not one.
      ValueError: δ or the accountant is out of range, or the accountant cannot account for the event.

    Example:
      >>> from tfdp_rec.privacy import PoissonSampling
      >>> sampling = PoissonSampling(num_units=110_794, expected_batch_size=1024, unit="user")
      >>> accountant = Accountant(GaussianDpEvent(1.0), sampling, delta=1e-6, accountant="rdp")
      >>> round(accountant.epsilon(steps=2000), 3)
      2.993
      >>> accountant.max_steps(target_epsilon=3.0)
      2010
    """

    def __init__(
        self,
        event: DpEvent,
        sampling: SamplingScheme,
        delta: float,
        accountant: str = "pld",
        allow_large_delta: bool = False,
    ):
        if not isinstance(sampling, SamplingScheme):
            raise TypeError(
                f"sampling must be a scheme such as tfdp_rec.data.PoissonSampling, got {sampling!r}: how "
                "units come into batches decides what a step costs."
            )
        if accountant not in ("pld", "rdp"):
            raise ValueError(f'accountant must be "pld" or "rdp", got {accountant!r}.')
        self.sampling = sampling
        self.delta = _checked_delta(delta, sampling.num_units, allow_large_delta)
        self.accountant = accountant
        self.event = event
        self.spent: list[tuple[DpEvent, str]] = []
        self._runs: list[tuple[DpEvent, int]] = []
        self._epsilons: dict[str, float] = {}
        self._check(event)

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return sum(steps for _, steps in self._runs)

    def runs(self, steps: int | None = None) -> list[tuple[DpEvent, int]]:
        """(event, steps) pairs of the first `steps` steps: those recorded, then more of the present event."""
        left = self.steps if steps is None else _checked_count("steps", steps)
        runs: list[tuple[DpEvent, int]] = []
        for event, count in [*self._runs, (self.event, left)]:
            taken = min(count, left)
            left -= taken
            if taken and runs and runs[-1][0] == event:
                runs[-1] = (event, runs[-1][1] + taken)
            elif taken:
                runs.append((event, taken))
        return runs

    def ledger(self, steps: int | None = None) -> DpEvent:
        """Everything that touched the data, as one dp_accounting event."""
        runs = self.runs(steps)
        trained = [self.sampling.compose_history(runs)] if runs else []
        return dp_accounting.ComposedDpEvent([event for event, _ in self.spent] + trained)

    def epsilon(self, steps: int | None = None) -> float:
        """ε at δ after `steps` steps in all; left out, after those recorded.

        Args:
          steps: may be fewer than recorded (a look back) or more (a forecast with the present event).
        """
        return self._epsilon(self.accountant, steps)

    def max_steps(self, target_epsilon: float) -> int:
        """The most steps in all, those recorded included, that keep ε within target_epsilon.

        Where what is recorded already costs more, that is `steps`: no further step fits. Never more than
        10^9.

        Raises:
          ValueError: target_epsilon is not positive.
        """
        _checked_epsilon(target_epsilon)
        if self.epsilon() > target_epsilon or not events.is_private(self.event):
            return self.steps
        quick = _quickest(self.ledger(self.steps + 1), self.accountant)
        rough = _most(lambda steps: self._epsilon(quick, steps), target_epsilon, self.steps)
        if quick == self.accountant:
            return rough
        return _most(self.epsilon, target_epsilon, rough if self.epsilon(rough) <= target_epsilon else self.steps)

    def record(self, event: DpEvent, steps: int = 1) -> None:
        """Counts `steps` steps of `event`, which becomes the present event."""
        _checked_count("steps", steps)
        if event != self.event:
            self._check(event)
            self.event = event
        if self._runs and self._runs[-1][0] == event:
            self._runs[-1] = (event, self._runs[-1][1] + steps)
        elif steps:
            self._runs.append((event, steps))

    def take_back(self, steps: int) -> None:
        """Uncounts steps of the last run that were counted ahead and did not happen.

        Raises:
          ValueError: more steps than the last run has.
        """
        _checked_count("steps", steps)
        last = self._runs.pop() if self._runs else (self.event, 0)
        if steps > last[1]:
            self._runs.append(last)
            raise ValueError(f"Cannot take back {steps} steps: the last run has {last[1]}.")
        if steps < last[1]:
            self._runs.append((last[0], last[1] - steps))

    def spend(self, event: DpEvent, label: str) -> None:
        """Counts something else that looked at the units' data, once, such as a count of popularity.

        Args:
          event: what it did; not sampled.
          label: what to call it in the statement.

        Example:
          >>> from tfdp_rec.privacy import PoissonSampling
          >>> accountant = Accountant(GaussianDpEvent(1.0), PoissonSampling(1000, 10), delta=1e-4)
          >>> accountant.spend(GaussianDpEvent(20.0), "popularity counts")
          >>> 0 < accountant.epsilon() < 0.2
          True
        """
        events.to_json(event)
        _check_supported(event, self.accountant)
        self.spent.append((event, label))

    def statement(self, steps: int | None = None) -> str:
        """The guarantee in words: unit, sampling, adjacency, δ, steps, accountant, and what it does not
        cover."""
        return statement(self, steps)

    def get_state(self) -> dict[str, Any]:
        """Everything counted, as JSON-able dicts, for a checkpoint."""
        return {
            "delta": self.delta,
            "event": events.to_json(self.event),
            "runs": [[events.to_json(event), steps] for event, steps in self._runs],
            "spent": [[events.to_json(event), label] for event, label in self.spent],
            "sampling": self.sampling.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what an earlier run counted.

        Raises:
          ValueError: the state is of another δ or sampling, or is not one of an accountant.
        """
        missing = {"delta", "event", "runs", "spent", "sampling"} - set(state)
        if missing:
            raise ValueError(f"This is not the state of an Accountant: it lacks {', '.join(sorted(missing))}.")
        if state["delta"] != self.delta:
            raise ValueError(f"This state was counted for δ = {state['delta']}, not {self.delta}.")
        event = events.from_json(state["event"])
        runs = [(events.from_json(each), int(steps)) for each, steps in state["runs"]]
        spent = [(events.from_json(each), label) for each, label in state["spent"]]
        self.sampling.set_state(state["sampling"])
        self.event, self._runs, self.spent = event, runs, spent

    def _epsilon(self, accountant: str, steps: int | None) -> float:
        ledger = self.ledger(steps)
        key = accountant + json.dumps(events.to_json(ledger))
        if key not in self._epsilons:
            self._epsilons[key] = epsilon_of(ledger, self.delta, accountant)
        return self._epsilons[key]

    def _check(self, event: DpEvent) -> None:
        if not isinstance(event, DpEvent):
            raise TypeError(f"event must be a dp_accounting.DpEvent, such as optimizer.dp_event(); got {event!r}.")
        events.to_json(event)
        _check_supported(self.sampling.compose_history([(event, 1)]), self.accountant)


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
    _check_supported(event, accountant)
    by_rdp = 0.0
    if _quickest(event, accountant) == "rdp":
        by_rdp = float(_fresh("rdp").compose(event).get_epsilon(delta))
    if accountant == "rdp" or by_rdp > _PLD_UP_TO:
        return by_rdp
    grid = _PLD_GRID * max(1.0, by_rdp / _PLD_FINE_UP_TO)
    return float(_fresh("pld", grid).compose(event).get_epsilon(delta))


def calibrate_noise(
    target_epsilon: float,
    delta: float,
    sampling: SamplingScheme,
    steps: int,
    accountant: str = "pld",
    make_event: Callable[[float], DpEvent] = GaussianDpEvent,
    spent: Iterable[tuple[DpEvent, str]] = (),
    allow_large_delta: bool = False,
) -> float:
    """The least noise multiplier, to one part in a thousand, for which `steps` steps cost at most
    target_epsilon.

    Args:
      target_epsilon: the budget; never exceeded by the answer.
      delta: δ.
      sampling: the sampling scheme.
      steps: how many steps the noise has to last for.
      accountant: "pld" or "rdp".
      make_event: the event of one step from the multiplier, where a step is more than one Gaussian.
      spent: (event, label) pairs of what else the budget must pay for.
      allow_large_delta: accept δ above 1 / num_units.

    Raises:
      ValueError: an argument is out of range, or no noise can meet the budget.

    Example:
      >>> from tfdp_rec.privacy import PoissonSampling
      >>> sampling = PoissonSampling(num_units=110_794, expected_batch_size=1024)
      >>> noise = calibrate_noise(3.0, delta=1e-6, sampling=sampling, steps=2000, accountant="rdp")
      >>> round(noise, 2)
      1.00
    """
    _checked_epsilon(target_epsilon)
    if _checked_count("steps", steps) == 0:
        raise ValueError("steps must be at least 1, got 0.")
    others = list(spent)

    def excess(noise: float, by: str) -> float:
        trial = Accountant(make_event(noise), sampling, delta, by, allow_large_delta)
        for event, label in others:
            trial.spend(event, label)
        return min(trial.epsilon(steps) - target_epsilon, 1e9)

    high = 1.0
    step = sampling.compose_history([(make_event(high), 1)])
    quick = _quickest(dp_accounting.ComposedDpEvent([step, *(event for event, _ in others)]), accountant)
    while excess(high, quick) > 0:  # rdp is quick, and its answer is never too little noise for pld
        high *= 2
        if high > 1e6:
            raise ValueError(
                f"No noise multiplier up to 10^6 keeps {steps} steps within epsilon = {target_epsilon}: "
                "raise target_epsilon, or spend less elsewhere."
            )
    low = high / 2
    while excess(low, accountant) <= 0:
        high, low = low, low / 2
        if high < 1e-3:
            return high
    noise = optimize.brentq(excess, low, high, args=(accountant,), rtol=2e-4)
    while excess(noise, accountant) > 0:
        noise *= 1.0005
    return float(noise)


def _most(epsilon: Callable[[int], float], target: float, start: int) -> int:
    """The largest number of steps from `start`, which fits, on that fits: doubling, then interpolation."""
    low, high = start, start + 1
    while epsilon(high) <= target:
        low, high = high, high + max(1, (high - start) // 2, high // 16)
        if high > _MOST_STEPS:
            return _MOST_STEPS
    while high - low > 1:
        below, above = epsilon(low) - target, min(epsilon(high) - target, 1e9)
        guess = low + round((high - low) * -below / (above - below))
        width = max(1, (high - low) // 8)  # stay off the ends, so that the interval always shrinks
        middle = min(max(guess, low + width), high - width)
        low, high = (middle, high) if epsilon(middle) <= target else (low, middle)
    return low


def _quickest(event: DpEvent, accountant: str) -> str:
    """rdp where it can account for the event, and bound what pld will say; else the accountant itself."""
    return "rdp" if _fresh("rdp").supports(event) else accountant


def _check_supported(event: DpEvent, accountant: str) -> None:
    if events.is_private(event) and not _fresh(accountant).supports(event):
        raise ValueError(
            f"The {accountant} accountant cannot account for {events.in_words(event)}; try "
            f'accountant="{"rdp" if accountant == "pld" else "pld"}".'
        )


def _fresh(accountant: str, grid: float = _PLD_GRID) -> dp_accounting.PrivacyAccountant:
    if accountant == "rdp":
        return dp_accounting.rdp.RdpAccountant()
    return dp_accounting.pld.PLDAccountant(value_discretization_interval=grid)


def _checked_delta(delta: float, num_units: int, allow_large: bool) -> float:
    if not 0 < delta < 1:
        raise ValueError(f"delta must be between 0 and 1, got {delta!r}.")
    if delta > 1 / num_units and not allow_large:
        raise ValueError(
            f"delta = {delta:g} is above 1 / num_units = {1 / num_units:.3g}: a mechanism that publishes one "
            "unit's data whole would still meet it. Choose a smaller delta, or pass allow_large_delta=True."
        )
    return float(delta)


def _checked_epsilon(target_epsilon: float) -> None:
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be positive and finite, got {target_epsilon!r}.")


def _checked_count(name: str, value: int) -> int:
    if int(value) != value or value < 0:
        raise ValueError(f"{name} must be a whole number, at least 0, got {value!r}.")
    return int(value)
