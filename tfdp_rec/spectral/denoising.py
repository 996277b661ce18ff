"""What a noisy Gram matrix says of the true one, and of which item goes with which history. All of it is
post-processing.

**Denoising.** G + N is released, N symmetric with N(0, σ²) off the diagonal, m × m. Its eigenvectors v_i are kept, as
nothing better is known, and each eigenvalue y_i is replaced by what the best of all such estimates of G would have,

    ξ_i = E v_iᵀ G v_i = y_i - 2 s² h(y_i),   s = σ√m,   h(y) = the mean over j of (y - y_j) / ((y - y_j)² + η²),

the spectrum itself saying how much of an eigenvalue is noise: far above the noise's edge 2s nearly nothing is taken
away, and inside the noise's semicircle nearly all. Negative ones become 0. No rank is chosen. η = s / (2 m^⅓) smooths
the sum.

**What the spectrum cannot see.** A pair of items may go together as no other does; such a pair is not in any direction
that stands out. What is left of an entry, when the denoised matrix is taken from it, is noise unless it is large: from
beyond 4σ on it counts, less those 4σ, and half of it is believed.

**Regression.** Items x_j are predicted from the others, x̂ = βμ + hB, by ridge regression on the denoised matrix,

    B = (G + Λ)⁻¹ (G - ½ diag G),   Λ = a (D + f s),

D the diagonal that the release leaves out, as well as it can be told from the counts; a and f are constants. Noise
makes the ridge heavier, for rare items most of all. Large entries S come in to first order, B + ½ (G + Λ)⁻¹ S (1 - B).

**Sums that were added up** have noise that differs from row to row. The spectrum is read by its average, large entries
by their own.

Reference:
    Bun, Allez, Bouchaud and Potters, Rotational invariant estimator for general noisy matrices, IEEE Transactions on
    Information Theory 2016. Steck, Embarrassingly shallow autoencoders for sparse data, WWW 2019 (the ridge
    regression without noise).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from tfdp_rec.files import row_chunks

_AT_ONCE = 2**22
RIDGE, NOISE_IN_RIDGE = 0.2, 1.0
DIAGONAL_KEPT = 0.5
LARGE, BELIEVED = 4.0, 0.5


def denoised(noisy: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    """The true matrix, as well as its spectrum lets it be told: positive semi-definite, its diagonal filled in.

    Args:
        noisy: symmetric.
        sigma: standard deviation of the noise of an entry off the diagonal.
    """
    values, vectors = linalg.eigh(noisy, driver="evd", check_finite=False)
    true = np.maximum(eigenvalues_without_noise(values, sigma), 0)
    kept = true > 0
    return (vectors[:, kept] * true[kept].astype(np.float32)) @ vectors[:, kept].T


def eigenvalues_without_noise(values: NDArray[np.float32], sigma: float) -> NDArray[np.float64]:
    """ξ of each eigenvalue.

    Args:
        values: of the noisy matrix.
        sigma: of its noise.

    Example:
        >>> round(eigenvalues_without_noise(np.array([0.0] * 99 + [100.0]), sigma=1.0)[-1])
        98
    """
    y = values.astype(np.float64)
    scale = sigma * np.sqrt(len(y))
    smooth = scale * 0.5 * len(y) ** (-1 / 3)
    pull = np.empty_like(y)
    for start, end in row_chunks((len(y), len(y)), _AT_ONCE):
        apart = y[start:end, None] - y
        pull[start:end] = np.mean(apart / (apart**2 + smooth**2), axis=1)
    return y - 2 * scale**2 * pull


def noise_on_average(of_rows: NDArray[np.float64]) -> float:
    """The root of the mean variance of the entries of a matrix, each of which has the lesser noise of its two rows.

    Args:
        of_rows: standard deviation of each row.

    Example:
        >>> noise_on_average(np.array([3.0, 3.0])), round(noise_on_average(np.array([1.0, 3.0])) ** 2, 3)
        (3.0, 3.0)
    """
    order = np.arange(len(of_rows), 0, -1)  # the least noisy row has the most entries of its noise
    return float(np.sqrt(np.average(np.sort(of_rows) ** 2, weights=2 * order - 1)))


def weights_between_items(
    noisy: NDArray[np.float32], noise: float | NDArray[np.float64], diagonal: NDArray[np.float64]
) -> NDArray[np.float32]:
    """B: how much an item in the history (row) speaks for another (column).

    Args:
        noisy: the released Gram matrix.
        noise: standard deviation of all its entries, or of each row; an entry then has the lesser of its two.
        diagonal: D, what the diagonal would about be.
    """
    of_rows = np.broadcast_to(np.asarray(noise, np.float64), [len(noisy)])
    sigma = noise_on_average(of_rows)
    true = denoised(noisy, sigma)
    beyond = noisy - true
    least = np.minimum.outer(*2 * [np.float32(LARGE) * of_rows.astype(np.float32)])
    beyond = np.sign(beyond) * np.maximum(np.abs(beyond) - least, 0)
    np.fill_diagonal(beyond, 0)
    own = np.diag(true).copy()
    ridge = RIDGE * (diagonal + NOISE_IN_RIDGE * sigma * np.sqrt(len(true)))
    factor = linalg.cho_factor(true + np.diag(ridge), lower=True, check_finite=False)
    weights = linalg.cho_solve(factor, true - np.diag((1 - DIAGONAL_KEPT) * own), check_finite=False)
    if beyond.any():
        weights = weights + BELIEVED * linalg.cho_solve(factor, beyond - beyond @ weights, check_finite=False)
    return weights.astype(np.float32)
