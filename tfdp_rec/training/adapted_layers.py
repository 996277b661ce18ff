"""Layers that learn by `adapt`: what they know of data has no noise, and leaves training with the weights.

`Normalization`, `StringLookup`, `IntegerLookup`, `TextVectorization` and `Discretization` are given their numbers and
names by their constructor, or find them by `adapt`; a constructor's stand for good. So a layer that can still be
adapted is refused, whether it was or will be.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import keras

from tfdp_rec.core.ground.keras_internals import can_adapt, has_file_vocabulary, keep_vocabulary, layers_within
from tfdp_rec.core.ground.refused import NotPrivate

_TEXT = (
    " A private step takes no text apart, however: vectorize the data beforehand, and put the layer in front again to "
    "serve, keras.Sequential([text_layer, model])."
)


def refuse_adapted(model: Any) -> None:
    """Refuses a model with a layer that can be adapted, unless it was compiled with `adapted_to_public_data=True`."""
    found = [] if model.private_step.adapted_to_public_data else [f for f in layers_within(model) if can_adapt(f)]
    if found:
        raise NotPrivate(
            f"{type(found[0]).__name__} '{found[0].name}' learns by adapt, without noise, what is released with the "
            "weights: give its constructor mean= and variance=, vocabulary= or bin_boundaries= that are public or paid "
            "for (tfdp_rec.privacy.private_moments, private_items, private_terms); or declare that adapt sees public "
            "data alone, compile(..., adapted_to_public_data=True)."
            + (_TEXT if isinstance(found[0], keras.layers.TextVectorization) else "")
        )


def find_file_vocabularies(model: Any) -> list[int]:
    """Places of the layers whose vocabulary was given as a file: in a loaded copy they look as if they could adapt."""
    return [place for place, layer in enumerate(layers_within(model)) if has_file_vocabulary(layer)]


def keep_vocabularies(model: Any, places: Collection[int]) -> None:
    """Has a loaded model's layers at these places know that their vocabulary was given."""
    for layer in (layer for place, layer in enumerate(layers_within(model)) if place in places):
        keep_vocabulary(layer)
