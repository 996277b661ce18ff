"""One place that says what a private training is to cost, and gives everybody else their part of it.

    plan = PrivatePlan(sampling=sampling, epsilon=8.0, delta=1e-6, steps=600)

    optimizer    clip C, noise σ, batch size B     tfdp_rec.LazyDPSGD(0.5, plan=plan)
    data         batches that prove their draw     plan.batches(fetch)
    fit          steps=600 and not one more        callbacks=[plan.budget()]
    statement    ε, δ, unit, sampling, mechanism   plan.accountant.statement()

Given ε, the least σ is searched for: by RDP first, whose answer is never too small, then confirmed and tightened with
the accountant asked for.

With a ledger the budget is for all that is in it: σ is searched for beside what others have paid there. The σ that was
found is noted in it, so that the same plan, made again by a program that goes on, has the same σ, and what is left.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from dp_accounting import DpEvent, GaussianDpEvent

from tfdp_rec.callbacks.privacy_budget import PrivacyBudget
from tfdp_rec.files import Path
from tfdp_rec.pricing import events
from tfdp_rec.pricing.composition import checked_epsilon
from tfdp_rec.pricing.correlated_noise import Correlation
from tfdp_rec.pricing.events import PlannedDpEvent
from tfdp_rec.sampling.schemes import Sampling, fold_gaussians
from tfdp_rec.spending.accountant import Accountant
from tfdp_rec.spending.calibration import calibrate_noise
from tfdp_rec.spending.entries import Changes
from tfdp_rec.spending.ledger import Ledger
from tfdp_rec.spending.ledger_lines import canonical, finite
from tfdp_rec.spending.meter import StepLimit

_NOTE = "plan"


class PrivatePlan:
    """Binds sampling, δ, steps and either ε or σ.

    Guarantee: an optimizer that takes the plan costs at most `epsilon` after `steps` steps on the sampling's batches,
    or is refused.

    Args:
        sampling: how batches are drawn; its `expected_batch_size` is B everywhere.
        delta: δ.
        steps: how many the budget has to last for.
        epsilon: the budget; the noise is found for it when it is first asked for.
        noise_multiplier: σ, instead of ε; the budget is then what `steps` steps cost.
        l2_norm_clip: C, unless the optimizer is given its own.
        accountant: "pld", tight, or "rdp", quick.
        make_event: the event of one step from σ, for a mechanism whose step is more than one Gaussian.
        correlation: of the noise, for `DPFTRL` and `LazyDPFTRL` on an order; its steps are the plan's.
        spent: (event, label) pairs of what else looks at the data, such as a popularity count. With a ledger they are
            paid for at once: make the plan first, and leave out what is paid and not done again.
        allow_large_delta: as for `Accountant`.
        asserted: as for `Accountant`.
        ledger: as for `Accountant`: a file, or a `Ledger`, that is paid in before anything is done.

    Raises:
        TypeError: not exactly one of ε and noise_multiplier; both make_event and correlation.
        ValueError: a value is out of range, or no noise can meet the budget; the ledger says that it is gone.
        BrokenLedger: the ledger is no evidence, or is about another unit or other data.

    Example:
        >>> import tfdp_rec
        >>> sampling = tfdp_rec.data.PoissonSampling(num_units=110_794, expected_batch_size=1024, unit="user")
        >>> plan = PrivatePlan(sampling=sampling, epsilon=3.0, delta=1e-6, steps=2000, accountant="rdp")
        >>> optimizer = tfdp_rec.LazyDPSGD(0.5, plan=plan)
        >>> round(optimizer.noise_multiplier, 2), optimizer.expected_batch_size, optimizer.l2_norm_clip
        (1.0, 1024.0, 1.0)
        >>> plan.accountant.epsilon(steps=2000) <= 3.0
        True
    """

    def __init__(
        self,
        *,
        sampling: Sampling,
        delta: float,
        steps: int,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        l2_norm_clip: float = 1.0,
        accountant: str = "pld",
        make_event: Callable[[float], DpEvent] = GaussianDpEvent,
        correlation: Correlation | None = None,
        spent: Iterable[tuple[DpEvent, str]] = (),
        allow_large_delta: bool = False,
        asserted: str = "",
        ledger: Path | Ledger | None = None,
    ):
        if (epsilon is None) == (noise_multiplier is None):
            raise TypeError("Give PrivatePlan either epsilon= or noise_multiplier=: each decides the other.")
        if int(steps) != steps or steps < 1:
            raise ValueError(f"steps must be a positive whole number, got {steps!r}.")
        if correlation is not None:
            make_event = _planned_by(correlation, steps, make_event)
        self.sampling, self.delta, self.steps, self.correlation = sampling, delta, int(steps), correlation
        self.l2_norm_clip, self.make_event, self.spent = l2_norm_clip, make_event, list(spent)
        self._target, self._given_noise = epsilon, noise_multiplier
        self._options: dict[str, Any] = {"accountant": accountant, "allow_large_delta": allow_large_delta}
        event = make_event(noise_multiplier or 1.0)
        self._payer = Accountant(event, sampling, delta, asserted=asserted, ledger=ledger, **self._options)
        try:
            self._refuse_gone()
        except ValueError:
            if not isinstance(ledger, Ledger):
                self._payer.close()
            raise
        self._before = self._payer.steps
        self._limit, self._limited = StepLimit(0), -1
        for other, label in self.spent:
            self._payer.spend(other, label)

    def __deepcopy__(self, memo: Any) -> PrivatePlan:
        return self  # a copied optimizer trains under the same plan

    @functools.cached_property
    def noise_multiplier(self) -> float:
        """σ: as given, as noted in the ledger, or the least that keeps `steps` steps within `epsilon`."""
        if self._target is None:
            return float(self._given_noise or 0.0)
        paid = self._payer.payments
        spent, ledger = ([], paid.ledger) if paid else (self.spent, None)
        noise = self._noted() or calibrate_noise(
            self._target, self.delta, self.sampling, self.steps, make_event=self.make_event, spent=spent, ledger=ledger,
            **self._options,
        )  # fmt: skip
        if paid and not self._noted():
            paid.ledger.note(_NOTE, self._note(noise))
        return noise

    def _note(self, noise: float) -> dict[str, Any]:
        """What makes this plan this plan, with the σ that was found for it."""
        step, asked = events.to_json(self.make_event(noise)), {"epsilon": self._target, "delta": self.delta}
        return {**asked, "steps": self.steps, "sampling": self.sampling.get_state(), "sigma": noise, "step": step}

    def _noted(self) -> float | None:
        """The σ that this plan was made with before; None if the ledger knows of no such plan."""
        lines = self._payer.payments.ledger.chain.lines if self._payer.payments else []
        for note in (line["settings"] for line in reversed(lines) if line.get("label") == _NOTE):
            if canonical(finite(self._note(note["sigma"]))) == canonical(note):
                return float(note["sigma"])
        return None

    def _refuse_gone(self) -> None:
        if self._target is None or self._payer.payments is None:
            return
        checked_epsilon(self._target)
        noted, spent = self._noted(), self._payer.epsilon()
        if noted and self.correlation:
            return  # to go on with a plan that is paid for costs nothing; what would cost is the budget's to refuse
        if noted:
            self._payer.record(self.make_event(noted), 0)
        if spent > self._target or noted and self._payer.max_steps(self._target) <= self._payer.steps:
            raise ValueError(
                f"The budget is gone: {self._payer.payments.ledger.path} holds epsilon {spent:.4g} of "
                f"{self._target:g}, and no step more fits. Release what was trained; to train on with these data, plan "
                "a larger epsilon."
            )

    @functools.cached_property
    def epsilon(self) -> float:
        """The budget: as given, or what `steps` steps cost."""
        if self._target is not None:
            return float(self._target)
        return self.accountant.epsilon(self._before + self.steps)

    @functools.cached_property
    def accountant(self) -> Accountant:
        """The one accountant of this plan's training."""
        self._payer.record(self.make_event(self.noise_multiplier), 0)  # the present event
        return self._payer

    def batches(self, fetch: Callable[..., Any], **options: Any) -> Any:
        """`sampling.batches(fetch, ...)`."""
        return self.sampling.batches(fetch, **options)

    def budget(self) -> PrivacyBudget:
        """The callback that counts, and stops `fit` before the budget is overspent.

        Raises:
            ValueError: `noise_multiplier` gives no finite ε.
        """
        if math.isinf(self.epsilon):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier:g} has no finite epsilon, so that no budget can be kept: fit "
                "without plan.budget(), or plan with epsilon=."
            )
        # A filter's ε is that of its whole budget, which says nothing of how many steps were planned.
        steps = self._before + self.steps if self.accountant.limit else None
        return PrivacyBudget(self.accountant, self.epsilon, steps=steps)

    # What an optimizer asks.

    def complete(self, settings: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's settings, with what it was not given taken from the plan.

        Raises:
            ValueError: another batch size than the sampling's.
        """
        batch = self.sampling.expected_batch_size
        if settings.get("expected_batch_size", batch) != batch:
            raise ValueError(
                f"expected_batch_size={settings['expected_batch_size']} is not the plan's {batch}, which is its "
                "sampling's: leave it out."
            )
        own: dict[str, Any] = {"l2_norm_clip": self.l2_norm_clip, "expected_batch_size": batch}
        if self.correlation is not None:
            own["correlation"] = self.correlation
        if "noise_multiplier" not in settings:
            own["noise_multiplier"] = self.noise_multiplier
        return {**own, **settings}

    def accept(self, optimizer: Any) -> None:
        """Takes an optimizer that was made with the plan.

        Raises:
            ValueError: a step of it costs more than was planned.
        """
        if self._target is not None:
            self._refuse_dearer(type(optimizer).__name__, optimizer.dp_event())
        before: list[tuple[DpEvent, str]] = getattr(optimizer, "events_before_training", list)()
        missing = [label for event, label in before if (event, label) not in self.accountant.spent_besides]
        if missing:
            raise ValueError(
                f"{type(optimizer).__name__} also spends on '{missing[0]}' before training, which the plan does not "
                "know of: give PrivatePlan(spent=[(event, label), ...]) what preselection.events() gives."
            )
        self.accountant.follow(optimizer)
        if events.is_private(optimizer.dp_event()):  # or there is no ε to keep
            optimizer.plan, optimizer.step_limit = self, self._limit
            self.limit_steps()

    def suspend_limit(self) -> None:
        """Lets a budget count instead, until `limit_steps`."""
        self._limit.set_left(None)
        self._limited = -1

    def limit_steps(self) -> None:
        """Lets the optimizers of this plan make what is left of its steps outside a `fit` with `budget()`, together.

        Under a ledger nothing is left outside: the budget pays for steps before they are made.
        """
        if self._limited != Changes.made:
            self._limit.set_left(0 if self._payer.payments else max(0, self._before + self.steps - self._payer.steps))
            self._limited = Changes.made

    def _refuse_dearer(self, name: str, event: DpEvent) -> None:
        planned = self.make_event(self.noise_multiplier)
        if isinstance(planned, PlannedDpEvent) and isinstance(event, PlannedDpEvent):
            planned, event = planned.event, event.event  # each costs as a whole; a step of another kind, every time
        least, found = fold_gaussians(planned), fold_gaussians(event)
        both = isinstance(least, GaussianDpEvent) and isinstance(found, GaussianDpEvent)
        if event == planned or both and found.noise_multiplier >= least.noise_multiplier * (1 - 1e-9):
            return
        raise ValueError(
            f"A step of {name} costs more than the plan's: {event} for {planned}. For AdaFEST write "
            "AdaFEST.with_total_noise(rate, noise_multiplier=plan.noise_multiplier, plan=plan, ...); for others give "
            "PrivatePlan(make_event=...), from noise multiplier to the step's event; EANA has no epsilon: plan with "
            "noise_multiplier=."
        )


def _planned_by(
    correlation: Correlation, steps: int, make_event: Callable[[float], DpEvent]
) -> Callable[[float], DpEvent]:
    """The event of a step from σ, for noise that is planned as a whole."""
    if make_event is not GaussianDpEvent:
        raise TypeError("Give PrivatePlan either correlation= or make_event=: each says what a step costs.")
    if steps != correlation.steps:
        raise ValueError(f"steps={steps} is not the correlation's {correlation.steps}, which its noise is planned for.")

    def event(noise: float) -> DpEvent:
        whole = correlation.dp_event(noise)
        return PlannedDpEvent(whole, steps, correlation.separation, correlation.participations, plan="planned")

    return event
