"""The undocumented parts of Keras and TensorFlow that this package uses, each in one function.

`tests/test_keras_internals.py` tests the assumption behind every function, so that a new version that breaks it is
found there and handled here.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import set_keras_mask
from keras.src.layers.layer import CallContext
from tensorflow.python import pywrap_tfe

_ENTRY = "entry_layer"  # of a call's context: the outermost layer
_NAMED = "object_name_uids"

# Variables.


def resource(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable of a Keras variable, without the check of `PrivateWeights`."""
    # Not a cast, and not a whole read, which would copy a table at every update. A caller must know that its rows
    # owe no noise.
    return vars(variable)["_value"]


def handles_of(variables: Iterable[keras.Variable]) -> list[Any]:
    """The handles of variables in graphs; variables on a parameter server have none."""
    found = (getattr(resource(variable), "handle", None) for variable in variables)
    return [handle for handle in found if handle is not None]


def look_up_resource(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable as Keras looks it up: refused, or checked, while a table owes noise."""
    return getattr(variable, RESOURCE_ATTRIBUTE)


def set_resource(variable: keras.Variable, held: Any) -> None:
    """Replaces the TensorFlow variable of a Keras variable."""
    vars(variable)["_value"] = held


RESOURCE_ATTRIBUTE = "_value"
"""The attribute by which Keras itself reads `resource(variable)`, always."""


# Layers and models.


def register_save_check(check: Callable[[Any, bool], None]) -> None:
    """Has `check(object, hdf5)` called before Keras writes a file of a model, or copies a layer through one."""
    # No method of a model is called by all of these: `save`, `keras.saving.save_model`, pickle, `copy.deepcopy`.
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    save_state, save_hdf5 = saving_lib._save_state, legacy_h5_format.save_model_to_hdf5

    @functools.wraps(save_state)
    def check_and_save_state(saveable: Any, weights_store: Any, assets_store: Any, inner_path: str, **rest: Any) -> Any:
        if not inner_path:  # the object that is saved, and not a part of it
            check(saveable, False)
        return save_state(saveable, weights_store, assets_store, inner_path, **rest)

    @functools.wraps(save_hdf5)
    def check_and_save_hdf5(model: Any, *args: Any, **options: Any) -> Any:
        check(model, True)
        return save_hdf5(model, *args, **options)

    saving_lib._save_state, legacy_h5_format.save_model_to_hdf5 = check_and_save_state, check_and_save_hdf5


def keep_error_plain(error: type[Exception]) -> None:
    """Has Keras raise an error within a layer's call as it is, without a heading and the arguments of the call."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]


def layers_within(model: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """A layer and all layers in it, each once."""
    return model._flatten_layers()


def parts(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that a layer contains directly."""
    return layer._layers


def own_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The trainable weights of a layer, without those of its parts."""
    return [variable for variable in layer._trainable_variables if variable.trainable]


def own_variables(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The weights of a layer, frozen ones too, without those of its parts."""
    return list(layer._trainable_variables)


def own_state(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The untrained variables of a layer, without those of its parts."""
    return layer._non_trainable_variables


def find_added_losses(layer: keras.layers.Layer) -> list[Any]:
    """The losses given to `add_loss` in the last call."""
    return getattr(layer, "_losses", [])


def random_states(model: keras.Model) -> list[keras.Variable]:
    """The states of all random layers, each once: set back, they draw the same again."""
    generators = [g for layer in layers_within(model) for g in getattr(layer, "_seed_generators", [])]
    # Metrics that break ties at random hold a generator, and Keras keeps no list of those.
    held = [value for layer in layers_within(model) for metric in layer._metrics for value in vars(metric).values()]
    generators += [value for value in held if isinstance(value, keras.random.SeedGenerator)]
    return list({id(g.state): g.state for g in generators}.values())


def draws(layer: keras.layers.Layer) -> bool:
    """Whether a layer draws random numbers, without regard to its parts."""
    return bool(getattr(layer, "_seed_generators", []))


def build_metrics(model: keras.Model, found: Any) -> None:
    """Makes the variables of compiled metrics from (x, y, y_pred, sample_weight) of a trace, or of nothing."""
    # A step that makes them is traced twice by TensorFlow, which halves the speed of the start.
    metrics = metrics_container(model)
    if found is None or found[1] is None or metrics is None or metrics.built:
        return
    like = lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype.name)  # noqa: E731
    metrics.build(*keras.tree.map_structure(like, found[1:3]))


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The mean that `fit` shows as "loss"."""
    return model._loss_tracker


def metrics_container(model: keras.Model) -> Any:
    """The container of the metrics given to `compile`, `built` once it has seen predictions; None without metrics."""
    return model._compile_metrics


def metrics_variables(model: Any) -> list[keras.Variable]:
    """The variables of a model's metrics, those also that were given to `compile` and have seen no batch yet."""
    held = metrics_container(model) if model.compiled else None
    given = () if held is None else tf.nest.flatten([held._user_metrics, held._user_weighted_metrics])
    found = [*model.metrics_variables, *(v for m in given if isinstance(m, keras.metrics.Metric) for v in m.variables)]
    return list({id(v): v for v in found}.values())


def compile_arguments(model: Any) -> dict[str, Any]:
    """What a compiled model was given by `compile`: the objects themselves, of which Keras' config has copies."""
    return dict(model._compile_config.config)


def begin_at_epoch(model: keras.Model, epoch: int | None) -> None:
    """Sets the first epoch of the present `fit`, from `on_train_begin`; None for the argument of `fit`."""
    model._initial_epoch = epoch


def functional_class() -> type:
    """The class of models made from inputs and outputs."""
    from keras.src.models import Functional

    return Functional


def is_functional(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether arguments of `keras.Model` are inputs and outputs."""
    from keras.src.models.model import functional_init_arguments

    return functional_init_arguments(args, options)


def mask_of(output: Any) -> tf.Tensor | None:
    """The mask of a layer's output."""
    return getattr(output, "_keras_mask", None)


@dataclasses.dataclass
class CallSurroundings:
    """What a layer finds beside its arguments when it is called: masks on them, and values such as `training`."""

    masks: dict[int, tf.Tensor]  # by place among the flat arguments
    values: dict[str, Any]

    @classmethod
    def of(cls, arguments: list[Any]) -> CallSurroundings:
        """Those of the call that is going on."""
        masks = {place: mask_of(value) for place, value in enumerate(arguments)}
        context = global_state.get_global_attribute("current_call_ctx")
        values = {} if context is None else {name: value for name, value in vars(context).items() if name != _ENTRY}
        return cls({place: mask for place, mask in masks.items() if mask is not None}, values)

    @contextlib.contextmanager
    def again(self, arguments: list[Any], masks: dict[int, tf.Tensor]) -> Iterator[None]:
        """A block in which other arguments, with masks of theirs, are given to the layer in the same surroundings."""
        for place, mask in masks.items():
            set_keras_mask(arguments[place], mask)
        before = global_state.get_global_attribute("current_call_ctx")
        context = CallContext(entry_layer=None)  # no layer's own, so that none ends it
        for name, value in self.values.items():
            context.set_value(name, value)
        global_state.set_global_attribute("current_call_ctx", context)
        try:
            yield
        finally:
            global_state.set_global_attribute("current_call_ctx", before)


def can_adapt(layer: keras.layers.Layer) -> bool:
    """Whether a layer knows, or will know, what its `adapt` finds in data, and not what its constructor was given."""
    if isinstance(layer, keras.layers.Normalization):
        return layer.input_mean is None
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is not None
    # The parts of a feature space are layers within it.
    parts = isinstance(layer, keras.utils.FeatureSpace) or getattr(layer, "_has_input_vocabulary", False)
    return hasattr(layer, "adapt") and not parts


def has_file_vocabulary(layer: keras.layers.Layer) -> bool:
    """Whether a layer's vocabulary was given as a file, of which a saved layer does not say that it was given."""
    lookup = getattr(layer, "_lookup_layer", layer)  # of a text layer
    return getattr(lookup, "_has_input_vocabulary", False) and getattr(lookup, "input_vocabulary", ()) is None


def keep_vocabulary(layer: keras.layers.Layer) -> None:
    """Has a loaded layer know that its vocabulary was given: it cannot be adapted."""
    layer._has_input_vocabulary = True


def kernel_of(layer: keras.layers.Layer) -> keras.Variable:
    """The variable itself; `layer.kernel` may be computed from it (quantized, or with LoRA)."""
    return layer._kernel


def embeddings_of(layer: keras.layers.Layer) -> keras.Variable:
    """The table itself; `layer.embeddings` may be computed from it (quantized, or with LoRA)."""
    return layer._embeddings


# Optimizers.


def object_numbers() -> dict[str, int]:
    """How many objects of each kind Keras has named in this thread."""
    return dict(global_state.get_global_attribute(_NAMED, {}))


@contextlib.contextmanager
def numbered_from(numbers: dict[str, int]) -> Iterator[None]:
    """A block in which Keras names objects as where it had named so many."""
    before = object_numbers()
    global_state.set_global_attribute(_NAMED, collections.defaultdict(int, numbers))
    try:
        yield
    finally:
        counted = {name: max(count, before.get(name, 0)) for name, count in object_numbers().items()}
        global_state.set_global_attribute(_NAMED, collections.defaultdict(int, before | counted))


def round_up_function_numbers() -> None:
    """Has TensorFlow number functions, whose names a SavedModel holds, from the next multiple of four million on."""
    while pywrap_tfe.TFE_Py_UID() % 4_000_000:
        pass


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """The learning rate as it was given: a schedule, or the variable with the number."""
    return optimizer._learning_rate


def learning_rate_now(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """The learning rate of the present step, also in a graph."""
    return optimizer._get_current_learning_rate()


# TensorFlow.


def is_compiled_with_xla() -> bool:
    """Whether the present graph will be compiled by XLA, which drops assertions."""
    from tensorflow.python.ops import control_flow_util

    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


@contextlib.contextmanager
def plain_calls() -> Iterator[None]:
    """A block in which functions are called, and calls built, without the options of TensorFlow's graph optimizer."""
    # A call keeps the options of the thread that built it. Those may be of long ago: a thread looks them up once.
    from tensorflow.python.eager import context

    here = context.context()
    before = here.function_call_options
    plain = tf.compat.v1.ConfigProto(allow_soft_placement=True)
    here.function_call_options = context.FunctionCallOptions(config_proto=plain)
    try:
        yield
    finally:
        here.function_call_options = before


def leave_strategy(model: keras.Model, *given: Any) -> None:
    """Has Keras run a model as on one device, with the first copy of each variable that has several.

    Args:
        model: Model.
        *given: Further objects with variables, such as metrics that Keras does not yet count among the model's.
    """
    others = [each for each in keras.tree.flatten(given) if isinstance(each, keras.metrics.Metric | keras.Optimizer)]
    for optimizer in others:
        if hasattr(optimizer, "_distribution_strategy"):
            optimizer._distribution_strategy = tf.distribute.get_strategy()
    for variable in (*model.variables, *(variable for other in others for variable in other.variables)):
        held = resource(variable)
        if isinstance(held, tf.distribute.DistributedValues):
            set_resource(variable, first := held.values[0])
            del first.handle._distributed_container  # the variable of which it was a copy
    vars(model)["_distribute_strategy"] = None


def hand_strategy(model: keras.Model, other: keras.Model) -> None:
    """Gives the distribution strategy of a model to another one on its layers."""
    held = vars(model)
    vars(other)["_distribute_strategy"], held["_distribute_strategy"] = held["_distribute_strategy"], None


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """A block outside the scopes of all distribution strategies: variables that it makes have one copy."""
    graph: Any = tf.compat.v1.get_default_graph()
    held = graph._distribution_strategy_stack, graph._variable_creator_stack
    graph._distribution_strategy_stack, graph._variable_creator_stack = [], []
    try:
        yield
    finally:
        graph._distribution_strategy_stack, graph._variable_creator_stack = held


def is_deterministic() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


def function_graph(graph: Any, name: str) -> Any:
    """The graph of a function that an operation of `graph` calls: a branch, a loop's body, a `tf.function`."""
    # A graph has the functions that were made in it; functions made outside all graphs are in the eager context.
    while graph is not None:
        for known in (name, name.encode()):
            if known in graph._functions:
                return graph._functions[known].graph
        graph = getattr(graph, "outer_graph", None)
    from tensorflow.python.eager import context

    return context.context().get_function(name).graph if hasattr(context.context(), "get_function") else None


@contextlib.contextmanager
def override_gradient(operation: str, by: Callable[..., Any]) -> Iterator[None]:
    """A block in which an operation's gradient is `by(operation, gradient of its output, its gradient function)`."""
    registered, function = _find_gradient(operation)
    registered["type"] = lambda op, gradient: by(op, gradient, function)
    try:
        yield
    finally:
        registered["type"] = function


@functools.cache
def _find_gradient(operation: str) -> tuple[dict[str, Any], Any]:
    # TensorFlow's registration of an operation's gradient function, and the function that was there at first.
    from tensorflow.python.framework import ops

    registered = ops.gradient_registry._registry[operation]
    return registered, registered["type"]


def run_unordered(operation: Any) -> None:
    """Has a function run a stateful operation always, but before or after no other one for being stateful."""
    if (manager := getattr(operation.graph, "experimental_acd_manager", None)) is not None:
        manager.run_independently(operation)


def keep_conditional(results: Any) -> None:
    """Has the conditional that gave some results stay one operation of its graph, whose branches are functions."""
    conditional = tf.nest.flatten(results)[0].op.inputs[0].op  # behind the identity that TensorFlow puts there
    conditional._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False))


def initializer_of(initial_value: Any) -> Any:
    """The Keras initializer behind the initial value that a variable creator is given; None if there is none."""
    named = inspect.getclosurevars(initial_value).nonlocals if callable(initial_value) else {}
    return named.get("initializer")


def schedule(coordinator: Any, attempt: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Runs a Python function on a worker, again if it dies; `ClusterCoordinator.schedule` accepts only graphs."""
    coordinator._cluster.schedule(attempt, arguments, {})


def iterator_spec(per_worker: Any) -> tf.TypeSpec:
    """The type of the iterators of a per-worker dataset."""
    return per_worker._values[0]._type_spec


def valueless_variable(spec: tf.TensorSpec, name: str) -> tf.Variable:
    """A trainable variable that has no values before they are assigned: a checkpoint names it and does not hold it."""
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    class Valueless(UninitializedVariable):
        """Its eager reads fail, where TensorFlow's own give an empty tensor."""

        def _read_variable_op(self, no_copy: bool = False) -> Any:
            self._check_values()
            return super()._read_variable_op(no_copy)

        def sparse_read(self, indices: Any, name: str | None = None) -> Any:
            self._check_values()
            return super().sparse_read(indices, name)

        def _check_values(self) -> None:
            if tf.executing_eagerly() and not self.is_initialized():
                raise tf.errors.FailedPreconditionError(None, None, f"{self.name} has no values.")

    return Valueless(trainable=True, name=name, shape=spec.shape, dtype=spec.dtype)


def checkpoint_keys(prefix: str) -> dict[str, str]:
    """The key in a checkpoint of each variable that it names, by the variable's own name."""
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

    written = tf.train.load_checkpoint(prefix).get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH")
    attributes = [each for node in TrackableObjectGraph.FromString(written).nodes for each in node.attributes]
    return {f"{each.full_name}:0": each.checkpoint_key for each in attributes}


def serving_archive(model: keras.Model) -> keras.export.ExportArchive:
    """What Keras' `export` of a model writes, without the second place that it gives to each variable."""
    from keras.src.export.export_utils import get_input_signature

    archive = keras.export.ExportArchive()
    archive.track_and_add_endpoint("serve", model, get_input_signature(model))
    for kind in ("variables", "trainable_variables", "non_trainable_variables"):
        archive.add_variable_collection(kind, [])  # a loader would hold what is in them beside what `serve` reads
    return archive


def resource_key(handle: Any) -> Any:
    """Name, device and container of a resource, the same by all eager tensors of its handle; else the tensor's id."""
    # A handle has no other name in Python than the text that it is shown as.
    found = re.search(r'ResourceHandle\((name=.*?), type=', repr(handle)) if _is_eager(handle) else None
    return found[1] if found else id(handle)


def _is_eager(tensor: Any) -> bool:
    return isinstance(tensor, tf.__internal__.EagerTensor)


def lengths_of_handle(handle: Any) -> list[int] | None:
    """The shape of a variable by its handle, -1 for lengths that may change; None for an unknown rank."""
    from tensorflow.python.ops import handle_data_util

    data = getattr(handle, "_handle_data", None)
    if data is None and isinstance(handle, tf.Tensor) and not _is_eager(handle):
        # A handle on a parameter server has them in the graph alone, where TensorFlow's own shapes come from.
        data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1 or data.shape_and_type[0].shape.unknown_rank:
        return None
    return [dimension.size for dimension in data.shape_and_type[0].shape.dim]


def lite_model(content: bytes) -> tuple[Any, set[str]]:
    """A TensorFlow Lite file as a tree of objects, and the names of the operations that it runs."""
    from tensorflow.lite.python import schema_py_generated as schema

    names = {code: name for name, code in vars(schema.BuiltinOperator).items()}
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(content, 0))
    # An operation has two codes; TensorFlow Lite runs the larger one.
    return model, {names[max(code.builtinCode, code.deprecatedBuiltinCode)] for code in model.operatorCodes}
