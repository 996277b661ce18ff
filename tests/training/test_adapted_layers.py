"""What layers learn by `adapt` has no noise: such layers are refused, whether they were adapted or will be."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.ground.keras_internals import can_adapt, has_file_vocabulary
from tfdp_rec.core.ground.refused import NotPrivate

L = keras.layers
WORDS = np.array(["tea", "jam", "odd"])
NUMBERS = np.array([[1.0], [2.0], [30.0]], "float32")


def adapted(layer, data):
    layer.adapt(data)
    return layer


def set_by_hand(layer):
    layer.set_vocabulary(["tea", "jam"])
    return layer


LEARNED = {
    "Normalization": lambda: adapted(L.Normalization(), NUMBERS),
    "Normalization, not yet": lambda: L.Normalization(),
    "Normalization of all": lambda: adapted(L.Normalization(axis=None), NUMBERS),
    "StringLookup": lambda: adapted(L.StringLookup(), WORDS),
    "StringLookup, tf-idf": lambda: adapted(L.StringLookup(output_mode="tf_idf"), WORDS),
    "StringLookup, by hand": lambda: set_by_hand(L.StringLookup()),
    "IntegerLookup": lambda: adapted(L.IntegerLookup(), np.array([3, 4, 4])),
    "Discretization": lambda: adapted(L.Discretization(num_bins=2), NUMBERS),
    "TextVectorization": lambda: adapted(L.TextVectorization(), WORDS),
}
GIVEN = {
    "Normalization": lambda path: L.Normalization(mean=1.0, variance=2.0),
    "StringLookup": lambda path: L.StringLookup(vocabulary=WORDS),
    "StringLookup of a file": lambda path: L.StringLookup(vocabulary=path),
    "StringLookup, tf-idf": lambda path: L.StringLookup(vocabulary=WORDS, idf_weights=[1, 2, 3], output_mode="tf_idf"),
    "IntegerLookup": lambda path: L.IntegerLookup(vocabulary=[3, 4]),
    "Discretization": lambda path: L.Discretization(bin_boundaries=[0.0, 1.0]),
    "TextVectorization": lambda path: L.TextVectorization(vocabulary=WORDS),
    "TextVectorization of a file": lambda path: L.TextVectorization(vocabulary=path),
    "Hashing": lambda path: L.Hashing(4),
    "HashedCrossing": lambda path: L.HashedCrossing(4),
    "Rescaling": lambda path: L.Rescaling(2.0),
}


class Holds(tfdp_rec.PrivateModel):
    """A model of numbers that holds any layers."""

    def __init__(self, *held, late=None):
        super().__init__()
        self.held, self.late, self.dense = list(held), late, L.Dense(1)

    def build(self, shape):
        if self.late is not None:
            self.made = self.late()
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        return self.dense(x)


class Stack(tfdp_rec.PrivateTraining, keras.Sequential):
    """A model that layers are added to at any time."""


def optimizer():
    return tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1000.0, expected_batch_size=3)


def refused():
    return pytest.raises(NotPrivate, match="adapt")


@pytest.mark.parametrize("kind", LEARNED)
def test_a_layer_that_learns_from_data_is_refused_when_the_model_is_compiled(kind):
    layer = LEARNED[kind]()
    with refused() as refusal:
        Holds(layer).compile(optimizer(), loss="mse")
    assert layer.name in str(refusal.value) and "adapted_to_public_data=True" in str(refusal.value)
    Holds(layer).compile(optimizer(), loss="mse", adapted_to_public_data=True)
    Holds(layer).compile("adam", loss="mse")  # which makes no claim


@pytest.mark.parametrize("kind", GIVEN)
def test_what_a_constructor_is_given_is_taken(kind, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("tea\njam\n")
    layer = GIVEN[kind](str(path))
    Holds(layer).compile(optimizer(), loss="mse")
    if hasattr(layer, "adapt"):  # and stands for good
        with pytest.raises((ValueError, AttributeError)):
            layer.adapt(WORDS if "String" in kind or "Text" in kind else NUMBERS)


NESTS = {
    "a model": lambda layer: keras.Sequential([keras.Sequential([layer])]),
    "a wrapper": lambda layer: L.TimeDistributed(layer),
    "a list of a list": lambda layer: Holds([[layer]]),
    "a dict": lambda layer: Holds({"a": {"b": layer}}),
    "a pipeline": lambda layer: L.Pipeline([layer]),
}


@pytest.mark.parametrize("nest", NESTS)
def test_a_layer_within_layers_is_found(nest):
    with refused():
        Holds(NESTS[nest](L.Normalization())).compile(optimizer(), loss="mse")


def test_a_feature_space_is_its_parts():
    space = keras.utils.FeatureSpace({"age": keras.utils.FeatureSpace.float_normalized()}, output_mode="concat")
    space.adapt({"age": [1.0, 2.0, 30.0]})
    with refused():
        Holds(space).compile(optimizer(), loss="mse")
    hashed = keras.utils.FeatureSpace({"name": keras.utils.FeatureSpace.string_hashed(4)}, output_mode="concat")
    hashed.adapt({"name": ["a", "b"]})
    Holds(hashed).compile(optimizer(), loss="mse")


def test_a_layer_of_ones_own_that_has_adapt_is_refused():
    class Scale(L.Layer):
        def adapt(self, data):
            self.scale = np.max(data)

    with refused():
        Holds(Scale()).compile(optimizer(), loss="mse")


def test_copies_and_loaded_layers_are_told_alike():
    for kind in LEARNED:
        layer = LEARNED[kind]()
        again = type(layer).from_config(layer.get_config())
        assert can_adapt(layer) and can_adapt(again), kind
        if "Look" not in kind and "Text" not in kind:  # whose tables Keras does not copy
            assert can_adapt(copy.deepcopy(layer)), kind
    for kind in ("Normalization", "StringLookup", "IntegerLookup", "Discretization", "TextVectorization"):
        layer = GIVEN[kind]("")
        assert not can_adapt(layer) and not can_adapt(type(layer).from_config(layer.get_config())), kind
        assert not has_file_vocabulary(layer)


def test_layers_that_are_made_later_are_found_before_the_first_step():
    model = Holds(late=L.Normalization)
    model.compile(optimizer(), loss="mse")
    with refused():
        model.prepare((NUMBERS, NUMBERS))
    with refused():
        model.fit(NUMBERS, NUMBERS, batch_size=3, verbose=0)
    model = Stack([L.Dense(1), keras.Input([1])][::-1])
    model.compile(optimizer(), loss="mse")
    model.fit(NUMBERS, NUMBERS, batch_size=3, verbose=0)
    model.add(adapted(L.Normalization(), NUMBERS))
    for train in (lambda: model.fit(NUMBERS, NUMBERS, verbose=0), lambda: model.train_on_batch(NUMBERS, NUMBERS)):
        with refused():
            train()


def functional(layer, kind=tfdp_rec.PrivateModel):
    x = keras.Input([1])
    return kind(x, L.Dense(1)(layer(x)))


@pytest.mark.slow
def test_the_declaration_goes_with_the_saved_model(tmp_path):
    model = functional(adapted(L.Normalization(), NUMBERS))
    model.compile(optimizer(), loss="mse", adapted_to_public_data=True)
    model.fit(NUMBERS, NUMBERS, batch_size=3, verbose=0)
    model.save(tmp_path / "declared.keras")
    loaded = keras.models.load_model(tmp_path / "declared.keras")
    assert loaded.private_step.adapted_to_public_data
    loaded.fit(NUMBERS, NUMBERS, batch_size=3, verbose=0)
    with refused():
        loaded.compile(optimizer(), loss="mse")
    larger = functional(adapted(L.Normalization(), NUMBERS))
    assert model.grow_into(larger).private_step.adapted_to_public_data


@pytest.mark.slow
def test_a_vocabulary_of_a_file_is_given_in_the_saved_model_too(tmp_path):
    (tmp_path / "words.txt").write_text("tea\njam\n")
    x = keras.Input([1], dtype="string")
    lookup = L.StringLookup(vocabulary=str(tmp_path / "words.txt"))
    model = tfdp_rec.PrivateModel(x, L.Flatten()(L.Embedding(3, 1)(lookup(x))))
    model.compile(optimizer(), loss="mse")
    words = tf.constant([["tea"], ["jam"], ["odd"]])
    model.fit(words, NUMBERS, batch_size=3, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(words, verbose=0), model.predict(words, verbose=0))
    loaded.fit(words, NUMBERS, batch_size=3, verbose=0)
    # It declares nothing for others: not for what that layer would learn, nor for the layers of a larger model.
    with pytest.raises(ValueError, match="adapt"):
        next(each for each in loaded.layers if isinstance(each, L.StringLookup)).adapt(WORDS)
    loaded.save(tmp_path / "again.keras")
    again = keras.models.load_model(tmp_path / "again.keras")
    for other in (loaded, again):
        assert not other.private_step.adapted_to_public_data
        learned = adapted(L.StringLookup(), WORDS)
        with refused():
            other.grow_into(tfdp_rec.PrivateModel(x, L.Flatten()(L.Embedding(4, 1)(learned(x)))))


def test_a_text_layer_of_a_file_is_given_in_the_saved_model_too(tmp_path):
    (tmp_path / "words.txt").write_text("tea\njam\n")
    path, options = str(tmp_path / "words.txt"), {"standardize": None, "split": None, "output_mode": "multi_hot"}
    x = keras.Input([], dtype="string")
    model = tfdp_rec.PrivateModel(x, L.Dense(1)(L.TextVectorization(vocabulary=path, **options)(x)))
    model.compile(optimizer(), loss="mse")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    layer = next(each for each in loaded.layers if isinstance(each, L.TextVectorization))
    assert layer.get_vocabulary() == ["[UNK]", "tea", "jam"]
    with pytest.raises(ValueError, match="adapt"):
        layer.adapt(WORDS)


def test_make_private_refuses_and_takes_the_declaration():
    ids = np.arange(200) % 20
    options = {"epsilon": 8.0, "batch_size": 20, "epochs": 1, "learning_rate": 0.1, "accountant": "rdp"}
    for kind in (keras.Model, tfdp_rec.PrivateModel):
        model = functional(adapted(L.Normalization(), ids[:, None] / 1.0), kind)
        model.compile("adam", "mse")
        data = (ids[:, None] / 20.0, ids[:, None] / 20.0)
        with refused():
            tfdp_rec.make_private(model, data, **options)
        private = tfdp_rec.make_private(model, data, adapted_to_public_data=True, **options)
        private.fit(verbose=0)
    mean, variance, _ = tfdp_rec.privacy.private_moments(ids[:, None], 0, 20, noise_multiplier=3.0)
    model = functional(L.Normalization(mean=mean, variance=variance), keras.Model)  # the way out
    model.compile("adam", "mse")
    tfdp_rec.make_private(model, data, **options)
