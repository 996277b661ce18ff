"""A model made of canaries, and the one-run audit of a mechanism through the real training path.

m canaries, each one example that reads one row of a table that no other example reads. The loss of canary i is

    −G ⟨E_i, u⟩,    u = (1, ..., 1) / √width,    G = 4 C,

so its gradient is −G u whatever the weights are, and clipping must cut it to norm C. A fair coin decides
whether the canary is in the training data; those that are take part in each of T steps of `fit`. The score is
what the released row moved along u. In units of the learning rate and the expected batch size, that is

    T C + N(0, T σ² C²)    for a canary that took part,    N(0, T σ² C²)    for one that did not,

which is exactly the composed Gaussian mechanism the accountant charges for: the strongest canary there is. What
is wrong in clipping, noise, settling or batching shows here as too large a distance between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.audit import OneRunAudit, flip_coins, one_run_audit
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import DpEvent, SelfComposedDpEvent
from tfdp_rec.core.ground.refused import refuse_below
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.training.model import PrivateTraining

_GAIN = 4.0  # how far a canary's gradient is beyond the clipping norm


@dataclass(frozen=True)
class AuditPlan:
    """Settings that are fixed before an audit: m canaries, r guesses, T steps, δ, confidence, width."""

    # The defaults tell half the noise from the whole at T = 2, σ = 4 (claim ε = 1.54 at δ = 1e-6).

    num_canaries: int = 100_000
    num_guesses: int = 800
    steps: int = 2
    delta: float = 1e-6
    confidence: float = 0.99
    width: int = 2

    def __post_init__(self) -> None:
        refuse_below(
            1, num_canaries=self.num_canaries, num_guesses=self.num_guesses, steps=self.steps, width=self.width
        )
        for name in ("delta", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}.")
        if self.num_guesses > self.num_canaries:
            raise ValueError(f"num_guesses must be at most {self.num_canaries}, got {self.num_guesses}.")

    def epsilon_claim(self, event: DpEvent) -> float:
        """ε that the mechanism's event promises for a canary in all steps; infinite without a guarantee."""
        return epsilon_of(SelfComposedDpEvent(event, self.steps), self.delta)


@keras.saving.register_keras_serializable(package="tfdp_rec")
class CanaryTable(SavedByArguments, PrivateTraining, keras.Model):
    """One row for each canary, and a loss whose gradient is the same vector, of norm G, for all of them."""

    def __init__(self, num_canaries: int, width: int = 2, gradient_norm: float = 4.0, **kwargs: Any):
        super().__init__(**kwargs)
        self.width, self.gradient_norm = width, gradient_norm
        self.rows = keras.layers.Embedding(num_canaries, width, embeddings_initializer="zeros", name="rows")
        self.rows.build((None,))
        self.built = True

    def per_example_loss(self, data: tf.Tensor, training: bool = True) -> tf.Tensor:
        """−G ⟨row, u⟩ for each canary in the batch."""
        return -self.gradient_norm * self.width**-0.5 * tf.reduce_sum(self.rows(data), axis=-1)

    def distances(self) -> np.ndarray:
        """Distance that each row has moved along u, in the weights as released."""
        (table,) = self.get_weights()
        return np.sum(table.astype(np.float64), axis=1) * self.width**-0.5


def audit_runs(
    optimizer: PrivateOptimizer,
    plan: AuditPlan | None = None,
    seed: int | None = None,
    batch_of: Callable[[np.ndarray], np.ndarray] = lambda included: included,
) -> Iterator[OneRunAudit]:
    """Audits without end, each a training of `plan.steps` steps with coins of its own."""
    # The canaries' gradients do not depend on the weights, so that one model serves all runs: a run's scores are what
    # its own steps moved.
    plan = plan or AuditPlan()
    model = CanaryTable(plan.num_canaries, plan.width, gradient_norm=_GAIN * optimizer.l2_norm_clip)
    model.compile(optimizer=optimizer)
    before = model.distances()
    run = 0
    while True:
        coins = flip_coins(plan.num_canaries, None if seed is None else seed + run)
        batch = np.asarray(batch_of(np.flatnonzero(coins)), np.int64)
        data = tf.data.Dataset.from_tensors(batch).map(_any_length).repeat(plan.steps)
        model.fit(data, epochs=1, verbose=0)
        after = model.distances()
        yield one_run_audit(
            after - before,
            coins,
            num_guesses=plan.num_guesses,
            delta=plan.delta,
            confidence=plan.confidence,
        )
        before, run = after, run + 1


def _any_length(batch: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.compat.v1.placeholder_with_default(batch, [None]), [None])
