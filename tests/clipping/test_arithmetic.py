"""Products that drop bits between the norm and the sum, and graphs that are rewritten: off, refused, or found out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.core.sensitivity import arithmetic, float_sums
from tfdp_rec.core.sensitivity.arithmetic import refuse_other_arithmetic

COARSE = ["auto_mixed_precision_onednn_bfloat16", "auto_mixed_precision_mkl"]
REWRITES = [*COARSE, "auto_mixed_precision", "debug_stripper"]
X = np.ones([4, 3], "float32")


@pytest.fixture
def coarse():
    """TensorFloat-32 as TensorFlow has it by default."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


def compiled():
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, layers.Dense(1)(inputs))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), "mse")
    return model


def test_compiling_a_private_model_turns_tensor_float_32_off(coarse):
    compiled()
    assert not tf.config.experimental.tensor_float_32_execution_enabled()


def test_a_step_is_refused_where_somebody_turned_it_on_again(coarse, monkeypatch):
    model = compiled()
    tf.config.experimental.enable_tensor_float_32_execution(True)
    model.train_on_batch(X, X[:, :1])  # no GPU: no matter
    model.compile_step_anew()
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0"])
    with pytest.raises(tfdp_rec.NotPrivate, match="TensorFloat-32 is on"):
        model.train_on_batch(X, X[:, :1])
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("mode", ["BF16", "tf32", "ANY"])
def test_onednns_coarse_modes_are_refused(mode, monkeypatch):
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        monkeypatch.setenv(name, "STRICT")
        refuse_other_arithmetic()
        monkeypatch.setenv(name, mode)
        with pytest.raises(tfdp_rec.NotPrivate, match=name):
            refuse_other_arithmetic()
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", ["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL", "TF_ENABLE_AUTO_MIXED_PRECISION"])
def test_variables_that_have_graphs_rewritten_are_refused(name, monkeypatch):
    monkeypatch.setenv(name, "0")
    refuse_other_arithmetic()
    monkeypatch.setenv(name, "1")
    with pytest.raises(tfdp_rec.NotPrivate, match=name):
        refuse_other_arithmetic()


@pytest.fixture
def rewriting():
    """Turns options of TensorFlow's graph optimizer on, and all of them off in the end."""
    yield lambda *names: tf.config.optimizer.set_experimental_options(dict.fromkeys(names, True))
    tf.config.optimizer.set_experimental_options(dict.fromkeys(REWRITES, False))


@pytest.fixture
def coarsening(rewriting):
    """Turns on an option by which products of float32 numbers lose bits; skips where the processor has no such ones."""

    def turn_on(option):
        rewriting(option)
        product = tf.function(lambda one, other: tf.matmul(one, other))(tf.fill([16, 16], 1 + 2.0**-19), tf.eye(16))
        if np.max(product) == np.float32(1 + 2.0**-19):
            pytest.skip(f"{option} changes no product on this processor: it has no bfloat16 arithmetic")

    return turn_on


@pytest.fixture
def wrong_canary(monkeypatch):
    """Has the canaries of steps that are traced from now on find a wrong product, once it is called."""
    wrong, bits = tf.Variable(0), arithmetic._bits
    of_all = lambda found: bits(found) + tf.cast(wrong, tf.uint8) if found.shape.rank else bits(found)  # noqa: E731
    monkeypatch.setattr(arithmetic, "_bits", of_all)
    return lambda option: wrong.assign(1)


@pytest.mark.parametrize("option", REWRITES)
def test_a_step_is_not_traced_where_its_graph_would_be_rewritten(option, rewriting):
    model = compiled()
    rewriting(option)
    for run in (lambda: clipped_sum(model, (X, X[:, :1]), 1.0), lambda: model.fit(X, X[:, :1], verbose=0)):
        with pytest.raises(tfdp_rec.NotPrivate, match=f"\\({option}\\)"):
            run()


@pytest.mark.parametrize("how", ["jit_compile", "set_jit", "TF_XLA_FLAGS"])
def test_xla_does_not_compile_a_private_step(how, monkeypatch):
    """It drops checks, and keeps bits that bfloat16 has no place for."""
    model = compiled()
    run = lambda: tf.function(lambda: clipped_sum(model, (X, X[:, :1]), 1.0).norms, jit_compile=how == "jit_compile")()  # noqa: E731
    monkeypatch.setenv("TF_XLA_FLAGS", f"--tf_xla_cpu_global_jit --tf_xla_auto_jit={2 * (how == 'TF_XLA_FLAGS')}")
    tf.config.optimizer.set_jit("autoclustering" if how == "set_jit" else "")
    try:
        with pytest.raises(tfdp_rec.NotPrivate, match="XLA would compile the private step"):
            run()
    finally:
        tf.config.optimizer.set_jit("")


@pytest.mark.parametrize("how", ["fit", "train_on_batch"])
def test_a_step_is_refused_if_xla_was_turned_on_after_the_first(how):
    model = compiled()
    train = lambda: getattr(model, how)(X, X[:, :1], **({"verbose": 0} if how == "fit" else {}))  # noqa: E731
    train()
    tf.config.optimizer.set_jit("autoclustering")
    try:
        with pytest.raises(tfdp_rec.NotPrivate, match="XLA would compile the private step"):
            train()
    finally:
        tf.config.optimizer.set_jit("")


# The canary: what is turned on once the step was traced.


class TurnOn(keras.callbacks.Callback):
    """Has graphs rewritten from the second step on."""

    def __init__(self, turn_on):
        super().__init__()
        self.turn_on = turn_on

    def on_train_batch_end(self, batch, logs=None):
        self.turn_on()


def kinds_of_products(**settings):
    """A model whose clipped sum has products by MatMul, BatchMatMul and Einsum, a table's and formed ones."""
    ids, numbers = keras.Input([2], dtype="int32"), keras.Input([4, 6])
    rows = layers.Embedding(9, 6)(ids)
    hidden = layers.Dense(6)(layers.Concatenate(axis=1)([rows, numbers]))
    hidden = layers.Conv1D(6, 2, groups=2)(layers.LayerNormalization()(hidden))
    model = tfdp_rec.PrivateModel([ids, numbers], layers.Dense(1)(layers.Flatten()(hidden)))
    mechanism = tfdp_rec.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, expected_batch_size=8)
    model.compile(mechanism, "mse", **settings)
    return model


def batches_of(rows):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, [rows, 2]), rng.normal(size=[rows, 4, 6]).astype("float32")
    return x, rng.normal(size=[rows, 1]).astype("float32")


def weights_of(model):
    return {v.path: np.asarray(v.value) for v in model.trainable_variables}


@pytest.mark.slow
@pytest.mark.parametrize(
    "turned_on, option, part",
    [
        ("wrong_canary", "", None),
        ("coarsening", COARSE[0], None),
        *(pytest.param("coarsening", *v, marks=pytest.mark.slow) for v in [(COARSE[1], None), (COARSE[0], 3)]),
    ],
)
def test_products_that_lose_bits_after_the_step_was_traced_are_found_out(
    turned_on, option, part, rewriting, request, monkeypatch
):  # fmt: skip
    """Also where TensorFlow drops assertions, no weight has moved, and the switch was turned after it was looked at."""
    monkeypatch.setattr("tfdp_rec.core.sensitivity.engine.refuse_other_arithmetic", lambda: None)
    turn_on = request.getfixturevalue(turned_on)
    model, batch = kinds_of_products(microbatch_size=part), batches_of(8)
    model.train_on_batch(*batch)
    before = weights_of(model)
    turn_on(option)
    with pytest.raises(tf.errors.InvalidArgumentError, match="drop bits between the norms and the sum"):
        model.train_on_batch(*batch)
    assert int(model.optimizer.iterations) == 1
    rewriting("debug_stripper")
    with pytest.raises(tf.errors.InvalidArgumentError, match="drop bits between the norms and the sum"):
        model.train_on_batch(*batch)
    for path, value in weights_of(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    if not option:
        return
    tf.config.optimizer.set_experimental_options(dict.fromkeys(REWRITES, False))
    model.train_on_batch(*batch)
    assert all(np.any(value != before[path]) for path, value in weights_of(model).items())


def test_a_callback_that_has_the_graph_rewritten_ends_the_fit(coarsening):
    model = compiled()
    with pytest.raises(tf.errors.InvalidArgumentError, match="drop bits between the norms and the sum"):
        model.fit(X, X[:, :1], batch_size=1, verbose=0, callbacks=[TurnOn(lambda: coarsening(COARSE[0]))])
    assert int(model.optimizer.iterations) == 1


def canaries(norms, **options):
    run = tf.function(arithmetic.canaries, **options)
    assert set(arithmetic.canaries(norms)) <= {o.type for o in run.get_concrete_function(norms).graph.get_operations()}
    return lambda: {kind: bool(right) for kind, right in run(norms).items()}


@pytest.mark.parametrize("norms", [[], [0.5, 3.0], [float("nan"), float("inf"), 0.0]])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_example_decides_what_the_canaries_say(norms, dtype):
    assert all(canaries(tf.constant(norms, dtype))().values())


def test_every_canary_waits_for_the_norms():
    """No optimizer of graphs can compute it beforehand, on the processor that the graph is made on."""
    graph = tf.function(arithmetic.canaries).get_concrete_function(tf.TensorSpec([None])).graph

    def waits(operation):
        return operation.type == "Placeholder" or any(waits(tensor.op) for tensor in operation.inputs)

    products = [o for o in graph.get_operations() if o.type in ("MatMul", "BatchMatMulV2", "Einsum", "AddN", "Mul")]
    assert len({o.type for o in products}) == 5
    assert all(waits(tensor.op) for operation in products for tensor in operation.inputs)


def test_every_write_of_a_step_waits_for_the_canaries():
    """Weights are computed from them; and a step that is not made is not counted."""
    model = compiled()
    model.prepare(tf.data.Dataset.from_tensors((X, X[:, :1])).element_spec)
    graph = tf.function(model.train_step, autograph=False).get_concrete_function((X, X[:, :1])).graph
    found: dict[tuple[tf.Operation, bool], bool] = {}

    def says(operation):
        text = operation.get_attr("value").string_val if operation.type == "Const" else []
        return arithmetic._NOT_EXACT.encode() in text or any(says(tensor.op) for tensor in operation.inputs)

    first = next(o for o in graph.get_operations() if o.type == "StringToNumber" and says(o))
    check = first.outputs[0].consumers()[0]  # not what merely waits for it: TensorFlow orders all that has an effect

    def follows(operation, by_data):
        key = operation, by_data
        if key not in found:
            several = {tensor.op for tensor in operation.inputs}
            found[key] = check in several or any([follows(each, by_data) for each in several])
            found[key] |= not by_data and any([follows(each, by_data) for each in operation.control_inputs])
        return found[key]

    of_logs = {id(variable.value.handle) for metric in model.metrics for variable in metric.variables}
    of_step = {inner.ref() for outer, inner in graph.captures if id(outer) not in of_logs}
    kinds = ("Assign", "ResourceApply", "ResourceScatter")
    writes = [o for o in graph.get_operations() if o.type.startswith(kinds) and o.inputs[0].ref() in of_step]
    counts = [o for o in writes if o.type.startswith("Assign")]
    assert len(of_logs) == 2 and len(counts) >= 2 and len(writes) == len(counts) + 2
    assert all(follows(o, by_data=o not in counts) for o in writes)


def test_a_canary_tells_of_xla():
    said = canaries(tf.ones([3]), jit_compile=True)()
    assert not said.pop("Cast") and all(said.values())


@pytest.mark.parametrize("option", COARSE)
def test_each_kind_of_product_has_a_canary_of_its_own(option, coarsening):
    ask = canaries(tf.ones([3]))
    coarsening(option)
    said = ask()
    assert said.pop("Cast") and len(said) == 4 and not any(said.values())


@pytest.mark.parametrize("option", COARSE)
def test_sums_have_the_products_that_canaries_see_whoever_traced_them_first(option):
    """All models share the sums' graphs, and a call within a branch would keep the options of their first trace."""
    products = float_sums.trace_once(float_sums._products.__wrapped__)

    def sums(x, g):
        way = float_sums.Way.of(tf.shape(x)[0], tf.constant(60.0), tf.float32)
        return products(x, g, *way)

    tf.config.optimizer.set_experimental_options({option: True})
    try:
        graph = tf.function(sums, autograph=False).get_concrete_function(tf.ones([4096, 3]), tf.ones([4096, 2])).graph
    finally:
        tf.config.optimizer.set_experimental_options({option: False})
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    calls = [node for node in nodes if node.op in ("PartitionedCall", "StatefulPartitionedCall")]
    options = [tf.compat.v1.ConfigProto.FromString(node.attr["config_proto"].s).graph_options for node in calls]
    assert len(options) >= 7 and not any(each.ListFields() for each in options)
