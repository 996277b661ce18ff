"""A SavedModel whose large tables are written by the servers that hold them, so that no process holds one whole.

    chief     makes a hollow model, whose large tables have a shape and no values, and writes the SavedModel of it:
              the graph, and the values of all other weights
    server    writes the rows that it holds, a piece after the other, settled in the section that writes them
    chief     merges the indices of all these files

A piece is a slice of a tensor in TensorFlow's own checkpoint format. What loads the SavedModel, which is TensorFlow
alone, puts the slices together and finds the tables as if one process had written them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdp_rec.core.claim.entries import warn_of_ordinary_steps
from tfdp_rec.core.ground.files import remove
from tfdp_rec.core.ground.keras_internals import checkpoint_keys, resource, serving_archive, valueless_variable
from tfdp_rec.distribute.served_model import ServedModel, bytes_of, is_divisible, spec_of
from tfdp_rec.training.release_methods import ReleaseMethods

_PIECE_VALUES = 1 << 24
_MOST_PIECES = 512  # about; what loads a table keeps all their files open, and 1,024 is a usual limit


@contextlib.contextmanager
def hollow_tables(min_bytes: int) -> Iterator[None]:
    """A block in which variables that may be tables, of more bytes than that, are made without values."""
    numbers = itertools.count()

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        spec = spec_of(options["initial_value"], options.get("dtype"))
        if not is_divisible(options, spec) or bytes_of(spec) <= min_bytes:
            return next_creator(**options)
        # Each has a name of its own, by which it is found in what Keras writes.
        return valueless_variable(spec, f"table_by_shards_{next(numbers)}")

    with tf.variable_creator_scope(create), _refuse_reads():
        yield


def export(folder: str, local: Any) -> None:
    """Writes the SavedModel of a hollow model, as its `export` would, without the tables that have no values."""
    if type(local).export is not ReleaseMethods.export:
        raise ValueError(_OWN_EXPORT.format(type(local).__name__))
    warn_of_ordinary_steps(local.privacy_history)
    with _refuse_reads(), local.private_weights.exporting():
        serving_archive(local).write_out(folder, verbose=False)


def write_tables(folder: str, local: Any, served: ServedModel) -> None:
    """Has the servers write the tables that a hollow model's SavedModel lacks."""
    variables, pieces = os.path.join(folder, "variables"), os.path.join(folder, "pieces")
    os.rename(variables, pieces)  # merging moves what it merges
    os.mkdir(variables)
    parts = [os.path.join(pieces, "variables")]
    keys = checkpoint_keys(parts[0])
    pairs = zip(local.weights, served.model.weights, strict=True)
    hollow = [(held, each.path) for mine, each in pairs if not (held := resource(mine)).is_initialized()]
    needed = [(keys[held.name], served.tables[path]) for held, path in hollow if held.name in keys]
    values = max(_PIECE_VALUES, sum(table.shape.num_elements() for _, table in needed) // _MOST_PIECES)
    for key, table in needed:  # what answers read
        for shard, rows in table.chunks(values):
            first, (height, width) = shard.first + int(rows[0]), table.shape
            parts.append(os.path.join(pieces, str(len(parts))))
            shard.server.write({table.path: rows}, parts[-1], key, f"{height} {width} {first},{len(rows)}:-")
            if not os.path.exists(f"{parts[-1]}.index"):
                raise OSError(
                    f"A server wrote to {os.path.dirname(folder)}, but its file is not there: a model is released "
                    "by shards to a file system that the coordinator and all servers share."
                )
    whole = os.path.join(variables, "variables")
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=whole, delete_old_dirs=False)
    remove(pieces)


@contextlib.contextmanager
def _refuse_reads() -> Iterator[None]:
    try:
        yield
    except tf.errors.FailedPreconditionError as problem:
        raise ValueError(_WHOLE_TABLES) from problem


_WHOLE_TABLES = (
    "The model reads its tables when it is made or exported, and by shards no process has a table whole: leave "
    "by_shards out."
)
_OWN_EXPORT = (
    "{} has an export of its own, which by shards would not be called: leave by_shards out, or serve a model without."
)
