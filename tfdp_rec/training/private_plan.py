"""`PrivatePlan`: the cost of a private training, from which optimizer, data, fit and statement take their parts.

    plan = PrivatePlan(sampling=sampling, epsilon=8.0, delta=1e-6, steps=600)

    optimizer    clip C, noise σ, batch size B     tfdp_rec.LazyDPSGD(0.5, plan=plan)
    data         batches that prove their draw     plan.batches(fetch)
    fit          the steps that fit the budget     callbacks=[plan.budget()]
    statement    ε, δ, unit, sampling, mechanism   plan.accountant.statement()

For a given ε the least σ is computed: by RDP first, whose answer is never too small, then tightened with the chosen
accountant.

With a ledger the budget covers all that is in it: σ is computed with the earlier payments. It is noted in the ledger,
so that a restarted program, which makes the same plan again, has the same σ and the rest of the budget. If nothing is
left, a warning says so, and the model can still be resumed from its checkpoint, to be saved.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdp_rec.core.claim import events
from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.allowance import Allowance
from tfdp_rec.core.claim.calibration import least_noise
from tfdp_rec.core.claim.composition import check_epsilon
from tfdp_rec.core.claim.entries import Entries, Use
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, PlannedDpEvent
from tfdp_rec.core.claim.ledger import Ledger, Payment, canonical, compose, finite
from tfdp_rec.core.claim.schemes import RandomAllocation, Sampling, fold_gaussians
from tfdp_rec.core.claim.spending import Unaccounted
from tfdp_rec.core.ground.files import Path
from tfdp_rec.core.mechanism.correlated_noise import Correlation
from tfdp_rec.core.sensitivity.weights import Auto
from tfdp_rec.training.arrays import warn_of_users
from tfdp_rec.training.privacy_budget import PrivacyBudget
from tfdp_rec.training.signal import share_of_signal

if TYPE_CHECKING:
    from tfdp_rec.training.planner import Suggestions

_NOTE = "plan"
_MUCH = 20.0  # above this ε, which bounds odds by half a billion, a plan warns


class PrivatePlan:
    """Sampling, δ, number of steps, and either ε or σ, of a training.

    Guarantee: an optimizer with the plan costs at most `epsilon` after `steps` steps on the sampling's batches, or is
    refused.

    Args:
        sampling: Sampling scheme, whose `expected_batch_size` is B everywhere.
        delta: Probability δ.
        steps: Number of steps that the budget pays for.
        epsilon: Budget; its noise is computed at the first use of `noise_multiplier`.
        noise_multiplier: Noise multiplier σ, instead of ε; the budget is then the cost of `steps` steps.
        l2_norm_clip: Clip C, or "auto", of optimizers that are given none.
        accountant: "pld", which is tight, or "rdp", which is quick.
        make_event: Function from σ to the event of one step, for mechanisms whose step is more than one Gaussian.
        correlation: Correlation of the noise, for `DPFTRL` and `LazyDPFTRL` on an order, with as many steps as the
            plan.
        spent: Other uses of the data, such as a popularity count: `tfdp_rec.privacy.Use` objects, each of which counts
            once wherever it is declared; or (event, label) pairs, each of which is another use each time a plan
            declares it. With a ledger they are paid for at once: make the plan before these uses.
        allow_large_delta: Whether to accept δ above 1 / num_units, as for `Accountant`.
        ledger: File, or `Ledger`, in which everything is paid for before it is done.

    Raises:
        TypeError: Both or none of ε and noise_multiplier are given, or both make_event and correlation.
        ValueError: A value is out of range, no noise can meet the budget, or the ledger's budget is spent (a warning,
            if this plan has spent it).
        BrokenLedger: The ledger was changed or is incomplete, or is about another unit or other data.

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
        self, *, sampling: Sampling, delta: float, steps: int, epsilon: float | None = None,
        noise_multiplier: float | None = None, l2_norm_clip: float | Auto = 1.0, accountant: str = "pld",
        make_event: Callable[[float], DpEvent] = GaussianDpEvent, correlation: Correlation | None = None,
        spent: Iterable[tuple[DpEvent, str]] = (), allow_large_delta: bool = False,
        ledger: Path | Ledger | None = None,
    ):
        if (epsilon is None) == (noise_multiplier is None):
            raise TypeError("Give PrivatePlan either epsilon= or noise_multiplier=: each decides the other.")
        if epsilon is not None:
            check_epsilon(epsilon)
            _warn_of_no_protection(epsilon)
        if int(steps) != steps or steps < 1:
            raise ValueError(f"steps must be a positive whole number, got {steps!r}.")
        sampling.refuse_parts(steps)
        if correlation is not None:
            make_event = _make_planned_event(correlation, steps, make_event)
        self.sampling = sampling
        self.delta = delta
        self.steps = int(steps)
        self.correlation = correlation
        self.l2_norm_clip = l2_norm_clip
        self.make_event = make_event
        uses = [*map(Use.of, spent)]
        Entries.of(*uses)  # refuses two that differ and have one id, of which one would be counted
        self._uses = {use.id: use for use in uses}
        self._target = epsilon
        self._given_noise = noise_multiplier
        event = make_event(noise_multiplier or 1.0)
        self._payer = Accountant(event, sampling, delta, accountant, allow_large_delta, ledger)
        try:
            self._refuse_gone()
            self._refuse_dear(uses)
        except ValueError:
            if not isinstance(ledger, Ledger):
                self._payer.close()
            raise
        self._before = self._payer.steps
        self._optimizer: Any = None  # the one that the gate is open for, outside of a fit
        for use in self._uses.values():
            self._payer.spend(*use, use.id, use.unit)

    @classmethod
    def suggest(
        cls, model: Any, rows: Any, *, num_units: int, epsilon: float, delta: float, unit: str = "example",
        spent: Iterable[tuple[DpEvent, str]] = (), l2_norm_clip: float | Auto = 1.0, accountant: str = "pld",
        verbose: Any = "auto",
    ) -> Suggestions:
        """Up to three plans, cheapest first, each of which has more of the signal that ε allows than those before it.

        Public numbers alone are used, and seconds and memory that a few steps of `LazyDPSGD` take here, by a new model
        of the same layers on made-up rows. No row is read, and nothing is spent.

        Args:
            model: Compiled model of layers, with one loss.
            rows: (x, y) as for `make_private`, or `tf.TensorSpec` in their place: shapes and types are looked at, and
                no value.
            num_units: Number of units, which is public.
            epsilon: Largest ε of the whole training.
            delta: Probability δ.
            unit: Name of a unit.
            spent: Other uses of the data, as for a plan.
            l2_norm_clip: Clip C, or "auto".
            accountant: Method by which the noise of the plans is computed, "pld" or "rdp".
            verbose: 0 for no progress.

        Returns:
            Suggestions: `print` shows the table, and `[0].plan` is the plan of the first row.

        Raises:
            ValueError: A value is out of range, no noise meets the budget, or the model is of another form.

        Example:
            >>> import keras, tensorflow as tf, tfdp_rec
            >>> model = keras.Sequential([keras.Input([1]), keras.layers.Embedding(50, 4), keras.layers.Flatten()])
            >>> model.compile(loss="mse")
            >>> rows = tf.TensorSpec([None, 1], tf.int32), tf.TensorSpec([None, 4])
            >>> found = tfdp_rec.PrivatePlan.suggest(
            ...     model, rows, num_units=500, epsilon=3.0, delta=1e-4, accountant="rdp")  # doctest: +SKIP
            >>> plan = found[0].plan  # doctest: +SKIP
        """
        from tfdp_rec.training import planner  # which makes plans

        prepare, values = planner.on_made_up_rows(model, rows)
        return planner.suggest(
            prepare, num_units, values, epsilon=epsilon, delta=delta, unit=unit, spent=spent,
            l2_norm_clip=l2_norm_clip, accountant=accountant, verbose=verbose,
        )  # fmt: skip

    @property
    def share_of_signal(self) -> float:
        """The share of the signal that ε allows which this batch size and number of steps reach."""
        return share_of_signal(self.sampling, self.steps, self.noise_multiplier, self.epsilon, self.delta)

    def __copy__(self) -> PrivatePlan:
        return self  # a second plan would allow its steps once more

    def __deepcopy__(self, memo: Any) -> PrivatePlan:
        return self  # a copied optimizer trains under the same plan

    @functools.cached_property
    def noise_multiplier(self) -> float:
        """Noise multiplier σ: as given, as noted in the ledger, or the least with which `steps` steps fit."""
        if self._target is None:
            return float(self._given_noise or 0.0)
        ledger = self._payer.spending.payments.ledger
        # A ledger holds the uses of `spent` already.
        besides = [compose(ledger.paid)] if ledger else [event for event, _ in self._uses.values()]
        noise = self._find_noise() or least_noise(
            self._target, self.delta, self.sampling, self.steps, self._payer.accountant, self.make_event, besides,
            self._payer.limit,
        )  # fmt: skip
        if ledger and not self._find_noise():
            ledger.note(_NOTE, self._note(noise))
        return noise

    def _note(self, noise: float) -> dict[str, Any]:
        # The plan's identity, and its σ.
        return {
            "epsilon": self._target,
            "delta": self.delta,
            "steps": self.steps,
            "sampling": self.sampling.get_state(),
            "sigma": noise,
            "step": events.to_json(self.make_event(noise)),
        }

    def _find_noise(self) -> float | None:
        # The σ of the same plan in an earlier process; None if the ledger has no such note.
        ledger = self._payer.spending.payments.ledger
        for note in reversed(ledger.notes(_NOTE) if ledger else []):
            if canonical(finite(self._note(note["sigma"]))) == canonical(note):
                return float(note["sigma"])
        return None

    def _refuse_dear(self, uses: Sequence[Use]) -> None:
        ledger = self._payer.spending.payments.ledger
        due = [Payment(use[0], label=use[1]) for use in uses if not self._payer.spending.has_spent(use)]
        if self._target is None or ledger is None or not due:
            return
        after = ledger.epsilon(self.delta, self._payer.accountant, due)
        if after > self._target:
            raise ValueError(
                f"The uses in spent= would take {ledger.path} to epsilon {after:.4g}, above the plan's "
                f"{self._target:g}: nothing was paid. Give a larger epsilon, or uses with more noise."
            )

    def _refuse_gone(self) -> None:
        ledger = self._payer.spending.payments.ledger
        if self._target is None or ledger is None:
            return
        noted, spent = self._find_noise(), self._payer.epsilon()
        if noted and self.correlation:
            return  # continuing a planned training is free; the budget refuses what would cost
        if noted:
            self._payer.set_event(self.make_event(noted))
        if spent > self._target or noted and self._payer.max_steps(self._target) <= self._payer.steps:
            said = (
                f"The budget is spent: {ledger.path} holds epsilon {spent:.4g} of "
                f"{self._target:g}, and no further step fits. Release the trained model; to continue on these data, "
                "plan a larger epsilon."
            )
            if not noted or not all(map(self._payer.spending.has_spent, self._uses.values())):
                raise ValueError(said)
            # The program may have ended after its last step, and come back for its checkpoint. Steps are refused.
            warnings.warn(said, stacklevel=3)

    @functools.cached_property
    def epsilon(self) -> float:
        """The budget: as given, or the cost of `steps` steps."""
        if self._target is not None:
            return float(self._target)
        return self.accountant.epsilon(self._before + self.steps)

    @functools.cached_property
    def accountant(self) -> Accountant:
        """The accountant of this plan's training."""
        self._payer.set_event(self.make_event(self.noise_multiplier))
        return self._payer

    def batches(self, fetch: Callable[..., Any], **options: Any) -> Any:
        """The sampling's batches; arguments as for `sampling.batches`."""
        return self.sampling.batches(fetch, **options)

    def file_batches(self, rows: Any, **options: Any) -> Any:
        """As many batches as the plan has steps, of rows that are read from front to back in each epoch.

        Args:
            rows: Rows of files, of which each is a unit: a `tfdp_rec.data.RowFiles`, or a `tf.data.Dataset` of batches.
            **options: Further arguments of `RandomAllocation.file_batches`.
        """
        if not isinstance(self.sampling, RandomAllocation):
            raise TypeError(
                f"{type(self.sampling).__name__} needs rows at random: plan.batches(fetch). Files that are read from "
                "front to back have a price with sampling=tfdp_rec.data.RandomAllocation(num_rows, steps_per_epoch)."
            )
        first = None if isinstance(rows, tf.data.Dataset) else next(iter(rows), None)
        if first is not None and self.sampling.unit == "example":  # who says unit="row" means rows
            warn_of_users(first, None, len(tf.nest.flatten(first)[0]))
        # Not one more, which would read the files once more.
        return self.sampling.file_batches(rows, **options).take(self.steps).prefetch(1)

    def budget(self) -> PrivacyBudget:
        """A callback that counts steps, and stops `fit` before the budget would be exceeded.

        Raises:
            ValueError: `noise_multiplier` gives no finite ε.
        """
        if math.isinf(self.epsilon):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier:g} has no finite epsilon, and so no budget: fit without "
                "plan.budget(), or plan with epsilon=."
            )
        return PrivacyBudget(self.accountant, self.epsilon, steps=self._most)

    @property
    def _most(self) -> int | None:
        # A filter's ε is that of its whole budget, whatever the number of planned steps.
        return self._before + self.steps if self.accountant.limit else None

    # For optimizers.

    def complete(self, settings: dict[str, Any]) -> dict[str, Any]:
        """An optimizer's settings, completed from the plan."""
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
            own["noise_multiplier"] = self.noise_multiplier  # computed now
        return own | settings

    def accept(self, optimizer: Any) -> None:
        """Follows and limits an optimizer that was made with the plan; refuses one that costs more than was planned."""
        event = optimizer.dp_event()
        if (self._target is not None or events.is_private(event)) and self._costs_more(event):
            raise ValueError(
                f"A step of {type(optimizer).__name__} costs more than the plan's: {event} for "
                f"{self.make_event(self.noise_multiplier)}. For AdaFEST write AdaFEST.with_total_noise(rate, "
                "noise_multiplier=plan.noise_multiplier, plan=plan, ...); for others give PrivatePlan(make_event=...), "
                "from noise multiplier to the step's event; EANA has no epsilon: plan with noise_multiplier=."
            )
        before: list[Use] = getattr(optimizer, "events_before_training", list)()
        missing = [use[1] for use in before if not self.accountant.spending.has_spent(use)]
        if missing:
            raise ValueError(
                f"{type(optimizer).__name__} also spends on '{missing[0]}' before training, which the plan does not "
                "contain: PrivatePlan(spent=[preselection.use])."
            )
        # A model may be made from such a use, a private count for example. Its saved file must carry the cost, for
        # accountants other than the plan's.
        for id, use in self._uses.items():
            optimizer.privacy_history.add_entry(use.entry, id)
        self.accountant.follow(optimizer)
        if not events.is_private(event):  # without a guarantee there is no ε to keep
            self.accountant.set_event(event)
            self.epsilon = math.inf
        else:
            optimizer.plan = self
            optimizer.privacy_history.open_by_plan = functools.partial(self.open, optimizer)
            if optimizer.built:
                self.open(optimizer)

    @functools.cached_property
    def _allowance(self) -> Allowance:
        target = self.accountant.epsilon(self._before + self.steps) if self._target is None else self._target
        return Allowance(self.accountant, target, self._most)

    def open(self, optimizer: Any) -> None:
        """Lets an optimizer make the steps that are left, outside of a fit; one optimizer of the plan at a time."""
        if optimizer.privacy_history.gate.is_kept:  # by a fit, which ends with this
            return
        if self._optimizer not in (None, optimizer):
            self._optimizer.privacy_history.stop()
        self._optimizer = optimizer
        self._allowance.begin(optimizer)
        with contextlib.suppress(Unaccounted):  # the gate stays closed; a budget, and the next step, say why
            self._allowance.left(optimizer)

    def pay(self, optimizer: Any) -> None:
        """Pays for the next step outside of a fit, if it fits; if not, its graph refuses it."""
        if optimizer.privacy_history.gate.is_kept:
            return
        if optimizer is not self._optimizer:
            self.open(optimizer)
        if self._allowance.left(optimizer):
            self._allowance.pay(optimizer, 1)

    def _costs_more(self, event: DpEvent) -> bool:
        # Than a step as planned; True also where the two cannot be compared.
        planned = self.make_event(self.noise_multiplier)
        if isinstance(planned, PlannedDpEvent) and isinstance(event, PlannedDpEvent):
            planned, event = planned.event, event.event  # each costs as a whole, so the wholes are compared
        least, found = fold_gaussians(planned), fold_gaussians(event)
        both = isinstance(least, GaussianDpEvent) and isinstance(found, GaussianDpEvent)
        return event != planned and not (both and found.noise_multiplier >= least.noise_multiplier * (1 - 1e-9))


def _warn_of_no_protection(epsilon: float) -> None:
    if epsilon > _MUCH:
        warnings.warn(
            f"epsilon = {epsilon:g} protects next to nothing: what is released may be e^{epsilon:g} times as likely "
            "with one unit's data as without. Trainings that claim privacy have 1 to 10.",
            stacklevel=3,
        )


def _make_planned_event(
    correlation: Correlation, steps: int, make_event: Callable[[float], DpEvent]
) -> Callable[[float], DpEvent]:
    # The function from σ to the event of a step, for noise that is planned as a whole.
    if make_event is not GaussianDpEvent:
        raise TypeError("Give PrivatePlan either correlation= or make_event=: each says what a step costs.")
    if steps != correlation.steps:
        raise ValueError(f"steps={steps} is not the correlation's {correlation.steps}, which its noise is planned for.")

    def event(noise: float) -> DpEvent:
        whole = correlation.dp_event(noise)
        return PlannedDpEvent(whole, steps, correlation.separation, correlation.participations, plan="planned")

    return event
