"""A batch with the proof of its draw, from the sampling to the step that trains on it.

`sampling.batches(fetch)` yields `Drawn(batch, draw)`. Amplification by sampling is claimed for a step only if

- *rows*: every tensor of the batch but the shared ones has one row for each unit that was drawn;
- *fresh*: it is the next draw of its iteration, 0, 1, 2, …: no draw is used twice, by any model, none comes from a file
  that another process wrote, and none is left out, since the choice may depend on the rows; a new iteration may begin
  at any time;
- *blind*: what the batch shares comes from a function that is not given the indices.

The sampling, whether it had a seed, and the keys of shared entries are part of the batch's *type*, so that they are
known when a step is traced. Number and size of the draw are tensors, and are checked in the step's graph, before
anything is computed from the batch. That a row belongs to its index cannot be checked: see docs/assumptions.md.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.core.claim.fetch import join, spec_of
from tfdp_rec.core.claim.names import NAMED, PROCESS, process_of
from tfdp_rec.core.ground.graph_checks import depend_on, require, require_all, sentence_of
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.sensitivity.batches import example_leaves, open_specs, refuse_padding
from tfdp_rec.core.sensitivity.independence import Reading, Shared, Walk

_NONE = -1
_TAKE_APART = ("tensorflow.", "keras.", "collections", "tfdp_rec.")  # modules that take any structure apart, and ours


class Draw(tf.experimental.ExtensionType):
    """The draw that a batch came from.

    Attributes:
        sampling: Random name of the sampling object.
        seeded: Whether the draw can be repeated.
        shared: Keys of the batch's entries that came from the sampling's `shared`.
        iteration: Random name of the iteration (`names.py`).
        number: Number of the draw within its iteration.
        size: Number of rows: one for each unit drawn, or for each seat.
        place: Place in an order, counted from its beginning; the number, where there is no order.
        present: Whether each row has data. The others contribute nothing: no gradient, no loss, no vote.
    """

    sampling: str
    seeded: bool
    shared: tuple[str, ...]
    iteration: tf.Tensor
    number: tf.Tensor
    size: tf.Tensor
    place: tf.Tensor
    present: tf.Tensor

    class Spec:
        """The type of a draw; refuses to take batches apart or to join them, with the reason."""

        def _batch(self, *_: Any) -> Any:
            raise NotPrivate(_NOT_DIVISIBLE)

        _unbatch = _to_batched_tensor_list = _batch
        shape = property(_batch)

    def _take(self, *_: Any, **__: Any) -> Any:
        raise NotPrivate(_NOT_TAKEN_APART)

    __getitem__ = __tf_tensor__ = _take  # by code that takes the pair of batch and draw for inputs and labels


class Drawn(NamedTuple):
    """An element of `sampling.batches(...)`: a batch and its draw.

    Example:
        >>> from tfdp_rec.privacy import PoissonSampling
        >>> drawn = next(iter(PoissonSampling(4, 4).batches(lambda indices: {"unit": indices})))
        >>> sorted(drawn.batch["unit"].numpy().tolist()), int(drawn.draw.size), int(drawn.draw.number)
        ([0, 1, 2, 3], 4, 0)
    """

    batch: Any
    draw: Draw

    # A model, loop or train_step that is not ours takes it for (x, y).
    def __getitem__(self, key: Any) -> Any:
        raise NotPrivate(_NOT_TAKEN_APART)

    def __iter__(self) -> Iterator[Any]:
        if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_TAKE_APART):
            raise NotPrivate(_NOT_TAKEN_APART)
        return tuple.__iter__(self)

    def __repr__(self) -> str:
        return "<batch of plan.batches(fetch), for fit of a tfdp_rec.PrivateModel; its rows are in .batch>"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a step's batch came from.

    Attributes:
        sampling: Sampling that drew the batch; None if that is not proved.
        seeded: Whether the draw can be repeated.
        place: Place of the batch in an order; int64 tensor.
        draw: Iteration and number of the draw; int64 tensors.
    """

    sampling: Any = None
    seeded: bool = False
    place: Any = 0
    draw: tuple[Any, Any] = (_NONE, _NONE)


NO_SAMPLING = Source()


def as_tensors(data: Any) -> Any:
    """A drawn batch as tensors alone, for transformations that refuse its type; other data unchanged."""
    if not isinstance(data, Drawn):
        return data
    return data.batch, (data.draw.iteration, data.draw.number, data.draw.size, data.draw.place, data.draw.present)


def as_drawn(spec: Any, data: Any) -> Any:
    """The inverse of `as_tensors`, for data of an element spec."""
    if not isinstance(spec, Drawn):
        return data
    batch, numbers = data
    return Drawn(batch, Draw(spec.draw.sampling, spec.draw.seeded, spec.draw.shared, *numbers))


def strip_draw(data: Any) -> Any:
    """A batch without its draw, or the spec of one; other data unchanged."""
    if isinstance(data, Drawn):
        return data.batch
    if any(isinstance(leaf, (Draw, Draw.Spec)) for leaf in tf.nest.flatten(data)):  # type: ignore[attr-defined]
        raise NotPrivate(
            "The batch was taken out of its Drawn(batch, draw) after sampling. To change the rows give "
            "sampling.batches(fetch, map=function), which leaves the draw in its place."
        )
    return data


def source_of(spec: Any, shared: Sequence[str] | None = None, expected_batch_size: float | None = None) -> Source:
    """The source of batches of a spec, as far as their type tells."""
    batch = strip_draw(spec)
    if not isinstance(spec, Drawn):
        return NO_SAMPLING
    draw, sampling = spec.draw, NAMED.get(spec.draw.sampling)
    if sampling is None:
        raise NotPrivate(
            "These batches were drawn by a sampling object that is gone or of another process: they may have been used "
            "before. Draw anew, with sampling.batches(fetch)."
        )
    if shared is not None:
        _refuse_seeing_shared(batch, draw.shared, shared)
    if expected_batch_size is not None and sampling.expected_batch_size != expected_batch_size:
        raise ValueError(
            f"The sampling's expected_batch_size is {sampling.expected_batch_size} and the optimizer's "
            f"{expected_batch_size:g}: give both the same, or say it once with tfdp_rec.PrivatePlan."
        )
    return Source(sampling, draw.seeded)


def check_batch(data: Any, shared: Sequence[str], expected_batch_size: float | None = None) -> tuple[Any, Source]:
    """The data of a step and their source; in the graph, the batch is computed only after the checks of its draw."""
    source = source_of(data, shared, expected_batch_size)
    if source.sampling is None:
        return strip_draw(data), source
    batch, draw = data
    rows = _check_rows(example_leaves(batch, shared), draw.size)
    with tf.control_dependencies(rows):
        used = _mark_used(draw)
    with tf.control_dependencies(used):
        batch = tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), batch)
        place = depend_on(draw.place, rows)
        return Drawn(batch, draw), dataclasses.replace(source, place=place, draw=(draw.iteration, draw.number))


def check_rows(data: Any, shared: Sequence[str]) -> Any:
    """The batch of a worker's step, after the checks of rows and type; the coordinator checks *fresh*."""
    if not isinstance(data, Drawn):
        return strip_draw(data)
    _refuse_seeing_shared(data.batch, data.draw.shared, shared)
    with tf.control_dependencies(_check_rows(example_leaves(data.batch, shared), data.draw.size)):
        return data._replace(batch=tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), data.batch))


def draw_numbers(data: Any) -> tf.Tensor:
    """Iteration and number of a batch's draw, int64 [2]; minus ones where there is no draw."""
    found = (data.draw.iteration, data.draw.number) if isinstance(data, Drawn) else (_NONE, _NONE)
    return tf.stack([tf.cast(number, tf.int64) for number in found])


class SeenDraws:
    """Check of the draws that workers have trained on: none twice. Those of a worker that died may be missing."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def add(self, iteration: int, number: int) -> None:
        """Notes a draw that was trained on; refuses one that was before, or that another process drew."""
        if iteration == _NONE:
            return
        if process_of(iteration) != PROCESS:
            raise NotPrivate(f"{_REFUSED}draw {number}{_KEPT[:-2]}.")
        if number <= self._last.get(iteration, _NONE):
            raise NotPrivate(f"{_REFUSED}draw {number}{_USED[:-2]}.")
        self._last[iteration] = number


def _refuse_seeing_shared(batch: Any, blind: Sequence[str], shared: Sequence[str]) -> None:
    seeing = [key for key in shared if key in _keys(batch) and key not in blind]
    if seeing:
        raise NotPrivate(
            f"The model takes '{seeing[0]}' to be the same for all examples (shared_inputs), but fetch made it, which "
            "sees the drawn units. Leave it out of fetch and give a function without arguments that returns a dict "
            f"with it: sampling.batches(fetch, shared=lambda: {{'{seeing[0]}': ...}})."
        )
    unknown = [key for key in blind if key not in shared]
    if unknown:
        raise NotPrivate(
            f"sampling.batches(shared=...) gives '{unknown[0]}', which the model does not name in its shared_inputs: "
            f"set shared_inputs = ('{unknown[0]}',) in the model's class, or leave it out."
        )


def _keys(batch: Any) -> set[str]:
    """Keys of all dicts of a nest."""
    if isinstance(batch, dict):
        return set(batch).union(*(_keys(value) for value in batch.values()))
    if isinstance(batch, (tuple, list)):
        return set().union(*(_keys(value) for value in batch))
    return set()


# What a step's graph checks.


def _check_rows(leaves: list[tf.Tensor], size: tf.Tensor) -> list[Any]:
    for leaf in leaves:
        if leaf.shape.rank == 0:
            raise NotPrivate(
                "A tensor of the sampled batch has no axis for its rows: every tensor must have one row for each unit "
                "drawn. Inputs that a batch shares come from sampling.batches(fetch, shared=...)."
            )
    rows = tf.stack([tf.shape(leaf, tf.int64)[0] for leaf in leaves])
    found = tf.strings.reduce_join(tf.strings.as_string(rows), separator=", ")
    return require(rows == size, _REFUSED, "the sampling drew ", size, " units and gives tensors of ", found, _ROWS)


def _mark_used(draw: Draw) -> list[Any]:
    """Checks that a draw is the next of its iteration, and marks it as used."""
    last = tf.ensure_shape(_last_numbers().lookup(draw.iteration), [])
    here = process_of(draw.iteration) == PROCESS
    number = tf.strings.as_string(draw.number)
    checks = require_all(
        (draw.number > last, _REFUSED, "draw ", number, _USED),
        (here, _REFUSED, "draw ", number, _KEPT),
        (draw.number <= last + 1, _REFUSED, "after draw ", last, " of an iteration comes draw ", number, _LEFT_OUT),
    )
    with tf.control_dependencies(checks):
        return [_last_numbers().insert(draw.iteration, depend_on(draw.number, checks))]


@functools.cache
def _last_numbers() -> Any:
    """The last draw trained on, by iteration; kept as long as the process lives, for all models."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, _NONE)


# Messages.

_REFUSED = "Refused batch: "
_ROWS = " rows. Every unit gives exactly one row: cut, repeat, filter or regroup rows before sampling, not after.\n"
_USED = (
    " of this iteration was trained on before. A draw is good for one step: leave out cache() and repeat(), or, to "
    "train several models on the same batches, give each a sampling of its own.\n"
)
_KEPT = (
    " was drawn by another process and kept in a file, by cache(filename), snapshot or save: it may have been trained "
    "on. Every process draws its own: leave these out after sampling.\n"
)
_LEFT_OUT = (
    ": the draws between were left out, and the choice may depend on their rows. Leave out filter(), skip() and "
    "shuffle() after sampling, or begin iterating anew: iter(batches).\n"
)
_CHOOSING = (
    "The batches went through {} after sampling, which could choose among draws by their rows, or mix the rows, and ε "
    "is that of draws as they come. Leave in prefetch, take and repeat; change rows in their place with "
    "sampling.batches(fetch, map=function), and choose rows before sampling."
)
_NOT_TAKEN_APART = (
    "A batch of plan.batches(fetch) is taken by a private step, and no private step took this one: make the model a "
    "tfdp_rec.PrivateModel(inputs, outputs), or put the mix-in first, class Mine(tfdp_rec.PrivateTraining, "
    "keras.Model), without a train_step of its own, and call fit. In a loop of your own call "
    "model.train_on_batch(batch); the rows are in batch.batch."
)
_NOT_DIVISIBLE = (
    "A sampled batch cannot be regrouped (batch, unbatch, padded_batch, ...): the units drawn together are what the "
    "guarantee is about. Set expected_batch_size in the sampling, or microbatch_size in compile."
)


@contextlib.contextmanager
def refusals_in_words() -> Iterator[None]:
    """Raises TensorFlow's errors about failed checks with their sentence alone; one about a batch as `NotPrivate`."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.UnknownError) as problem:
        found = re.search(rf"{_REFUSED}([^\n]*?)\.(?=\\n|\n|$)", str(problem))
        if found is None and (said := sentence_of(problem)):
            raise type(problem)(problem.node_def, problem.op, said) from None
        if found is None:
            raise
        raise NotPrivate(f"{_REFUSED}{found.group(1)}.") from problem


def generate(
    drawn: Callable[[], Iterator[Any]],
    signature: Any,
    sampling: Any,
    shared: Callable[[], dict[str, Any]] | None,
    map: Callable[..., Any] | None,  # noqa: A002
    seeded: bool = False,
) -> tf.data.Dataset:
    """Elements (numbers of `Draw`, rows) of a generator as `Drawn`, with what the batch shares."""
    _collect_at_exit()
    keys: list[str] = []
    if shared is not None:
        example = shared()
        keys, signature = sorted(example), join(signature, spec_of(example))

    def elements() -> Iterator[Any]:
        for numbers, rows in drawn():
            yield numbers, rows if shared is None else join(rows, shared())

    numbers = (*(tf.TensorSpec([], tf.int64),) * 4, tf.TensorSpec([None], tf.bool))
    rows = tf.data.Dataset.from_generator(elements, output_signature=(numbers, signature))
    return dataset_of(rows, sampling, seeded, keys, map)


@functools.cache
def _collect_at_exit() -> None:
    # Iterators in reference cycles, as Keras leaves one, would be ended after Python is, with a page of warnings.
    atexit.register(gc.collect)


def dataset_of(
    rows: tf.data.Dataset, sampling: Any, seeded: bool, shared: Sequence[str], map: Callable[..., Any] | None  # noqa: A002
) -> tf.data.Dataset:
    """Elements (numbers of `Draw`, batch) as `Drawn`, each batch after `map`."""
    change = None if map is None else _read_map(map, rows.element_spec[1], shared)

    def attach_draw(numbers: tuple[tf.Tensor, ...], batch: Any) -> Drawn:
        if change is not None:
            with tf.control_dependencies(_check_rows(example_leaves(batch, shared), numbers[2])):
                batch = tf.nest.map_structure(tf.identity, batch)
            batch = change(*batch) if type(batch) is tuple else change(batch)
        return Drawn(batch, Draw(sampling.name, seeded, tuple(shared), *numbers))

    return note_every_draw(rows.map(attach_draw))


def _read_map(map: Callable[..., Any], spec: Any, shared: Sequence[str]) -> Any:  # noqa: A002
    """`map` as a graph; refused unless row i of its result is made of row i alone, and what is shared of no row."""
    spec = open_specs(spec, shared)
    apart = lambda *given: map(*tf.nest.map_structure(lambda leaf: leaf, given))  # noqa: E731 (it may pop labels)
    traced = tf.function(apart).get_concrete_function(*(spec if type(spec) is tuple else [spec]))
    walk, leaves = Walk(Reading(), traced.graph), example_leaves(spec, shared)
    for leaf, tensor in zip(tf.nest.flatten(spec), traced.graph.inputs):
        of_rows = any(leaf is one for one in leaves)
        if of_rows or not isinstance(leaf, tf.TensorSpec):  # which is several inputs, and would shift the pairs
            refuse_padding(leaf)
        walk.leaf(tensor, of_rows)
    walk.read()
    if traced.graph.variables:  # a metric, or what a callback writes, may hold the data of others
        raise NotPrivate(
            f"map reads the variable '{traced.graph.variables[0].name}', which may hold something of other examples: "
            "give it the numbers, tf.constant(variable.numpy())."
        )
    for path, tensor in keras.tree.flatten_with_path(traced.structured_outputs):
        key = next((key for key in path if key in shared), None)
        if key is None:
            refuse_padding(tensor)
            walk.require_rows(tensor, "what map returns")
        elif not isinstance(walk.value(tensor), Shared):
            raise NotPrivate(
                f"map makes '{key}' anew, which the batch shares, and map sees the drawn units: leave it as it is, and "
                "make it in the function that is given as shared=."
            )
    return traced


# A step sees a draw that was left out only by a gap in its iteration. What begins anew leaves no gap: `take_while` and
# `repeat`, or one draw a time that a `filter` keeps or drops, choose among iterations. So the way from the sampling to
# the fit is read, too.


def note_every_draw(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Notes a dataset of this package that gives draws as they come."""
    _EVERY_DRAW.add(dataset)
    return dataset


def refuse_choosing(dataset: Any) -> None:
    """Refuses a dataset of drawn batches in which a transformation could choose among them by their rows."""
    while dataset not in _EVERY_DRAW:
        made_by = type(dataset).__name__.strip("_").removesuffix("Dataset")
        if made_by not in _AS_THEY_COME:
            raise NotPrivate(_CHOOSING.format(made_by))
        (dataset,) = dataset._inputs()


_EVERY_DRAW: weakref.WeakSet[tf.data.Dataset] = weakref.WeakSet()
# The last three leave out draws, or repeat them, whatever the rows are: a step refuses them when it meets one.
_AS_THEY_COME = {"Prefetch", "Take", "Options", "AssertCardinality", "Repeat"}
_AS_THEY_COME |= {"Cache", "Skip", "Shuffle"}
