"""What a user's `fetch` gives for indices, and what its `shared` gives without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Fetch = Callable[[np.ndarray], Any]
Shared = Callable[[], dict[str, Any]]


def checked_rows(rows: Any, size: int) -> Any:
    """What fetch gave for so many indices.

    Raises:
        NotPrivate: an array of it has not as many rows.
    """
    import tensorflow as tf

    from tfdp_rec.refused import NotPrivate

    for leaf in tf.nest.flatten(rows):
        shape = np.shape(leaf)
        if not shape or shape[0] != size:
            raise NotPrivate(
                f"Refused batch: fetch gave an array of shape {list(shape)} for {size} indices. It must give one row "
                "for each index, in their order; what a batch shares comes from sampling.batches(fetch, shared=...)."
            )
    return rows


def joined(rows: Any, shared: dict[str, Any]) -> Any:
    """A batch with what it shares.

    Raises:
        ValueError: the batch has no dict to take it, or has an entry of that name.
    """
    if isinstance(rows, tuple) and rows and not hasattr(rows, "_fields"):
        return (joined(rows[0], shared), *rows[1:])
    if not isinstance(rows, dict) or not isinstance(shared, dict) or set(rows) & set(shared):
        raise ValueError(
            "shared= must give a dict, and fetch a dict (or a tuple that begins with one) without those keys, into "
            f"which they go; got {type(shared).__name__} and {type(rows).__name__}."
        )
    return {**rows, **shared}


def spec_of(batch: Any) -> Any:
    """The tf.TensorSpec nest of some arrays."""
    import tensorflow as tf

    def spec(array: Any) -> Any:
        array = np.asarray(array)
        return tf.TensorSpec(array.shape, tf.as_dtype(array.dtype))

    return tf.nest.map_structure(spec, batch)


def signature_of(fetch: Fetch, num_units: int) -> Any:
    """The tf.TensorSpec nest of `fetch`; a dimension that changes with the number of units is left open."""
    import tensorflow as tf

    sizes = range(min(3, num_units + 1))
    probes = [tf.nest.map_structure(np.asarray, checked_rows(fetch(np.arange(size)), size)) for size in sizes]
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
        shape = [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*(a.shape for a in arrays))]
        return tf.TensorSpec(shape, tf.as_dtype(arrays[0].dtype))

    return tf.nest.map_structure(spec, *probes)
