"""Sentences of refusals: the operation, the user's own line that made it, the reason and the way out."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import Any

_OWN = str(pathlib.Path(os.path.abspath(__file__)).parents[3]) + os.sep  # the package
_LIBRARIES = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("tensorflow", "keras", "tf_keras"))
_BELOW = tuple(os.path.join("keras", "src", part) + os.sep for part in ("ops", "backend", "utils"))  # wrappers
_LOOKUP = _LIBRARIES[1] + os.path.join("src", "layers", "preprocessing", "index_lookup.py")
_SOFTMAX = _LIBRARIES[0] + os.path.join("python", "ops", "nn_ops.py"), "sparse_softmax_cross_entropy_with_logits"
_INSIDE = os.path.join("sensitivity", "engine.py")  # frames below this one are the model's

REASONS = {
    "mixes": (
        "puts several examples of the batch together, so that one example's gradient depends on the others and "
        "clipping bounds nothing",
        "Compute every example's loss from that example; shared negatives and statistics belong into shared_inputs",
    ),
    "divisor": (
        "adds up over several examples of the batch what the loss is divided by, so that one example's gradient "
        "depends on the others and clipping bounds nothing",
        "Divide by a number that no example decides, such as the places of a row: return keras.ops.mean(loss); or "
        "write per_example_loss(self, data, training), which returns each example's own mean, of shape [batch]",
    ),
    "in batch": (
        "multiplies examples of the batch with each other, so that clipping one's gradient bounds nothing",
        "Draw negatives from the public catalogue: self.items = tfdp_rec.CandidateScores(vocabulary=ids, width=32, "
        "negatives=100); per_example_loss returns self.items.cross_entropy(queries, item_ids). For a tower: "
        "tfdp_rec.TowerScores(tower, candidates, negatives=100)",
    ),
    "size": (
        "lets the number of examples in the batch into a value, so that one example more or less changes all others' "
        "gradients",
        "Return one loss an example and leave averaging to the optimizer, which divides by expected_batch_size",
    ),
    "position": (
        "computes with the place of an example in its batch, which depends on the other examples",
        "Use numbers that are part of the example's own data, and tf.gather(x, ids, batch_dims=1) in place of "
        "gather_nd, x of known lengths beside the batch's",
    ),
    "order": (
        "reads the batch in another order than by example (a reshape or transpose that runs examples together)",
        "Keep the batch as the first axis: reshape [B, T, n] to [B * T, n] or [B, T * n], not to [T, B, n]",
    ),
    "length": (
        "is told by the contents of the batch which shape, order or place its result has",
        "Use fixed lengths: pad in the data pipeline, and mask with tf.where or a product",
    ),
    "branches": (
        "joins a value by example and one that is not, so that the result is neither",
        "Give both branches, or every turn of the loop, tensors of one shape with the batch on one axis",
    ),
    "decides": (
        "runs a loop as often as the contents of the batch say",
        "Run the loop a fixed number of times, and choose between outcomes with tf.where",
    ),
    "branch": (
        "chooses a branch while the graph runs, which is not read",
        "Compute both sides for every example and choose between them with tf.where, or choose in Python",
    ),
    "unknown": (
        "has no rule for how it treats the examples of a batch, or not for these inputs",
        "Write it with operations that have one, or register a rule: both are in docs/privacy-independence.md",
    ),
    "triangle": (
        "takes a triangle of a matrix, for which there is no rule",
        "In place of TFRS' DotInteraction use keras_rs.layers.DotInteraction; else multiply by a constant mask, "
        "tf.constant(np.tril(np.ones([n, n])))",
    ),
    "text": (
        "takes text apart, for which there is no rule",
        "Do it in the data, before training: no weight lies before it. To serve the model, put the layer of the text "
        "in front again: keras.Sequential([text_layer, model])",
    ),
    "narrow": (
        "converts a fraction out of range to a number that depends on its place in the batch",
        "Cast to tf.int32 or tf.int64",
    ),
    "sampler": (
        "draws negatives for a loss that reads the items' table past its layer (tf.nn.sampled_softmax_loss, nce_loss)",
        "Let a layer hold the table and draw: self.items = tfdp_rec.CandidateScores(count, width, negatives=100); "
        "per_example_loss returns self.items.cross_entropy(queries, item_ids). If the table is read elsewhere, too: "
        "tfdp_rec.TowerScores(table, np.arange(count), negatives=100)",
    ),
    "graph": (
        "multiplies a whole table by a graph (as LightGCN does): every score reads every user's edges, so that one "
        "example's edges enter the gradients of all others",
        "No rewriting helps. Recommend from private sums (tfdp-rec train --data log.csv --mechanism spectral), or "
        "train a two-tower: each example's rows of a user and an item, and negatives by tfdp_rec.CandidateScores",
    ),
    "seed": (
        "draws random numbers for the examples from a seed that is not drawn anew",
        "Use a layer of keras.layers, or give the operation a keras.random.SeedGenerator that belongs to the layer",
    ),
    "seed twice": (
        "draws random numbers from a seed that another operation has drawn from, so that examples share their noise",
        "Draw once, or give each operation, and each layer, a seed of its own",
    ),
    "metric": (
        "reads a metric, whose contents depend on all examples so far",
        "Leave metrics out of the loss",
    ),
    "shares": (
        "carries the gradient of something that all examples share, and each example's part in it is unknown",
        "Give the layer one row an example (a position embedding: ids of shape [batch, T]), and put weights of the "
        "model's own into a layer; for a tower of shared candidates, use tfdp_rec.TowerScores",
    ),
    "slice": (
        "carries the gradient of a slice of something that all examples share, and each example's part in it is "
        "unknown",
        "Write tf.expand_dims(rows, 0) for rows[None], tf.squeeze(rows, 1) for rows[:, 0], and look up only the rows "
        "that are used",
    ),
    "unknown length": (
        "repeats a tensor along an axis whose length is not known while the step is traced, and may be 1",
        "Give each of the shared_inputs (negatives, say) a static length, for example [1000] and not [None]: "
        "by tf.ensure_shape",
    ),
    "outside": (
        "uses a tensor that comes neither from the batch nor from the model",
        "Make it part of the batch",
    ),
    "write": (
        "writes to {}, which would leave training without clipping or noise",
        "Keep such state out of the loss. A metric that the loss updates must be an attribute of the model, "
        "self.accuracy = keras.metrics.Mean(); running statistics can be learned before training, from public data",
    ),
    "effect": (
        "has an effect beside its result (Python code, printing, writing files or lookup tables) on private data",
        "Remove it, or do it in the data pipeline; Keras metrics can follow a training's numbers",
    ),
}

WITHOUT_RULE = {
    **dict.fromkeys(("Where", "Unique", "UniqueV2", "UniqueWithCounts", "DynamicPartition"), "length"),
    "MatrixBandPart": "triangle",
    **dict.fromkeys(("L2Loss", "Bincount", "DenseBincount", "Roll"), "mixes"),
    **dict.fromkeys(("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt"), "seed"),
    **dict.fromkeys(("StringLower", "StringUpper", "StringStrip", "RegexReplace", "StaticRegexReplace"), "text"),
    **dict.fromkeys(("StringSplit", "StringSplitV2", "StringNGrams", "StringJoin", "Substr", "UnicodeDecode"), "text"),
    **dict.fromkeys(("UniformCandidateSampler", "LogUniformCandidateSampler", "AllCandidateSampler"), "sampler"),
    **dict.fromkeys(("LearnedUnigramCandidateSampler", "FixedUnigramCandidateSampler"), "sampler"),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), "branch"),
}  # fmt: skip
"""Reasons for operations without a rule that are known to be unfit."""

GRAPHS = "SparseTensorDenseMatMul", "SparseMatrixMatMul"
"""Products that are unfit although no example is in their inputs: a user's edges are no public constant."""

EFFECTS = "Inplace", "Debug", "Copy", "Empty", "FakeParam"
"""Beginnings of the types that TensorFlow does not call stateful, and that write into their inputs or to files, or
give memory as it was left."""


def sentence(operation: Any, reason: str, detail: str = "", subject: str = "", layers: Iterable[str] = ()) -> str:
    """The refusal of one operation."""
    why, way_out = REASONS[reason]
    found = f" (found in {subject})" if subject else ""
    return f"{operation.type} {_place(operation, layers)} {why.format(detail)}{found}. {way_out}."


def cause(operations: Iterable[Any]) -> tuple[Any, str] | None:
    """The first operation that explains why tables are read whole, and the reason; None if there is none."""
    for operation in operations:
        if WITHOUT_RULE.get(operation.type) == "sampler":
            return operation, "sampler"
        dense = operation.type == "MatMul" and not is_gradient(operation) and _is_dense_graph(*operation.inputs)
        if dense or operation.type in GRAPHS:
            return operation, "graph"
    return None


def _is_dense_graph(edges: Any, rows: Any) -> bool:
    # Edges of all users and items times their rows: [n, n], not of the batch and no weight, times [n, width].
    known = edges.shape.rank == rows.shape.rank == 2 and None not in (*edges.shape, *rows.shape)
    constant = edges.op.type in ("Const", "Placeholder")  # a constant of the program is captured by a placeholder
    return known and constant and edges.shape[0] == edges.shape[1] == rows.shape[0] > rows.shape[1]


def _place(operation: Any, layers: Iterable[str]) -> str:
    """The user's line that made the operation, or else the layer and the library's line."""
    made = users_line(operation)
    if made is None and is_gradient(operation):
        operation, gradient = forward(operation), "the gradient of "
        made = users_line(operation)
    else:
        gradient = ""
    if made is not None:
        return f"in {gradient}{made}"
    scopes = operation.name.split("/")
    layer = next((f"layer '{name}'" for name in layers if name in scopes), None)
    line = librarys_line(operation)
    return f"in {gradient}" + ", ".join(part for part in (layer, line) if part) if layer or line else operation.name


def is_gradient(operation: Any) -> bool:
    """Whether an operation is part of a backward pass."""
    return operation.name.startswith("gradient_tape/")


def forward(operation: Any) -> Any:
    """The operation whose gradient this one computes: TensorFlow names gradients by it."""
    path = operation.name.removeprefix("gradient_tape/").split("/")
    known = {o.name: o for o in operation.graph.get_operations()} if is_gradient(operation) else {}
    for length in range(len(path), 0, -1):
        if "/".join(path[:length]) in known:
            return known["/".join(path[:length])]
    return operation


def users_line(operation: Any) -> str | None:
    """File, line and function of the innermost frame below the private step, outside the libraries."""
    for frame in reversed(_frames_of_model(operation)):
        if not _is_library(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.name})"
    return None


def librarys_line(operation: Any) -> str | None:
    """The innermost line of Keras or of this package, without wrappers of operations."""
    for frame in reversed(_frames_of_model(operation)):
        path = frame.filename
        if path.startswith(_OWN) or (_LIBRARIES[1] in path and not any(part in path for part in _BELOW)):
            short = path.rsplit("site-packages" + os.sep, 1)[-1].replace(os.path.dirname(_OWN[:-1]) + os.sep, "")
            return f"{short}:{frame.lineno} ({frame.name})"
    return None


def is_librarys_check(operation: Any) -> bool:
    """Whether an operation is a library's own check that a lookup layer knows its words, or labels have logits' shape.

    Both end a training as an id outside a table does; the kernel of such labels makes the check again.
    """
    frames = list(operation.traceback or ())
    made = next((frame.filename for frame in reversed(frames) if _LIBRARIES[0] not in frame.filename), "")
    of_labels = any(frame.filename.endswith(_SOFTMAX[0]) and frame.name == _SOFTMAX[1] for frame in frames)
    return operation.type == "Assert" and (made.endswith(_LOOKUP) or of_labels)


def _frames_of_model(operation: Any) -> list[Any]:
    """The frames of the model: those below the private step."""
    frames = list(operation.traceback or ())
    inside = [number for number, frame in enumerate(frames) if frame.filename.endswith(_INSIDE)]
    return frames[inside[-1] + 1 :] if inside else frames


def _is_library(filename: str) -> bool:
    return any(name in filename for name in _LIBRARIES) or filename.startswith(_OWN) or filename.startswith("<")
