"""How much of the signal that ε allows is reached with a batch size and a number of epochs; and a choice of both.

T sums over batches of B units hold a direction B T times, beside noise of σ √T: its signal is B √T / σ. All n units in
one sum, with the noise σ₁ that one release needs, give the most that ε allows, n / σ₁. So

    share = (B √T / σ) / (n / σ₁)

of it is reached. Only public settings are in it. It falls where σ is below 1, that is where each step is cheap in noise
and dear in ε: small batches, few epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.events import GaussianDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release
from tfdp_rec.core.claim.schemes import PoissonSampling, RandomAllocation, Sampling

_ENOUGH = 0.9
_EPOCHS = (5, 10, 20, 40)
_CANDIDATES = (1, 2, 4, 7, 12, 20, 35, 60)  # epochs
_STEPS = 400  # with fewer, trainings of the studies had not arrived where more took them
_MOST_UNITS = 8192  # of a batch
_MOST_VALUES = 2**18  # of a batch's data, which memory follows
_MOST_SEEN = 2e7  # units over all epochs: where there are more, signal is not what lacks


def share_of_signal(sampling: Sampling, steps: int, noise_multiplier: float, epsilon: float, delta: float) -> float:
    """The share of the signal that ε allows."""
    return _noise_for(1.0, sampling, steps, epsilon, delta) / noise_multiplier


def _noise_for(share: float, sampling: Sampling, steps: int, epsilon: float, delta: float) -> float:
    """The noise multiplier with which that share of the signal is reached."""
    reached = sampling.expected_batch_size * math.sqrt(steps) / sampling.num_units
    return reached * noise_of_one_release(epsilon, delta) / share


def choose_batches(
    units: int, values: int, epsilon: float, delta: float, batch_size: int | None = None, epochs: int | None = None
) -> tuple[int, int]:
    """Batch size and epochs, those that are not given: the fewest epochs with nearly all of the signal that ε allows.

    Args:
        units: Number of units.
        values: Number of values in a unit's row.
        epsilon: ε of the training.
        delta: δ of the training.
        batch_size: Batch size, if it is given.
        epochs: Number of epochs, if it is given.
    """
    most = max(1, int(_MOST_SEEN / units))
    candidates = [epochs] if epochs else [each for each in _EPOCHS if each <= most] or [most]
    for each in candidates[:-1]:
        size = _batch_size(units, values, each) if batch_size is None else batch_size
        sampling, steps = PoissonSampling(units, size), each * math.ceil(units / size)
        enough = GaussianDpEvent(_noise_for(_ENOUGH, sampling, steps, epsilon, delta))
        # Whether the least noise reaches as much, without a search for it.
        if epsilon_of(sampling.compose_history([(enough, steps)]), delta, "rdp") <= epsilon:
            return size, each
    return _batch_size(units, values, candidates[-1]) if batch_size is None else batch_size, candidates[-1]


def candidates(units: int, values: int, unit: str) -> Iterator[tuple[Sampling, int]]:
    """Samplings and steps to choose among: for each number of epochs the largest batch, drawn in two ways."""
    # A smaller batch has more steps in as many epochs: it takes longer, and has less of the signal.
    for epochs in _CANDIDATES:
        size = _batch_size(units, values, epochs)
        steps = math.ceil(units / size)
        yield PoissonSampling(units, size, unit), epochs * steps
        yield RandomAllocation(units, steps, unit), epochs * steps


def _batch_size(units: int, values: int, epochs: int) -> int:
    most = min(_MOST_UNITS, max(256, _MOST_VALUES // max(values, 1)), max(1, units // 2))
    steps = math.ceil(units / max(1, min(most, units * epochs // _STEPS)))
    return math.ceil(units / steps)  # so that an epoch is no more than one
