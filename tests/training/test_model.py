"""Models of all kinds: functional and subclassed side by side, what they save, and what they refuse."""

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from settling import IDS, LABELS, batches, in_training, model_of

import tfdp_rec


class Subclassed(tfdp_rec.PrivateModel):
    def __init__(self, **options):
        super().__init__(**options)
        self.score = keras.layers.Dense(1)

    def call(self, inputs):
        return self.score(inputs)


class Wrapping(tfdp_rec.PrivateModel):
    """Hands inputs and outputs to its parent, as one may with Keras."""

    def __init__(self, width):
        inputs = keras.Input([width])
        super().__init__(inputs, keras.layers.Dense(1)(inputs))


def test_a_subclass_works_beside_functional_models():
    """Keras would make every PrivateModel functional once one of them is."""
    model_of()
    Wrapping(3)
    bases = tfdp_rec.PrivateModel.__bases__
    assert Subclassed()(np.ones([2, 3])).shape == (2, 1)
    assert Wrapping(4)(np.ones([2, 4])).shape == (2, 1)
    assert tfdp_rec.PrivateModel.__bases__ == bases == (tfdp_rec.PrivateTraining, keras.Model)
    assert isinstance(model_of(), tfdp_rec.PrivateModel) and isinstance(Wrapping(2), Wrapping)
    assert Wrapping(2).input.shape == (None, 2)


@pytest.mark.slow
def test_a_functional_model_is_cloned_and_loaded(tmp_path):
    model = in_training()
    model.save(tmp_path / "m.keras")
    for other in (keras.models.load_model(tmp_path / "m.keras"), keras.models.clone_model(model)):
        assert isinstance(other, tfdp_rec.PrivateModel) and other(IDS).shape == (20, 1)


def saved(path):
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, entry: found.update({name: np.array(entry)} if hasattr(entry, "shape") else {}))
    return found


@pytest.mark.slow
def test_metrics_stay_inside(tmp_path):
    """The exact sum of the losses, and the number of examples, are protected by nothing."""
    model = in_training()
    model.compile(model.optimizer, loss="mse", metrics=["mae", keras.metrics.MeanSquaredError()], run_eagerly=True)
    kept = []

    class Writes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                kept.extend(float(v.numpy()) for v in model.metrics_variables)
                assert "metrics_variables" not in model.get_state_tree()
                model.save_weights(tmp_path / "m.weights.h5")
                model.export(str(tmp_path / "servable"), verbose=False)
                tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))

    model.fit(batches().take(3), verbose=0, callbacks=[Writes()])
    assert kept and all(kept)
    numbers = list(saved(tmp_path / "m.weights.h5").values())
    for path in map(str, (tmp_path / "servable/variables/variables", tmp_path / "ckpt-1")):
        names = [name for name, _ in tf.train.list_variables(path) if "GRAPH" not in name]
        numbers += [tf.train.load_variable(path, name) for name in names if "privacy" not in name]
    left = {float(value) for value in numbers if np.ndim(value) == 0}
    assert not left & {value for value in kept if value != int(value)}  # counts are like others


@pytest.mark.slow
def test_dense_weights_are_saved_once(tmp_path):
    model = in_training()
    model.save_weights(tmp_path / "m.weights.h5")
    kernels = [name for name, value in saved(tmp_path / "m.weights.h5").items() if value.shape == (6, 1)]
    assert kernels == ["layers/dense/vars/0"]


@pytest.mark.fast_cases("train_on_batch")
@pytest.mark.parametrize("again", ["fit", "train_on_batch"])
def test_a_layer_frozen_after_a_fit_is_refused(again):
    model = model_of()
    model.fit(batches(), verbose=0)
    model.layers[-1].trainable = False
    with pytest.raises(ValueError, match="frozen"):
        model.fit(batches(), verbose=0) if again == "fit" else model.train_on_batch(IDS[:4], LABELS[:4])
    model.layers[-1].trainable = True
    model.fit(batches(), verbose=0)


def test_a_batch_of_unknown_rank_is_refused_in_words():
    model = tfdp_rec.PrivateModel(inputs := keras.Input([3]), keras.layers.Dense(1)(inputs))
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), loss="mse")
    model.prepare((tf.ones([4, 3]), tf.zeros([4, 1])))

    @tf.function(autograph=False)
    def step(x, y):
        return model.train_step((x, tf.py_function(lambda value: value, [y], tf.float32)))

    with pytest.raises(tfdp_rec.NotPrivate, match="shape <unknown>.*fixed length"):
        step(tf.ones([4, 3]), tf.zeros([4, 1]))
