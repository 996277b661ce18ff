"""The bound of weights whose noise comes late, and the steps that it leaves no room for.

Where a step's noise is less than float32 holds beside a weight, a row that is read stays where it is, and one that is
not moves by the noise of many steps, which tells one from the other. So the weights of such tables have a bound R, and
a step with too little noise beside it is left out or refused:

    R = 4 max(weights as they were released, η s whose grid is kept),    raised to 2¹⁸ η s by a step, or less
    η s ≥ 2⁻¹⁹ R    in every step

Both follow from public numbers: what the rows of a batch hold decides nothing. docs/privacy-noise.md has the proof.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfdp_rec.core.ground.branches import choose
from tfdp_rec.core.ground.graph_checks import HOST, Check, negate, place_on_host
from tfdp_rec.core.ground.keras_internals import learning_rate_of
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import find_withheld, largest_of
from tfdp_rec.core.mechanism.base import Step
from tfdp_rec.core.mechanism.pending import RowMarks
from tfdp_rec.core.mechanism.tables import NO_OWNER, Operations, assign, run_after


class WeightBound:
    """The bound of the weights in an optimizer's tables."""

    def __init__(self, optimizer: Any, marks: RowMarks):
        self.optimizer, self.tables, self._marks = optimizer, optimizer.tables, marks
        self._has_velocity, self._is_scheduled = optimizer.recursion.has_velocity, is_scheduled(optimizer)
        # Of the largest η s, the least that a step may have. A schedule falls far; a velocity carries noise far.
        by_rate = 2.0**-7 if self._is_scheduled else 0.5
        self._least_part = 2.0**-4 if self._has_velocity else by_rate
        # The number of steps that tables have left out since the last warning of it.
        with tf.device(HOST):
            self._left_out = tf.Variable(0, trainable=False, dtype=tf.int64, name="left_out")

    @property
    def room(self) -> float:
        """How many times its noise η s the bound may be in a step."""
        return 2.0**19  # noise takes no weight as far as to twice the bound, where float32 has steps of η s / 8

    @property
    def sizes(self) -> list[tf.Variable]:
        """The largest weight that each table was released with, and what steps raise that to."""
        several = [(table.path, find_withheld(table.variable)) for table in self.tables.values()]
        without = [path for path, places in several if places is None]
        if without:
            raise NotPrivate(NO_OWNER.format(without[0]))
        return [places.bound for _, places in several if places is not None]

    @place_on_host
    def find(self) -> tf.Tensor:
        """The bound ahead of a step."""
        reach = self.optimizer.recursion.reach
        sizes = [size.read_value() for size in self.sizes] + [reach * speed for speed in self._read_speeds()]
        return _GROWTH * tf.reduce_max(tf.stack([*sizes, self._marks.largest.read_value()]))  # whose grid they stand on

    def foresee(self, rate: float, enough: float) -> float:
        """The bound in a training of that largest rate, from what is public ahead of it; or a part that is enough."""
        optimizer = self.optimizer
        scale = rate * optimizer.noise_multiplier * optimizer.l2_norm_clip / optimizer.expected_batch_size
        raised = min(self.room * self._least_part * scale, _AMPLE)
        if raised >= enough:  # to look through large tables takes a while
            return raised
        several = [find_withheld(table.variable) for table in self.tables.values()]
        sizes = [p.bound if p.is_withheld else largest_of(p.rows) for p in several if p is not None]
        return max([raised, *(_GROWTH * float(size) for size in sizes)])

    def _read_speeds(self) -> list[tf.Tensor]:
        """The largest velocity that each table was released with."""
        states = (find_withheld(table.state) for table in self.tables.values() if table.state is not None)
        return [places.bound.read_value() for places in states if places is not None]

    def _find_within(self, step: Step) -> tf.Tensor:
        """The bound in a step, whose noise may raise it."""
        raised = tf.minimum(self.room * self._least_part * tf.abs(step.noise_scale), _AMPLE)
        return tf.maximum(step.bound, raised)

    @place_on_host
    def count(self, step: Step) -> Operations:
        """Raises the bound to that of a step, and counts it if tables leave it out."""
        size, sizes = self._find_within(step) / _GROWTH, self.sizes

        def raise_all() -> tf.Tensor:
            for each in sizes:
                each.assign(size)
            return tf.constant(True)

        least = tf.reduce_min(tf.stack([each.read_value() for each in sizes]))
        raised = choose(negate(least >= size), raise_all, lambda: tf.constant(False))  # in few steps
        is_left_out = tf.cast((step.pace == 0) & (step.learning_rate != 0), tf.int64)
        with run_after([raised]):
            return assign(self._left_out, self._left_out.read_value() + is_left_out)

    @place_on_host
    def limit(self, step: Step) -> tf.Tensor:
        """What no move of a step takes a weight past, float32 (`meeting.within`)."""
        return tf.where(step.stddev == 0, math.inf, tf.cast(self._find_within(step), tf.float32))

    def pace_of(self, learning_rate: tf.Tensor, stddev: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
        """The learning rate of tables in a step of that rate and noise: 0 where they leave the step out."""
        # A schedule that ends at 0 gets there: its last steps are left out.
        if self._has_velocity:  # which would move weights all the same
            return learning_rate
        faint = self._is_faint(tf.cast(learning_rate, tf.float64) * stddev, bound) & (stddev > 0)
        return tf.where(faint, 0.0, learning_rate)

    def check_noise(self, step: Step) -> Check:
        """A check that the noise of a step is enough."""
        scale = tf.cast(step.learning_rate, tf.float64) * step.stddev
        enough = ~self._is_faint(scale, step.bound) | (step.stddev == 0)
        if self._has_velocity:  # which rests as long as no step was made, nor velocity read
            moving = tf.reduce_max(tf.stack([self._marks.largest.read_value(), *self._read_speeds()]))
            return enough | (scale == 0) & (moving == 0), _MOVES_WITHOUT_NOISE
        return enough | (scale == 0) | self._is_scheduled, _TOO_FAINT

    def _is_faint(self, scale: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
        return negate(self.room * tf.abs(scale) >= bound)

    def warn_of_steps_left_out(self) -> None:
        """Warns of the steps that tables have left out since it was last called."""
        left_out = int(self._left_out.numpy())
        self._left_out.assign(0)
        if left_out:
            warnings.warn(_LEFT_OUT.format(left_out), stacklevel=2)


def is_scheduled(optimizer: Any) -> bool:
    """Whether an optimizer's learning rate is a schedule."""
    return isinstance(learning_rate_of(optimizer), keras.optimizers.schedules.LearningRateSchedule)


_AMPLE = 64.0  # a bound that noise does not raise further, so that a rate may fall the more where noise is large
_GROWTH = 4.0  # times the largest weight that was released, a weight may become
_MOVES_WITHOUT_NOISE = (
    "The noise of this step is too small beside the weights, or beside that of earlier steps, and momentum still moves "
    "the weights: none would hide in their last bits which rows were read. Use a larger learning_rate or l2_norm_clip, "
    "end a schedule above a sixteenth of its largest rate, or leave momentum out."
)
_TOO_FAINT = (
    "The noise of this step is less than a hundred-thousandth of the largest weight, or much less than that of an "
    "earlier step: in float32 a row that is read would not move, and one that is not read would, by the noise of many "
    "steps. Use a larger learning_rate or l2_norm_clip, or DPSGD; before you lower a learning rate, call "
    "model.settle(), or give a keras.optimizers.schedules.LearningRateSchedule."
)
_LEFT_OUT = (
    "Tables left out {} steps of a low learning rate, since the last release, whose noise was too small beside their "
    "weights or beside that of earlier steps (docs/privacy-noise.md). If it was not the end of a schedule, use a "
    "larger learning_rate or l2_norm_clip, or DPSGD."
)
