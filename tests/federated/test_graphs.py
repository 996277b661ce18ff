"""A bundle's graph is read before it runs: what could remember a click, or fail or grow by one, is refused."""

import copy
import shutil

import flatbuffers
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

from tfdp_rec.core.claim.ledger import read
from tfdp_rec.federated import AttentionMechanism, graphs, serving
from tfdp_rec.federated.client import PrivateClient
from tfdp_rec.models import news

H, D, B = 4, 3, 2
WINDOW = [tf.TensorSpec((1, H, D), tf.float32, "vectors"), tf.TensorSpec((1, H), tf.bool, "mask")]
LONG = np.ones((10_001, 1), "float32")
ONES = (np.ones((1, H, D), "float32"), np.ones((1, H), bool))


def content_of(function, signature=WINDOW):
    """The graph of a function of (vectors, mask), as a bundle holds it."""

    @tf.function(input_signature=signature, autograph=False)
    def attention(vectors, mask):
        return tf.identity(function(vectors, mask), name="attention")

    concrete = attention.get_concrete_function()
    return concrete.graph.as_graph_def().SerializeToString(), concrete


def plain(vectors, mask):
    return tf.nn.softmax(tf.reduce_sum(vectors, axis=1)[:, :B])


class Memory:
    """The ways in which a graph can carry one answer's clicks into another, or out of the device."""

    def __init__(self, folder):
        self.file, self.seen = str(folder / "seen"), tf.Variable(tf.zeros([1, B]))
        self.map = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def variable(self, vectors, mask):
        return self.seen.assign(self.seen + plain(vectors, mask))

    def read_variable(self, vectors, mask):
        return plain(vectors, mask) + self.seen

    def file_written(self, vectors, mask):
        with tf.control_dependencies([tf.io.write_file(self.file, tf.strings.as_string(vectors[0, 0, 0]))]):
            return plain(vectors, mask)

    def file_read(self, vectors, mask):
        return plain(vectors, mask) + tf.strings.to_number(tf.io.read_file(self.file))

    def python(self, vectors, mask):
        return tf.ensure_shape(tf.numpy_function(lambda v: v[:, 0, :B], [vectors], tf.float32), (1, B))

    def table(self, vectors, mask):
        with tf.control_dependencies([self.map.insert(tf.constant([1], tf.int64), vectors[0, :1, 0])]):
            return plain(vectors, mask)

    def queue(self, vectors, mask):
        queue = tf.queue.FIFOQueue(9, [tf.float32], [()], shared_name="seen")
        with tf.control_dependencies([queue.enqueue(vectors[0, 0, 0])]):
            return plain(vectors, mask)

    def random(self, vectors, mask):
        return plain(vectors, mask) + tf.random.normal((1, B), seed=1)

    def stateless_random(self, vectors, mask):
        return plain(vectors, mask) + tf.random.stateless_normal((1, B), (1, 2))

    def printed(self, vectors, mask):
        tf.print(vectors)
        return plain(vectors, mask)

    def uninitialized(self, vectors, mask):
        return plain(vectors, mask) + tf.raw_ops.Empty(shape=[1, B], dtype=tf.float32)

    def failing(self, vectors, mask):
        return tf.debugging.check_numerics(plain(vectors, mask), "N8 was clicked")

    def loop(self, vectors, mask):
        return tf.while_loop(lambda x: tf.reduce_sum(x) < 10, lambda x: [x * 2], [plain(vectors, mask)])[0]

    def branch(self, vectors, mask):
        return tf.cond(vectors[0, 0, 0] > 0, lambda: self.file_read(vectors, mask), lambda: plain(vectors, mask))

    def nested(self, vectors, mask):
        return tf.function(self.file_written, input_signature=WINDOW)(vectors, mask)

    def out_of_range(self, vectors, mask):
        return tf.gather(plain(vectors, mask), tf.cast(vectors[0, 0, :1], tf.int32), axis=0)


@pytest.mark.parametrize("way", [name for name, value in vars(Memory).items() if callable(value) and name[0] != "_"])
def test_a_graph_that_could_remember_or_fail_is_refused(way, tmp_path):
    memory = Memory(tmp_path)
    content, _ = content_of(getattr(memory, way))
    with pytest.raises(ValueError, match="which a phone does not run") as refused:
        graphs.encoder(content, H, D, B)
    assert str(refused.value).endswith(".") and len(str(refused.value)) < 500
    assert not (tmp_path / "seen").exists()


def test_functions_are_refused_also_where_they_are_not_called(tmp_path):
    graph, other = tf.compat.v1.GraphDef(), tf.compat.v1.GraphDef()
    graph.ParseFromString(content_of(plain)[0])
    other.ParseFromString(content_of(Memory(tmp_path).nested)[0])
    graph.library.CopyFrom(other.library)
    with pytest.raises(ValueError, match="holds a function, which a phone does not run"):
        graphs.encoder(graph.SerializeToString(), H, D, B)


def test_a_plain_graph_runs_and_hints_to_tensorflow_are_dropped():
    content, _ = content_of(plain)
    graph = tf.compat.v1.GraphDef()
    graph.ParseFromString(content)
    for node in graph.node:
        node.device = "/job:elsewhere/task:7"
        node.attr["_kernel"].s = b"another"
    run = graphs.encoder(graph.SerializeToString(), H, D, B)
    np.testing.assert_allclose(run(*ONES), [[0.5, 0.5]])


def test_an_answer_is_a_function_of_its_window_alone():
    """Whatever was asked before: the same bits."""
    encoder = news.user_encoder("nrms", 8, 2, 4)
    attention = news.layers.PrivateAttention(B, 1.0, 0.2)
    encoder.build((1, H, D))
    attention.build((1, 8))

    class Model:
        user_encoder, private_attention = encoder, attention

    concrete = serving._attention(Model, H, D)
    lite = serving._convert(concrete)
    rng = np.random.default_rng(0)
    windows = rng.normal(size=(20, 1, H, D)).astype("float32")
    for run in (
        graphs.encoder(concrete.graph.as_graph_def().SerializeToString(), H, D, B),
        graphs.lite_encoder(lite, H, D, B),
    ):
        first = [np.array(run(window, ONES[1])) for window in windows]
        again = {int(i): np.array(run(windows[i], ONES[1])) for i in rng.permutation(20)}
        assert all(np.array_equal(first[i], again[i]) for i in range(20))


@pytest.mark.parametrize(
    "content, complaint",
    [
        (b"no graph at all", "cannot be read"),
        (b"", "not that of an attention"),
        (content_of(plain, [tf.TensorSpec((1, H, D + 1), tf.float32, "vectors"), WINDOW[1]])[0], "of other sizes"),
        (content_of(lambda v, m: tf.reduce_sum(v, axis=1))[0], "of other sizes"),
        (content_of(plain, [tf.TensorSpec((1, None, D), tf.float32, "vectors"), WINDOW[1]])[0], "unknown size"),
        (content_of(lambda v, m: plain(v, m) + tf.reduce_sum(LONG * tf.transpose(LONG)))[0], "more than"),
    ],
)
def test_graphs_of_other_or_unknown_sizes_are_refused(content, complaint):
    with pytest.raises(ValueError, match=complaint):
        graphs.encoder(content, H, D, B)


def lite_of(function, folder):
    module = tf.Module()
    module.seen = getattr(getattr(function, "__self__", None), "seen", None)
    module.attention = content_of(function)[1]
    tf.saved_model.save(module, str(folder / "saved"), signatures={"attention": module.attention})
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder / "saved"), signature_keys=["attention"])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS]
    converter.experimental_enable_resource_variables = True
    return converter.convert()


@pytest.fixture(scope="module")
def lite(tmp_path_factory):
    """The lite file of `plain`."""
    return lite_of(plain, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("way", ["variable", "loop", "branch", "random", "file_written"])
def test_a_lite_file_that_could_remember_is_refused(way, tmp_path):
    content = lite_of(getattr(Memory(tmp_path), way), tmp_path)
    with pytest.raises(ValueError, match="which a phone does not run"):
        graphs.lite_encoder(content, H, D, B)


def changed(content, change):
    """A lite file with its parts changed."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAsModel(content, 0))
    change(model)
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


@pytest.mark.parametrize("way, runs", [("out_of_range", "GATHER"), ("file_written", "CUSTOM")])
def test_the_operations_that_are_read_are_those_that_run(way, runs, tmp_path):
    """A file has two codes for each, and the larger one is run: what failed for some clicks looked like an ADD."""

    def disguise(model):
        for code in model.operatorCodes:
            code.builtinCode = schema.BuiltinOperator.ADD

    content = changed(lite_of(getattr(Memory(tmp_path), way), tmp_path), disguise)
    with pytest.raises(ValueError, match=f"holds .*{runs}, which a phone does not run"):
        graphs.lite_encoder(content, H, D, B)(*ONES)


def sum_of(model, reads, writes):
    """An operation more: the sum of two tensors."""
    model.operatorCodes.append(schema.OperatorCodeT())
    operation = schema.OperatorT()
    operation.opcodeIndex, operation.inputs, operation.outputs = len(model.operatorCodes) - 1, reads, [writes]
    operation.builtinOptionsType, operation.builtinOptions = schema.BuiltinOptions.AddOptions, schema.AddOptionsT()
    model.subgraphs[0].operators.append(operation)


@pytest.mark.fast_cases("a variable", "unwritten")
@pytest.mark.parametrize("kind", ["a variable", "unwritten", "a constant", "an empty constant", "the answer"])
def test_a_lite_file_that_reads_what_an_earlier_run_has_left_is_refused(kind, lite):
    """The answer plus what is seen; then what is seen, plus the answer. Without delegates it counted 0, 1, 2, 3."""

    def remember(model):
        graph = model.subgraphs[0]
        (answer,) = graph.outputs
        graph.tensors += [copy.deepcopy(graph.tensors[answer]) for _ in range(2)]
        seen, told = len(graph.tensors) - 2, len(graph.tensors) - 1
        graph.tensors[seen].isVariable, graph.tensors[seen].buffer = kind == "a variable", 0
        if "constant" in kind:
            model.buffers.append(schema.BufferT())
            model.buffers[-1].data = np.zeros([B if kind == "a constant" else 0], np.float32).view(np.uint8)
            graph.tensors[seen].buffer = len(model.buffers) - 1
        if kind != "the answer":
            sum_of(model, [answer, seen], told)
        if kind not in ("the answer", "an empty constant"):
            sum_of(model, [answer, told], seen)
        graph.outputs = [told]

    content = changed(lite, remember)
    with pytest.raises(ValueError, match="read before they are written, or written twice"):
        graphs.lite_encoder(content, H, D, B)
    same = changed(lite, lambda model: None)
    np.testing.assert_allclose(graphs.lite_encoder(same, H, D, B)(*ONES), [[0.5, 0.5]])


def outer_product(model, length, claimed):
    """An operation more: a column plus a row, of which the file says that it has another size."""
    graph = model.subgraphs[0]
    like = graph.tensors[graph.outputs[0]]
    for shape in ((length, 1), (1, length), claimed):
        graph.tensors.append(copy.deepcopy(like))
        graph.tensors[-1].shape, graph.tensors[-1].shapeSignature, graph.tensors[-1].buffer = list(shape), None, 0
        if shape is not claimed:
            model.buffers.append(schema.BufferT())
            model.buffers[-1].data = np.zeros(length, np.float32).view(np.uint8)
            graph.tensors[-1].buffer = len(model.buffers) - 1
    sum_of(model, [len(graph.tensors) - 3, len(graph.tensors) - 2], len(graph.tensors) - 1)


def test_the_sizes_of_a_lite_file_are_bounded_whatever_it_says_of_them(lite, monkeypatch):
    """Once a delegate left the size that the file claimed, and 160 GB were granted."""
    content = lite
    large = changed(content, lambda model: outer_product(model, 11_000, (1, 1)))
    with pytest.raises(ValueError, match="more than 100,000,000 numbers together"):
        graphs.lite_encoder(large, H, D, B)
    small = changed(content, lambda model: outer_product(model, 10, (1, 1)))
    np.testing.assert_allclose(graphs.lite_encoder(small, H, D, B)(*ONES), [[0.5, 0.5]])
    monkeypatch.setattr(tf.lite, "Interpreter", None)  # what the file itself says is refused before it is allocated
    for claimed, complaint in (((11_000, 11_000), "more than 100,000,000"), ((-1, 10), "unknown size")):
        said = changed(content, lambda model, claimed=claimed: outer_product(model, 10, claimed))
        with pytest.raises(ValueError, match=complaint):
            graphs.lite_encoder(said, H, D, B)


def test_a_lite_file_that_is_none_is_refused(lite):
    for content in (b"", b"no file at all"):
        with pytest.raises(ValueError, match="cannot be read"):
            graphs.lite_encoder(content, H, D, B)
    with pytest.raises(ValueError, match="of other sizes"):
        graphs.lite_encoder(lite, H, D, B + 1)


def test_an_answer_that_fails_for_some_clicks_is_noise_and_comes_all_the_same(world, tmp_path):
    mechanism = AttentionMechanism(3, 2.0, 1e-5)
    serving.export_client(world.model(), world.catalogue, tmp_path / "bundle", mechanism, 5, tflite=False)
    phone = PrivateClient(tmp_path / "bundle", tmp_path / "ledger.jsonl", 20.0)

    def fail(vectors, mask):
        raise tf.errors.InvalidArgumentError(None, None, "N8 was clicked")

    phone._encode = fail
    phone.record("N8")
    assert phone.attention().shape == (3,) and len(read(tmp_path / "ledger.jsonl").paid) == 1
    phone.close()


def test_a_bundle_of_another_version_or_size_is_refused_before_anything_is_paid(world, tmp_path):
    mechanism = AttentionMechanism(3, 2.0, 1e-5)
    serving.export_client(world.model(), world.catalogue, tmp_path / "bundle", mechanism, 5, tflite=False)
    said = (tmp_path / "bundle" / "bundle.json").read_text()
    for old, new, complaint in (
        ("tfdp_rec bundle 2", "tfdp_rec bundle 1", "export it anew"),
        ('"history_length": 5', '"history_length": 1000000', "whole number from 1 to 1000"),
        ('"history_length": 5', '"history_length": 6', "of other sizes"),
        ('"history_length": 5', '"history_length": 5.0', "whole number"),
        ('"num_basis": 3', '"num_basis": 4', "of other sizes"),
        ('"num_basis": 3', '"num_basis": 3.0', "whole number"),
    ):
        assert old in said
        (tmp_path / "bundle" / "bundle.json").write_text(said.replace(old, new))
        with pytest.raises(ValueError, match=complaint):
            PrivateClient(tmp_path / "bundle", tmp_path / "ledger.jsonl", 20.0)
    (tmp_path / "bundle" / "bundle.json").write_text(said)
    vectors = dict(np.load(tmp_path / "bundle" / "news.npz"))
    np.savez(tmp_path / "bundle" / "news.npz", ids=vectors["ids"][:-1], vectors=vectors["vectors"])
    with pytest.raises(ValueError, match="one vector for each news"):
        PrivateClient(tmp_path / "bundle", tmp_path / "ledger.jsonl", 20.0)
    shutil.rmtree(tmp_path / "bundle")
    assert not (tmp_path / "ledger.jsonl").exists()
