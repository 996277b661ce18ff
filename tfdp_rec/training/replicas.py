"""Replicas: the devices of a `tf.distribute.MirroredStrategy`, which share the sum of a step, and nothing else.

A batch is drawn, checked and paid for as a whole. Each device clips some examples of it, by their places, and the sums
are added up as those of microbatches are (`core/sensitivity/microbatches.py`). Noise is drawn once, on the first
device, which alone holds the weights: the others read from it what a step needs. So there are no copies that must be
kept equal, and no mechanism knows of replicas.

Within a scope Keras makes variables that have a copy on each device. When a model is compiled with a mechanism, the
first copy becomes the variable, for good.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.checks import has_replicas

_SHARES = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)


def devices_of(model: Any) -> tuple[str, ...]:
    """The devices of the strategy in whose scope this runs, or the model was made; none without a strategy.

    Raises:
        NotPrivate: The strategy is of another kind.
    """
    found = model.private_step.devices
    for strategy in (model.distribute_strategy, tf.distribute.get_strategy()):
        if type(strategy) in _SHARES:
            found = tuple(strategy.extended.worker_devices)
        elif has_replicas(strategy):
            raise NotPrivate(
                f"{type(strategy).__name__}: each replica of it would clip and add noise separately. The devices of "
                "one machine share a step under tf.distribute.MirroredStrategy; on several machines, train with "
                "parameter servers, tfdp_rec.distribute.ParameterServerTrainer."
            )
    return found


def refuse_unshared(model: Any, x: Any) -> None:
    """Refuses a fit in the scope of a strategy that the model was not compiled in, and batches that it has cut up."""
    cut = tf.distribute.DistributedDataset, tf.distribute.DistributedValues
    if any(isinstance(each, cut) for each in tf.nest.flatten(x)):
        raise NotPrivate(
            "The strategy has cut these batches up already, and a batch is drawn, clipped and counted as a whole: give "
            "the dataset itself, or its batches, without experimental_distribute_dataset. The devices share each batch."
        )
    strategy = tf.distribute.get_strategy()
    if has_replicas(strategy) and devices_of(model) != model.private_step.devices:
        raise NotPrivate(
            f"This fit is in the scope of a {type(strategy).__name__}, and the model was not compiled in it: make and "
            "compile the model in the scope too, so that its devices share the steps; or call fit outside it."
        )


def refuse_ordinary(model: Any) -> None:
    """Refuses ordinary training in a strategy's scope, for which the variables of a model would need their copies."""
    if model.private_step.devices and has_replicas(strategy := tf.distribute.get_strategy()):
        raise ValueError(
            f"The variables of '{model.name}' have one copy since it was compiled with a mechanism, so the replicas of "
            f"a {type(strategy).__name__} cannot train it: compile and fit it outside the scope, or make a new model."
        )

