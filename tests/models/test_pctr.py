"""The click model: shapes, exact clipping, learning, saving."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdp_rec
from experiments.bench.baselines import clipped_sum_by
from experiments.generated.clicks import KAGGLE_BUCKETS, SyntheticCriteo, auc
from tfdp_rec.models.pctr import PCTR
from tfdp_rec.noise import KeyedNoise

SMALL = (300, 200, 50) + (10,) * 23


def clicks():
    return keras.losses.BinaryCrossentropy(from_logits=True)


def small_model(optimizer):
    model = PCTR(buckets=SMALL, hidden=[32, 32])
    model.compile(optimizer, loss=clicks())
    return model


def test_widths_follow_the_formula_and_the_study_model_has_its_size():
    model = PCTR()
    assert model.embedding_widths[:5] == [12, 9, 33, 23, 8]
    assert [d.units for d in model.mlp] == [598] * 4
    tables = sum(size * width for size, width in zip(KAGGLE_BUCKETS, model.embedding_widths))
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables if "table" in v.path) == tables
    assert len(set(model.table_paths)) == 26


@pytest.mark.slow
def test_private_steps_clip_exactly():
    model, rng = PCTR(buckets=[30, 20, 10], hidden=[8, 8], num_numeric=5), np.random.default_rng(1)
    model.compile(tfdp_rec.DPSGD(0.1, l2_norm_clip=0.5, noise_multiplier=1.0, expected_batch_size=6), loss=clicks())
    features = {"numeric": rng.normal(size=[6, 5]).astype("float32"), "categorical": rng.integers(0, 10, [6, 3])}
    batch = features, rng.integers(0, 2, 6).astype("float32")
    fast, slow = (
        clipped_sum_by(s, model, batch, l2_norm_clip=0.5)
        for s in ("bookkeeping", "per_example")
    )
    np.testing.assert_allclose(fast.norms, slow.norms, rtol=1e-4)
    assert set(model.table_paths) == set(fast.reads)
    for path, gradient in fast.gradients.items():
        np.testing.assert_allclose(
            tf.convert_to_tensor(gradient), tf.convert_to_tensor(slow.gradients[path]), rtol=1e-3, atol=1e-5
        )


@pytest.mark.slow
def test_adafest_learns_clicks():
    generator = SyntheticCriteo(SMALL, seed=2, signal=2.0, numeric_share=0.0)  # nothing to learn but the tables
    train, test = generator.examples(20_000), generator.examples(10_000, part="test")
    model = small_model(
        tfdp_rec.AdaFEST(
            10.0,
            l2_norm_clip=1.0,
            noise_multiplier=0.3,
            contribution_clip=1.0,
            contribution_noise_multiplier=1.0,
            threshold=5.0,
            expected_batch_size=500,
            dense_optimizer=keras.optimizers.Adam(3e-3),
            noise=KeyedNoise(4),
        )
    )
    sampling = tfdp_rec.data.PoissonSampling(len(train), 500)
    model.fit(sampling.batches(train.fetch, seed=0), steps_per_epoch=120, verbose=0)
    scores = model.predict(test.fetch(slice(None))[0], batch_size=5000, verbose=0)[:, 0]
    assert auc(test.labels, scores) > 0.7
    assert 0 < model.optimizer.updated_values < 120 * sum(s * w for s, w in zip(SMALL, model.embedding_widths))


def test_the_model_saves_and_loads(tmp_path):
    features, _ = SyntheticCriteo(SMALL, seed=1).examples(8).fetch(slice(None))
    model = small_model("sgd")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(features), model(features), rtol=1e-6)
    assert again.get_config() == model.get_config()


@pytest.mark.parametrize("wrong", [{"buckets": []}, {"buckets": [5, 0]}, {"hidden": [8, 0]}])
def test_impossible_models_are_refused(wrong):
    with pytest.raises(ValueError, match="positive"):
        PCTR(**wrong)
