"""Denoising: closer to the truth than the release, and than any cut of its spectrum; no noise, ridge regression."""

import numpy as np
import pytest

from tfdp_rec.spectral import denoising
from tfdp_rec.spectral.denoising import denoise, eigenvalues_without_noise, weights_between_items

SIZE, SIGMA = 400, 1.0


def symmetric_noise(rng, size=SIZE):
    upper = np.triu(rng.standard_normal((size, size)) * SIGMA, 1)
    return upper + upper.T


@pytest.fixture(scope="module")
def truth():
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.standard_normal((SIZE, 30)))
    return (basis * np.geomspace(600, 10, 30)) @ basis.T  # the noise's edge is 40


def error(estimate, truth):
    return np.linalg.norm(estimate - truth)


@pytest.mark.slow
def test_closer_than_the_release_and_than_the_best_cut_of_its_spectrum(truth):
    noisy = (truth + symmetric_noise(np.random.default_rng(1))).astype(np.float32)
    values, vectors = np.linalg.eigh(noisy)
    cuts = [(vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T for rank in range(1, SIZE)]
    best_cut = min(error(cut, truth) for cut in cuts)  # chosen knowing the truth
    assert error(denoise(noisy, SIGMA), truth) < best_cut < error(noisy, truth)


def test_noise_alone_leaves_next_to_nothing():
    noisy = symmetric_noise(np.random.default_rng(2)).astype(np.float32)
    assert np.linalg.norm(denoise(noisy, SIGMA)) < 0.1 * np.linalg.norm(noisy)
    assert np.linalg.norm(denoise(noisy, SIGMA / 2)) > 0.2 * np.linalg.norm(noisy)  # a wrong σ is seen


def test_an_eigenvalue_becomes_what_its_direction_has_of_the_truth(truth):
    noisy = truth + symmetric_noise(np.random.default_rng(3))
    values, vectors = np.linalg.eigh(noisy)
    has = np.einsum("ik,ij,jk->k", vectors, truth, vectors)[-12:]
    np.testing.assert_allclose(eigenvalues_without_noise(values, SIGMA)[-12:], has, rtol=0.05, atol=4)


@pytest.mark.parametrize("sigma", [1e-9, 0.01])
def test_without_noise_it_is_ridge_regression(truth, sigma):
    diagonal = np.full(SIZE, 50.0)
    got = weights_between_items(truth.astype(np.float32), sigma, diagonal)
    own = np.diag(np.diag(truth))
    ridge = 0.2 * (50.0 + np.sqrt(sigma**2 * SIZE + 10.0**2))  # 10 where there is no noise
    inverse = np.linalg.inv(truth + ridge * np.eye(SIZE))
    np.testing.assert_allclose(got, inverse @ (truth - denoising.DIAGONAL_KEPT * own), atol=2e-3)


def test_a_pair_that_no_direction_shows_is_kept():
    noisy = symmetric_noise(np.random.default_rng(4))
    noisy[7, 9] = noisy[9, 7] = 15.0
    weights = weights_between_items(noisy.astype(np.float32), SIGMA, np.full(SIZE, 30.0))
    assert np.argmax(weights[7]) == 9 and np.argmax(weights[9]) == 7
