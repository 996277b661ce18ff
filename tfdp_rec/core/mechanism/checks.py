"""Refusals of options, tables, and optimizers for dense variables; parts of an optimizer as configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.keras_internals import handles_of, learning_rate_of
from tfdp_rec.core.ground.refused import NotPrivate, refuse_no_number
from tfdp_rec.core.mechanism.rules import Recursion, TableRule
from tfdp_rec.core.sensitivity.data_flow import refuse_data_read

_BY_EXAMPLE = "clipping is by example, through l2_norm_clip"
_ACCUMULATED = (
    "make batches (expected_batch_size, batch_size) as large as the accumulated ones, and give compile or make_private "
    "microbatch_size=, the number of examples that fit into memory at once: one clipped sum, one noise"
)
_AVERAGE = "average saved models instead: averages of released weights cost no privacy"
_REFUSED_OPTIONS = {
    **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm"), _BY_EXAMPLE),
    **dict.fromkeys(("use_ema", "ema_momentum", "ema_overwrite_frequency"), _AVERAGE),
    "loss_scale_factor": "it would scale gradients past the clip; mixed_bfloat16 needs no loss scaling",
    **dict.fromkeys(("history", "arrivals"), "it is for parameter servers, which set it themselves"),
    "row_scale": "it brought no gain and was removed (docs/adaptive.md); load such a model with compile=False",
    "gradient_accumulation_steps": _ACCUMULATED,
}


def admit(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options that Keras' optimizers take; one that would break the guarantee is refused."""
    for option, value in options.items():
        if option in _REFUSED_OPTIONS and (value or option == "ema_momentum"):
            raise ValueError(f"{name} does not take {option}: {_REFUSED_OPTIONS[option]}.")
    return {option: value for option, value in options.items() if option not in _REFUSED_OPTIONS}


def check_dense(optimizer: Any) -> keras.optimizers.Optimizer | None:
    """An optimizer for the dense variables, also from a name or config; one that needs raw gradients is refused."""
    if optimizer is None:
        return None
    try:
        optimizer = keras.optimizers.get(optimizer)
    except ValueError as problem:
        raise ValueError(f"dense_optimizer={optimizer!r} is no optimizer of Keras', such as \"adam\".") from problem
    if not type(optimizer).__module__.startswith("keras."):
        raise NotPrivate(
            f"dense_optimizer must be of a class of Keras' own, got {type(optimizer).__name__}: what another class "
            "reads beside the gradients, such as a metric, would move the weights without clipping or noise."
        )
    if hasattr(optimizer, "dp_event") or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"dense_optimizer must be an ordinary Keras optimizer, got {type(optimizer).__name__}: the gradients it "
            "receives are clipped and noised already."
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(f"dense_optimizer takes no gradient_accumulation_steps: {_ACCUMULATED}.")
    return optimizer


def refuse_data_beside_the_sum(optimizer: Any, variables: Iterable[Any]) -> None:
    """Raises `NotPrivate` if a constraint depends on more than its weight, or a learning rate on more than the step."""
    for variable in variables:
        if variable.constraint is not None:
            spec = tf.TensorSpec(variable.shape, variable.dtype)
            refuse_data_read(f"The constraint of '{variable.path}'", variable.constraint, [spec])
    for each in filter(None, (optimizer, getattr(optimizer, "dense_optimizer", None))):
        rate = learning_rate_of(each)
        if callable(rate):
            by_step = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
            steps = [tf.TensorSpec([], each.iterations.dtype)] if by_step else []
            refuse_data_read(f"The learning rate of {type(each).__name__}", rate, steps, handles_of([each.iterations]))


def check_rule(optimizer: Any, rule: Any) -> TableRule | None:
    """A rule for the tables, or its config, refused where the mechanism, its momentum or its decay cannot have it."""
    rule = deserialize(rule)
    if rule is None:
        return None
    name, recursion = type(optimizer).__name__, optimizer.recursion
    if not isinstance(rule, TableRule):
        raise ValueError(
            f"table_rule must be one of tfdp_rec.optimizers, such as Adagrad(), got {rule!r}: others would work on "
            "whole tables at every step. dense_optimizer takes any of Keras."
        )
    if optimizer.why_no_table_rule:
        raise ValueError(
            f"{name} takes no table_rule: {optimizer.why_no_table_rule}. Use DPSGD, or AdaFEST with work for "
            "chosen rows alone, which take it; or leave it out: dense_optimizer= takes any of Keras for the rest."
        )
    if recursion.has_velocity or recursion.weight_decay:
        raise ValueError(
            f"{name} with table_rule={rule!r} takes no momentum and no weight_decay, which are of plain SGD: leave "
            "them out, or give the dense variables a dense_optimizer that has them."
        )
    return rule


def refuse_other_model(optimizer: Any, variables: Iterable[keras.Variable]) -> None:
    """Raises unless the optimizer was built for these very variables."""
    name = type(optimizer).__name__
    known = {id(dense.variable): path for path, dense in optimizer.dense.items()}
    known |= {id(table.variable): path for path, table in optimizer.tables.items()}
    if not {id(v) for v in variables} <= set(known):
        raise ValueError(
            f"This {name} was built for another model, or for this one before layers were thawed; give each model its "
            "own, and compile with a new one after a change of trainable."
        )
    frozen = sorted(set(known.values()) - {v.path for v in variables})
    if frozen:
        raise ValueError(
            f"{', '.join(frozen)} was frozen after this {name} was built, which would go on adding noise to it: "
            "compile with a new optimizer after a change of trainable, or call make_private again."
        )


_REPLICAS = (
    tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy, tf.distribute.TPUStrategy,
    tf.distribute.OneDeviceStrategy,
)  # fmt: skip


def has_replicas(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas train by a distribution strategy."""
    return isinstance(strategy, _REPLICAS) or strategy.num_replicas_in_sync > 1


def refuse_replicas() -> None:
    """Refuses a step that each replica of a strategy would make."""
    if has_replicas(strategy := tf.distribute.get_strategy()) and not tf.distribute.in_cross_replica_context():
        raise NotPrivate(
            f"{type(strategy).__name__}: each replica of a strategy would clip and add noise separately. Make and "
            "compile the model in the scope of a tf.distribute.MirroredStrategy and call its fit, which shares the "
            "sum of a step among the devices; not strategy.run(...)."
        )


def refuse_on_table(variable: keras.Variable) -> None:
    """Raises for a table that a mechanism cannot update by row."""
    if len(variable.shape) != 2:
        raise ValueError(f"Table '{variable.path}' must have shape [rows, width], got {tuple(variable.shape)}.")
    if variable.constraint is not None:
        raise NotPrivate(
            f"Table '{variable.path}' has a constraint, which would touch every row at every step; use the "
            "optimizer's weight_decay, or keras.regularizers.L2, instead."
        )
    regularizer_decay(variable)


def regularizer_decay(variable: keras.Variable) -> float:
    """The weight decay that a table's own regularizer is; other regularizers than L2 are refused."""
    # The gradient of l2 ‖θ‖² is 2 l2 θ, on every row, whatever the examples are: under plain SGD a decay λ = 2 l2.
    regularizer = variable.regularizer
    if regularizer is None:
        return 0.0
    kind = type(regularizer)  # not a subclass, which may compute something else
    if kind is keras.regularizers.L2 or (kind is keras.regularizers.L1L2 and not regularizer.l1):
        return 2.0 * float(regularizer.l2)
    shown = f"L1L2(l1={regularizer.l1:g})" if kind is keras.regularizers.L1L2 else kind.__name__
    raise NotPrivate(
        f"Table '{variable.path}' has the regularizer {shown}, which would touch every row at every step and has no "
        "exact lazy form: use keras.regularizers.L2, which is a decay, or the optimizer's weight_decay."
    )


def recursion_of_table(optimizer: Any, variable: keras.Variable) -> Recursion:
    """The step of a table's rows: the optimizer's, with the decay of the table's own regularizer."""
    own, recursion = regularizer_decay(variable), optimizer.recursion
    if not own:
        return recursion
    name, table = type(optimizer).__name__, f"Table '{variable.path}' has a regularizer"
    if not optimizer.moves_every_row:
        raise NotPrivate(
            f"{table}, and {name} moves only some rows at a step: the rows that it leaves alone would not decay. Leave "
            "the regularizer out, or use DPSGD or LazyDPSGD."
        )
    if optimizer.table_rule is not None:
        raise NotPrivate(
            f"{table}, and {name} has table_rule={optimizer.table_rule!r}, which would scale its gradient, row by row: "
            "only of plain SGD is it an exact decay. Leave one of them out."
        )
    if recursion.has_velocity:
        raise NotPrivate(
            f"{table}, which with momentum has no exact lazy form: leave one of them out, or give the dense variables "
            "a dense_optimizer that has momentum."
        )
    return dataclasses.replace(recursion, weight_decay=recursion.weight_decay + own)


def serialize(part: Any) -> Any:
    """A schedule, an optimizer, a rule or a preselection for a config; None stays None."""
    return None if part is None else keras.saving.serialize_keras_object(part)


def deserialize(part: Any) -> Any:
    """The inverse of `serialize`; what is no config stays."""
    return keras.saving.deserialize_keras_object(part) if isinstance(part, dict) else part


def positive(name: str, value: float) -> float:
    """A setting as a positive, finite number."""
    refuse_no_number(name, value)
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value}.")
    return float(value)


def check_not_negative(name: str, value: float) -> float:
    """A setting as a finite number of at least 0."""
    refuse_no_number(name, value)
    if not 0 <= float(value) < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0, got {value}.")
    return float(value)
