"""A model made of canaries, and the one-run audit of a mechanism through the real training path.

m canaries, each one example that reads one row of a table that no other example reads. The loss of canary i is

    −G ⟨E_i, u⟩,    u = (1, ..., 1) / √width,    G = 4 C,

so its gradient is −G u whatever the weights are, and clipping must cut it to norm C. A fair coin decides
whether the canary is in the training data; those that are take part in each of T steps of `fit`. The score is
what the released row moved along u. In units of the learning rate and the expected batch size, that is

    T C + N(0, T σ² C²)    for a canary that took part,    N(0, T σ² C²)    for one that did not,

which is exactly the composed Gaussian mechanism the accountant charges for: the strongest canary there is. What
is wrong in clipping, noise, settling or batching shows here as too large a distance between the two.

Each canary has a row, and so noise, of its own: its score depends on no other canary's coin, as the strongest of the
three bounds assumes. At a sampling rate q < 1 a canary that takes part is drawn into each step with probability q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.audit import Family, Gaussian, OneRunAudit, flip_coins, one_run_audit
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.event_family import EventFamily
from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from tfdp_rec.core.ground.refused import refuse_below
from tfdp_rec.core.mechanism.base import PrivateOptimizer
from tfdp_rec.models.arguments import SavedByArguments
from tfdp_rec.training.model import PrivateTraining

_GAIN = 4.0  # how far a canary's gradient is beyond the clipping norm
_BATCH = tf.TensorSpec([None], tf.int64)


@dataclass(frozen=True)
class AuditPlan:
    """Settings that are fixed before an audit: m canaries, r guesses, T steps, δ, confidence, width, rate q."""

    # The defaults tell half the noise from the whole at T = 2, σ = 4 (claim ε = 1.54 at δ = 1e-6).

    num_canaries: int = 100_000
    num_guesses: int = 800
    steps: int = 2
    delta: float = 1e-6
    confidence: float = 0.99
    width: int = 2
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        refuse_below(
            1, num_canaries=self.num_canaries, num_guesses=self.num_guesses, steps=self.steps, width=self.width
        )
        for name in ("delta", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}.")
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate must be above 0 and at most 1, got {self.sampling_rate}.")
        if self.num_guesses > self.num_canaries:
            raise ValueError(f"num_guesses must be at most {self.num_canaries}, got {self.num_guesses}.")

    def epsilon_claim(self, event: DpEvent) -> float:
        """ε that the mechanism's event promises for a canary that takes part; infinite without a guarantee."""
        return epsilon_of(self._trained(event), self.delta)

    @functools.cached_property
    def family(self) -> Family:
        """What Gaussian noise of any multiplier claims of such a training; prices are kept for further runs."""
        if self.sampling_rate == 1:
            return Gaussian()
        return EventFamily(lambda strength: self._trained(GaussianDpEvent(1 / strength)))

    def _trained(self, event: DpEvent) -> DpEvent:
        step = PoissonSampledDpEvent(self.sampling_rate, event) if self.sampling_rate < 1 else event
        return SelfComposedDpEvent(step, self.steps)


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
    batch_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[OneRunAudit]:
    """Audits without end, each a training of `plan.steps` steps with coins of its own.

    Args:
        optimizer: The mechanism.
        plan: Settings of the audit.
        seed: Seed of the coins and batches; without it the system's entropy decides.
        batch_of: Function from the canaries that take part to the batch of a step, where it is not the plan's.
    """
    # The canaries' gradients do not depend on the weights, so that one model serves all runs: a run's scores are what
    # its own steps moved.
    plan = plan or AuditPlan()
    model = CanaryTable(plan.num_canaries, plan.width, gradient_norm=_GAIN * optimizer.l2_norm_clip)
    model.compile(optimizer=optimizer)
    before = model.distances()
    run = 0
    while True:
        coins = flip_coins(plan.num_canaries, None if seed is None else seed + run)
        included, draws = np.flatnonzero(coins), np.random.default_rng(None if seed is None else [seed, run])

        def drawn(included: np.ndarray, draws: np.random.Generator = draws) -> np.ndarray:
            return included[draws.random(included.size) < plan.sampling_rate]

        batches = [np.asarray((batch_of or drawn)(included), np.int64) for _ in range(plan.steps)]
        data = tf.data.Dataset.from_generator(functools.partial(iter, batches), output_signature=_BATCH)
        data = data.apply(tf.data.experimental.assert_cardinality(plan.steps))
        model.fit(data, epochs=1, verbose=0)
        after = model.distances()
        yield one_run_audit(
            after - before,
            coins,
            num_guesses=plan.num_guesses,
            delta=plan.delta,
            confidence=plan.confidence,
            share_included=1.0 if plan.sampling_rate < 1 else 0.5,
            family=plan.family,
        )
        before, run = after, run + 1
