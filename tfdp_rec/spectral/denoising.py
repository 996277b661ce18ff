"""Estimates from a noisy Gram matrix: the true matrix, and the weights with which a history predicts an item. All of
it is post-processing.

**Denoising.** G + N is released, N symmetric with N(0, σ²) off the diagonal, m × m. Its eigenvectors v_i are kept, for
want of a better basis, and each eigenvalue y_i is replaced by that of the best such estimate of G,

    ξ_i = E v_iᵀ G v_i = y_i - 2 s² h(y_i),   s = σ√m,   h(y) = the mean over j of (y - y_j) / ((y - y_j)² + η²),

which the spectrum determines: far above the edge 2s of the noise nearly nothing is subtracted, and inside the noise's
semicircle nearly all. Negative ones become 0. No rank is chosen. η = s / (2 m^⅓) smooths the sum.

**Large entries.** A single pair of items that occur together more than all others is in no leading eigenvector. The
residual of an entry, less the denoised matrix, is noise unless it is large: beyond 4σ it counts, reduced by 4σ and
halved.

**Regression.** Items x_j are predicted from the others, x̂ = βμ + hB, by ridge regression on the denoised matrix,

    B = (G + Λ)⁻¹ (G - ½ diag G),   Λ = a (D + √(s² + b²)),

D the diagonal that the release leaves out, estimated from the counts; a and b are constants. Noise makes the ridge
heavier, for rare items most of all; b is for the chance in the data itself, which is left where there is no noise.
Large entries S enter to first order, B + ½ (G + Λ)⁻¹ S (1 - B).

**Sums of several releases** have noise that differs from row to row: the spectrum is denoised with the average, large
entries with their own.

Reference:
    Bun, Allez, Bouchaud and Potters, Rotational invariant estimator for general noisy matrices, IEEE Transactions on
    Information Theory 2016. Steck, Embarrassingly shallow autoencoders for sparse data, WWW 2019 (the ridge
    regression without noise).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from tfdp_rec.core.ground.files import row_chunks

_AT_ONCE = 2**22
RIDGE, LEAST_NOISE = 0.2, 10.0
DIAGONAL_KEPT = 0.5
LARGE, BELIEVED = 4.0, 0.5


def denoise(noisy: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    """An estimate of the true matrix, positive semi-definite, its diagonal filled in."""
    # Beside the main thread and by NumPy, which lets go of Python's lock: it may take a minute, and signals are heard.
    pool = ThreadPoolExecutor(1)
    try:
        values, vectors = pool.submit(np.linalg.eigh, noisy).result()
    finally:
        pool.shutdown(wait=False)
    true = np.maximum(eigenvalues_without_noise(values, sigma), 0)
    kept = true > 0
    return (vectors[:, kept] * true[kept].astype(np.float32)) @ vectors[:, kept].T


def eigenvalues_without_noise(values: NDArray[np.float32], sigma: float) -> NDArray[np.float64]:
    """ξ of each eigenvalue of a matrix whose entries have noise of standard deviation σ."""
    y = values.astype(np.float64)
    scale = sigma * np.sqrt(len(y))
    smooth = scale * 0.5 * len(y) ** (-1 / 3)
    pull = np.empty_like(y)
    for start, end in row_chunks((len(y), len(y)), _AT_ONCE):
        apart = y[start:end, None] - y
        pull[start:end] = np.mean(apart / (apart**2 + smooth**2), axis=1)
    return y - 2 * scale**2 * pull


def noise_on_average(of_rows: NDArray[np.float64]) -> float:
    """The root of the mean variance of a matrix's entries, each of which has the lesser noise of its two rows."""
    order = np.arange(len(of_rows), 0, -1)  # the row with the least noise sets that of the most entries
    return float(np.sqrt(np.average(np.sort(of_rows) ** 2, weights=2 * order - 1)))


def weights_between_items(
    noisy: NDArray[np.float32], noise: float | NDArray[np.float64], diagonal: NDArray[np.float64]
) -> NDArray[np.float32]:
    """B, the weight of an item in the history (row) for another (column); `noise` of all entries, or of each row."""
    of_rows = np.broadcast_to(np.asarray(noise, np.float64), [len(noisy)])
    sigma = noise_on_average(of_rows)
    true = denoise(noisy, sigma)
    beyond = noisy - true
    least = np.float32(LARGE) * of_rows.astype(np.float32)
    least = np.minimum(least[:, None], least)  # an entry has the lesser noise of its two rows
    beyond = np.sign(beyond) * np.maximum(np.abs(beyond) - least, 0)
    np.fill_diagonal(beyond, 0)
    own = np.diag(true).copy()
    # B = (G + Λ)⁻¹ (G - ½ diag G), then the first-order term of the large entries.
    ridge = RIDGE * (diagonal + np.hypot(sigma * np.sqrt(len(true)), LEAST_NOISE))
    factor = linalg.cho_factor(true + np.diag(ridge), lower=True, check_finite=False)
    weights = linalg.cho_solve(factor, true - np.diag((1 - DIAGONAL_KEPT) * own), check_finite=False)
    if beyond.any():
        weights = weights + BELIEVED * linalg.cho_solve(factor, beyond - beyond @ weights, check_finite=False)
    return weights.astype(np.float32)
