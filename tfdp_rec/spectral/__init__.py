"""Recommendations from private sums, without training: docs/spectral.md."""

from tfdp_rec.datasets.histories import Catalogue, Histories
from tfdp_rec.spectral.recommender import SpectralRecommender

__all__ = ["Catalogue", "Histories", "SpectralRecommender"]
