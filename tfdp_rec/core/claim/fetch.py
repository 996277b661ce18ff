"""Checks of what a user's `fetch` returns for indices, and its `shared` without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Fetch = Callable[[np.ndarray], Any]
Shared = Callable[[], dict[str, Any]]


def require_rows(rows: Any, size: int) -> Any:
    """The arrays that `fetch` returned, each of which must have `size` rows."""
    import tensorflow as tf

    from tfdp_rec.core.ground.refused import NotPrivate

    for leaf in tf.nest.flatten(rows):
        shape = np.shape(leaf)
        if not shape or shape[0] != size:
            raise NotPrivate(
                f"Refused batch: fetch returned an array of shape {list(shape)} for {size} indices. It must give one "
                "row for each index, in their order; shared inputs come from sampling.batches(fetch, shared=...)."
            )
    return rows


def join(rows: Any, shared: dict[str, Any]) -> Any:
    """A batch with its shared inputs in its dict, or in the first of a tuple."""
    if isinstance(rows, tuple) and rows and not hasattr(rows, "_fields"):
        return (join(rows[0], shared), *rows[1:])
    if not isinstance(rows, dict) or not isinstance(shared, dict) or set(rows) & set(shared):
        raise ValueError(
            "shared= must give a dict, and fetch a dict (or a tuple that begins with one) without those keys, to which "
            f"they are added; got {type(shared).__name__} and {type(rows).__name__}."
        )
    return {**rows, **shared}


def spec_of(batch: Any) -> Any:
    """The nest of tf.TensorSpec of arrays."""
    import tensorflow as tf

    def spec(array: Any) -> Any:
        array = np.asarray(array)
        return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))

    return tf.nest.map_structure(spec, batch)


def signature_of(fetch: Fetch, num_units: int, capacity: int | None = None) -> Any:
    """The nest of tf.TensorSpec of `fetch`, for a number of rows; without, what changes with that is left open."""
    import tensorflow as tf

    sizes = range(min(3, num_units + 1))
    probes = [tf.nest.map_structure(np.asarray, require_rows(fetch(np.arange(size)), size)) for size in sizes]
    for probe in probes[1:]:
        tf.nest.assert_same_structure(probes[0], probe)

    def spec(*arrays: np.ndarray) -> Any:
        kinds = {(array.dtype, array.ndim) for array in arrays}
        if len(kinds) > 1:
            raise ValueError(
                "fetch gives arrays of different dtype or rank for 0, 1 and 2 units: "
                + ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
                + ". An empty batch must have the dtype and the other dimensions of any batch."
            )
        shape = [axis[0] if len(set(axis)) == 1 else None for axis in zip(*(a.shape for a in arrays))]
        shape[0] = capacity or shape[0]
        return tf.TensorSpec(shape, tf.as_dtype(arrays[0].dtype))

    return tf.nest.map_structure(spec, *probes)


def spec_of_rows(rows: Any, capacity: int | None = None) -> Any:
    """The nest of tf.TensorSpec of stretches of rows, for a number of rows or any."""
    import tensorflow as tf

    def spec(array: Any) -> tf.TensorSpec:
        return tf.TensorSpec([capacity, *array.shape[1:]], array.dtype)

    first = rows.element_spec if isinstance(rows, tf.data.Dataset) else next(iter(rows), None)
    if first is None:
        raise ValueError("There are no rows: all files are empty.")
    return tf.nest.map_structure(spec, first if isinstance(rows, tf.data.Dataset) else spec_of(first))
