"""Bags of ids as arrays of one length: ids `[bags, length]`, and weights, 0 where a bag has no more ids.

    z = Σ_t v_t E[i_t] / d,    d = 1, Σ_t v_t or √(Σ_t v_t²)

does not see places of weight 0, neither in z nor in its gradient, so that bags padded so are clipped as bags of their
own lengths would be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
import tensorflow as tf

_ONE_AXIS = "ids and weights must have one axis beside that of the bags"


def padded(ids: Any, length: int, weights: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of one length, for `keras_rs.layers.EmbedReduce` and other layers that take both.

    A longer bag is cut: its first `length` ids are kept, the others are lost. A shorter one is filled up with weights
    of 0 and its own first id, so that no other row of the table is read; an empty one with id 0 (or "").

    The length must be public: a guess before the data are seen, or what a service stores. The longest bag of the data
    is one person's, and would be told by every shape of the model, its export included.

    Args:
        ids: One of these: a `tf.RaggedTensor` `[bags, None]`; a `tf.SparseTensor` `[bags, any]` whose values are the
            ids; a SciPy sparse matrix `[bags, ids]` whose columns are the ids and whose values are the weights; a
            sequence of sequences; a pair of arrays (values, splits), bag b being `values[splits[b] : splits[b + 1]]`.
        length: Length of all bags.
        weights: Weights of the ids, in the same form (of a pair, the values alone); 1 if left out.

    Returns:
        Ids, and float32 weights, both `[bags, length]`.

    Raises:
        ValueError: The length is below 1, the splits are no row splits, bags have several axes, or the weights do not
            match the ids.

    Example:
        >>> ids, weights = padded([[7, 5], [], [1, 2, 3, 4]], 3)
        >>> ids.tolist(), weights.tolist()
        ([[7, 5, 7], [0, 0, 0], [1, 2, 3]], [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}.")
    values, splits, by = _flat(ids, weights)
    values = np.asarray(values.tolist()) if values.dtype == object else values  # text
    if splits.ndim != 1 or not len(splits) or splits[0] or splits[-1] != len(values) or np.any(np.diff(splits) < 0):
        raise ValueError(
            "splits must begin with 0, not fall, and end with the number of values, so that bag b is "
            "values[splits[b] : splits[b + 1]]; append that number to offsets that lack it."
        )
    if by.shape != values.shape:
        raise ValueError(f"weights must be one for each id, in the same bags: got {len(by)} for {len(values)} ids.")
    there = np.arange(length) < np.diff(splits)[:, None]
    places = splits[:-1, None] + np.where(there, np.arange(length), 0)
    none = np.zeros(1, values.dtype), np.zeros(1, "float32")  # where the first id of an empty last bag would be
    filled = np.concatenate([values, none[0]])[places]
    filled[np.diff(splits) == 0] = none[0]
    return filled, np.where(there, np.concatenate([by, none[1]])[places], np.float32(0))


def _flat(ids: Any, weights: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Ids and weights one bag after the other, and the places where bags begin and end.
    if scipy.sparse.issparse(ids):
        if weights is not None:
            raise ValueError("The values of a SciPy matrix are its weights: leave weights= out.")
        rows = ids.tocsr()
        return rows.indices, rows.indptr.astype(np.int64), rows.data.astype("float32")
    pair = isinstance(ids, tuple) and len(ids) == 2 and all(isinstance(part, (np.ndarray, tf.Tensor)) for part in ids)
    values, splits = (np.asarray(part) for part in ids) if pair else _bags(ids)
    if values.ndim != 1:
        raise ValueError(f"{_ONE_AXIS}; their values have {values.ndim} axes.")
    if weights is None:
        return values, splits, np.ones(values.shape, "float32")
    by, same = (np.asarray(weights), splits) if pair else _bags(weights)
    if not np.array_equal(splits, same):
        raise ValueError("weights must be one for each id, in the same bags; their bags have other lengths.")
    return values, splits, by.astype("float32")


def _bags(given: Any) -> tuple[np.ndarray, np.ndarray]:
    # A sparse tensor of more axes would be read as bags of all that an example has.
    if isinstance(given, (tf.RaggedTensor, tf.SparseTensor)) and given.shape.rank != 2:
        raise ValueError(f"{_ONE_AXIS}, [bags, any]; got {given.shape}.")
    if isinstance(given, tf.RaggedTensor):
        return np.asarray(given.values), np.asarray(given.row_splits)
    if isinstance(given, tf.SparseTensor):
        ordered = tf.sparse.reorder(given)
        lengths = np.bincount(np.asarray(ordered.indices)[:, 0], minlength=int(ordered.dense_shape[0]))
        values = np.asarray(ordered.values)
    else:
        lengths = np.array([len(bag) for bag in given], np.int64)
        values = np.concatenate([np.asarray(bag) for bag in given if len(bag)] or [np.zeros(0, np.int64)])
    return values, np.concatenate([[0], np.cumsum(lengths)])
