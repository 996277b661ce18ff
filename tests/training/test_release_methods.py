"""No way for weights to leave training leaves a row unsettled: the doors of a model, one by one."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from settling import EVERY_ID, IDS, LABELS, ROWS, assert_settled, in_training, loaded_table, model_of, raw

import tfdp_rec
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.ground.withheld_rows import rows_of
from tfdp_rec.core.mechanism.weights import PrivateWeights
from tfdp_rec.training.release_methods import ReleaseMethods

# Every door, each given (model, folder), returns a table that left training, or None if only numbers did.


def _save(model, folder):
    model.save(folder / "m.keras")
    return loaded_table(folder / "m.keras")


def _save_model(model, folder):
    keras.saving.save_model(model, folder / "m.keras")
    return loaded_table(folder / "m.keras")


def _save_weights(model, folder):
    model.save_weights(folder / "m.weights.h5")
    other = model_of()
    other.load_weights(folder / "m.weights.h5")
    return other.layers[1].embeddings


def _checkpoint(model, folder):
    path = tf.train.Checkpoint(model=model).save(str(folder / "ckpt"))
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    return tf.train.load_variable(path, names[0])


def _saved_model(model, folder):
    tf.saved_model.save(model, str(folder / "sm"))
    path = str(folder / "sm/variables/variables")
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    return tf.train.load_variable(path, names[0])


def _export(model, folder):
    model.export(str(folder / "servable"), verbose=False)
    path = str(folder / "servable/variables/variables")
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    return tf.train.load_variable(path, names[0])


def _own_variables(model, folder):
    model.optimizer.save_own_variables({})


def _layer_file(model, folder):
    store = {}
    model.layers[1].save_own_variables(store)
    return np.array(store["0"])  # as a file does


def _part_saved(model, folder):
    ids = keras.Input([2], dtype="int32")
    tfdp_rec.PrivateModel(ids, model.layers[1](ids)).save_weights(folder / "part.weights.h5")
    other = tfdp_rec.PrivateModel(ids, keras.layers.Embedding(ROWS, 3)(ids))
    other.load_weights(folder / "part.weights.h5")
    return other.layers[1].embeddings


DOORS = {
    "evaluate": lambda m, f: m.evaluate(IDS, LABELS, verbose=0) and None,
    "predict": lambda m, f: m.predict(EVERY_ID, verbose=0)[:0].sum() or None,
    "predict_on_batch": lambda m, f: m.predict_on_batch(EVERY_ID)[:0].sum() or None,
    "test_on_batch": lambda m, f: m.test_on_batch(IDS, LABELS) and None,
    "call": lambda m, f: m(EVERY_ID) is None,
    "get_weights": lambda m, f: m.get_weights()[0],
    "save": _save,
    "keras.saving.save_model": _save_model,
    "save_weights": _save_weights,
    "export": _export,
    "Checkpoint": _checkpoint,
    "saved_model.save": _saved_model,
    "optimizer.save_own_variables": _own_variables,
    "state tree": lambda m, f: m.get_state_tree() and None,
    "a private part saved": _part_saved,
}

READS = {
    "layer.get_weights": lambda m, f: m.layers[1].get_weights(),
    "layer.set_weights": lambda m, f: m.layers[1].set_weights([np.zeros([ROWS, 3])]),
    "layer.save_own_variables": _layer_file,
    "a layer's state tree": lambda m, f: keras.Sequential([m.layers[1]]).get_state_tree(),
    "a layer called": lambda m, f: m.layers[1](np.arange(ROWS)),
    "a part called": lambda m, f: keras.Model(m.input, m.layers[1].output)(EVERY_ID),
    "a part's get_weights": lambda m, f: keras.Model(m.input, m.layers[1].output).get_weights(),
    "a part saved": lambda m, f: keras.Model(m.input, m.layers[1].output).save_weights(f / "part.weights.h5"),
    "a checkpoint of the layer": lambda m, f: tf.train.Checkpoint(layer=m.layers[1]).save(str(f / "ckpt")),
    "a pickled layer": lambda m, f: pickle.dumps(m.layers[1]),
    "a copied layer": lambda m, f: copy.deepcopy(m.layers[1]),
    "variable.numpy": lambda m, f: m.layers[1].embeddings.numpy(),
    "variable.value": lambda m, f: m.layers[1].embeddings.value,
    "variable.assign": lambda m, f: m.layers[1].embeddings.assign(np.zeros([ROWS, 3])),
    "np.array(variable)": lambda m, f: np.array(m.layers[1].embeddings),
    "variable to tensor": lambda m, f: tf.convert_to_tensor(m.layers[1].embeddings),
    "keras.ops": lambda m, f: keras.ops.sum(m.layers[1].embeddings),
    "a norm": lambda m, f: tf.norm(m.layers[1].embeddings),
    "a lookup": lambda m, f: tf.gather(m.layers[1].embeddings, [0]),
    "an embedding lookup": lambda m, f: tf.nn.embedding_lookup(m.layers[1].embeddings, [0]),
    "a row": lambda m, f: m.layers[1].embeddings[0],
    "a sum": lambda m, f: m.layers[1].embeddings + 1.0,
    "a product": lambda m, f: np.ones([1, ROWS]) @ m.layers[1].embeddings,
    "its text": lambda m, f: repr(m.layers[1].embeddings),
    "a regularizer": lambda m, f: keras.regularizers.L2(0.1)(m.layers[1].embeddings),
    "the variables of the model": lambda m, f: [variable.numpy() for variable in m.trainable_variables],
}


@pytest.fixture(scope="module")
def pair():
    """A lazy model and an eager one, in the middle of one training, which every test takes a step further."""
    return model_of(), model_of(tfdp_rec.DPSGD)


def step(model):
    number = int(model.optimizer.iterations) % 5
    model.train_on_batch(IDS[4 * number :][:4], LABELS[4 * number :][:4])


@pytest.mark.parametrize("door", DOORS)
def test_a_door_releases(door, tmp_path, pair):
    for model in pair:
        step(model)
    lazy, eager = pair
    assert not lazy.optimizer.releasable
    let_out, expected = DOORS[door](lazy, tmp_path), raw(eager)
    assert lazy.optimizer.releasable
    assert_settled(raw(lazy), expected)
    if isinstance(let_out, (np.ndarray, tf.Tensor, keras.Variable)) or hasattr(let_out, "__array__"):
        assert_settled(let_out, expected)


@pytest.mark.parametrize("read", READS)
def test_a_read_outside_a_release_is_refused_and_changes_nothing(read, tmp_path, pair):
    for model in pair:
        step(model)
    lazy, eager = pair
    before = raw(lazy)
    # A file or copy of a part is refused before it is read, for its lost history.
    with pytest.raises((NotPrivate, ValueError), match="owes noise.*settle()|privacy history"):
        READS[read](lazy, tmp_path)
    assert not lazy.optimizer.releasable
    np.testing.assert_array_equal(raw(lazy), before)
    lazy.settle()
    assert_settled(lazy.layers[1].embeddings, raw(eager))


@pytest.mark.slow
def test_compiling_anew_settles(eager_tables):
    model = in_training()
    optimizer = model.optimizer
    model.compile("sgd", loss="mse")
    assert optimizer.releasable
    assert_settled(raw(model), eager_tables[2])


def _through(door, model, folder):
    """What a user does at a door."""
    saved = folder / f"{door}.weights.h5"
    takes = {
        "__call__": (IDS,),
        "evaluate": (IDS, LABELS, 32, 0),
        "predict": (EVERY_ID, 32, 0),
        "predict_on_batch": (EVERY_ID,),
        "test_on_batch": (IDS, LABELS),
        "save_own_variables": ({},),
        "save": (folder / "m.keras",),
        "save_weights": (saved,),
        "export": (str(folder / "servable"), "tf_saved_model", False),
        "load_weights": (folder / "save_weights.weights.h5",),
        "set_weights": ([value.numpy() for value in map(rows_of, model.weights)],),
        "set_state_tree": ({},),
    }
    getattr(model, door)(*takes.get(door, ()))


def test_every_door_releases_where_no_guard_stands(tmp_path, monkeypatch):
    """Most are protected twice: a read of a table would be refused. Here the doors are alone."""
    monkeypatch.setattr(PrivateWeights, "check_read", lambda weights, variable: None)
    model, doors = in_training(), [name for name, door in vars(ReleaseMethods).items() if hasattr(door, "__wrapped__")]
    doors.sort(key="load_weights".__eq__)  # from a file that another door wrote
    assert len(doors) == 15, doors
    for door in doors:
        step(model)
        assert not model.optimizer.releasable
        _through(door, model, tmp_path)
        assert model.optimizer.releasable, door


def test_second_checkpoint_settles_again(tmp_path, eager_tables):
    model = in_training(2)
    checkpoint = tf.train.Checkpoint(model=model)
    checkpoint.save(str(tmp_path / "ckpt"))
    model.train_on_batch(IDS[8:12], LABELS[8:12])
    path = checkpoint.save(str(tmp_path / "ckpt"))
    names = [name for name, shape in tf.train.list_variables(path) if shape == [ROWS, 3]]
    assert_settled(tf.train.load_variable(path, names[0]), eager_tables[2])


@pytest.mark.slow
def test_tensorflow_checkpoint_restores_a_settled_model(tmp_path):
    model = in_training()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    released = model.get_weights()
    model.train_on_batch(IDS[:4], LABELS[:4])
    tf.train.Checkpoint(model=model).restore(path)
    assert int(model.optimizer.iterations) == 3
    model.optimizer.debts.marks.restart(3)
    for one, other in zip(model.get_weights(), released, strict=True):
        np.testing.assert_array_equal(one, other)
