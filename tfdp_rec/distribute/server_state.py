"""What a parameter server keeps of a training, written and read by the server itself.

Files in a folder that coordinator and servers share, one for each piece of each variable, so that neither file nor
memory grows with a table. Writing is one critical section: a step that lands late is in all of a server's files or in
none.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfdp_rec.distribute.sections import Lock
from tfdp_rec.files import rows_at_a_time
from tfdp_rec.optimizers.tables import scatter

_PIECE_VALUES = 1 << 24


class ServerState:
    """Saves and restores the variables of one server, by name."""

    def __init__(self, lock: Lock, variables: Mapping[str, tf.Variable]):
        self._variables = dict(variables)
        self._save = lock.section(self._write)
        self._restore = lock.section(self._read)

    def save(self, folder: str) -> None:
        """Writes the variables' values into a folder, as the server sees it."""
        self._save(tf.constant(folder))

    def restore(self, folder: str) -> None:
        """Sets the variables to what `save` wrote."""
        self._restore(tf.constant(folder))

    def files(self) -> list[str]:
        """The names of the files that `save` writes."""
        return [
            f"{number}-{piece}"
            for number, variable in enumerate(self._variables.values())
            for piece in range(_pieces(variable))
        ]

    def _write(self, folder: tf.Tensor) -> None:
        for number, variable in enumerate(self._variables.values()):
            if _pieces(variable) == 1:
                tf.io.write_file(_file(folder, number, 0), tf.io.serialize_tensor(variable.read_value()))
                continue

            def piece(index: tf.Tensor, number: int = number, variable: tf.Variable = variable) -> tf.Tensor:
                values = tf.gather(variable, _rows(variable, index))
                tf.io.write_file(_file(folder, number, index), tf.io.serialize_tensor(values))
                return index + 1

            _each_piece(variable, piece)

    def _read(self, folder: tf.Tensor) -> None:
        for number, variable in enumerate(self._variables.values()):
            if _pieces(variable) == 1:
                values = tf.io.parse_tensor(tf.io.read_file(_file(folder, number, 0)), variable.dtype)
                variable.assign(tf.ensure_shape(values, variable.shape))
                continue

            def piece(index: tf.Tensor, number: int = number, variable: tf.Variable = variable) -> tf.Tensor:
                values = tf.io.parse_tensor(tf.io.read_file(_file(folder, number, index)), variable.dtype)
                scatter("Update", variable, _rows(variable, index), values)
                return index + 1

            _each_piece(variable, piece)


def _file(folder: tf.Tensor, number: int, piece: tf.Tensor | int) -> tf.Tensor:
    return tf.strings.join([folder, "/", str(number), "-", tf.strings.as_string(piece)])


def _rows_a_piece(variable: tf.Variable) -> int:
    return rows_at_a_time(variable.shape, _PIECE_VALUES)


def _pieces(variable: tf.Variable) -> int:
    """In how many pieces it is written; one, if its shape may change."""
    if not variable.shape.rank:
        return 1
    return max(1, -(-variable.shape[0] // _rows_a_piece(variable)))


def _rows(variable: tf.Variable, piece: tf.Tensor) -> tf.Tensor:
    start = tf.cast(piece, tf.int64) * _rows_a_piece(variable)
    return tf.range(start, tf.minimum(start + _rows_a_piece(variable), variable.shape[0]))


def _each_piece(variable: tf.Variable, act) -> None:  # type: ignore[no-untyped-def]
    start = (tf.constant(0),)
    tf.while_loop(lambda i: i < _pieces(variable), lambda i: (act(i),), start, parallel_iterations=1)
