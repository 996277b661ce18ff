"""Saved files are whole or not there."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from settling import EVERY_ID, in_training

import tfdp_rec


@pytest.mark.slow
def test_an_interrupted_save_leaves_the_older_file(tmp_path, monkeypatch):
    model, path = in_training(1), tmp_path / "m.keras"
    model.save(path)
    before = path.read_bytes()

    def half(self, filepath, *args, **kwargs):
        with open(filepath, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(keras.Model, "save", half)
    with pytest.raises(KeyboardInterrupt):
        model.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m.keras"]


@pytest.mark.slow
def test_existing_files_and_folders_are_replaced(tmp_path):
    model = in_training(1)
    for _ in range(2):
        model.save(tmp_path / "m.keras")
        model.save_weights(tmp_path / "m.weights.h5")
        model.export(str(tmp_path / "servable"), verbose=False)
    assert sorted(os.listdir(tmp_path)) == ["m.keras", "m.weights.h5", "servable"]
    assert tf.saved_model.load(str(tmp_path / "servable")).serve(EVERY_ID).shape == [15, 1]


def test_a_model_whose_layers_are_not_built_when_it_is_loaded_is_refused(tmp_path):
    """Keras would leave them at random; it came to an index out of range before."""

    @keras.saving.register_keras_serializable("tests")
    class Unfinished(tfdp_rec.PrivateModel):
        def __init__(self, **options):
            super().__init__(**options)
            self.table, self.dense = keras.layers.Embedding(5, 2), keras.layers.Dense(1)

        def build(self, shape):
            self.built = True

        def call(self, ids):
            return self.dense(self.table(ids))

    model = Unfinished()
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=4), loss="mse")
    model.fit(np.arange(4), np.ones([4, 1]), batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="build all its layers"):
        keras.models.load_model(tmp_path / "model.keras")
