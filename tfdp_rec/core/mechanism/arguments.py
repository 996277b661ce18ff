"""The arguments that the constructors of all mechanisms take, for type checkers and editors.

A mechanism is given either its numbers (`Numbers`) or a plan that completes them (`Planned`): two overloads.
"""

from __future__ import annotations

from typing import Any, NotRequired, Protocol, TypedDict

import keras

from tfdp_rec.core.mechanism.noise.base import NoiseSource
from tfdp_rec.core.mechanism.rules import TableRule
from tfdp_rec.core.sensitivity.weights import Auto


class Plan(Protocol):
    """A `tfdp_rec.PrivatePlan`, which stands on the optimizers."""

    def complete(self, settings: dict[str, Any], /) -> dict[str, Any]:
        """An optimizer's settings, completed from the plan."""


class Options(TypedDict, total=False):
    """What may be left out; documented at `PrivateOptimizer`."""

    momentum: float
    nesterov: bool
    weight_decay: float | None
    dense_optimizer: keras.optimizers.Optimizer | str | None
    table_rule: TableRule | None
    noise: NoiseSource | None
    secure: bool
    name: str | None


class Numbers(Options):
    """What decides clipping and noise, without a plan."""

    l2_norm_clip: float | Auto
    noise_multiplier: float
    expected_batch_size: float


class Planned(Options):
    """A plan, and what is not to be the plan's."""

    plan: Plan
    l2_norm_clip: NotRequired[float | Auto]
    noise_multiplier: NotRequired[float]
    expected_batch_size: NotRequired[float]
