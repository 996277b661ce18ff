"""Weights of a table's rows before the clip: g_r ← s_r g_r, with s public or paid for, and constant.

Each example's gradient with respect to row r is multiplied by s_r; the scaled gradient's norm over all variables is
clipped to C, summed, and gets the noise that it would get without. The step is made with that noisy sum: in the space
of scaled gradients the noise is the same for all coordinates, and rows of a small s lend their room under the clip to
the others.

Guarantee: sensitivity is C whatever s is, since ‖w_b S g_b‖ ≤ C for each example b, with w_b = min(1, C / ‖S g_b‖)
and S the diagonal matrix of the scales, which no example of this training decides: ε is as without. Noise that comes
late knows nothing of s: lazy stays exact.

That s comes from no private data, or from what was released and paid for (`private_counts`), is the caller's to see to.

Reference:
    Li, Zaheer, Reddi, Smith, "Private adaptive optimization with side information", ICML 2022 (AdaDPS): the same, with
    one scale a coordinate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_rec.optimizers.tables import Table
from tfdp_rec.refused import NotPrivate


class RowScale:
    """The scales of some tables' rows; a plain object, which neither Keras nor TensorFlow tracks or saves.

    Args:
        given: path of a table, or name of the layer that has it -> a number for each row. Names alone stand for scales
            that a saved optimizer had: it makes no step before it is given them again.

    Raises:
        ValueError: for what are not positive finite numbers.

    Example:
        >>> RowScale({"items": [1.0, 0.5, 0.25]}).names
        ['items']
    """

    def __init__(self, given: Mapping[str, Any] | Sequence[str] | None):
        named = given if isinstance(given, Mapping) else {}
        self.names = list(given or ())
        self.awaited = bool(self.names) and not isinstance(given, Mapping)
        self._given = {name: _checked(name, values) for name, values in named.items()}
        self._found: dict[str, tf.Tensor] | None = None

    def find(self, tables: Iterable[Table]) -> None:
        """Finds the tables that are meant.

        Args:
            tables: the optimizer's.

        Raises:
            ValueError: there is none of that name, or several, or one of another length.
        """
        several = list(tables)
        with tf.init_scope():
            self._found = {
                table.path: tf.constant(values, tf.float32)
                for name, values in self._given.items()
                for table in [_meant(name, len(values), several)]
            }

    def given_again(self, given: Mapping[str, Any], tables: Iterable[Table] | None) -> RowScale:
        """Those of an optimizer that was loaded.

        Args:
            given: as at first, or nothing.
            tables: the optimizer's, if it is built.

        Raises:
            ValueError: it has its scales already, which stay as they are.
        """
        if not self.awaited:
            raise ValueError(
                "row_scale is constant in time: give it to a new optimizer, and compile with that; only one that was "
                "loaded without its numbers takes them later."
            )
        found = RowScale(dict(given))
        if tables is not None:
            found.find(tables)
        return found

    @property
    def by_path(self) -> dict[str, tf.Tensor]:
        """Table path -> float32 `[rows]`.

        Raises:
            NotPrivate: they were in use when the optimizer was saved, and were not given again.
        """
        if self.awaited:
            raise NotPrivate(
                f"This optimizer was saved with row_scale= for {', '.join(self.names)}, whose numbers no file holds: "
                "give them again before training, optimizer.row_scale = {...}, or {} to train on without."
            )
        if self._given and self._found is None:
            raise ValueError("row_scale= needs to know the tables: call model.prepare(batch), or fit, which finds out.")
        return self._found or {}


def _checked(name: str, values: Any) -> np.ndarray:
    numbers = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = numbers.astype(np.float32)
    if numbers.ndim != 1 or not (np.isfinite(narrow).all() and (narrow > 0).all()):
        raise ValueError(
            f"row_scale of '{name}' must be positive finite numbers, one a row; got shape {numbers.shape}, from "
            f"{np.min(numbers, initial=np.inf):g} to {np.max(numbers, initial=-np.inf):g}."
        )
    return narrow


def _meant(name: str, rows: int, tables: Sequence[Table]) -> Table:
    meant = [table for table in tables if name == table.path or name in table.path.split("/")[-2:-1]]
    if len(meant) != 1:
        known = ", ".join(f"'{table.path}'" for table in tables) or "none"
        raise ValueError(f"row_scale names '{name}', which is {len(meant)} of the model's tables: there are {known}.")
    if meant[0].rows != rows:
        raise ValueError(f"row_scale of '{name}' must have {meant[0].rows} numbers, one a row; got {rows}.")
    return meant[0]


def scale_by_counts(counts: Any, constant: float, power: float = 0.5) -> np.ndarray:
    """s_r = (c / (count_r + c))^power: 1 for rows that nobody reads, less the more they are read.

    Args:
        counts: of the rows, from public data, or the `values` of `tfdp_rec.privacy.private_counts`; below zero is zero.
        constant: c; public.
        power: how much less.

    Raises:
        ValueError: constant is not positive, or power negative.

    Example:
        >>> scale_by_counts([0, 30, -2], constant=10).tolist()
        [1.0, 0.5, 1.0]
    """
    if not constant > 0 or power < 0:
        raise ValueError(f"constant must be positive and power at least 0, got {constant} and {power}.")
    return (constant / (np.maximum(np.asarray(counts, np.float64), 0.0) + constant)) ** power
