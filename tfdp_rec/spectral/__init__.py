"""Recommendations from private sums, without training: docs/spectral.md."""

from tfdp_rec.datasets.log import Catalogue
from tfdp_rec.datasets.log import Log as Histories
from tfdp_rec.spectral.recommender import SpectralRecommender
from tfdp_rec.spectral.release import Release

__all__ = ["Catalogue", "Histories", "Release", "SpectralRecommender"]
