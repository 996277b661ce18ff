"""KGEntity: shapes, padding, the loss against its definition, clipping, private training, saving."""

import inspect

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf

import tfdp_rec
from experiments.bench.baselines import clipped_sum_by
from experiments.generated.knowledge_graph import SyntheticKG
from tfdp_rec.models.kg_entity import EncoderBlock, KGEntity

KG = SyntheticKG(num_individuals=2000, vocabulary_size=400, num_topics=8, context_length=6, max_activities=9)
SIZES = {"entities": 401, "unigrams": 401, "bigrams": 401}


def make_model(**changes):
    seeding.seed(0)
    return KGEntity(
        SIZES, num_labels=401, **{"width": 8, "num_heads": 2, "context_length": 6, "num_blocks": 1, **changes}
    )


def make_batch(individuals=range(12), seed=0, negatives=30):
    batch = KG.fetch(np.asarray(list(individuals), np.int64), seed=seed)
    return {**batch, "negatives": 1 + np.random.default_rng(seed).permutation(400)[:negatives]}


def tensors(batch):
    return {name: tf.convert_to_tensor(values) for name, values in batch.items()}


def test_padding_changes_nothing():
    """More padding, or what stands in the table's padding row, is not seen."""
    model, batch = make_model(), make_batch()
    before = model(batch).numpy()
    wider = {f: np.pad(batch[f], ((0, 0), (0, 0), (0, 2))) for f in SIZES}
    np.testing.assert_allclose(model(wider), before, atol=1e-6)
    long = {f: batch[f].astype("int64") for f in SIZES}
    np.testing.assert_allclose(model(long), before, atol=1e-6)
    for layer in model.tables.values():
        layer.embeddings.assign(tf.tensor_scatter_nd_update(layer.embeddings.value, [[0]], [[9.0] * 8]))
    np.testing.assert_allclose(model(batch), before, atol=1e-6)


def test_every_feature_position_and_value_matters():
    model, batch = make_model(), make_batch([3, 4])
    before = model(batch).numpy()
    for feature in SIZES:
        changed = {**batch, feature: batch[feature].copy()}
        changed[feature][0, 0, 0] = batch[feature][0, 0, 0] % 400 + 1
        moved = np.abs(model(changed).numpy() - before).max(axis=1)
        assert moved[0] > 1e-6 and moved[1] == 0
    swapped = {f: batch[f].copy() for f in SIZES}
    row = int(np.argmax((batch["entities"][:, :, 0] > 0).sum(axis=1)))
    for f in SIZES:
        swapped[f][row, [0, 1]] = batch[f][row, [1, 0]]
    assert np.abs(model(swapped).numpy() - before)[row].max() > 1e-6


def test_an_empty_context_is_a_defined_query():
    empty = {f: np.zeros((2, 6, 2), np.int32) for f in SIZES}
    query = make_model()(empty).numpy()
    assert np.all(np.isfinite(query))
    np.testing.assert_array_equal(query[0], query[1])


def test_loss_is_the_corrected_sampled_softmax():
    model, batch = make_model(), make_batch()
    query, table = model(batch).numpy(), None
    losses = model.per_example_loss(tensors(batch)).numpy()
    table = model.labels.embeddings.numpy()
    for row, loss in enumerate(losses):
        label = batch["label"][row]
        negatives = [n for n in batch["negatives"] if n != label]
        logits = np.array([query[row] @ table[label], *(query[row] @ table[n] + np.log(400 / 30) for n in negatives)])
        assert loss == pytest.approx(np.log(np.exp(logits).sum()) - logits[0], rel=1e-4)


def test_top_k_is_the_best_of_the_whole_catalogue():
    model, batch = make_model(), make_batch()
    scores, ids = model.top_k(batch, 7)
    everything = model(batch).numpy() @ model.labels.embeddings.numpy().T
    everything[:, 0] = -np.inf
    np.testing.assert_array_equal(ids, np.argsort(-everything, axis=1)[:, :7])
    np.testing.assert_allclose(scores, -np.sort(-everything, axis=1)[:, :7], rtol=1e-5)


@pytest.mark.slow
def test_clipping_agrees_with_one_example_at_a_time():
    model, batch = make_model(), tensors(make_batch(range(3)))
    fast = tfdp_rec.clipping.clipped_sum(model, batch, l2_norm_clip=0.3, training=False)
    slow = clipped_sum_by("per_example", model, batch, l2_norm_clip=0.3)
    np.testing.assert_allclose(fast.norms, slow.norms, rtol=1e-4)
    assert set(fast.gradients) == set(slow.gradients) == {v.path for v in model.trainable_variables}
    for path in fast.gradients:
        np.testing.assert_allclose(
            tf.convert_to_tensor(fast.gradients[path]), tf.convert_to_tensor(slow.gradients[path]), atol=1e-5
        )


def batches(size=64):
    rng = np.random.default_rng(0)
    examples = [make_batch(rng.integers(0, 2000, size), seed=i) for i in range(6)]
    first = [None if name not in KGEntity.shared_inputs else len(v) for name, v in examples[0].items()]
    names = {name: tf.TensorSpec([n, *v.shape[1:]], v.dtype) for n, (name, v) in zip(first, examples[0].items())}
    return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=names).repeat()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["SGD", "LazyDPSGD"])
def test_training_lowers_the_loss_and_keeps_only_tables_sparse(mechanism):
    model = make_model()
    if mechanism == "SGD":
        model.compile(optimizer=keras.optimizers.SGD(0.5))
    else:
        make = getattr(tfdp_rec, mechanism)
        model.compile(optimizer=make(2.0, l2_norm_clip=1.0, noise_multiplier=0.01, expected_batch_size=64))
    history = model.fit(batches(), steps_per_epoch=6, epochs=6, verbose=0).history["loss"]
    assert history[-1] < history[0] - 0.3
    if mechanism != "SGD":
        tables = {path.split("/")[-2] for path in model.optimizer.tables}
        assert tables >= {"entities", "unigrams", "bigrams", "labels"}


def test_save_and_load_give_the_same_queries(tmp_path):
    model, batch = make_model(), make_batch()
    before = model(batch).numpy()
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(keras.saving.load_model(tmp_path / "model.keras")(batch), before, atol=1e-6)


@pytest.mark.parametrize("make", [make_model, lambda: EncoderBlock(8, 2, 16)])
def test_config_holds_every_argument(make):
    thing = make()
    arguments = set(inspect.signature(type(thing).__init__).parameters) - {"self", "kwargs"}
    assert arguments <= set(thing.get_config())
    assert type(thing).from_config(thing.get_config()).get_config() == thing.get_config()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="bigrams"):
        KGEntity({"entities": 10, "unigrams": 10}, num_labels=10)
    with pytest.raises(ValueError, match="num_heads"):
        KGEntity(SIZES, num_labels=10, width=10, num_heads=4)
