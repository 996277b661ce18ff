"""Saved files are whole or not there."""

import os

import keras
import pytest
import tensorflow as tf
from settling import EVERY_ID, in_training


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


def test_existing_files_and_folders_are_replaced(tmp_path):
    model = in_training(1)
    for _ in range(2):
        model.save(tmp_path / "m.keras")
        model.save_weights(tmp_path / "m.weights.h5")
        model.export(str(tmp_path / "servable"), verbose=False)
    assert sorted(os.listdir(tmp_path)) == ["m.keras", "m.weights.h5", "servable"]
    assert tf.saved_model.load(str(tmp_path / "servable")).serve(EVERY_ID).shape == [15, 1]
