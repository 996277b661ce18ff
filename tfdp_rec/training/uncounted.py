"""A word for who trains privately and counts nothing: noise without accounting is no guarantee that can be named."""

from __future__ import annotations

import warnings

import keras
from dp_accounting import NonPrivateDpEvent


class SayUncounted(keras.callbacks.Callback):
    """Says once a model that no ε is being counted. Goes behind all other callbacks, which may have begun to count."""

    keeps_off_weights = True

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Looks whether an accountant follows the model's history."""
        optimizer, history = self.model.optimizer, self.model.privacy_history
        if history.followed or isinstance(optimizer.dp_event(), NonPrivateDpEvent):
            return  # or there is no ε to count
        history.followed = True
        warnings.warn(
            f"No epsilon is being counted: no accountant follows this model under {type(optimizer).__name__}. With "
            "accountant = tfdp_rec.privacy.Accountant(model.optimizer.dp_event(), sampling, delta=...), whose sampling "
            "draws the batches, give fit callbacks=[tfdp_rec.callbacks.PrivacyBudget(accountant, target_epsilon=...)]; "
            "accountant.follow(model) counts steps that were made already, too.",
            stacklevel=2,
        )
