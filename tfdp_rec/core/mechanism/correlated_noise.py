"""Noise correlated from step to step, for training on a fixed order: strategies, their sensitivity, their error.

Independent noise adds up in the weights. Correlated noise subtracts at every step a part of the noise of earlier steps.
With C lower triangular and Toeplitz, c_0 = 1, and z_t ~ N(0, s²) independent, training sees

    g_t + n_t,    n = C⁻¹ z,    so that g + n = C⁻¹ (C g + z):

post-processing of C g + z, one Gaussian mechanism for the *whole* training, also where each g_t depends on earlier
outputs (Denisov et al.).

**Strategy.** A *buffered* Toeplitz matrix has c_i = Σ_m a_m θ_m^{i−1}, i ≥ 1: its noise needs d buffers T_m and no
earlier z,

    n_t = z_t − Σ_m a_m T_m,    T_m ← θ_m T_m + n_t,

which is C n = z solved step by step; without buffers n is independent. a_m ≥ 0, 0 ≤ θ_m < 1 and Σ a_m ≤ 1 make all
c_i non-negative and decreasing.

**Sensitivity.** Under zero-out adjacency a unit changes the g_t of its own steps alone, each by u_t, ‖u_t‖ ≤ 1 in units
of the clip. If these steps are at least b apart and at most k, then ‖Σ_t C[:, t] u_t‖ is largest with all u_t equal,
since no entry of CᵀC is negative, and at the earliest steps, 0, b, 2b, …, since the c_i decrease (Kalinin and Lampert):

    S² = Σ_t (Σ_{i < k, ib ≤ t} c_{t−ib})².

Tests compare S with every pattern of participation. It is rounded up by more than the rounding errors of float64; the
parameters are float32 numbers, so that the noise in training is that of the same C.

**Error.** The noise in the weights after the last step is Σ_j w_j n_j, w_j = η_j for plain SGD: its standard deviation
is s ‖wᵀ C⁻¹‖. At equal ε, s is proportional to S, so that the best strategy has the least S ‖wᵀ C⁻¹‖.

Reference:
    Denisov et al., "Improved differential privacy for SGD via optimal private linear operators on adaptive streams",
    2022.
    Dvijotham et al., "Efficient and near-optimal noise generation for streaming differential privacy", 2024.
    Kalinin and Lampert, "Banded square root matrix factorization for differentially private model training", 2024.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, signal

from tfdp_rec.core.claim.events import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from tfdp_rec.core.claim.gaussian_release import noise_of_one_release

Array = NDArray[np.float64]
Measure = Literal["last", "mean"]

MOST_STEPS = 2**21
_ROUNDED_UP = 1 + 2.0**-30  # sums of so many non-negative float64 numbers lose less
_MOST_BUFFERS = 8


@dataclasses.dataclass(frozen=True)
class BufferedToeplitz:
    """The matrix C with c_0 = 1 and c_i = Σ_m a_m θ_m^{i−1}; the identity, independent noise, without buffers.

    Args:
        scales: a_m, at least 0, together at most 1; rounded down to float32, in which the noise is computed.
        decays: θ_m, at least 0 and below 1; rounded to float32.

    Raises:
        ValueError: A value is out of range: the formula of the sensitivity would not hold.

    Example:
        >>> BufferedToeplitz([0.5], [0.5]).coefficients(4)
        array([1.   , 0.5  , 0.25 , 0.125])
        >>> BufferedToeplitz([0.5], [0.5]).inverse_coefficients(4)
        array([ 1. , -0.5,  0. ,  0. ])
    """

    scales: Sequence[float] = ()
    decays: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", tuple(map(_round_down, self.scales)))
        object.__setattr__(self, "decays", tuple(float(np.float32(decay)) for decay in self.decays))
        if len(self.scales) != len(self.decays) or len(self.scales) > _MOST_BUFFERS:
            raise ValueError(
                f"A buffer has a scale and a decay, and there are at most {_MOST_BUFFERS} of them; got "
                f"{len(self.scales)} scales and {len(self.decays)} decays."
            )
        if not all(scale >= 0 for scale in self.scales) or not math.fsum(self.scales) <= 1:
            raise ValueError(f"scales must be at least 0 and sum to at most 1, got {self.scales}.")
        if not all(0 <= decay < 1 for decay in self.decays):
            raise ValueError(f"decays must be at least 0 and below 1, got {self.decays}.")

    @property
    def buffers(self) -> int:
        """d, the number of buffers of each weight."""
        return len(self.scales)

    def next_noise(self, unit: Any, buffers: Sequence[Any]) -> tuple[Any, list[Any]]:
        """n_t from z_t, `unit`, and T_1 … T_d, `buffers`; and the buffers after it."""
        noise = unit
        for scale, held in zip(self.scales, buffers):
            noise = noise - scale * held
        return noise, [decay * held + noise for decay, held in zip(self.decays, buffers)]

    def coefficients(self, steps: int) -> Array:
        """c_0, c_1, … of C, as many as `steps`."""
        powers = np.power(np.array(self.decays)[:, None], np.arange(steps - 1)[None])
        return np.concatenate([[1.0], np.array(self.scales) @ powers])[:steps]

    def inverse_coefficients(self, steps: int) -> Array:
        """Coefficients of C⁻¹, as many as `steps`: the response of the noise to one z."""
        move = np.diag(self.decays) - np.array(self.scales)[None, :]  # T ← M T + z, so that the response is Mⁱ 1
        response = np.ones([self.buffers, 1])
        while response.shape[1] < steps:  # from M⁰ … Mⁱ⁻¹ to M⁰ … M²ⁱ⁻¹ by the power Mⁱ
            response, move = np.concatenate([response, move @ response], axis=1), move @ move
        return np.concatenate([[1.0], -np.array(self.scales) @ response])[:steps]

    def sensitivity(self, steps: int, separation: int, participations: int) -> float:
        """S in units of the clip, rounded up.

        Args:
            steps: n, the number of steps of the whole training.
            separation: b, the least distance between two steps of a unit.
            participations: k, the largest number of steps of a unit.
        """
        # Row j, column t of `together` is Σ_{i ≤ j} c_{t + (j − i) b}; then of the last k terms alone.
        together = np.pad(self.coefficients(steps), (0, -steps % separation)).reshape(-1, separation).cumsum(axis=0)
        together[participations:] -= together[:-participations].copy()
        return float(np.sqrt(np.sum(np.square(together.ravel()[:steps])))) * _ROUNDED_UP

    def last_error(self, rates: Array) -> float:
        """‖wᵀ C⁻¹‖, w = `rates`: the noise in the weights after the last step, in units of z's."""
        response = self.inverse_coefficients(len(rates))
        return float(np.linalg.norm(signal.fftconvolve(rates[::-1], response)[: len(rates)]))

    def errors(self, rates: Array) -> Array:
        """The noise in the weights, Σ_{j ≤ t} w_j n_j, w = `rates`, after every step t, in units of z's."""
        # The covariance of (weight, buffers) from step to step: rates that change have no Toeplitz response.
        size, scales = 1 + self.buffers, np.array([0.0, *self.scales])
        covariance, found = np.zeros([size, size]), []
        for rate in rates:
            entry = np.array([rate, *np.ones(self.buffers)])  # where n enters: the weight, the buffers
            move = np.diag([1.0, *self.decays]) - np.outer(entry, scales)
            covariance = move @ covariance @ move.T + np.outer(entry, entry)
            found.append(covariance[0, 0])
        return np.sqrt(np.array(found))


def _round_down(value: float) -> float:
    nearest = np.float32(value)  # numpy 2 would compare it in float32
    return float(nearest if float(nearest) <= value else np.nextafter(nearest, np.float32(0)))


INDEPENDENT = BufferedToeplitz()


@dataclasses.dataclass(frozen=True)
class Correlation:
    """A strategy for one planned training.

    Guarantees:
        - All releases of such a training are post-processing of one Gaussian mechanism: `dp_event`. A training that
          stops early releases a part of them, and is covered.
        - Steps beyond the plan are not covered. They need a new plan with fresh noise, whose event is composed with
          this one's.
        - Zero-out adjacency: data sets that differ by one unit, which contributes nothing in one of them. The steps of
          other units must not move for that. No amplification is claimed, so the order may be known.

    Args:
        strategy: C.
        steps: n, the largest number of steps.
        separation: b, the least distance between two steps of a unit; in epochs of one fixed order, the number of steps
            in an epoch.
        participations: k, the largest number of steps of a unit; 0 for as many as fit.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> plan = Correlation(BufferedToeplitz([0.46], [0.954]), steps=27 * 22, separation=27)
        >>> plan.participations
        22
        >>> round(plan.against_independent(), 3)
        0.24
        >>> plan.dp_event(noise_multiplier=plan.sensitivity)
        GaussianDpEvent(noise_multiplier=1.0)
    """

    strategy: BufferedToeplitz
    steps: int
    separation: int
    participations: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "separation"):
            value = getattr(self, name)
            if int(value) != value or not 1 <= value <= MOST_STEPS:
                raise ValueError(f"{name} must be a whole number from 1 to {MOST_STEPS}, got {value!r}.")
        fitting = -(-self.steps // self.separation)
        if int(self.participations) != self.participations or not 0 <= self.participations <= fitting:
            raise ValueError(
                f"participations must be a whole number up to {fitting}, the number that fits into {self.steps} steps "
                f"at least {self.separation} apart, got {self.participations!r}; omit it for that number."
            )
        object.__setattr__(self, "participations", int(self.participations) or fitting)

    @functools.cached_property
    def sensitivity(self) -> float:
        """S, the most by which one unit changes C g, in units of the clip, rounded up."""
        return self.strategy.sensitivity(self.steps, self.separation, self.participations)

    def dp_event(self, noise_multiplier: float) -> DpEvent:
        """The event of the whole training; `noise_multiplier` is σ, of each z_t in units of the clip."""
        if not 0 <= noise_multiplier < math.inf:
            raise ValueError(f"noise_multiplier must be at least 0 and finite, got {noise_multiplier!r}.")
        return GaussianDpEvent(noise_multiplier / self.sensitivity) if noise_multiplier else NonPrivateDpEvent()

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        """The σ with which the whole training costs at most `epsilon` at `delta`.

        Example:
            >>> plan = Correlation(BufferedToeplitz(), steps=100, separation=25)
            >>> round(plan.noise_multiplier(8.0, 1e-6), 3)  # four times one step, independent
            1.306
        """
        return noise_of_one_release(epsilon, delta) * self.sensitivity * _ROUNDED_UP

    def error(self, measure: Measure = "last", rates: Sequence[float] | None = None) -> float:
        """The noise's standard deviation in a weight, in units of z's.

        Args:
            measure: "last", after the last step, or "mean", the root of the mean square over all steps.
            rates: Weight of each step's noise, such as its learning rate; ones by default. With momentum μ and "last",
                η_j (1 − μ^{n−j}) / (1 − μ).

        Raises:
            ValueError: The measure is unknown, or there is not one rate a step.
        """
        weights = self._rates(rates)
        if measure == "last":
            return self.strategy.last_error(weights)
        if measure != "mean":
            raise ValueError(f'measure must be "last" or "mean", got {measure!r}.')
        if rates is not None:
            return float(np.sqrt(np.mean(np.square(self.strategy.errors(weights)))))
        summed = np.cumsum(self.strategy.inverse_coefficients(self.steps))  # the sum's response is Toeplitz too
        return float(np.sqrt(np.square(summed) @ np.arange(self.steps, 0, -1) / self.steps))

    def against_independent(self, measure: Measure = "last", rates: Sequence[float] | None = None) -> float:
        """The noise in a weight, with `measure` and `rates`, divided by that of independent noise at the same ε."""
        independent = Correlation(INDEPENDENT, self.steps, self.separation, self.participations)
        ours, theirs = (plan.sensitivity * plan.error(measure, rates) for plan in (self, independent))
        return ours / theirs

    def _rates(self, rates: Sequence[float] | None) -> Array:
        found = np.ones(self.steps) if rates is None else np.asarray(rates, np.float64)
        if found.shape != (self.steps,) or not np.all(np.isfinite(found)) or not np.any(found):
            raise ValueError(f"rates must be {self.steps} finite numbers, not all 0: one for each step of the plan.")
        return found

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"noise correlated over {self.steps} steps by {self.strategy.buffers} buffers; a unit is in at most "
            f"{self.participations} of them, at least {self.separation} apart; zero-out adjacency, nothing amplified"
        )

    def get_config(self) -> dict[str, Any]:
        """Arguments as JSON-able values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Correlation:
        """The inverse of `get_config`, whose result `config` is."""
        return cls(**{**config, "strategy": BufferedToeplitz(**config["strategy"])})


def optimised_correlation(
    steps: int,
    separation: int,
    buffers: int = 1,
    *,
    participations: int = 0,
    measure: Measure = "last",
    rates: Sequence[float] | None = None,
) -> Correlation:
    """The plan with the least noise in the weights at equal ε, found by L-BFGS from a few starts.

    Arguments as `Correlation` and `Correlation.error`; none may depend on the data. Of d `buffers`, one has nearly all
    of the gain, two a little more for many steps.

    Example:
        >>> round(optimised_correlation(steps=600, separation=600, buffers=2).against_independent(), 3)
        0.128
    """

    def plan(position: Array) -> Correlation:
        return Correlation(_strategy(position), steps, separation, participations)

    def noise(position: Array) -> float:
        trial = plan(position)
        return math.log(trial.sensitivity * trial.error(measure, rates))

    best = plan(np.zeros(0))
    for longest in (separation, steps, 10 * steps) if buffers else ():
        start = np.concatenate([np.log(np.geomspace(1, longest + 1, buffers + 2)[1:-1]), np.zeros(buffers)])
        # Parameters are rounded to float32: the steps of the differences must be much larger than that.
        options = {"maxiter": 300, "finite_diff_rel_step": 1e-3}
        bounds = _BOUNDS * buffers * 2
        found = optimize.minimize(noise, start, jac="3-point", method="L-BFGS-B", bounds=bounds, options=options)
        best = min(best, plan(found.x), key=lambda one: one.sensitivity * one.error(measure, rates))
    return best


_BOUNDS = [(-12.0, 14.0)]  # of the arguments of `_strategy`: decays from 6e-6 to 1 − 8e-7


def _strategy(position: Array) -> BufferedToeplitz:
    """Decays 1 / (1 + e^−x), then scales e^y / (1 + Σ e^y), a float32's rounding below what they may sum to."""
    far, weights = np.split(position, 2)
    scales = np.exp(weights) / (1 + np.sum(np.exp(weights)))
    return BufferedToeplitz(tuple(scales * (1 - 1e-6)), tuple(1 / (1 + np.exp(-far))))
