"""Layers that learn by `adapt`: what they know of data has no noise, and leaves training with the weights.

`Normalization`, `StringLookup`, `IntegerLookup`, `TextVectorization` and `Discretization` are given their numbers and
names by their constructor, or find them by `adapt`; a constructor's stand for good. So a layer that can still be
adapted is refused, whether it was or will be.
"""

from __future__ import annotations

from typing import Any

from tfdp_rec.keras_internals import adapts, layers_within, vocabulary_is_of_a_file
from tfdp_rec.refused import NotPrivate


def refuse_adapted(model: Any) -> None:
    """Refuses a model with a layer that can be adapted, unless it was compiled with `adapted_to_public_data=True`."""
    found = [] if model.private_step.adapted_to_public_data else [f for f in layers_within(model) if adapts(f)]
    if found:
        raise NotPrivate(
            f"{type(found[0]).__name__} '{found[0].name}' learns by adapt, without noise, what is released with the "
            "weights: give its constructor mean= and variance=, vocabulary= or bin_boundaries= that are public or paid "
            "for (tfdp_rec.privacy.private_moments, private_items, private_terms); or declare that adapt sees public "
            "data alone, compile(..., adapted_to_public_data=True)."
        )


def is_declared(model: Any) -> bool:
    """Whether a loaded copy may have layers that look as if they could be adapted: also those with a file of words."""
    return model.private_step.adapted_to_public_data or any(map(vocabulary_is_of_a_file, layers_within(model)))
