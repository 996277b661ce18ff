"""A batch with the proof of its draw, from the sampling to the step that trains on it.

`sampling.batches(fetch)` yields `Drawn(batch, draw)`. Amplification by sampling is claimed for a step only if

- *rows*: every tensor of the batch but the shared ones has one row for each unit that was drawn;
- *fresh*: it is the next draw of its iteration, 0, 1, 2, …: none twice, by whichever model, none that another process
  drew and kept, and none left out, since who leaves out a draw may have looked at it; a new iteration may begin at any
  time;
- *blind*: what the batch shares comes from a function that is not given the indices.

Which sampling drew, whether with a seed, and which entries are shared is part of the batch's *type*, so that it is
known when a step is traced. Number and size of the draw are tensors, and are checked in the step's graph, before
anything is computed from the batch. Nobody can check that a row belongs to its index: see docs/assumptions.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdp_rec.clipping.batches import example_leaves
from tfdp_rec.demands import demand, given
from tfdp_rec.refused import NotPrivate
from tfdp_rec.sampling.iterations import PROCESS, process_of
from tfdp_rec.sampling.schemes import Sampling, sampling_named

_NONE = -1


class Draw(tf.experimental.ExtensionType):
    """Which draw of which sampling a batch is.

    Attributes:
        sampling: name of the sampling object, random.
        seeded: whether the draw can be repeated.
        shared: keys of the batch that came from the sampling's `shared`.
        iteration: of the sampling's batches, a random number (`iterations.py`).
        number: of the draw within its iteration.
        size: how many units were drawn.
        place: in an order, counted from its beginning; its number, where there is no order.
    """

    sampling: str
    seeded: bool
    shared: tuple[str, ...]
    iteration: tf.Tensor
    number: tf.Tensor
    size: tf.Tensor
    place: tf.Tensor

    class Spec:
        """Its type; says why a drawn batch cannot be taken apart or put together with others."""

        @property
        def shape(self) -> Any:
            raise NotPrivate(_NOT_DIVISIBLE)

        def _batch(self, batch_size: Any) -> Any:
            raise NotPrivate(_NOT_DIVISIBLE)

        def _unbatch(self) -> Any:
            raise NotPrivate(_NOT_DIVISIBLE)

        def _to_batched_tensor_list(self, value: Any) -> Any:
            raise NotPrivate(_NOT_DIVISIBLE)


class Drawn(NamedTuple):
    """An element of `sampling.batches(...)`: a batch, and the draw that it is.

    Example:
        >>> from tfdp_rec.privacy import PoissonSampling
        >>> drawn = next(iter(PoissonSampling(4, 4).batches(lambda indices: {"unit": indices})))
        >>> sorted(drawn.batch["unit"].numpy().tolist()), int(drawn.draw.size), int(drawn.draw.number)
        ([0, 1, 2, 3], 4, 0)
    """

    batch: Any
    draw: Draw


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a step's batch came from.

    Attributes:
        sampling: what drew it; None if nothing proves that a sampling did.
        seeded: whether the draw can be repeated.
        begins: int64 tensor, 1 if the batch is the first of its iteration.
        place: int64 tensor, of the batch in an order.
    """

    sampling: Sampling | None = None
    seeded: bool = False
    begins: Any = 0
    place: Any = 0


NO_SAMPLING = Source()


def as_tensors(data: Any) -> Any:
    """A drawn batch without what its type says, for transformations that know tensors alone; other data as they are."""
    if not isinstance(data, Drawn):
        return data
    return data.batch, (data.draw.iteration, data.draw.number, data.draw.size, data.draw.place)


def as_drawn(spec: Any, data: Any) -> Any:
    """The inverse of `as_tensors`.

    Args:
        spec: the element spec that the data had.
        data: what `as_tensors` made of an element.
    """
    if not isinstance(spec, Drawn):
        return data
    batch, numbers = data
    return Drawn(batch, Draw(spec.draw.sampling, spec.draw.seeded, spec.draw.shared, *numbers))


def undrawn(data: Any) -> Any:
    """A batch without its draw, or the spec of one; other data as they are.

    Raises:
        NotPrivate: for a draw that is not where `sampling.batches` put it.
    """
    if isinstance(data, Drawn):
        return data.batch
    if any(isinstance(leaf, (Draw, Draw.Spec)) for leaf in tf.nest.flatten(data)):  # type: ignore[attr-defined]
        raise NotPrivate(
            "The batch was taken out of its Drawn(batch, draw) after sampling. To change the rows give "
            "sampling.batches(fetch, map=function), which leaves the draw in its place."
        )
    return data


def source_of(spec: Any, shared: Sequence[str] | None = None, expected_batch_size: float | None = None) -> Source:
    """Where batches of a spec come from, as far as their type tells.

    Args:
        spec: a batch or an element spec; perhaps `Drawn`.
        shared: keys that the model takes to be shared by the batch, if that is known.
        expected_batch_size: the optimizer's, if that is known.

    Raises:
        NotPrivate: for batches of a sampling that this process does not know, or whose shared inputs are not blind.
        ValueError: if the sampling expects another batch size than the optimizer.
    """
    batch = undrawn(spec)
    if not isinstance(spec, Drawn):
        return NO_SAMPLING
    draw, sampling = spec.draw, sampling_named(spec.draw.sampling)
    if sampling is None:
        raise NotPrivate(
            "These batches were drawn by a sampling object that is gone or of another process: nobody knows whether "
            "they were used before. Draw anew, with sampling.batches(fetch)."
        )
    if shared is not None:
        _refuse_seeing_shared(batch, draw.shared, shared)
    if expected_batch_size is not None and sampling.expected_batch_size != expected_batch_size:
        raise ValueError(
            f"The sampling's expected_batch_size is {sampling.expected_batch_size} and the optimizer's "
            f"{expected_batch_size:g}: give both the same, or say it once with tfdp_rec.PrivatePlan."
        )
    return Source(sampling, draw.seeded)


def opened(data: Any, shared: Sequence[str], expected_batch_size: float | None = None) -> tuple[Any, Source]:
    """The batch of a step and where it came from; the batch exists only once its draw was found good.

    Args:
        data: what the dataset gave, perhaps `Drawn`.
        shared: keys that the model takes to be shared by the batch.
        expected_batch_size: the optimizer's.

    Raises:
        NotPrivate: as `source_of`; in the step, for rows or draws that are not what the module's head asks for.
    """
    source = source_of(data, shared, expected_batch_size)
    if source.sampling is None:
        return undrawn(data), source
    batch, draw = data
    rows = _check_rows(example_leaves(batch, shared), draw.size)
    with tf.control_dependencies(rows):
        taken = _take(draw)
    with tf.control_dependencies(taken):
        batch = tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), batch)
        begins = given(tf.cast(tf.equal(draw.number, 0), tf.int64), rows)
        return batch, dataclasses.replace(source, begins=begins, place=draw.place)


def check_rows(data: Any, shared: Sequence[str]) -> Any:
    """The batch of a worker's step: rows and type are checked; `fresh` is for who knows all workers' draws.

    Args:
        data: what the dataset gave.
        shared: keys that the model takes to be shared by the batch.
    """
    if not isinstance(data, Drawn):
        return undrawn(data)
    _refuse_seeing_shared(data.batch, data.draw.shared, shared)
    with tf.control_dependencies(_check_rows(example_leaves(data.batch, shared), data.draw.size)):
        return tf.nest.map_structure(lambda v: v if v is None else tf.identity(v), data.batch)


def draw_numbers(data: Any) -> tf.Tensor:
    """Iteration and number of a batch's draw, int64 [2]; of no draw, minus ones."""
    found = (data.draw.iteration, data.draw.number) if isinstance(data, Drawn) else (_NONE, _NONE)
    return tf.stack([tf.cast(number, tf.int64) for number in found])


class SeenDraws:
    """The draws of workers, looked at after their steps: each good for one. A worker that dies may leave some out.

    Example:
        >>> from tfdp_rec.sampling.iterations import new_iteration
        >>> seen, iteration = SeenDraws(), new_iteration()
        >>> seen.add(iteration, 0), seen.add(iteration, 2)
        (None, None)
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def add(self, iteration: int, number: int) -> None:
        """Notes a draw that was trained on.

        Raises:
            NotPrivate: it was trained on before, or is of another process.
        """
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
            "sees who was drawn. Leave it out of fetch and give a function without arguments that returns a dict with "
            f"it: sampling.batches(fetch, shared=lambda: {{'{seeing[0]}': ...}})."
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
    checks: list[Any] = []
    for leaf in leaves:
        if leaf.shape.rank == 0:
            raise NotPrivate(
                "A tensor of the sampled batch has no axis for its rows: every tensor has one row for each unit drawn, "
                "but those of sampling.batches(fetch, shared=...)."
            )
        rows = tf.shape(leaf, tf.int64)[0]
        checks += demand(
            rows == size, _REFUSED, "the sampling drew ", size, " units and gives a tensor of ", rows, " rows. Every "
            "unit gives exactly one row: cut, repeat, filter or regroup rows before sampling, not after.\n",
        )  # fmt: skip
    return checks


def _take(draw: Draw) -> list[Any]:
    """Marks a draw as used, once it was found to be the next of its iteration."""
    last = _last_numbers().lookup(draw.iteration)
    here = process_of(draw.iteration) == PROCESS
    checks = demand(draw.number > last, _REFUSED, "draw ", draw.number, _USED)
    checks += demand(here, _REFUSED, "draw ", draw.number, _KEPT)
    gap = [_REFUSED, "after draw ", last, " of an iteration comes draw ", draw.number, _LEFT_OUT]
    checks += demand(draw.number <= last + 1, *gap)
    with tf.control_dependencies(checks):
        return [_last_numbers().insert(draw.iteration, given(draw.number, checks))]


class _Process:
    """What is kept as long as the process lives."""

    last_numbers: Any = None


def _last_numbers() -> Any:
    """The last draw trained on, by iteration."""
    if _Process.last_numbers is None:
        with tf.init_scope(), tf.device("CPU:0"):
            _Process.last_numbers = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, _NONE)
    return _Process.last_numbers


# Sentences.

_REFUSED = "Refused batch: "
_USED = (
    " of this iteration was trained on before. A draw is good for one step: leave out cache() and repeat(), or, to "
    "train several models on the same batches, give each a sampling of its own.\n"
)
_KEPT = (
    " was drawn by another process and kept in a file, by cache(filename), snapshot or save: nobody knows whether it "
    "was trained on. Every process draws its own: leave these out after sampling.\n"
)
_LEFT_OUT = (
    ": what is between was left out, and who leaves out a draw may have looked at it. Leave out filter(), skip() and "
    "shuffle() after sampling, or begin iterating anew: iter(batches).\n"
)
_NOT_DIVISIBLE = (
    "A sampled batch cannot be regrouped (batch, unbatch, padded_batch, ...): the units drawn together are what the "
    "guarantee is about. Set expected_batch_size in the sampling, or microbatch_size in compile."
)


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Turns what a step's graph, or a data pipeline, says of a refused batch into one sentence."""
    try:
        yield
    except (tf.errors.InvalidArgumentError, tf.errors.UnknownError) as problem:
        found = re.search(rf"{_REFUSED}([^\n]*?)\.(?=\\n|\n|$)", str(problem))
        if found is None:
            raise
        raise NotPrivate(f"{_REFUSED}{found.group(1)}.") from problem


Map = Callable[..., Any]


def dataset_of(rows: tf.data.Dataset, sampling: Sampling, seeded: bool, shared: Sequence[str], map: Map | None) -> Any:  # noqa: A002
    """Elements ((iteration, number, size, place), batch) as `Drawn`.

    Args:
        rows: the elements.
        sampling: what drew them.
        seeded: whether with a seed.
        shared: keys that came from the sampling's `shared`.
        map: what to do with each batch first.
    """

    def drawn(numbers: tuple[tf.Tensor, ...], batch: Any) -> Drawn:
        mapped = batch if map is None else map(*batch) if type(batch) is tuple else map(batch)
        return Drawn(mapped, Draw(sampling.name, seeded, tuple(shared), *numbers))

    return rows.map(drawn)
