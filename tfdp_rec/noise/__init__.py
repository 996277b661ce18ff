"""Sources of the unit Gaussians that the mechanisms scale and add.

EntropyNoise is for training, SecureNoise for those who fear attacks on floating-point samplers, KeyedNoise
for tests. docs/privacy-noise.md says what each one promises and what it does not.
"""

from tfdp_rec.noise.base import NoiseSource, Request
from tfdp_rec.noise.entropy import EntropyNoise
from tfdp_rec.noise.keyed import KeyedNoise
from tfdp_rec.noise.secure import SecureNoise
from tfdp_rec.noise.tails import truncation_delta

__all__ = ["EntropyNoise", "KeyedNoise", "NoiseSource", "Request", "SecureNoise", "truncation_delta"]
