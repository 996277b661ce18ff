"""The weight w of an example in the clipped sum, by the norm of its gradient: none contributes more than C.

    l2_norm_clip=C         w = min(1, C / norm)      gradients within the clip stay as they are
    l2_norm_clip="auto"    w = C / (norm + γ)        C = 1, γ = 0.01: every gradient gets nearly the length C

w · norm ≤ C under both, for norms that are rounded up, so the sum's sensitivity is C under both.

"auto" normalises, which is biased: the sum is C times a sum of unit vectors, so it shows directions and no sizes. An
example whose loss is nearly at its least weighs as much as any other, unless its gradient is shorter than γ. A gradient
of zero stays zero.

Reference:
    Z. Bu, Y.-X. Wang, S. Zha, G. Karypis, Automatic Clipping: Differentially Private Deep Learning Made Easier and
    Stronger, 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import tensorflow as tf

from tfdp_rec.core.ground.refused import refuse_no_number

LEAST_CLIP = 1e-9  # below, numbers within the clip are too near to the smallest float32 numbers
GAMMA = 0.01

Auto = Literal["auto"]
WeightRule = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""Weights w of examples from their norms and C, with w · norm ≤ C."""


def clip_weight(norms: tf.Tensor, l2_norm_clip: tf.Tensor) -> tf.Tensor:
    """min(1, C / norm)."""
    return l2_norm_clip / tf.maximum(norms, l2_norm_clip)


def normalise_weight(norms: tf.Tensor, l2_norm_clip: tf.Tensor) -> tf.Tensor:
    """C / (norm + γ)."""
    return l2_norm_clip / (norms + GAMMA)


def clip_and_rule(l2_norm_clip: float | Auto) -> tuple[float, WeightRule]:
    """C and the rule of the weights, from what an argument `l2_norm_clip` was given."""
    if isinstance(l2_norm_clip, str):
        if l2_norm_clip not in get_args(Auto):
            raise ValueError(f'l2_norm_clip must be a number, or "auto", got {l2_norm_clip!r}.')
        return 1.0, normalise_weight
    refuse_no_number("l2_norm_clip", l2_norm_clip)
    if not LEAST_CLIP <= float(l2_norm_clip) < float("inf"):
        raise ValueError(
            f"l2_norm_clip must be a finite number of at least {LEAST_CLIP}, which is as little as float32 can keep "
            f'to, or "auto"; got {l2_norm_clip}.'
        )
    return float(l2_norm_clip), clip_weight
