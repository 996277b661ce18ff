"""Steps of ordinary optimizers on weights that were trained privately: counted, and named in statements and at export.

No ε covers them, unless they are made on public data. They are counted in the graph of the step, so the step must be
traced after the first private step on its weights: `prepare_ordinary_steps` has it traced again.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfdp_rec.core.claim.entries import new_id
from tfdp_rec.core.claim.meter import Meter, meters_of
from tfdp_rec.core.mechanism.base import PrivateOptimizer

_COUNTED, _UNCOUNTED = "counted_steps_id", "uncounted_steps_id"  # attributes of an ordinary optimizer


def meters_on(model: Any) -> list[Meter]:
    """The meters whose steps have trained a trainable variable of the model."""
    return list({id(each): each for v in model.trainable_variables for each in meters_of(v)}.values())


def count_ordinary_step(model: Any) -> None:
    """Counts a step of the model's own optimizer, in the graph of the step."""
    # All of them count the same steps, under one id.
    for meter in meters_on(model):
        meter.count_ordinary(model.optimizer, vars(model.optimizer).setdefault(_COUNTED, new_id()))


def uncounted_steps(model: Any, optimizer: Any) -> dict[str, tuple[str, int]]:
    """The steps of an ordinary optimizer that no meter counted, (its name, number) by an id; nothing, if none."""
    if optimizer is None or isinstance(optimizer, PrivateOptimizer):
        return {}
    counted = max((each.snapshot().steps_of(getattr(optimizer, _COUNTED, "")) for each in meters_on(model)), default=0)
    made = keras.ops.convert_to_numpy(optimizer.iterations)  # of a strategy's optimizer, too
    steps = int(made) - counted
    id = vars(optimizer).setdefault(_UNCOUNTED, new_id())
    return {id: (type(optimizer).__name__, steps)} if steps > 0 else {}


def note_uncounted_steps(model: Any, found: dict[str, tuple[str, int]]) -> None:
    """Adds such steps to the history of a model that is to be trained privately."""
    for id, (name, steps) in found.items():
        model.open_history().add_ordinary(name, steps, id)


_COMPILE = "compile it with a mechanism of this package, such as tfdp_rec.LazyDPSGD, or call tfdp_rec.make_private"
_FIT = "on private data call fit of what make_private returned, whose weights these are, not of this model"


def prepare_ordinary_steps(model: Any, way_out: str = _COMPILE) -> None:
    """Warns, once, of a model's training by an ordinary optimizer; called before its steps.

    The step is traced again if other models have begun to train its weights privately.
    """
    known = [id(meter) for meter in meters_on(model)] if model.built else []
    if known != vars(model).get("_counted_by", []):
        vars(model)["_counted_by"] = known
        model.train_function = None
    if not vars(model).setdefault("_told_not_private", False):
        vars(model)["_told_not_private"] = True
        warnings.warn(
            f"{type(model).__name__} trains under {type(model.optimizer).__name__}, which is not private: {way_out}.",
            stacklevel=3,
        )


def watch(model: keras.Model) -> None:
    """Counts all further steps of a plain Keras model that shares layers with a private one, without XLA."""
    # The methods are replaced on the instance: the user's code holds this object, of a class without this package's.
    train_step, fit, train_on_batch = model.train_step, model.fit, model.train_on_batch

    def count_and_step(*args: Any, **kwargs: Any) -> Any:
        count_ordinary_step(model)
        return train_step(*args, **kwargs)

    def count_before(train: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            prepare_ordinary_steps(model, _FIT)
            return train(*args, **kwargs)

        return run

    vars(model).update(train_step=count_and_step, fit=count_before(fit), train_on_batch=count_before(train_on_batch))
    # Keras compiles with XLA where there is a GPU, and XLA drops the checks of a table's reads.
    model.jit_compile = False
    model.train_function = model.test_function = model.predict_function = None
