"""A catalogue that items join, for models with a row of each item in their tables.

The model that has other items is a second one (`PrivateTraining.grow_into`), which goes on where the first one stopped.
"""

from __future__ import annotations

import zipfile
from typing import Any, TypeVar

import keras
import numpy as np
from numpy.typing import ArrayLike, NDArray

from tfdp_rec.core.ground.files import Path
from tfdp_rec.core.ground.keras_internals import layers_within
from tfdp_rec.datasets.log import PADDING

Model = TypeVar("Model", bound="OwnCatalogue")


def load_model(path: Path, **options: Any) -> Any:
    """The `TwoTower` or `SASRec` in a .keras file; `options` of Keras' `load_model`."""
    from tfdp_rec.models import SASRec, TwoTower

    try:
        found = keras.models.load_model(path, **options)
    except (AttributeError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as problem:
        said = " ".join(str(problem).split())[:200].rstrip(".")
        raise ValueError(f"{path} holds no model that can be loaded: {said}.") from problem
    if not isinstance(found, (SASRec, TwoTower)):
        raise ValueError(f"{path} holds a {type(found).__name__}; only TwoTower and SASRec answer histories.")
    return found


class OwnCatalogue:
    """Mix-in, ahead of `PrivateTraining`: `grow` of models made by `vocabulary` and `prior`."""

    vocabulary: NDArray[np.int64]
    prior: NDArray[np.float64]

    def item_tables(self) -> list[Any]:
        """Layers with a table that has a row for padding and then one for each item."""
        raise NotImplementedError

    def grow(self: Model, new_ids: ArrayLike, prior: ArrayLike | None = None) -> Model:
        """A model of further items, which goes on where this one stopped: see `PrivateTraining.grow_into`.

        Args:
            new_ids: Raw ids of the items that join, from a public list or found privately.
            prior: Popularity of all items, the new ones last, up to scale; None for the present one, with the least
                popularity for each new item.

        Returns:
            The model of more items.

        Raises:
            ValueError: An id is known already or repeated, or the prior does not fit.

        Example:
            >>> import tfdp_rec
            >>> model = tfdp_rec.models.TwoTower(vocabulary=[318, 296], width=4, hidden=0)
            >>> model.grow([593]).vocabulary.tolist()
            [318, 296, 593]
        """
        if prior is not None and self.constants_of_items():
            raise ValueError("A model upon sums takes no prior: new items have the least popularity of the others.")
        joining = np.atleast_1d(new_ids)
        known = np.intersect1d(self.vocabulary, joining).tolist()
        if known:
            raise ValueError(f"In the catalogue already: {known[:5]}.")
        if prior is None:
            prior = np.append(self.prior, np.full(len(joining), self.prior.min()))
        changed = {
            "vocabulary": [*self.vocabulary.tolist(), *joining.tolist()],
            "prior": np.asarray(prior).tolist(),
        }
        usual = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.item_tables()[0].dtype_policy)
        try:
            config = {**self.get_config(), **changed, **self._other_arguments()}  # type: ignore[attr-defined]
            made = type(self).from_config(config)  # type: ignore[attr-defined]
        finally:
            keras.config.set_dtype_policy(usual)
        for mine, other in zip(layers_within(self), layers_within(made)):  # type: ignore[arg-type]
            other.trainable = mine.trainable
        rows = [PADDING, *range(1, len(self.vocabulary) + 1)]
        tables = dict.fromkeys((table.embeddings.path for table in self.item_tables()), rows)
        made.take_constants(self)
        replaced = [variable.path for variable in self.constants_of_items()]
        return self.grow_into(made, kept=tables, replaced=replaced)  # type: ignore[attr-defined]

    def _other_arguments(self) -> dict[str, Any]:
        """Further arguments of the constructor."""
        return {}

    def constants_of_items(self) -> list[keras.Variable]:
        """Weights beside the tables that depend on the items, and are not trained."""
        return []

    def take_constants(self: Model, before: Model) -> None:
        """Takes the values of these from a model of the first of its items."""
