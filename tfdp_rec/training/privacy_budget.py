"""Training that stops before its privacy budget is overspent.

Training stops while the next step (the next `steps_per_execution`, which Keras runs as one) would not fit any more. An
`Allowance` (core/claim/allowance.py) prices the steps, pays for them and opens the gate in their graph. At most 15
Python calls of this package are made in a step, under a ledger too.
"""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdp_rec.core.claim.accountant import Accountant
from tfdp_rec.core.claim.allowance import Allowance
from tfdp_rec.core.claim.counters import void_of
from tfdp_rec.core.claim.sampling_proof import Source


class PrivacyBudget(keras.callbacks.Callback):
    """Counts the steps of `fit` in an accountant and stops when the next would exceed the budget.

    Adds `epsilon` to an epoch's logs, of all but the last a bound that is quickly found.

    Args:
        accountant: Accountant that follows the model from here on; its `sampling` drew the batches of this fit.
        target_epsilon: Budget, at the accountant's δ.
        steps: Largest number of steps of the accountant in all, whatever ε allows; None for no such limit.

    Raises:
        ValueError: target_epsilon is not positive; in `fit`, no step fits, the model has made steps that the accountant
            cannot account for, or the batches are not the sampling's.
        TypeError: In `fit`, the optimizer is not a private one.

    Example:
        >>> import tfdp_rec
        >>> sampling = tfdp_rec.data.PoissonSampling(num_units=1000, expected_batch_size=10)
        >>> optimizer = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=10)
        >>> accountant = tfdp_rec.privacy.Accountant(optimizer.dp_event(), sampling, delta=1e-4, accountant="rdp")
        >>> budget = PrivacyBudget(accountant, target_epsilon=2.0)
        >>> accountant.max_steps(2.0)
        1322
    """

    keeps_budget = True  # a fit whose callbacks have one is not given that of the optimizer's plan

    def __init__(self, accountant: Accountant, target_epsilon: float, *, steps: int | None = None):
        super().__init__()
        if not isinstance(accountant, Accountant):
            raise TypeError(f"accountant must be a tfdp_rec.privacy.Accountant, got {accountant!r}.")
        if not target_epsilon > 0:
            raise ValueError(f"target_epsilon must be positive, got {target_epsilon!r}.")
        accountant.sampling.refuse_parts(steps or 0)
        self.accountant = accountant
        self.target_epsilon = target_epsilon
        self.steps = steps

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not hasattr(self.model.optimizer, "privacy_history"):
            raise TypeError(
                f"PrivacyBudget needs a private optimizer such as tfdp_rec.DPSGD, got {self.model.optimizer!r}."
            )
        self.accountant.follow(self.model)
        self.accountant.give_back_rest()  # what a fit that was cut off left open: each is paid for by itself
        self._check_source()
        # The optimizer's own choices, such as a pre-selection of rows, cost before the first step.
        for use in getattr(self.model.optimizer, "events_before_training", list)():
            if not self.accountant.spending.has_spent(use):
                self.accountant.spend(use[0], use[1], use.id)
        self.ended_fit, self._last_epoch = False, False
        self.model.optimizer.privacy_history.gate.leave_epoch()
        self._allowance = Allowance(self.accountant, self.target_epsilon, self.steps, in_fit=True)
        # This only prices. A step is paid for, or refused, just before it: a resumed fit may have none to make.
        self._allowance.left(self.model.optimizer)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps, self._allowance.target = int(self.model.steps_per_execution), self.target_epsilon
        optimizer = self.model.optimizer
        keeper = optimizer.keeper
        self._allowance.pay(optimizer, steps, math.inf if keeper is None else keeper.steps_ahead)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._refuse_other_ledger(self.model.optimizer.keeper)  # now all callbacks have begun
        self._last_epoch = epoch + 1 >= (self.params.get("epochs") or 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._end(self._last_epoch and batch + 1 == self.params.get("steps"))

    def _end(self, planned: bool) -> None:
        # Ends the fit if no step fits any more; says so, unless the fit ends here by itself.
        model, self._allowance.target = self.model, self.target_epsilon
        if self._allowance.left(model.optimizer) < int(model.steps_per_execution) and not model.stop_training:
            model.stop_training = self.ended_fit = True
            if self.params.get("verbose") and not planned:
                print(f"\n{self._describe_end()}: training ends.", flush=True)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end(self._last_epoch)
        if logs is not None:
            is_last = self._last_epoch or self.model.stop_training
            logs["epsilon"] = self.accountant.epsilon() if is_last else self.accountant.rough_epsilon()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.accountant.give_back_rest()
        self.model.optimizer.privacy_history.lift()

    def _check_source(self) -> None:
        source = getattr(self.model, "feeding", None) or Source()
        if source.sampling is None:
            raise ValueError(
                "The data of this fit carry no proof that they were sampled (no sampling drew them, or a map dropped "
                "it), and epsilon is claimed only for batches that a sampling drew. After make_private call "
                "private.fit(); with a PrivatePlan fit on plan.batches(fetch), else on "
                "accountant.sampling.batches(fetch)."
            )
        void = void_of(self.model.optimizer, source)
        if void:
            raise ValueError(f"No budget can be kept, since {void}: epsilon is infinite.")
        if source.sampling is not self.accountant.sampling:
            raise ValueError(
                f"The data of this fit were drawn by another sampling ({source.sampling.describe()}) than the "
                "accountant's: give both the same object."
            )

    def _refuse_other_ledger(self, keeper: Any) -> None:
        if keeper is not None and keeper.ledger is not self.accountant.spending.payments.ledger:
            raise ValueError(
                "What a killed run has made since its last checkpoint is known to the ledger that paid for it: give "
                "the checkpoints the budget's accountant, TrainingCheckpoint(..., accountant=accountant)."
            )

    def _describe_end(self) -> str:
        accountant, more = self.accountant, int(self.model.steps_per_execution)
        steps, lost, epsilon = accountant.steps, accountant.missing_steps, f"{accountant.epsilon():.4g}"
        said = f"All {steps:,} steps are made, for epsilon {epsilon}"
        if self.steps is None or steps < self.steps:
            target = f"{epsilon} of {self.target_epsilon:g} after {steps:,} steps, and {more} more would not fit"
            said = f"The privacy budget is spent: epsilon is {target}"
        if lost:
            said += f"; the model has {steps - lost:,} of these, {lost:,} were lost in a crash or are another model's"
        return said
