"""How much noise banded correlations under Poisson sampling would save, by arithmetic: python -m experiments.banded

Noise C⁻¹ z of a lower triangular Toeplitz C with b diagonals, batches from one of b parts of the units in turn, each
unit of a part with probability b B / n: then T steps cost what T / b steps of plain noise cost at that probability, and
b = 1 is plain noise (Choquette-Choo et al., "(Amplified) banded matrix factorization", 2023). C is the root of the
matrix of sums, cut to b diagonals. Error is that of the sums of all steps so far, in units of plain noise's: the root
of its mean square over the training, and at the end.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular, toeplitz

from tfdp_rec.privacy import PoissonSampling, calibrate_noise

# Units, batch, steps, δ, numbers of diagonals.
STUDIES = {
    "main job": (110_794, 4_096, 600, 1e-6, (1, 2, 4, 8, 16, 27)),
    "clicks": (80_000, 8_000, 400, 1e-6, (1, 2, 4, 8, 10)),
}


def root_of_sums(steps: int, diagonals: int) -> NDArray[np.float64]:
    """The first diagonals of C with CC = the matrix of sums, as a matrix whose columns have length 1 at most."""
    ratios = np.array([(2 * k - 1) / (2 * k) if k < diagonals else 0.0 for k in range(1, steps)])
    first = np.cumprod(np.concatenate([[1.0], ratios]))
    return np.tril(toeplitz(first)) / np.linalg.norm(first)


def errors_of_sums(strategy: NDArray[np.float64]) -> tuple[float, float]:
    """Mean over all steps, and the last: standard deviation of the noise in a sum, of noise C⁻¹ z."""
    sums = np.tril(np.ones_like(strategy))
    rows = np.linalg.norm(solve_triangular(strategy.T, sums.T).T, axis=1)
    return float(np.sqrt(np.mean(rows**2))), float(rows[-1])


def main() -> None:
    for name, (units, batch, steps, delta, bands) in STUDIES.items():
        for epsilon in (8.0, 3.0, 1.0):
            found = []
            for diagonals in bands:
                sampling = PoissonSampling(units, min(units, diagonals * batch))
                noise = calibrate_noise(epsilon, delta, sampling, math.ceil(steps / diagonals))
                found.append(noise * np.array(errors_of_sums(root_of_sums(steps, diagonals))))
            told = ", ".join(f"b = {b}: {each[0]:.3f}, {each[1]:.3f}" for b, each in zip(bands, found / found[0]))
            print(f"{name}, epsilon = {epsilon:g}: {told}", flush=True)


if __name__ == "__main__":
    main()
