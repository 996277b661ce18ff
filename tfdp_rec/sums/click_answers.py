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
    """Probabilities of clicks from released numbers and public values alone."""

    def __init__(self, model: ClickModel):
        super().__init__()
        names = dict.fromkeys(name for crossing in model.counted for name in crossing)
        keys = {name: tf.constant(model.columns[name]) for name in names}
        places = tf.lookup.KeyValueTensorInitializer
        self.tables = {
            name: tf.lookup.StaticHashTable(places(each, tf.range(len(each), dtype=tf.int64)), -1)
            for name, each in keys.items()
        }
        self.crossings = [(crossing, [len(keys[name]) for name in crossing]) for crossing in model.weights]
        self.added = [tf.Variable(np.append(each, 0.0), trainable=False) for each in model.weights.values()]
        found = model.reliability
        self.rate, self.scale, self.offset, self.ends = model.rate, found.scale, found.offset, found.logits[[0, -1]]
        self.serve = tf.function(self._serve, input_signature=[
            {name: tf.TensorSpec([None], each.dtype, name) for name, each in keys.items()}
        ])  # fmt: skip

    def _serve(self, rows: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        places = {name: table.lookup(rows[name]) for name, table in self.tables.items()}
        logits = tf.constant(np.log(self.rate / (1 - self.rate)))
        for (crossing, sizes), added in zip(self.crossings, self.added):
            cells, known = tf.constant(0, tf.int64), tf.constant(True)
            for name, size in zip(crossing, sizes):
                cells, known = cells * size + places[name], known & (places[name] >= 0)
            logits += tf.gather(added, tf.where(known, cells, np.prod(sizes)))  # behind the last: 0
        return {"probability": tf.sigmoid(self.scale * tf.clip_by_value(logits, *self.ends) + self.offset)}


def export(filepath: str | os.PathLike[str], model: ClickModel) -> None:
    """Writes the SavedModel; an older folder stays until this one is complete."""
    answers = ClickAnswers(model)
    with replace_atomically(filepath) as whole:
        tf.saved_model.save(answers, whole, signatures=answers.serve)
