"""What we lean on of Keras and TensorFlow that they do not promise: each promise stated, and nowhere else relied on.

To be run against the oldest and the newest versions that we support.
"""

import ast
import copy
import gc
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from tensorflow.python.framework import config

import tfdp_rec
from tfdp_rec.core.ground import keras_internals
from tfdp_rec.core.ground.branches import choose, choose_from, wrap_in_call

PACKAGE = Path(tfdp_rec.__file__).parent
UNPROMISED_MODULES = ("keras.src", "tensorflow.python", "tensorflow.compiler")


# Nowhere else.


def bound(tree):
    """Names with an underscore that a file binds itself: functions, classes, attributes, variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
            yield node.args[1].value


def named(tree):
    """(line, name) of every attribute with an underscore that a file looks up, also by getattr, and of modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.lineno, node.args[1].value
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(UNPROMISED_MODULES):
            yield node.lineno, "_" + (node.module or "")


def touches(sources):
    """Lines that look up a name with one underscore that none of the sources binds: it belongs to somebody else."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    own = {name for tree in trees.values() for name in bound(tree)} | {"_fields", "_replace", "_asdict", "_exit"}
    return [
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        for line, name in named(tree)
        if name.startswith("_") and not name.startswith("__") and name not in own
    ]


@pytest.mark.slow
def test_what_is_not_promised_is_touched_in_one_module_alone():
    sources = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "keras_internals.py"}
    assert touches(sources) == []


@pytest.mark.parametrize(
    "line", ["model._layers", "getattr(model, '_layers', 0)", "from keras.src.models import Functional", "a.b._c.d"]
)
def test_a_touch_is_noticed(line):
    assert len(touches({"a.py": f"class A:\n    def _own(self): self._mine = self._own\n{line}"})) == 1


# One promise a function.


def small():
    inputs = keras.Input([3])
    inner = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5, seed=1)])
    model = keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
    model.compile("sgd", loss="mse")
    return model, inner


def test_resource_is_the_variable_that_is_trained():
    variable = keras.Variable(np.ones(2, "float32"))
    held = keras_internals.resource(variable)
    assert isinstance(held, tf.Variable)
    held.assign([2.0, 3.0])
    np.testing.assert_array_equal(variable, [2.0, 3.0])


def test_set_resource_exchanges_it():
    variable, other = keras.Variable(np.ones(2, "float32")), tf.Variable([5.0, 6.0])
    keras_internals.set_resource(variable, other)
    assert keras_internals.resource(variable) is other
    np.testing.assert_array_equal(variable, [5.0, 6.0])


def test_keras_reads_a_variable_by_that_attribute_alone():
    """So that a property of this name sees every read: value, numpy, conversion, indexing, handle, assignment, text."""
    seen = []

    def read(variable):
        seen.append(True)
        return keras_internals.resource(variable)

    variable = keras.Variable(np.ones(2, "float32"))
    attribute = property(read, keras_internals.set_resource)
    variable.__class__ = type("Seen", (type(variable),), {keras_internals.RESOURCE_ATTRIBUTE: attribute})
    ways = [
        lambda: variable.value, variable.numpy, lambda: np.array(variable), lambda: tf.convert_to_tensor(variable),
        lambda: variable[0], lambda: variable.handle, lambda: variable.assign([1.0, 2.0]), lambda: repr(variable),
        lambda: variable + 1.0, lambda: keras.ops.take(variable, [0]), lambda: tf.function(lambda: variable * 2.0)(),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        seen.clear()
        way()
        assert seen, number


def test_layers_within_are_all_layers_once():
    model, inner = small()
    found = list(keras_internals.layers_within(model))
    assert found[0] is model and all(any(f is layer for f in found) for layer in [*model.layers, *inner.layers])
    assert len({id(f) for f in found}) == len(found)


def test_parts_are_the_layers_held():
    model, inner = small()
    assert any(part is inner for part in keras_internals.parts(model))
    assert not any(part is inner.layers[0] for part in keras_internals.parts(model))


def test_own_weights_are_not_those_of_parts():
    model, inner = small()
    assert keras_internals.own_weights(model) == [] and len(keras_internals.own_weights(inner.layers[0])) == 2
    inner.layers[0].trainable = False
    assert keras_internals.own_weights(inner.layers[0]) == []


def test_own_state_is_what_a_layer_holds_beside_its_weights():
    layer = keras.layers.BatchNormalization()
    layer.build([None, 2])
    assert len(keras_internals.own_state(layer)) == 2


def test_added_losses_are_those_of_add_loss():
    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_sum(inputs))
            return inputs

    layer = Adds()
    assert not keras_internals.find_added_losses(layer)
    layer(tf.ones([2]))
    assert len(keras_internals.find_added_losses(layer)) == 1


def test_random_states_set_back_draw_the_same():
    model, _ = small()
    states = keras_internals.random_states(model)
    before, x = [np.array(s) for s in states], np.ones([4, 3])
    one = model(x, training=True)
    for state, value in zip(states, before, strict=True):
        state.assign(value)
    assert states and np.array_equal(one, model(x, training=True))


def test_who_draws_is_the_layer_and_not_what_holds_it():
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input([2]), dropout, keras.layers.Dense(1)])
    assert [layer for layer in keras_internals.layers_within(model) if keras_internals.draws(layer)] == [dropout]


def test_a_generator_that_two_layers_hold_has_one_state():
    class Holds(keras.layers.Layer):
        def __init__(self, generator):
            super().__init__()
            self.generator = generator

        def call(self, inputs):
            return inputs

    generator, inputs = keras.random.SeedGenerator(7), keras.Input([3])
    model = keras.Model(inputs, Holds(generator)(Holds(generator)(inputs)))
    (state,) = keras_internals.random_states(model)
    assert state is generator.state


def test_the_loss_tracker_is_what_fit_shows():
    model, _ = small()
    shown = model.train_on_batch(np.ones([4, 3]), np.ones([4, 1]))
    assert float(keras_internals.loss_tracker(model).result()) == pytest.approx(float(np.ravel(shown)[0]))


def test_compiled_metrics_are_built_by_what_they_see():
    model, _ = small()
    assert keras_internals.metrics_container(model) is None
    model.compile("sgd", loss="mse", metrics=["mae"])
    found = keras_internals.metrics_container(model)
    assert not found.built and any(metric is found for metric in model.metrics)
    model.test_on_batch(np.ones([4, 3]), np.ones([4, 1]))
    assert found.built and [metric.name for metric in found.metrics] == ["mae"]


def test_compiled_metrics_are_built_by_shapes_as_by_a_batch():
    model, other = small()[0], small()[0]
    for each in (model, other):
        each.compile("sgd", loss="mse", metrics=["mae", "auc"])
    batch = np.ones([4, 3], np.float32), np.ones([4, 1], np.float32)
    other.set_weights(model.get_weights())
    keras_internals.build_metrics(model, (batch[0], tf.constant(batch[1]), model(batch[0]), None))
    built = [variable.shape for variable in model.metrics_variables]
    shown = [each.test_on_batch(*batch) for each in (model, other)]
    assert built == [variable.shape for variable in other.metrics_variables]
    np.testing.assert_allclose(*shown)
    part = keras.Model(model.inputs[0], {"one": model.outputs[0], "other": model.outputs[0]})
    part.compile("sgd", loss={"one": "mse"}, metrics={"one": ["mae"]})
    keras_internals.build_metrics(part, (batch[0], {"one": batch[1], "other": None}, part(batch[0]), None))
    assert [each.name for each in keras_internals.metrics_container(part).metrics] == ["mae"]
    for nothing in (None, (batch[0], None, None, None)):  # a loss without predictions, and data without targets
        keras_internals.build_metrics(small()[0], nothing)


@pytest.mark.parametrize("way", ["metrics", "weighted_metrics"])
def test_metrics_given_to_compile_are_known_before_they_see_a_batch(way):
    model, _ = small()
    own = keras.metrics.MeanSquaredError()
    model.compile("sgd", loss="mse", **{way: [own]})
    found = keras_internals.metrics_variables(model)
    assert {id(variable) for variable in own.variables} <= {id(variable) for variable in found}
    assert {id(v) for v in model.metrics_variables} < {id(variable) for variable in found}  # Keras tells fewer
    model.test_on_batch(np.ones([4, 3]), np.ones([4, 1]))
    assert {id(v) for v in model.metrics_variables} == {id(v) for v in keras_internals.metrics_variables(model)}


def test_fit_begins_at_the_epoch_it_is_told():
    class Begin(keras.callbacks.Callback):
        epochs = ()

        def on_train_begin(self, logs=None):
            keras_internals.begin_at_epoch(self.model, 2)

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs = (*self.epochs, epoch)

    (model, _), begin = small(), Begin()
    model.fit(np.ones([4, 3]), np.ones([4, 1]), epochs=4, verbose=0, callbacks=[begin])
    assert begin.epochs == (2, 3)
    keras_internals.begin_at_epoch(model, None)


def test_functional_models_are_told_by_their_arguments():
    inputs = keras.Input([2])
    model = keras.Model(inputs, inputs)
    assert type(model) is keras_internals.functional_class()
    assert keras_internals.is_functional((inputs, inputs), {})
    assert keras_internals.is_functional((), {"inputs": inputs, "outputs": inputs})
    assert not keras_internals.is_functional((), {"name": "model"})


def test_the_mask_goes_with_an_output():
    output = keras.layers.Embedding(5, 2, mask_zero=True)(np.array([[0, 1]]))
    assert np.array(keras_internals.mask_of(output)).tolist() == [[False, True]]
    assert keras_internals.mask_of(tf.ones([2])) is None


@pytest.mark.parametrize("rate", [0.5, keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)])
def test_learning_rates_as_given_and_as_they_are_now(rate):
    optimizer = keras.optimizers.SGD(rate)
    given = keras_internals.learning_rate_of(optimizer)
    assert given is rate if callable(rate) else float(given) == 0.5
    assert float(keras_internals.learning_rate_now(optimizer)) == 0.5
    optimizer.build([keras.Variable(1.0)])
    optimizer.iterations.assign(1)
    assert float(keras_internals.learning_rate_now(optimizer)) == (0.25 if callable(rate) else 0.5)


def test_xla_is_noticed_while_tracing():
    seen = []

    def function():
        seen.append(keras_internals.is_compiled_with_xla())
        return tf.constant(1)

    tf.function(function)()
    tf.function(function, jit_compile=True)()
    assert seen == [False, True] and not keras_internals.is_compiled_with_xla()


def calls_in(graph):
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    calls = [node for node in nodes if node.op in ("PartitionedCall", "StatefulPartitionedCall")]
    return [tf.compat.v1.ConfigProto.FromString(node.attr["config_proto"].s).graph_options for node in calls]


def test_a_plain_call_has_no_options_of_the_graph_optimizer():
    inner = tf.function(lambda x: 2 * x, autograph=False)

    def outer(x):
        with keras_internals.plain_calls():
            return tf.function(inner, autograph=False)(x)

    def branch(x):
        return choose(x > 0, wrap_in_call(lambda: 2 * x), lambda: x)

    tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": True})
    try:
        in_branch = calls_in(tf.function(branch, autograph=False).get_concrete_function(tf.constant(1.0)).graph)
        plain, other = (tf.function(each, autograph=False).get_concrete_function(1.0) for each in (outer, inner))
        plain, other = calls_in(plain.graph), calls_in(tf.function(lambda: inner(1.0)).get_concrete_function().graph)
    finally:
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": False})
    assert len(plain) == 2 and len(in_branch) == 1
    assert not any(each.ListFields() for each in (*plain, *in_branch))
    assert len(other) == 1 and other[0].rewrite_options.auto_mixed_precision_onednn_bfloat16 == 1


def test_outside_scopes_a_variable_has_one_copy_and_inside_again_several():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        with keras_internals.outside_scopes():
            alone, now = tf.Variable(1.0), tf.distribute.get_strategy()
        several = tf.Variable(1.0)
        assert now is not strategy and tf.distribute.get_strategy() is strategy
    assert not isinstance(alone, tf.distribute.DistributedValues)
    assert isinstance(several, tf.distribute.DistributedValues)
    with pytest.raises(ZeroDivisionError), strategy.scope(), keras_internals.outside_scopes():
        1 / 0  # noqa: B018
    assert not tf.distribute.has_strategy()


def test_a_model_leaves_its_strategy_with_the_first_copies():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inputs = keras.Input([2])
        model = keras.Model(inputs, keras.layers.Dropout(0.5)(keras.layers.Dense(1)(inputs)))
        metrics = [keras.metrics.AUC(), "accuracy"]
        other = keras.Model(model.input, model.output)
    keras_internals.hand_strategy(other, model)
    assert model.distribute_strategy is strategy and other.distribute_strategy is not strategy
    first = [v.value.values[0] for v in model.weights]
    keras_internals.leave_strategy(model, ((metrics,), {"loss": "mse"}))
    assert [keras_internals.resource(v) is one for v, one in zip(model.weights, first, strict=True)] == 2 * [True]
    assert model.distribute_strategy is tf.distribute.get_strategy()
    for variable in (*model.variables, *metrics[0].variables):
        assert not isinstance(keras_internals.resource(variable), tf.distribute.DistributedValues)
    del strategy, first
    gc.collect()
    keras.optimizers.SGD().build(model.trainable_variables)  # which asks what a copy is one of


def test_an_unordered_operation_runs_always_and_waits_for_none():
    def controls(unordered):
        @tf.function
        def two():
            made = [tf.raw_ops.DeepCopy(x=tf.constant(number)).op for number in (1, 2)]
            for each in made if unordered else ():
                keras_internals.run_unordered(each)
            return tf.constant(0)

        graph = two.get_concrete_function().graph
        copies = [each for each in graph.get_operations() if each.type == "DeepCopy"]
        assert set(copies) <= set(graph.control_outputs)
        return len(copies[1].control_inputs)

    assert controls(False) == 1 and controls(True) == 0
    with tf.Graph().as_default():
        keras_internals.run_unordered(tf.raw_ops.DeepCopy(x=tf.constant(1)).op)  # where nothing orders, nothing is done


def test_determinism_is_noticed():
    assert not keras_internals.is_deterministic()
    tf.config.experimental.enable_op_determinism()
    try:
        assert keras_internals.is_deterministic()
    finally:
        config.disable_op_determinism()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_conditional_of_ours_stays_one_operation_where_there_is_one_device(devices, monkeypatch):
    """With others, operations of a branch may stand elsewhere, and TensorFlow takes it apart."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: [None] * devices)

    @tf.function(autograph=False)
    def both(x):
        one = choose(x > 1, lambda: {"a": x, "b": -x}, lambda: {"a": 2 * x, "b": x})
        return one["a"], choose_from([lambda: x, lambda: x + 1, lambda: x + 2], tf.cast(x, tf.int32))

    graph = both.get_concrete_function(tf.TensorSpec([], tf.float32)).graph
    found = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf", "Case", "StatelessCase")]
    assert [op.get_attr("_lower_using_switch_merge") for op in found] == [devices > 1] * 2
    for x, results in ((2.0, [2.0, 4.0]), (1.0, [2.0, 2.0])):
        assert [float(value) for value in both(tf.constant(x))] == results
    assert float(choose(tf.constant(True), lambda: tf.constant(1.0), lambda: tf.constant(2.0))) == 1.0


def test_the_initializer_of_a_variable_is_found():
    seen, initializer = [], keras.initializers.RandomUniform(seed=1)

    def create(next_creator, **options):
        seen.append(keras_internals.initializer_of(options["initial_value"]))
        return next_creator(**options)

    with tf.variable_creator_scope(create):
        keras.Variable(initializer, shape=(2, 3))
    assert seen == [initializer] and keras_internals.initializer_of(3.0) is None


def test_every_layer_answers_for_kernel_and_table():
    dense, embedding = keras.layers.Dense(2), keras.layers.Embedding(4, 2)
    dense.build([None, 3]), embedding.build([None])
    assert keras_internals.kernel_of(dense) is dense.kernel
    assert keras_internals.embeddings_of(embedding) is embedding.embeddings


def test_function_graphs_are_found_by_name():
    inner = tf.function(lambda x: tf.sin(x))

    def outer(x):
        return tf.cond(x > 0, lambda: inner(x), lambda: tf.cos(x))

    graph = tf.function(outer).get_concrete_function(tf.TensorSpec([])).graph
    (branch,) = (op for op in graph.get_operations() if op.type in ("If", "StatelessIf"))
    found = keras_internals.function_graph(graph, branch.get_attr("then_branch").name)
    called = next(op for op in found.get_operations() if "PartitionedCall" in op.type)
    body = keras_internals.function_graph(found, called.get_attr("f").name)
    assert "Sin" in {op.type for op in body.get_operations()}


def test_lengths_of_a_handle_are_those_that_may_be_assigned():
    fixed, free = tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([2, 3]), shape=[None, 3])
    assert keras_internals.lengths_of_handle(fixed.handle) == [2, 3]
    assert keras_internals.lengths_of_handle(free.handle) == [-1, 3]
    assert keras_internals.lengths_of_handle(tf.zeros([])) is None


def test_a_resource_has_one_key_by_whatever_tensor_it_is_held():
    one, other = tf.Variable(1.0, name="v"), tf.Variable(1.0, name="v")
    key = keras_internals.resource_key(one.handle)
    assert key == keras_internals.resource_key(tf.identity(one.handle)) != keras_internals.resource_key(other.handle)


def test_an_operation_is_differentiated_in_another_way_within_the_block_alone():
    def doubled(operation, gradient, otherwise):
        assert operation.type == "Sin"
        return 2 * otherwise(operation, gradient)

    def slope():
        with tf.GradientTape() as tape:
            tape.watch(x := tf.constant(0.0))
            y = tf.sin(x)
        return float(tape.gradient(y, x))

    with pytest.raises(KeyError), keras_internals.override_gradient("Sin", doubled):
        assert slope() == 2.0
        raise KeyError
    assert slope() == 1.0


def test_a_lite_file_is_read_and_names_its_operations():
    signature = [tf.TensorSpec([2, 3], tf.float32)]
    concrete = tf.function(lambda x: tf.nn.softmax(x), input_signature=signature).get_concrete_function()
    content = tf.lite.TFLiteConverter.from_concrete_functions([concrete]).convert()
    model, operations = keras_internals.lite_model(content)
    (graph,) = model.subgraphs
    assert operations == {"SOFTMAX"} and len(graph.operators) == 1
    assert [list(graph.tensors[i].shape) for i in (*graph.inputs, *graph.outputs)] == [[2, 3], [2, 3]]
    assert all(len(model.buffers[tensor.buffer].data or ()) == 0 for tensor in graph.tensors)


def test_a_check_runs_once_before_every_file_and_copy(tmp_path, monkeypatch):
    for module, name in ((saving_lib, "_save_state"), (legacy_h5_format, "save_model_to_hdf5")):
        monkeypatch.setattr(module, name, getattr(module, name))  # so that they are put back at the end
    seen = []
    keras_internals.register_save_check(lambda saved, hdf5: seen.append((saved, hdf5)))
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    copy.deepcopy(model.layers[0])
    model.save(tmp_path / "m.h5")
    assert seen == [(model, False), (model, False), (model.layers[0], False), (model, True)]


def test_the_lengths_of_a_variable_are_known_where_the_graph_alone_has_them():
    """As for a variable on a parameter server: else a step on a cluster was refused for a length that may be 1."""
    table, found = tf.Variable(tf.zeros([7, 4])), []

    @tf.function
    def read():
        handle = tf.compat.v1.get_default_graph().capture(table.handle)
        handle._handle_data = None
        found.append(keras_internals.lengths_of_handle(handle))
        return tf.constant(0)

    read()
    assert found == [[7, 4]]


def test_an_error_within_a_layer_is_raised_as_it_is():
    class Refused(ValueError):
        pass

    class Refusing(keras.layers.Layer):
        def call(self, x):
            raise Refused("One sentence.")

    with pytest.raises(Refused, match="when calling Refusing"):
        Refusing()(np.ones([2, 3]))
    keras_internals.keep_error_plain(Refused)
    with pytest.raises(Refused, match="^One sentence.$"):
        Refusing()(np.ones([2, 3]))


def test_a_call_in_the_surroundings_of_another_has_its_masks_and_its_training():
    class Inner(keras.layers.Layer):
        def call(self, x, training=None):
            seen.append((training, keras_internals.mask_of(x)))
            return x

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            around.append(keras_internals.CallSurroundings.of([x]))
            return self.inner(x)

    seen, around, outer, x = [], [], Outer(), tf.ones([2, 3])
    model = keras.Sequential([outer])
    model(x)  # builds
    seen.clear(), around.clear()
    keras_internals.set_keras_mask(x, tf.constant([True, False]))
    model(x, training=True)
    other = tf.zeros([2, 3])
    with around[0].again([other], {0: tf.constant([False, False])}):
        outer(other)
    outer(tf.zeros([2, 3]))
    assert [training for training, _ in seen] == [True, True, None]
    masks = [None if mask is None else mask.numpy().tolist() for _, mask in seen]
    assert masks == [[True, False], [False, False], None]


def test_a_variable_without_values_is_named_in_a_checkpoint_and_found_there_when_slices_of_it_are_added(tmp_path):
    spec = tf.TensorSpec([5, 3], tf.float32)

    def create(next_creator, **options):
        large = options["trainable"] and len(options["initial_value"]().shape) == 2
        return keras_internals.valueless_variable(spec, "hollow_0") if large else next_creator(**options)

    ids = keras.Input([2], dtype="int32")
    with tf.variable_creator_scope(create):
        table = keras.layers.Embedding(5, 3)
        model = keras.Model(ids, keras.layers.Rescaling(2.0)(table(ids)))
    hollow = keras_internals.resource(table.embeddings)
    for read in (hollow.numpy, lambda: tf.gather(hollow, [1]), lambda: tf.convert_to_tensor(hollow)):
        with pytest.raises(tf.errors.FailedPreconditionError, match="has no values"):
            read()
    keras_internals.serving_archive(model).write_out(tmp_path / "servable", verbose=False)
    written, added = tmp_path / "servable" / "variables", tmp_path / "added"
    written.rename(added)
    key = keras_internals.checkpoint_keys(str(added / "variables"))[hollow.name]
    values = np.arange(15, dtype="float32").reshape(5, 3)
    for start, end in ((0, 4), (4, 5)):
        place = f"5 3 {start},{end - start}:-"
        tf.raw_ops.SaveV2(
            prefix=str(added / str(start)), tensor_names=[key], shape_and_slices=[place], tensors=[values[start:end]]
        )
    parts = [str(added / name) for name in ("variables", "0", "4")]
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=str(written / "variables"))
    loaded = tf.saved_model.load(tmp_path / "servable")
    assert np.array_equal(loaded.serve(tf.constant([[4, 0]])), 2 * values[None, [4, 0]])
    assert sum(len(each.shape) == 2 for each in loaded._all_variables) == 1 and not loaded.variables


def test_objects_are_named_as_where_others_were_named_before():
    keras.layers.Dense(1)
    numbers, names = keras_internals.object_numbers(), []
    for _ in range(2):
        with keras_internals.numbered_from(numbers):
            names.append([keras.layers.Dense(1).name, keras.layers.Dense(1).name, keras.layers.Embedding(2, 2).name])
    assert names[0] == names[1] and len(set(names[0])) == 3
    assert keras.layers.Dense(1).name not in names[0]  # outside, no name is given twice


def test_functions_are_numbered_from_the_same_number_on(tmp_path):
    def numbers(after):
        keras_internals.round_up_function_numbers()
        for _ in range(after):
            tf.function(lambda x: x + 1).get_concrete_function(tf.constant(1.0))
        keras_internals.round_up_function_numbers()
        module = tf.Module()
        module.serve = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([None])])
        tf.saved_model.save(module, tmp_path / f"after-{after}")
        found = re.findall(rb"_(\d{5,})", (tmp_path / f"after-{after}" / "saved_model.pb").read_bytes())
        return {int(each) % 4_000_000 for each in found}

    numbers(1)  # the first file of a process takes one more
    assert numbers(0) == numbers(40) != set()
