"""Published checkpoints: a small one, written here in the same format, against a plain forward pass in NumPy."""

import json
import math
import struct
import sys

import keras
import numpy as np
import pytest
from bert_files import CONFIG, HEADS, LAYERS, LENGTH, PLACES, VOCABULARY, WIDTH, save, tensors, written

from tfdp_rec.models import news
from tfdp_rec.models.news.bert import Checkpoint

pytest.importorskip("safetensors")

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("bert"))


def normed(x, scale, shift, epsilon):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + shift


ACTS = {
    "gelu": np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    "gelu_new": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0.0),
}


def oracle(t, tokens, mask, act="gelu", epsilon=CONFIG["layer_norm_eps"]):
    """One text at a time, one head at a time, in double precision."""
    t = {name: values.astype("float64") for name, values in t.items()}

    def linear(x, name):
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x, name):
        return normed(x, t[f"{name}.weight"], t[f"{name}.bias"], epsilon)

    def one(ids, read):
        x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm(x + t["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in (f"encoder.layer.{index}" for index in range(LAYERS)):
            q, k, v = (linear(x, f"{layer}.attention.self.{part}") for part in ("query", "key", "value"))
            heads = []
            for part in np.split(np.arange(WIDTH), HEADS):
                scores = q[:, part] @ k[:, part].T / math.sqrt(WIDTH // HEADS)
                scores = np.where(read[None, :], scores, -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, part])
            mixed = linear(np.concatenate(heads, -1), f"{layer}.attention.output.dense")
            x = norm(x + mixed, f"{layer}.attention.output.LayerNorm")
            hidden = ACTS[act](linear(x, f"{layer}.intermediate.dense"))
            x = norm(x + linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return x

    return np.stack([one(ids, read) for ids, read in zip(tokens, mask)])


def texts(count=5, seed=3):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCABULARY, size=(count, LENGTH)).astype("int32")
    tokens *= np.arange(LENGTH) < rng.integers(2, LENGTH + 1, size=(count, 1))
    return tokens, tokens != 0


def states(model, tokens, mask):
    return np.array(model({"token_ids": tokens, "padding_mask": mask}))


@pytest.mark.parametrize("act", ACTS)
def test_states_are_those_of_a_plain_forward_pass(tmp_path, act):
    model = news.pretrained_bert(save(tmp_path, CONFIG | {"hidden_act": act}), LENGTH)
    tokens, mask = texts()
    found, expected = states(model, tokens, mask), oracle(tensors(), tokens, mask, act)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    other = oracle(tensors(), tokens, mask, "gelu" if act != "gelu" else "relu")
    assert np.abs(expected - other).max() > 2e-4, "the oracle tells activations apart"


@pytest.mark.slow_cases("BF16-8")
@pytest.mark.parametrize("kind, bits", [("F64", 24), ("F16", 11), ("BF16", 8)])
def test_other_types_names_and_tensors_are_read(tmp_path, kind, bits):
    """As the oldest checkpoints are: "bert." before, norms of gamma and beta, a head for pre-training beside."""
    plain = tensors()
    norms = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    named = {"bert.embeddings.position_ids": np.arange(3.0), "cls.predictions.bias": np.ones(VOCABULARY)}
    for name, values in plain.items():
        for now, before in norms.items():
            name = name.replace(now, before)
        named["bert." + name] = values
    model = news.pretrained_bert(save(tmp_path, named=named, kind=kind), LENGTH)
    table = np.array(model.get_layer("embeddings").words.embeddings)
    np.testing.assert_allclose(table, plain["embeddings.word_embeddings.weight"], rtol=2.0 ** (1 - bits))
    tokens, mask = texts()
    np.testing.assert_allclose(states(model, tokens, mask), oracle(plain, tokens, mask), atol=2.0 ** (6 - bits))


@pytest.mark.slow
def test_what_is_frozen_stays_frozen_when_it_is_saved(folder, tmp_path):
    model = news.pretrained_bert(folder, LENGTH)
    assert not model.trainable_variables and len(model.variables) == 4 + 16 * LAYERS
    model = news.pretrained_bert(folder, LENGTH, trainable_layers=1)
    model.save(tmp_path / "bert.keras")
    loaded = keras.saving.load_model(tmp_path / "bert.keras")
    tokens, mask = texts()
    np.testing.assert_allclose(states(loaded, tokens, mask), states(model, tokens, mask), atol=1e-6)
    paths = [[v.path for v in m.trainable_variables] for m in (model, loaded)]
    assert paths[0] == paths[1] and len(paths[0]) == 16 and all("layer_2" in path for path in paths[0])


# Files that are not what they say.


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "roberta"}, "model_type is bert"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"pad_token_id": 1}, "pad_token_id"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "mish"}, "hidden_act must be one of"),
        ({"num_attention_heads": 3}, "multiple of num_attention_heads"),
        ({"hidden_size": "8"}, "hidden_size must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps"),
        ({"layer_norm_eps": "1e-3"}, "no number"),
        ({"num_hidden_layers": LAYERS + 1}, "lacks the tensor encoder.layer.3"),
        ({"vocab_size": VOCABULARY + 1}, r"shape \[30, 8\] where \[31, 8\] belongs"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        news.pretrained_bert(save(tmp_path, CONFIG | change), LENGTH)


def test_a_configuration_that_says_too_little_is_refused(tmp_path):
    lacking = {name: value for name, value in CONFIG.items() if name != "hidden_size"}
    with pytest.raises(ValueError, match="does not say all sizes.*hidden_size"):
        news.pretrained_bert(save(tmp_path, lacking))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        news.pretrained_bert(tmp_path)


@pytest.mark.parametrize("options, name", [({"length": 0}, "length"), ({"length": PLACES + 1}, "length"),
    ({"trainable_layers": -1}, "trainable_layers"), ({"trainable_layers": LAYERS + 1}, "trainable_layers")])
def test_arguments_out_of_the_checkpoints_range_are_refused(folder, options, name):
    with pytest.raises(ValueError, match=f"{name} must be in"):
        news.pretrained_bert(folder, **({"length": LENGTH} | options))


SMALL = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.ones(2, "float32")}


def with_header(change, length=None):
    """A file of SMALL whose header says something else."""
    whole = written(SMALL)
    size = struct.unpack_from("<Q", whole)[0]
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + whole[8 + size :]


def said(name, value):
    return with_header(lambda header: header["a"].update({name: value}))


DAMAGED = {
    "nothing": b"",
    "no header": b"\x10" + b"\0" * 7,
    "huge header": with_header(lambda h: None, 2**62),
    "no JSON": struct.pack("<Q", 4) + b"{{{{" + b"\0" * 32,
    "no text": struct.pack("<Q", 4) + b"\xff\xfe\xff\xfe",
    "deep JSON": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no names": struct.pack("<Q", 2) + b"[]",
    "no entry": with_header(lambda h: h.update(a=7)),
    "a long name": with_header(lambda h: h.update({"a" * 9999: 7})),
    "unheard-of type": said("dtype", ["F32"]),
    "no shape": said("shape", None),
    "cut": written(SMALL)[:-4],
    "beyond": said("data_offsets", [16, 40]),
    "before": said("data_offsets", [-8, 16]),
    "backwards": said("data_offsets", [24, 0]),
    "fractions": said("data_offsets", [0.0, 24.0]),
    "few bytes": said("data_offsets", [0, 20]),
}
DAMAGED = {name: (data, "damaged or cut short, or of another format") for name, data in DAMAGED.items()}
DAMAGED |= {
    "missing": (written({"b": SMALL["b"]}), "lacks the tensor a"),
    "type": (written(SMALL, "I64"), "of type I64"),
    "shape": (said("shape", [3, 2]), r"shape \[3, 2\] where \[2, 3\] belongs"),
    "no numbers": (written({"a": SMALL["a"] * np.nan, "b": SMALL["b"]}), "not finite"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, name):
    data, message = DAMAGED[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as refused:
        found = Checkpoint(path, None)
        found.read("a", 2, 3)
        found.read("b", 2)
    assert len(str(refused.value)) < 500 and str(path) in str(refused.value)


def test_a_tensor_is_read_from_its_own_place(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(written(SMALL))
    for name, values in SMALL.items():
        np.testing.assert_array_equal(Checkpoint(path, None).read(name, *values.shape), values)


def test_without_the_extra_one_sentence_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"safetensors is missing; install it with  pip install 'tfdp-rec\[bert\]'.$"):
        news.pretrained_bert(folder, LENGTH)
