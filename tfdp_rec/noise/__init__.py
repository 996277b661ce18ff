"""Sources of the unit Gaussians that the mechanisms scale and add.

EntropyNoise is for training, SecureNoise against attacks on floating-point samplers, KeyedNoise for tests; `release`
is for plain arrays of your own that are released once. docs/privacy-noise.md says what each one promises and what it
does not.
"""

from typing import TYPE_CHECKING

from tfdp_rec.core.ground.lazy_imports import lazy_getattr

# A federated client draws words (`words`) and never loads TensorFlow.
if TYPE_CHECKING:
    from tfdp_rec.core.mechanism.noise.base import NoiseSource as NoiseSource
    from tfdp_rec.core.mechanism.noise.base import Request as Request
    from tfdp_rec.core.mechanism.noise.gaussian import EntropyNoise as EntropyNoise
    from tfdp_rec.core.mechanism.noise.keyed import KeyedNoise as KeyedNoise
    from tfdp_rec.core.mechanism.noise.secure import SecureNoise as SecureNoise
    from tfdp_rec.core.mechanism.noise.tails import truncation_delta as truncation_delta
    from tfdp_rec.core.mechanism.noise.words import release as release
else:
    __getattr__, __all__ = lazy_getattr(__name__)
