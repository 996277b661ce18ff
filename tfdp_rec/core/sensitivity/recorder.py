"""Runs a model's layers under recording: the calls that were made, their inputs, and the tensors to differentiate.

For the length of one `with record_calls(...)` every layer that owns trainable weights has `call` replaced on the
instance (Keras looks it up there first). The replacement runs the layer by its rule and notes the call. Nothing else
of the model changes, so any Keras model works: functional, subclassed, nested, with layers called several times. A
layer without an exact rule is refused by name, since its gradient would escape the clip.

**Secret seeds.** A dropout mask depends on the place of an example in the batch, and removing one example moves those
behind it. Under secret masks this changes no distribution (docs/privacy-independence.md); under masks that can be
computed afterwards, the gradients of all others would change with the one example. Keras seeds its layers from Python's
`random`, counts on from there, and saves the count with the model. So `secret_seeds` replaces the seeds before a step
by the operating system's entropy, and once more after it: a saved model holds no seed that was used.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdp_rec.core.ground.graph_checks import HOST, Check, require, require_equal
from tfdp_rec.core.ground.keras_internals import (
    find_added_losses,
    keep_error_plain,
    layers_within,
    own_weights,
    parts,
    random_states,
    resource,
)
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.system_words import system_words
from tfdp_rec.core.sensitivity import rules
from tfdp_rec.core.sensitivity.independence.reading import ours
from tfdp_rec.core.sensitivity.independence.refusals import cause, sentence, users_line
from tfdp_rec.core.sensitivity.own_rows import own_rows
from tfdp_rec.core.sensitivity.rules import Call

keep_error_plain(NotPrivate)
Read = tuple[keras.Variable, tf.Tensor]
"""A table and ids of rows that are read."""
BeforeRead = Callable[[keras.Variable, tf.Tensor], None]


def settle_nothing(variable: keras.Variable, ids: tf.Tensor) -> None:
    """Settles nothing: for optimizers without pending noise."""


def settle_by_owner(variable: keras.Variable, ids: tf.Tensor) -> None:
    """Settles rows that are about to be read, by the owner of their table; a table that is not private has none."""
    # By name: `PrivateWeights` is on a higher floor.
    if (owner := vars(variable).get("private_weights")) is not None:
        owner.settle_before_reads([(variable, ids)])


class SettledAhead:
    """A guard that settles all rows of some tables at once, where their ids are known, and later sees to their reads.

    Args:
        owner: Owner of the tables.
        ahead: Ids that are going to be read, by table path.
        variables: The tables and other variables of the model.
    """

    def __init__(self, owner: Any, ahead: Mapping[str, tf.Tensor], variables: Sequence[keras.Variable]):
        self._owner, self._reads = owner, list[Read]()
        self._ahead = [(variable, ahead[variable.path]) for variable in variables if variable.path in ahead]
        owner.settle_before_reads(self._ahead)

    def __call__(self, variable: keras.Variable, ids: tf.Tensor) -> None:
        """Notes a read of rows that were settled ahead; settles those of another table."""
        if any(variable is known for known, _ in self._ahead):
            self._reads.append((variable, ids))
        else:
            settle_by_owner(variable, ids)

    @property
    def checks(self) -> list[Check]:
        """That no row was read that owed noise, whatever was known ahead."""
        several = self._owner.owe_noise(self._reads)
        with tf.device(HOST):
            return [(~owing, _UNPAID) for owing in several]


_UNPAID = (
    "Rows of a table were read before their pending noise was applied: the ids that a batch reads are others than when "
    "the model was prepared. Compile the model again."
)


class Unit(NamedTuple):
    """A layer that is recorded as a whole, with its rule or the reason of its refusal."""

    layer: keras.layers.Layer
    rule: rules.Rule | None
    refusal: str = ""


def units_and_refusals(model: keras.Model) -> list[Unit]:
    """All units of a model, the refused ones first."""
    whys = [(layer, rules.refusal(layer)) for layer in layers_within(model)]
    refused = [Unit(one, None, f"Layer '{one.name}' ({type(one).__name__}) {why}.") for one, why in whys if why]
    found = {id(unit.layer): unit for unit in refused}

    # From the outermost layer inwards: a layer that a rule covers is recorded as a whole, its parts are not.
    def visit(layer: keras.layers.Layer) -> None:
        if not layer.trainable_variables or id(layer) in found:
            return
        rule = rules.rule_for(layer)
        if rule is not None or (own_weights(layer) and layer is not model):
            found[id(layer)] = Unit(layer, rule) if rule is not None else _unit_without_rule(layer)
        else:
            for child in parts(layer):
                visit(child)

    visit(model)
    return sorted(found.values(), key=lambda unit: unit.rule is not None)


def _unit_without_rule(layer: keras.layers.Layer) -> Unit:
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
    """The calls made while recording, and a tape of the variables that are read outside all calls."""

    def __init__(self, model: keras.Model, tape: tf.GradientTape | None, before_read: BeforeRead):
        self.calls: list[Call] = []
        self.direct = own_weights(model)  # which its loss reads itself
        if tape is not None:
            tape.watch([rules.resource(v) for v in self.direct])
        self.outside = tf.GradientTape()  # stopped during each recorded call
        self._model, self._tape, self._before_read = model, tape, before_read
        self._within = False
        self._required: list[tuple[tf.Tensor, tf.Tensor, str]] = []
        self._checks: list[tf.Operation] = []
        self._read_within: list[tuple[keras.layers.Layer, set[int]]] = []  # the variables that a layer's call reads
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._began = 0 if self._graph is None else len(self._graph.get_operations())

    def run(self, unit: Unit, original: Callable[..., Any], args: Any, kw: Any) -> Any:
        """Runs a layer by its rule, and notes the call."""
        layer, rule = unit.layer, unit.rule
        assert rule is not None
        if self._within:  # part of a layer that is recorded whole
            return original(*args, **kw)
        if not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not self._graph:
            raise NotPrivate(
                f"Layer '{layer.name}' is called inside a loop or a branch, where calls cannot be recorded; move the "
                "call out, or register a rule for the layer that loops."
            )
        call = Call(layer, rule, args, kw)
        self._within = True
        try:
            # Settling rows is no part of the loss that is read.
            hooks = rules.Hooks(lambda t: self._watch(call, t), ours()(self._before_read), self._require_equal)
            with self.outside.stop_recording(), tf.GradientTape() as inside:
                output = rule.run(call, original, hooks)
        finally:
            self._within = False
        self._read_within.append((layer, {id(variable) for variable in inside.watched_variables()}))
        self.calls.append(call)
        return output

    def _require_equal(self, found: tf.Tensor, wanted: tf.Tensor, sentence: str) -> None:
        if tf.executing_eagerly():
            require_equal(found, wanted, sentence)
        both = (tf.reshape(tf.cast(each, tf.int64), [-1]) for each in (found, wanted))
        self._required.append((*both, sentence))

    def check_all(self) -> None:
        """One check of all that the calls require, ahead of every gradient."""
        if not self._required or tf.executing_eagerly():
            return
        found, wanted, sentences = zip(*self._required, strict=True)
        met = tf.equal(tf.concat(found, axis=0), tf.concat(wanted, axis=0))
        sizes = [tf.size(each) for each in found]
        with tf.device(HOST):
            ends = tf.cumsum(tf.stack(sizes))
            first = tf.argmin(tf.cast(tf.concat([met, [False]], axis=0), tf.int32), output_type=tf.int32)
            failed = tf.searchsorted(ends, first[None], side="right")[0]
            why = tf.gather(tf.constant(sentences), tf.minimum(failed, len(sentences) - 1))
            self._checks = require(tf.reduce_all(met), why)

    def refuse_reads_outside(self) -> None:
        """Refuses variables that are read outside their layer's call, as in `matmul(h, layer.kernel)`."""
        read = {id(variable) for variable in self.outside.watched_variables()}
        own = {id(variable) for variable in self.direct}
        others = [v for v in self._model.trainable_variables if id(v) not in own]
        for layer, inside in self._read_within:  # a rule gives the gradient of its layer's variables alone
            of_layer = {id(variable) for variable in layer.trainable_variables}
            if strange := [v.path for v in others if id(rules.resource(v)) in inside and id(v) not in of_layer]:
                raise NotPrivate(
                    f"The call of layer '{layer.name}' reads weights of other layers ({', '.join(strange)}), whose "
                    "gradient would not have this part: make those layers attributes of this one, or call them "
                    "outside it and give it their outputs."
                )
        escaped = [v.path for v in others if id(rules.resource(v)) in read]
        if escaped:
            made = [] if self._graph is None else self._graph.get_operations()[self._began :]
            if found := cause(made):
                raise NotPrivate(sentence(*found))
            raise NotPrivate(
                f"Trainable variables are read outside a layer call that can be recorded: {', '.join(escaped)}. Move "
                "what reads them into the call of the layer that owns them (keras.layers.ReversibleEmbedding gives "
                "logits from an embedding table)."
            )

    def differentiate(self, losses: tf.Tensor, seeds: tf.Tensor | None = None) -> tuple[list[Any], list[Any]]:
        """The gradients of all that the calls watched, call by call, and those of the model's own weights."""
        assert self._tape is not None
        for call in self.calls:
            call.bag = call.rule.find_bag(call)
        watched = [t for call in self.calls for t in (call.watched if call.bag is None else [call.bag.total])]
        sources = [*watched, *(rules.resource(v) for v in self.direct)]
        with own_rows(), tf.control_dependencies(self._checks):
            backward = self._tape.gradient(losses, sources, seeds, unconnected_gradients="zero")
        left, gradients = iter(backward), []
        for call in self.calls:
            own = [next(left) for _ in (call.watched if call.bag is None else [call.bag.total])]
            if call.bag is not None:
                call.bag = call.bag.add_gradient(*own)
                own = [call.bag.of_rows]
            gradients += own
        return gradients, list(left)

    def _watch(self, call: Call, tensor: tf.Tensor) -> tf.Tensor:
        if self._tape is not None:
            self._tape.watch(tensor)
        call.watched.append(tensor)
        return tensor

    def tables(self) -> dict[str, list[tf.Tensor]]:
        """Variables that all calls read by row alone: path -> the ids of each call."""
        read: dict[str, list[tf.Tensor]] = {}
        whole: set[str] = set()
        for call in self.calls:
            by_row = call.rule.tables(call)
            whole.update(v.path for v in call.layer.trainable_variables if v.path not in by_row)
            for path, ids in by_row.items():
                read.setdefault(path, []).append(ids)
        return {path: ids for path, ids in read.items() if path not in whole}


@contextlib.contextmanager
def record_calls(
    model: keras.Model,
    tape: tf.GradientTape | None = None,
    before_read: BeforeRead = settle_nothing,
) -> Iterator[Recording]:
    """Records calls of all layers with weights, for the length of the block."""
    refuse_duplicate_paths(model)
    units = units_and_refusals(model)
    for unit in units:
        if unit.rule is None:
            raise NotPrivate(unit.refusal)
    recorder = Recording(model, tape, before_read)
    runs = [(unit.layer, functools.partial(recorder.run, unit)) for unit in units]
    with replace_calls(runs), recorder.outside:
        yield recorder
    recorder.check_all()
    refuse_added_losses(model)
    recorder.refuse_reads_outside()


@contextlib.contextmanager
def replace_calls(runs: Sequence[tuple[keras.layers.Layer, Callable[..., Any]]]) -> Iterator[None]:
    """Replaces layers' calls by `run(call, args, kwargs)`, for the length of the block."""

    def replacement(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
        return rules.Recorded(lambda *args, **kwargs: run(original, args, kwargs))

    own = [(layer, layer.__dict__.get("call")) for layer, _ in runs]  # of a layer whose call the user has replaced
    try:
        for layer, run in runs:
            layer.__dict__["call"] = replacement(layer.call, run)
        yield
    finally:
        for layer, before in own:
            layer.__dict__.pop("call", None)
            if before is not None:
                layer.__dict__["call"] = before


def refuse_duplicate_paths(model: keras.Model) -> None:
    """Refuses two variables of one path: gradients are stored by path."""
    paths = [v.path for v in model.trainable_variables]
    twice = sorted({p for p in paths if paths.count(p) > 1}) if len(set(paths)) < len(paths) else []
    if twice:
        raise NotPrivate(
            f"Several trainable variables are called {', '.join(twice)}; give their layers distinct names."
        )


def refuse_added_losses(model: keras.Model) -> None:
    """Refuses `add_loss` and activity regularisers: they depend on the batch and are in no example's loss."""
    for layer in layers_within(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise NotPrivate(
                f"Layer '{layer.name}' adds a loss of its own by activity_regularizer, which clipping by example does "
                "not cover: make it part of per_example_loss."
            )
        for loss in find_added_losses(layer):
            made = None if isinstance(loss, tf.__internal__.EagerTensor) else loss.op
            if made is not None and (found := cause(made.graph.get_operations())):
                raise NotPrivate(sentence(*found))
            line = None if made is None else users_line(made)
            raise NotPrivate(
                f"Layer '{layer.name}' adds a loss by add_loss{f' in {line}' * bool(line)}, which clipping by example "
                "does not cover. Return it, one number an example, from per_example_loss(self, data, training=True), "
                "added to that of the model; in place of a penalty on weights alone give their layer "
                "kernel_regularizer=keras.regularizers.L2(l2), or embeddings_regularizer=."
            )


def refuse_unrecorded(
    model: keras.Model, calls: Sequence[Call], direct: Sequence[keras.Variable] = ()
) -> None:
    """Refuses trainable variables of no recorded call: their gradient would be lost."""
    owned = {v.path for call in calls for v in call.layer.trainable_variables} | {v.path for v in direct}
    lost = [v.path for v in model.trainable_variables if v.path not in owned]
    if lost:
        raise NotPrivate(
            f"Trainable variables take no part in the loss through a recorded layer call: {', '.join(lost)}. Call "
            "their layer in the loss, or set trainable=False on it."
        )


@contextlib.contextmanager
def secret_seeds(model: keras.Model) -> Iterator[None]:
    """Gives the model's random layers secret seeds for the length of the block, and others afterwards."""
    _replace_seeds(random_states(model))
    yield
    _replace_seeds(random_states(model))


def _replace_seeds(states: list[keras.Variable]) -> None:
    if not states:
        return
    words = tf.reshape(system_words(2 * len(states)), [len(states), 2])
    for state, word in zip(states, tf.unstack(tf.cast(words, tf.int64))):
        resource(state).assign(tf.cast(word, resource(state).dtype))
