"""Growth: a training goes on in a model whose tables have more rows, or fewer.

A Keras variable keeps its shape. So tables grow by a second model of the same layers, made with other table sizes, that
takes over what the first one has:

    weights              rows that stay come first, in their order; the rows behind them keep the new model's values
    optimizer's state    velocities and rule state go with their rows, and are zero for new rows
    privacy history      all of it: the new model has spent what the first one has

All pending noise is settled first, as for a saved model. So no row owes noise, and a new row owes nothing for the steps
before it was there. Planned noise (DPFTRL) does not go on: without its buffers, which no release has, a plan begins
anew.

**Privacy.** Which rows there are is visible in the model. So new ids come from a public list, or from a private choice
that is paid for, such as `private_items`. Removing rows gives no ε back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.ground.files import row_chunks
from tfdp_rec.core.ground.keras_internals import compile_arguments, resource
from tfdp_rec.core.mechanism.tables import CHUNK_VALUES, scatter
from tfdp_rec.core.mechanism.weights import owners_of

Kept = Mapping[str, Sequence[int]]
"""The rows that stay, in their new order, by path of a table."""


class _Pair(NamedTuple):
    before: keras.Variable
    after: keras.Variable
    rows: np.ndarray | None  # rows of `before` that stay; None if the whole variable does


def take_over(before: Any, after: Any, kept: Kept, replaced: frozenset[str] = frozenset()) -> None:
    """Gives `after` what `before` has; arguments as for `PrivateTraining.grow_into`."""
    pairs = list(_pairs(before, after, kept, replaced))
    _refuse_unfit(before, pairs, carries=before.is_private and after.optimizer is None)
    for owner in (owner for model in (before, after) for owner in owners_of(model)):
        owner.release()
    with before.private_weights.exporting():
        if before.is_private and after.optimizer is None:  # first: a plan may refuse it
            try:
                _take_over_optimizer(before, after, {pair.before.path: pair.rows for pair in pairs})
            except BaseException:
                after.optimizer, after.compiled = None, False
                raise
        history = before.saved_history()
        if history is not None:  # ahead of the weights that it is about
            after.open_history().merge(history)
        for pair in pairs:
            _copy(pair)


def _refuse_unfit(before: Any, pairs: Sequence[_Pair], carries: bool) -> None:
    before.saved_history()  # of a model that another one on its layers has trained, this makes the history
    history = before.privacy_history
    if history is not None and history.undescribed_steps:
        raise ValueError(
            f"The optimizer has made {history.undescribed_steps} steps that the model's privacy history does not "
            "describe: a model that goes on would not tell of them."
        )
    if not carries:
        return
    optimizer = before.optimizer
    if isinstance(optimizer.dp_event(), PlannedDpEvent):
        raise ValueError(
            f"{type(optimizer).__name__} plans its noise for one model from its first step on. Train the second model "
            "with an optimizer and a plan of its own: compile it before grow_into."
        )
    moved = [pair.before.path for pair in pairs if pair.rows is not None and not _all_stay(pair)]
    if moved and getattr(optimizer, "preselection", None) is not None:
        raise ValueError(
            f"Rows of {', '.join(moved)} get other numbers, and {type(optimizer).__name__} trains rows that were "
            "chosen by number: keep all rows, or compile the second model with a preselection of its own before."
        )


def _all_stay(pair: _Pair) -> bool:
    return np.array_equal(pair.rows, np.arange(pair.before.shape[0]))  # type: ignore[arg-type]


def _pairs(before: Any, after: Any, kept: Kept, replaced: frozenset[str]) -> Iterator[_Pair]:
    if type(before) is not type(after) or before is after:
        raise ValueError(
            f"grow_into takes another {type(before).__name__}, got {'this one' if before is after else after!r}."
        )
    if len(before.weights) != len(after.weights):
        raise ValueError(
            f"The new model has {len(after.weights)} weights and this one {len(before.weights)}: give one of the same "
            "layers, built (call it on a batch first)."
        )
    tables = (variable for variable in before.weights if before.private_tables.may_change_rows(variable))
    unknown = set(kept) - {variable.path for variable in tables}
    if unknown:
        raise ValueError(f"kept names {', '.join(sorted(unknown))}, which is no table of this model.")
    trained = replaced - {variable.path for variable in before.weights if not variable.trainable}
    if trained:
        raise ValueError(f"replaced names {', '.join(sorted(trained))}, which is no frozen weight of this model.")
    paths = [[variable.path for variable in model.weights] for model in (before, after)]
    for mine, other in zip(before.weights, after.weights):
        if set(paths[0]) == set(paths[1]) and mine.path != other.path:
            raise ValueError(f"'{other.path}' stands in the place of '{mine.path}': make both models by the same code.")
        if mine.trainable != other.trainable:
            raise ValueError(f"'{mine.path}' is trained in one of the models alone: freeze the same layers in both.")
        if mine.path in replaced:
            continue
        if mine is other and mine.path in kept:
            raise ValueError(f"Both models have the same table '{mine.path}', whose rows stay as they are.")
        yield _Pair(mine, other, _rows_that_stay(before, mine, other, kept.get(mine.path)))


def _rows_that_stay(model: Any, mine: Any, other: Any, kept: Sequence[int] | None) -> np.ndarray | None:
    if mine.dtype != other.dtype or len(mine.shape) != len(other.shape) or mine.shape[1:] != other.shape[1:]:
        raise ValueError(
            f"'{mine.path}' is {mine.dtype} of shape {mine.shape}, and {other.dtype} of shape {other.shape} in the new "
            "model: only the number of rows of tables may change."
        )
    if kept is None and mine.shape == other.shape:
        return None
    if not model.private_tables.may_change_rows(mine):
        raise ValueError(f"'{mine.path}' has another number of rows in the new model, and is read as a whole.")
    rows = np.arange(mine.shape[0]) if kept is None else np.asarray(kept)
    numbers = rows.ndim == 1 and (rows.dtype.kind in "iu" or not rows.size)
    if not numbers or not np.isin(rows, np.arange(mine.shape[0])).all() or len(np.unique(rows)) != len(rows):
        raise ValueError(f"kept['{mine.path}'] must be distinct rows between 0 and {mine.shape[0] - 1}.")
    if len(rows) > other.shape[0]:
        raise ValueError(
            f"{len(rows)} rows of '{mine.path}' stay and the new model has room for {other.shape[0]}: to remove rows "
            "say which ones stay, in kept."
        )
    return rows.astype(np.int64)


def _copy(pair: _Pair) -> None:
    if pair.rows is None:
        pair.after.assign(pair.before)
        return
    source, target = resource(pair.before), resource(pair.after)
    for start, end in row_chunks([len(pair.rows), *source.shape[1:]], CHUNK_VALUES):  # no copy of a whole table
        rows = pair.rows[start:end]
        scatter("Update", target, tf.range(start, end, dtype=tf.int64), tf.gather(source, rows))


def _take_over_optimizer(before: Any, after: Any, rows: Mapping[str, np.ndarray | None]) -> None:
    mine, given = before.optimizer, compile_arguments(before)
    given["optimizer"] = type(mine).from_config(mine.get_config())
    given |= {name: _renew_metrics(given.get(name)) for name in ("metrics", "weighted_metrics")}
    after.private_step.devices = before.private_step.devices
    after.compile(**given, **before.private_step.options)
    other = after.optimizer
    numbers = before.private_tables.numbers
    if numbers is not None:
        after.private_tables.build(numbers)
    if mine.built:
        saved: dict[str, Any] = {}
        mine.save_own_variables(saved)
        stay = {id(table.state): rows[table.path] for table in mine.tables.values() if table.state is not None}
        for number, (variable, new) in enumerate(zip(mine.variables, other.variables, strict=True)):
            kept = stay.get(id(variable))
            if kept is not None:
                moved = np.zeros(new.shape, new.dtype)
                moved[: len(kept)] = np.asarray(saved[str(number)])[kept]
                saved[str(number)] = moved
        other.load_own_variables(saved)
    if mine.plan is not None:
        mine.plan.accept(other)


def _renew_metrics(metrics: Any) -> Any:
    """Metrics without what they have counted; a custom loss, which has no state, goes along as it is."""

    def renew(one: Any) -> Any:
        return type(one).from_config(one.get_config()) if isinstance(one, keras.metrics.Metric) else one

    return keras.tree.map_structure(renew, metrics)
