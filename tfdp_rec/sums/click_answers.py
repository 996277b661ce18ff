"""A `ClickModel` as a SavedModel: values of columns in, probabilities out, by TensorFlow's operations."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdp_rec.core.ground.files import replace_atomically

if TYPE_CHECKING:
    from tfdp_rec.sums.clicks import ClickModel


class ClickAnswers(tf.Module):
    """Probabilities of clicks, from released numbers alone."""

    def __init__(self, model: ClickModel):
        super().__init__()
        self.columns, self.crossings, self.correction = model.columns, list(model.weights), model.reliability
        self.added = [tf.Variable(np.append(each, 0.0), trainable=False) for each in model.weights.values()]
        self.usual = np.log(model.rate / (1 - model.rate))
        padded = [np.pad(each, [(0, 1), (0, 0)]) for each in model.vectors]
        self.vectors = {name: tf.Variable(each, trainable=False) for name, each in zip(model.factors, padded)}
        names = dict.fromkeys(name for crossing in (*self.crossings, model.factors) for name in crossing)
        spec = {name: tf.TensorSpec([None], tf.int64, name) for name in names}
        self.serve = tf.function(self._serve, input_signature=[spec])

    def _serve(self, rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        logits, found = tf.constant(self.usual), self.correction
        for crossing, added in zip(self.crossings, self.added):
            cells, known = tf.constant(0, tf.int64), tf.constant(True)
            for name in crossing:
                ids, size = rows[name], self.columns[name]
                cells, known = cells * size + ids, known & (ids >= 0) & (ids < size)
            logits += tf.gather(added, tf.where(known, cells, len(added) - 1))  # the last: nothing
        if self.vectors:
            logits += tf.reduce_sum(tf.multiply(*(self._vectors_of(name, rows[name]) for name in self.vectors)), axis=1)
        logits = tf.clip_by_value(logits, found.logits[0], found.logits[-1])
        return {"probability": tf.sigmoid(found.scale * logits + found.offset)}

    def _vectors_of(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        size = self.columns[name]
        return tf.gather(self.vectors[name], tf.where((ids >= 0) & (ids < size), ids, size))


def export(filepath: str | os.PathLike[str], model: ClickModel) -> None:
    """Writes the SavedModel; an older folder stays until this one is complete."""
    answers = ClickAnswers(model)
    with replace_atomically(filepath) as whole:
        tf.saved_model.save(answers, whole, signatures=answers.serve)
