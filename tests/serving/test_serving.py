"""The exported recommender: the same answer to Python, to TensorFlow's command and to a C program."""

import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfdp_rec

VOCABULARY = [318, 296, 593, 356, 50, 480, 2571]
HISTORY = [318, 593]


@pytest.fixture(scope="module")
def model():
    made = tfdp_rec.models.TwoTower(
        VOCABULARY, width=4, hidden=3, prior=[7, 6, 5, 4, 3, 2, 1], history_length=3, ks=(1, 2)
    )
    made.compile(optimizer=tfdp_rec.LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=0.5, expected_batch_size=4))
    rng = np.random.default_rng(0)
    for _ in range(5):
        context, label = rng.integers(0, 8, [4, 3]), rng.integers(1, 8, 4)
        made.train_on_batch({"context": context, "label": label, "negatives": np.array([2, 5, 7])})
    return made


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "servable"
    model.export(str(path), k=4)
    return path


@pytest.fixture(scope="module")
def served(folder):
    return tf.saved_model.load(str(folder))


def ask(served, histories):
    answer = served.serve(tf.constant(histories, tf.int64))
    return answer["ids"].numpy(), answer["scores"].numpy()


def expected(model, history, k=4):
    """From the model itself, in numpy: the last movies watched, no movie of the history in the answer."""
    numbers = [VOCABULARY.index(i) + 1 for i in history if i in VOCABULARY]
    recent = numbers[-model.history_length :]
    scores = model(tf.constant([recent + [0] * (model.history_length - len(recent))])).numpy()[0]
    scores[[n - 1 for n in numbers]] = -np.inf
    best = np.argsort(-scores)[:k]
    return np.array(VOCABULARY)[best], scores[best]


@pytest.mark.slow_cases("history0")
@pytest.mark.parametrize("history", [HISTORY, [2571], [318, 296, 593, 356, 50][:3], [50, 480, 2571, 318]])
def test_answers_are_the_models(model, served, history):
    ids, scores = ask(served, [history])
    k = min(4, len(VOCABULARY) - len(history))
    want_ids, want_scores = expected(model, history)
    assert ids[0, :k].tolist() == want_ids[:k].tolist()
    np.testing.assert_allclose(scores[0, :k], want_scores[:k], rtol=1e-5)


def test_padding_may_stand_anywhere(served):
    ids, scores = ask(served, [[318, 593, 0, 0], [0, 0, 318, 593], [318, 0, 593, 0]])
    assert (ids == ids[0]).all()
    np.testing.assert_allclose(scores - scores[0], 0, atol=1e-6)


def test_unknown_ids_are_ignored_and_an_empty_history_is_answered(served):
    known, _ = ask(served, [[318, 593, 0]])
    with_unknown, _ = ask(served, [[318, 999_999, 593]])
    nothing, _ = ask(served, np.zeros([1, 0]))
    padding, _ = ask(served, [[0, 0, 0]])
    assert known.tolist() == with_unknown.tolist()
    assert nothing.tolist() == padding.tolist()


def test_the_history_is_left_out_and_what_is_missing_is_zero(served):
    ids, _ = ask(served, [VOCABULARY[:5]])
    assert set(ids[0].tolist()) == {480, 2571, 0}


def test_only_the_last_movies_count_but_all_are_left_out(served):
    long, _ = ask(served, [[356, 318, 296, 593]])
    assert 356 not in long[0]


@pytest.mark.parametrize("k", [0, 8])
def test_k_out_of_range_is_refused(model, tmp_path, k):
    with pytest.raises(ValueError, match="k must be a whole number between 1 and the 7 items"):
        model.export(str(tmp_path / "x"), k=k)


@pytest.mark.slow
def test_saved_model_cli_gives_the_same_answer(folder, served, tmp_path):
    np.save(tmp_path / "history.npy", np.array([HISTORY], np.int64))
    command = pathlib.Path(sys.executable).with_name("saved_model_cli")
    arguments = [command, "run", "--dir", folder, "--tag_set", "serve", "--signature_def", "serving_default"]
    arguments += ["--inputs", f"history={tmp_path / 'history.npy'}", "--outdir", tmp_path]
    subprocess.run(arguments, check=True, capture_output=True, timeout=120)
    ids, scores = ask(served, [HISTORY])
    assert np.load(tmp_path / "ids.npy").tolist() == ids.tolist()
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), scores, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_a_c_program_gives_the_same_answer(folder, served, tmp_path):
    library = pathlib.Path(tf.__file__).parent
    shared = sorted(library.glob("libtensorflow_cc.so.*")) + sorted(library.glob("libtensorflow_framework.so.*"))
    program = tmp_path / "client"
    source = pathlib.Path(__file__).with_name("client.c")
    build = ["cc", source, "-I", library / "include", *shared, f"-Wl,-rpath,{library}", "-o", program]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    model = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    signature = model.meta_graphs[0].signature_def["serving_default"]
    names = [signature.inputs["history"].name, signature.outputs["ids"].name, signature.outputs["scores"].name]
    said = subprocess.run(
        [program, folder, *names, *map(str, HISTORY)], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    lines = [line.split() for line in said.splitlines()]
    ids, scores = ask(served, [HISTORY])
    assert [int(line[0]) for line in lines] == ids[0].tolist()
    np.testing.assert_allclose([float(line[1]) for line in lines], scores[0], rtol=1e-4)
