"""Rows weighed before the clip: the oracle's sums and norms, the same sensitivity, lazy as eager; saved and refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import Scored, example_gradients
from keras import layers

import tfdp_rec
from tfdp_rec.clipping import clipped_sum
from tfdp_rec.clipping.engine import SLACK
from tfdp_rec.datasets.histories import Catalogue
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.optimizers import scale_by_counts
from tfdp_rec.optimizers.noise_walk import noise_in_rows
from tfdp_rec.privacy import private_counts
from tfdp_rec.refused import NotPrivate

ROWS, WIDTH, SIZE, CLIP = 7, 3, 6, 0.7
RNG = np.random.default_rng(2)
IDS = RNG.integers(0, ROWS, [SIZE, 4]).astype("int32")  # seven rows in bags of four: many repeat
IDS[0] = 5
LABELS = RNG.integers(0, ROWS, SIZE).astype("int32")
NEGATIVES = np.array([3, 3, 5, 1], "int32")
BATCH = {"x": IDS, "label": LABELS, "negatives": NEGATIVES, "weight": np.linspace(0.1, 3, SIZE).astype("float32")}
SCALES = {"bag": np.linspace(0.05, 4.0, ROWS), "scores": np.geomspace(0.1, 2.0, ROWS)}
BASICS = {"l2_norm_clip": CLIP, "noise_multiplier": 1.0, "expected_batch_size": SIZE}


def forward(parts, batch):
    query = parts[2](tf.reduce_sum(parts[0](batch["x"]), axis=1))
    return parts[1](query, batch["label"], batch["negatives"])


def model_of(optimizer=None, **options):
    keras.utils.set_random_seed(0)
    kit = [
        layers.Embedding(ROWS, WIDTH, embeddings_initializer="normal", name="bag"),
        tfdp_rec.CandidateScores(ROWS, WIDTH, embeddings_initializer="normal", name="scores"),
        layers.Dense(WIDTH, name="dense"),
    ]
    model = Scored(kit, forward, ("negatives",))
    model.per_example_loss(BATCH)
    model.compile((optimizer or tfdp_rec.LazyDPSGD)(0.3, **{**BASICS, "row_scale": SCALES, **options}))
    return model


def whole(gradient, shape):
    return gradient if not isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(
        tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(shape, tf.int64))
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}])
@pytest.mark.parametrize("clip", [CLIP, 1e3])
def test_norms_and_sums_are_those_of_scaled_gradients_taken_one_by_one(options, clip):
    model = model_of()
    model.prepare(BATCH)
    expected, norms = {v.path: np.zeros(v.shape) for v in model.trainable_variables}, []
    for number in range(SIZE):
        gradients = example_gradients(model, BATCH, number)
        for path in gradients:
            if path.split("/")[-2] in SCALES:
                gradients[path] = gradients[path] * SCALES[path.split("/")[-2]][:, None]
        norms.append(np.sqrt(sum(np.sum(g**2) for g in gradients.values())))
        for path, gradient in gradients.items():
            expected[path] += gradient * min(1.0, clip / (1 + SLACK) / norms[-1])
    found = clipped_sum(model, BATCH, clip, training=False, **options)
    np.testing.assert_allclose(found.norms, norms, rtol=1e-5)
    assert float(found.sensitivity) == np.float32(clip)
    assert min(norms) < CLIP < max(norms)
    for variable in model.trainable_variables:
        got = whole(found.gradients[variable.path], variable.shape)
        atol = 2e-5 * min(clip, max(norms))
        np.testing.assert_allclose(got, expected[variable.path], atol=atol, err_msg=variable.path)


def test_the_sum_of_a_batch_and_of_the_same_without_one_example_are_within_the_clip():
    model = model_of(row_scale={"bag": np.geomspace(1e-6, 1e6, ROWS), "scores": np.geomspace(1e6, 1e-6, ROWS)})
    model.prepare(BATCH)

    def sums(kept):
        batch = {name: value if name == "negatives" else value[kept] for name, value in BATCH.items()}
        found = clipped_sum(model, batch, CLIP, training=False).gradients
        return {v.path: np.asarray(whole(found[v.path], v.shape), np.float64) for v in model.trainable_variables}

    everybody = sums(np.arange(SIZE))
    for number in range(SIZE):
        others = sums(np.delete(np.arange(SIZE), number))
        assert np.sqrt(sum(np.sum((everybody[p] - others[p]) ** 2) for p in others)) <= CLIP


def test_lazy_is_eager_and_noise_is_not_scaled():
    lazy = model_of(tfdp_rec.LazyDPSGD, noise=KeyedNoise(3), aggregate_noise=False)
    eager = model_of(tfdp_rec.DPSGD, noise=KeyedNoise(3))
    data = tf.data.Dataset.from_tensors(BATCH).repeat(4)
    for model in (lazy, eager):
        model.fit(data, verbose=0)
    for one, other in zip(lazy.get_weights(), eager.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert len({round(length, 9) for length in noise_in_rows(lazy.optimizer, 9).values()}) == 1
    plain = model_of(tfdp_rec.DPSGD, noise=KeyedNoise(3), row_scale=None)
    plain.fit(data, verbose=0)
    assert np.max(np.abs(plain.get_weights()[0] - eager.get_weights()[0])) > 1e-3
    assert plain.optimizer.dp_event() == eager.optimizer.dp_event()


REFUSED = {
    "too short": ({"bag": np.ones(ROWS - 1)}, "must have 7 numbers"),
    "another layer": ({"rows": np.ones(ROWS)}, "'rows', which is 0 of the model's tables"),
    "no table": ({"dense": np.ones(WIDTH)}, "'dense', which is 0 of the model's tables"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scales_of_no_table_of_the_model_are_refused(name):
    given, match = REFUSED[name]
    with pytest.raises(ValueError, match=match) as refused:
        model_of(row_scale=given).train_on_batch(BATCH)
    assert str(refused.value).endswith(".") and len(str(refused.value)) < 500


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf, 1e-60, 1e60])
def test_scales_that_are_not_positive_finite_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="must be positive finite numbers"):
        model_of(row_scale={"bag": np.array([1.0] * (ROWS - 1) + [wrong])})


def test_a_saved_optimizer_says_whose_scales_it_had_and_steps_only_with_them(tmp_path):
    ids = keras.Input([4], dtype="int32")
    rows = layers.Flatten()(layers.Embedding(ROWS, WIDTH, name="bag")(ids))
    model = tfdp_rec.PrivateModel(ids, layers.Dense(1)(rows))
    model.compile(tfdp_rec.LazyDPSGD(0.1, **BASICS, row_scale={"bag": SCALES["bag"]}), "mse")
    model.train_on_batch(IDS, np.ones([SIZE, 1]))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    assert loaded.optimizer.row_scale == ["bag"]
    with pytest.raises(NotPrivate, match="give them again before training"):
        loaded.train_on_batch(IDS, np.ones([SIZE, 1]))
    loaded.optimizer.row_scale = {"bag": SCALES["bag"]}
    loaded.train_on_batch(IDS, np.ones([SIZE, 1]))
    with pytest.raises(ValueError, match="constant in time"):
        loaded.optimizer.row_scale = {"bag": np.ones(ROWS)}
    assert b"0.05" not in (str(loaded.optimizer.get_config())).encode()


def test_released_counts_make_scales():
    watched = [[10, 20]] * 300 + [[10]] * 500
    counts = private_counts(watched, Catalogue([10, 20, 30]), noise_multiplier=1.0).values
    scale = scale_by_counts(counts, constant=100.0)
    assert scale[0] < scale[1] < scale[2] <= 1.0
    assert scale[0] == pytest.approx((100 / 900) ** 0.5, rel=0.1)
    for constant, power in ((0.0, 0.5), (1.0, -1.0)):
        with pytest.raises(ValueError, match="constant must be positive"):
            scale_by_counts(counts, constant, power)
