"""Runs a model's layers under recording: which calls were made, with what inputs, and what to differentiate.

For the length of one `with recording(...)` every layer that owns trainable weights has `call` replaced on the instance
(Keras looks it up there first). The replacement runs the layer through its rule and notes the call. Nothing else of the
model changes, so any Keras model works: functional, subclassed, nested, with layers called several times.

What cannot be handled exactly is refused here, by name: it would make a gradient escape the clip.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.clipping import rules
from tfdp_rec.clipping.rules import NO_BATCH, Call
from tfdp_rec.demands import demand
from tfdp_rec.keras_internals import added_losses, layers_within, own_weights, parts, random_states, resource
from tfdp_rec.noise.system_words import system_words
from tfdp_rec.refused import NotPrivate

BeforeRead = Callable[[keras.Variable, tf.Tensor], None]


def no_settling(variable: keras.Variable, ids: tf.Tensor) -> None:
    """What happens before a table is read when nothing is pending: nothing."""


def guard_of(model: keras.Model) -> BeforeRead:
    """What must be done before the model's tables are read: by duck typing, since it is of a higher floor."""
    return getattr(getattr(model, "release", None), "before_read", no_settling)


class Unit(NamedTuple):
    """A layer to record whole: with its rule, or with the reason why it has none."""

    layer: keras.layers.Layer
    rule: rules.Rule | None
    refusal: str = ""


def units(model: keras.Model) -> list[tuple[keras.layers.Layer, rules.Rule]]:
    """The layers to record, each with its rule: the outermost ones that a rule covers whole.

    Args:
        model: a built Keras model.

    Raises:
        NotPrivate: for a layer that mixes examples, or weights that no rule covers.
    """
    found = []
    for unit in units_and_refusals(model):
        if unit.rule is None:
            raise NotPrivate(unit.refusal)
        found.append((unit.layer, unit.rule))
    return found


def units_and_refusals(model: keras.Model) -> list[Unit]:
    """As `units`, those that are refused first, and with the reason.

    Args:
        model: a built Keras model.
    """
    whys = [(layer, rules.refusal(layer)) for layer in layers_within(model)]
    refused = [Unit(one, None, f"Layer '{one.name}' ({type(one).__name__}) {why}.") for one, why in whys if why]
    seen = {id(unit.layer) for unit in refused}
    found: list[Unit] = []

    def visit(layer: keras.layers.Layer) -> None:
        if not layer.trainable_variables or id(layer) in seen:
            return
        rule = rules.rule_for(layer)
        if rule is None and own_weights(layer) and layer is not model:
            seen.add(id(layer))
            found.append(_universal_or_refused(layer))
        elif rule is not None:
            seen.add(id(layer))
            found.append(Unit(layer, rule))
        else:
            for child in parts(layer):
                visit(child)

    visit(model)
    return [*refused, *sorted(found, key=lambda unit: unit.rule is not None)]


def _universal_or_refused(layer: keras.layers.Layer) -> Unit:
    names = ", ".join(v.path for v in own_weights(layer))
    if isinstance(layer, keras.Model):
        why = f"Model '{layer.name}' owns weights itself ({names}); put them into a layer of their own."
        return Unit(layer, None, why)
    if any(isinstance(part, keras.layers.Embedding) for part in layers_within(layer)):
        why = (
            f"Layer '{layer.name}' owns weights ({names}) beside an Embedding, so each example's gradient would have "
            "the table's shape; put the weights into a layer of their own."
        )
        return Unit(layer, None, why)
    return Unit(layer, rules.UNIVERSAL)


class Recording:
    """The calls made while recording, and the tape they were made under.

    A second tape, stopped for the length of each call, notes the variables that are read outside all calls.
    """

    def __init__(
        self,
        tape: tf.GradientTape | None,
        batch_size: tf.Tensor | None,
        before_read: BeforeRead,
        direct: Sequence[keras.Variable] = (),
    ):
        self.calls: list[Call] = []
        self.direct = list(direct)  # the model's own weights, which its loss reads itself
        self.outside = tf.GradientTape()
        self.settling: set[int] = set()  # numbers of the operations that settle rows before they are read
        self._tape, self._batch_size, self._before_read = tape, batch_size, before_read
        self._within = False
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def run(self, layer: keras.layers.Layer, rule: rules.Rule, original: Callable[..., Any], args: Any, kw: Any) -> Any:
        if self._within:  # part of a layer that is recorded whole
            return original(*args, **kw)
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise NotPrivate(
                f"Layer '{layer.name}' is called inside a loop or a branch, where its calls cannot be recorded; move "
                "it out, or register a rule for the layer that loops."
            )
        call = Call(layer, rule, args, kw)
        self._within = True
        try:
            hooks = rules.Hooks(lambda t: self._watch(call, t), self._settle)
            with self.outside.stop_recording():
                output = rule.run(call, original, hooks)
        finally:
            self._within = False
        self.calls.append(call)
        return output

    def _settle(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """Settles rows about to be read, and notes which operations did: they are ours, not the model's."""
        start = self._made()
        self._before_read(variable, ids)
        self.settling.update(range(start, self._made()))

    def _made(self) -> int:
        return 0 if self._graph is None else len(self._graph.get_operations())

    def refuse_reads_outside(self, model: keras.Model) -> None:
        """A variable that is read past its layer's call (`matmul(h, layer.kernel)`) has a gradient nobody clips."""
        read = {id(variable) for variable in self.outside.watched_variables()}
        own = {id(variable) for variable in self.direct}
        others = [v for v in model.trainable_variables if id(v) not in own]
        escaped = [v.path for v in others if id(rules.resource(v)) in read]
        if escaped:
            raise NotPrivate(
                f"Trainable variables are read outside a layer call that can be recorded: {', '.join(escaped)}. Move "
                "what reads them into the call of the layer that owns them (keras.layers.ReversibleEmbedding gives "
                "logits from an embedding table)."
            )

    def _watch(self, call: Call, tensor: tf.Tensor) -> tf.Tensor:
        if self._batch_size is not None and tf.executing_eagerly():  # in a graph, the reading sees to it
            demand(tf.shape(tensor)[0] == self._batch_size, f"Layer '{call.layer.name}' {NO_BATCH}")
        if self._tape is not None:
            self._tape.watch(tensor)
        call.watched.append(tensor)
        return tensor

    def tables(self) -> dict[str, list[tf.Tensor]]:
        """Variables that were only ever read by row: path -> the ids each call read."""
        read: dict[str, list[tf.Tensor]] = {}
        whole: set[str] = set()
        for call in self.calls:
            by_row = call.rule.tables(call)
            whole.update(v.path for v in call.layer.trainable_variables if v.path not in by_row)
            for path, ids in by_row.items():
                read.setdefault(path, []).append(ids)
        return {path: ids for path, ids in read.items() if path not in whole}


@contextlib.contextmanager
def recording(
    model: keras.Model,
    tape: tf.GradientTape | None = None,
    batch_size: tf.Tensor | None = None,
    before_read: BeforeRead = no_settling,
) -> Iterator[Recording]:
    """Replaces `call` on every layer with weights, for the length of the block.

    Args:
        model: a built model.
        tape: watches what the rules ask for.
        batch_size: what every watched tensor's first axis must be.
        before_read: called with a table and the ids about to be read from it.

    Raises:
        NotPrivate: for what cannot be recorded exactly.
    """
    refuse_duplicate_paths(model)
    found = units(model)
    recorder = Recording(tape, batch_size, before_read, own_direct(model, tape))
    with replaced([(layer, functools.partial(recorder.run, layer, rule)) for layer, rule in found]), recorder.outside:
        yield recorder
    refuse_added_losses(model)
    recorder.refuse_reads_outside(model)


@contextlib.contextmanager
def replaced(runs: Sequence[tuple[keras.layers.Layer, Callable[..., Any]]]) -> Iterator[None]:
    """Has others run layers, for the length of the block.

    Args:
        runs: layers, each with `run(call, args, kwargs)`, which is given the layer's own call.
    """

    def replacement(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run(original, args, kwargs)

    try:
        for layer, run in runs:
            layer.__dict__["call"] = replacement(layer.call, run)
        yield
    finally:
        for layer, _ in runs:
            layer.__dict__.pop("call", None)


def own_direct(model: keras.Model, tape: tf.GradientTape | None) -> list[keras.Variable]:
    """The weights of the model itself, watched; eagerly, where nothing is read, they are refused."""
    own = own_weights(model)
    if own and tf.executing_eagerly():
        names = ", ".join(v.path for v in own)
        raise NotPrivate(
            f"Model '{model.name}' owns weights itself ({names}), which only a traced step can tell apart by example; "
            "put them into a layer of their own."
        )
    if tape is not None:
        tape.watch([rules.resource(v) for v in own])
    return own


def refuse_duplicate_paths(model: keras.Model) -> None:
    """Gradients are kept by variable path, so two variables must not share one."""
    paths = [v.path for v in model.trainable_variables]
    twice = sorted({p for p in paths if paths.count(p) > 1}) if len(set(paths)) < len(paths) else []
    if twice:
        raise NotPrivate(
            f"Several trainable variables are called {', '.join(twice)}; give their layers distinct names."
        )


def refuse_added_losses(model: keras.Model) -> None:
    """`add_loss` and activity regularisers depend on the batch but are in no example's loss: refused."""
    for layer in layers_within(model):
        if getattr(layer, "activity_regularizer", None) is not None or added_losses(layer):
            raise NotPrivate(
                f"Layer '{layer.name}' adds a loss of its own (add_loss or activity_regularizer), which clipping by "
                "example does not cover; make it part of per_example_loss."
            )


def refuse_unread(recorder: Recording) -> None:
    """Where no graph is read, what is not by example is told by its shape: a batch's length is not known."""
    if recorder.direct:
        names = ", ".join(v.path for v in recorder.direct)
        raise NotPrivate(f"The model owns weights itself ({names}); put them into a layer of their own.")
    for call in recorder.calls:
        if not tf.executing_eagerly() and any(t.shape.rank and t.shape[0] is not None for t in call.watched):
            raise NotPrivate(f"Layer '{call.layer.name}' {NO_BATCH}.")


def refuse_unrecorded(
    model: keras.Model, calls: Sequence[Call], direct: Sequence[keras.Variable] = ()
) -> None:
    """Every trainable variable must belong to a recorded call: otherwise its gradient would be lost."""
    owned = {v.path for call in calls for v in call.layer.trainable_variables} | {v.path for v in direct}
    lost = [v.path for v in model.trainable_variables if v.path not in owned]
    if lost:
        raise NotPrivate(
            f"Trainable variables take no part in the loss through a recorded layer call: {', '.join(lost)}. Call "
            "their layer in the loss, or set trainable=False on it."
        )


@contextmanager
def secret_seeds(model: keras.Model) -> Iterator[None]:
    """Within it, the model's random layers draw from seeds that were never seen and will never be.

    Args:
        model: of any layers.

    Example:
        >>> dropout = keras.layers.Dropout(0.5, seed=7)
        >>> model = keras.Sequential([keras.Input([3]), dropout])
        >>> with secret_seeds(model):
        ...     masked = model(tf.ones([2, 3]), training=True)
        >>> dropout.seed_generator.state.numpy().tolist() == [7, 1]
        False
    """
    _replace(random_states(model))
    yield
    _replace(random_states(model))


def _replace(states: list[keras.Variable]) -> None:
    if not states:
        return
    words = tf.reshape(system_words(2 * len(states)), [len(states), 2])
    for state, word in zip(states, tf.unstack(tf.cast(words, tf.int64))):
        resource(state).assign(tf.cast(word, resource(state).dtype))
