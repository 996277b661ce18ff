"""Sources of the unit Gaussians that the mechanisms scale and add.

EntropyNoise is for training, SecureNoise against attacks on floating-point samplers, KeyedNoise for tests; `release`
is for plain arrays of your own that are released once. docs/privacy-noise.md says what each one promises and what it
does not.
"""

from tfdp_rec.lazily import imported_when_asked

__all__ = ["EntropyNoise", "KeyedNoise", "NoiseSource", "Request", "SecureNoise", "release", "truncation_delta"]

# A federated client draws words (`words`) and never loads TensorFlow.
__getattr__ = imported_when_asked(
    __name__,
    {
        "EntropyNoise": "gaussian",
        "KeyedNoise": "keyed",
        "NoiseSource": "base",
        "Request": "base",
        "SecureNoise": "secure",
        "release": "words",
        "truncation_delta": "tails",
    },
)
