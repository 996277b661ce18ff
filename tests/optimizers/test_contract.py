"""What every mechanism promises, whichever it is: a new one joins by being listed."""

import contextlib
import functools
import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from helpers import bytes_in, operations, tensors_of_shape

import tfdp_rec
from tfdp_rec import mechanisms
from tfdp_rec.core.claim.events import describe
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.noise import EntropyNoise, KeyedNoise, SecureNoise
from tfdp_rec.optimizers import Adagrad, Adam, Preselection, PrivateOptimizer
from tfdp_rec.privacy import BufferedToeplitz, Correlation

BASICS = {"learning_rate": 0.3, "l2_norm_clip": 0.7, "noise_multiplier": 0.9, "expected_batch_size": 4.0}
CHOSEN = Preselection({"items/embeddings": list(range(0, 200, 7))})
OWN = {  # a value for every setting that some mechanism has for itself
    "preselection": CHOSEN,
    "contribution_clip": 1.0,
    "contribution_noise_multiplier": 1.0,
    "threshold": 1.0,
    "num_survivors": 20,
    "selection_epsilon": 0.5,
    "correlation": Correlation(BufferedToeplitz([0.3, 0.2], [0.95, 0.5]), steps=50, separation=5),
}
MECHANISMS = {m.kind: {name: OWN[name] for name in m.own} for m in mechanisms.MECHANISMS}
MOVES_ALL_ROWS = [m.kind for m in mechanisms.MECHANISMS if m.rows != "chosen"]  # these take momentum and weight decay
EVERY = pytest.mark.parametrize("kind", MECHANISMS, ids=lambda kind: kind.__name__)
RULES = {
    tfdp_rec.DPSGD: Adam(),
    tfdp_rec.EANA: Adagrad(),
    tfdp_rec.FEST: Adagrad(rowwise=False),
}
EVERY_WAY = pytest.mark.parametrize(
    ("kind", "rule"),
    [*((kind, None) for kind in MECHANISMS), *RULES.items()],
    ids=lambda each: each and getattr(each, "__name__", repr(each)),
)
ROWS, WIDTH = 211, 5


def optimizer_of(kind, **options):
    return kind(**{**BASICS, **MECHANISMS[kind], **options})


def model_of(kind, seed=1, compile_options=None, **options):
    seeding.seed(seed)
    ids = keras.Input([3], dtype="int32")
    table = keras.layers.Embedding(ROWS, WIDTH, name="items")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
    model.compile(optimizer_of(kind, **options), loss="mse", **(compile_options or {}))
    return model


def batches():
    rng = np.random.default_rng(3)
    ids = rng.integers(0, ROWS, [12, 3]).astype("int32")
    return tf.data.Dataset.from_tensor_slices((ids, rng.normal(size=[12, 1]).astype("float32"))).batch(3)


SEED = 0x5EED0C0FFEE
STEPS = 4


class WatchedNoise(KeyedNoise):
    """Keeps the graph of the step that first drew from it, with all that is around the draw."""

    graph = None

    def draw(self, requests, step):
        if self.graph is None and not tf.executing_eagerly():
            self.graph = tf.compat.v1.get_default_graph()
            while hasattr(self.graph.outer_graph, "outer_graph"):
                self.graph = self.graph.outer_graph
        return super().draw(requests, step)


@pytest.fixture(scope="module")
def trained():
    """A model of each mechanism, trained in a graph, several steps an execution."""

    @functools.cache
    def of(kind, rule=None):
        model = model_of(kind, compile_options={"steps_per_execution": 2}, noise=WatchedNoise(SEED), table_rule=rule)
        model.fit(batches(), verbose=0)
        return model

    return of


def saved_and_loaded(model, path):
    """A model loaded again and trained for a step with the noise of the operating system, from a seed."""
    model.save(path)
    model = keras.models.load_model(path)
    state = [np.asarray(v) for v in (*model.optimizer.variables, *model.weights)]
    config, tables = model.optimizer.get_config(), model.optimizer.tables.keys()
    model.run_eagerly = True
    keras.utils.set_random_seed(1)
    model.train_on_batch(*next(iter(batches())))
    return model, path, state, config, tables


@pytest.fixture(scope="module")
def loaded(trained, tmp_path_factory):
    @functools.cache
    def of(kind, rule, time=1):
        return saved_and_loaded(trained(kind, rule), tmp_path_factory.mktemp("contract") / "model.keras")

    return of


# Configuration.


@EVERY
def test_it_can_be_made_from_what_its_record_says_and_from_nothing_less(kind):
    optimizer_of(kind)
    for needed in {*BASICS, *MECHANISMS[kind]}:
        given = {name: value for name, value in {**BASICS, **MECHANISMS[kind]}.items() if name != needed}
        with pytest.raises((TypeError, ValueError), match=needed):
            kind(**given)


@EVERY
def test_privacy_settings_are_given_by_name(kind):
    with pytest.raises(TypeError, match=f"{kind.__name__} takes its settings by name.*expected_batch_size=") as refusal:
        kind(0.1, 1.0, 1.1, 256)
    assert len(str(refusal.value)) < 500 and str(refusal.value).endswith(".")
    by_place = [p.name for p in inspect.signature(kind).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == ["learning_rate"]


@EVERY
def test_config_holds_every_argument(kind):
    arguments = {"plan"}
    for parent in kind.__mro__:
        if issubclass(parent, PrivateOptimizer):
            arguments |= {
                name
                for name, p in inspect.signature(parent.__init__).parameters.items()
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != "self"
            }
    assert set(optimizer_of(kind).get_config()) == arguments
    listed = inspect.signature(kind).parameters.values()  # as help() shows them
    assert {p.name for p in listed if p.kind is not p.VAR_KEYWORD} == arguments


@EVERY
def test_config_makes_the_same_again(kind):
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 100)
    options = {"dense_optimizer": "adam", "secure": True, "name": "mine", "table_rule": RULES.get(kind)}
    optimizer = optimizer_of(kind, learning_rate=schedule, noise_multiplier=1.75, **options)
    config = optimizer.get_config()
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is kind and again.get_config() == config
    assert again.table_rule == RULES.get(kind)
    assert again.noise_multiplier == 1.75 and isinstance(again.noise, SecureNoise)
    assert describe(again.dp_event()) == describe(optimizer.dp_event())


@EVERY
def test_a_rule_that_normalises_is_in_the_config_and_cannot_be_set(kind):
    optimizer = optimizer_of(kind, l2_norm_clip="auto")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == optimizer.get_config() and again.get_config()["l2_norm_clip"] == "auto"
    assert again.l2_norm_clip == 1.0 and again.clip_rule is optimizer.clip_rule
    assert describe(again.dp_event()) == describe(optimizer_of(kind, l2_norm_clip=1.0).dp_event())
    for one, value in ((optimizer, 1.0), (optimizer_of(kind), "auto")):
        with pytest.raises(AttributeError, match="l2_norm_clip of a .* is fixed"):
            one.l2_norm_clip = value


@EVERY
def test_noise_is_never_in_the_config(kind):
    optimizer = optimizer_of(kind, noise=KeyedNoise(123456789))
    assert "123456789" not in str(keras.optimizers.serialize(optimizer))
    assert isinstance(kind.from_config(optimizer.get_config()).noise, EntropyNoise)


@EVERY
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("l2_norm_clip", 0.0),
        ("l2_norm_clip", float("nan")),
        ("noise_multiplier", -1.0),
        ("noise_multiplier", float("inf")),
        ("expected_batch_size", 0),
        ("clipnorm", 1.0),
        ("global_clipnorm", 1.0),
        ("use_ema", True),
        ("loss_scale_factor", 8.0),
        ("gradient_accumulation_steps", 2),
        ("dense_optimizer", tfdp_rec.EANA(**BASICS)),
        ("dense_optimizer", keras.optimizers.Adam(gradient_accumulation_steps=2)),
    ],
)
def test_what_it_cannot_honour_it_refuses(kind, option, value):
    with pytest.raises(ValueError, match=option):
        optimizer_of(kind, **{option: value})


@EVERY
def test_every_setting_is_fixed(kind):
    optimizer = optimizer_of(kind)
    before = optimizer.get_config()
    assert {"l2_norm_clip", "noise_multiplier", "expected_batch_size"} <= set(optimizer.constructed_with)
    for name in optimizer.constructed_with:
        with pytest.raises(AttributeError, match=f"{name} of a {kind.__name__} is fixed"):
            setattr(optimizer, name, 2.5)
    with pytest.raises(AttributeError, match="clip_rule"):
        optimizer.clip_rule = lambda norms, clip: tf.ones_like(norms)
    optimizer.built = True
    with pytest.raises(AttributeError, match=f"noise of a {kind.__name__} that was built is fixed"):
        optimizer.noise = KeyedNoise(0)
    assert optimizer.get_config() == before
    assert not [v for v in optimizer.variables if v.name in optimizer.constructed_with], "a file would set it"


def test_momentum_near_1_is_refused_where_noise_comes_late():
    """At 1 - 10⁻⁸ a row that was not read was an exact multiple of its velocity: it had no noise of its own."""
    variables = [keras.Variable(np.zeros([4, 2], "float32"), name="table")]
    for momentum, refused in ((0.999, False), (1 - 1e-6, True), (1 - 1e-12, True)):
        optimizer = tfdp_rec.LazyDPSGD(**BASICS, momentum=momentum)
        with pytest.raises(ValueError, match="at most 0.999") if refused else contextlib.nullcontext():
            optimizer.build(variables, {variables[0].path: None})


@pytest.mark.parametrize("kind", MOVES_ALL_ROWS)
def test_momentum_with_weight_decay_is_refused(kind):
    with pytest.raises(ValueError, match="momentum and weight_decay"):
        optimizer_of(kind, momentum=0.9, weight_decay=0.1)


def test_decay_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="learning_rate . weight_decay"):
        optimizer_of(tfdp_rec.LazyDPSGD, learning_rate=2.0, weight_decay=0.5)


# Raw gradients.


@EVERY
def test_raw_gradients_are_refused(kind):
    optimizer = optimizer_of(kind, **({"preselection": Preselection({"v": [0]})} if kind is tfdp_rec.FEST else {}))
    variable = keras.Variable(np.ones([30, 2], "float32"), name="v")
    optimizer.build([variable], {"v": None})
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(variable._value))
    gradient = tape.gradient(loss, variable._value)
    for attempt in (
        lambda: optimizer.apply([gradient], [variable]),
        lambda: optimizer.apply([gradient]),
        lambda: optimizer.apply_gradients([(gradient, variable)]),
    ):
        with pytest.raises(NotPrivate, match="raw gradients"):
            attempt()
    with pytest.raises((NotPrivate, ValueError)):
        optimizer.stateless_apply(optimizer.variables, [gradient], [variable])
    assert np.all(np.asarray(variable) == 1) and int(optimizer.iterations) == 0


@EVERY
def test_it_must_be_told_its_tables_and_serves_one_model(kind):
    optimizer = optimizer_of(kind, **({"preselection": Preselection({"v": [0]})} if kind is tfdp_rec.FEST else {}))
    variable, other = (keras.Variable(np.ones([30, 2], "float32"), name="v") for _ in range(2))
    with pytest.raises(ValueError, match="prepare"):
        optimizer.build([variable])
    optimizer.build([variable], {"v": None})
    optimizer.build([variable], {"v": None})
    with pytest.raises(ValueError, match="another model"):
        optimizer.build([other], {"v": None})


# Training and saving.


@pytest.mark.fast_cases("LazyDPSGD-None")
@EVERY_WAY
def test_eager_and_graph_train_alike(kind, rule, trained):
    eager = model_of(kind, table_rule=rule, compile_options={"run_eagerly": True}, noise=KeyedNoise(SEED))
    eager.fit(batches(), verbose=0)
    assert int(eager.optimizer.iterations) == int(trained(kind, rule).optimizer.iterations) == STEPS
    for one, other in zip(eager.get_weights(), trained(kind, rule).get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.fast_cases("LazyDPSGD-None")
@EVERY_WAY
def test_save_and_load(kind, rule, trained, loaded):
    model, (again, _, state, config, tables) = trained(kind, rule), loaded(kind, rule)
    assert config == model.optimizer.get_config() and tables == model.optimizer.tables.keys()
    for one, other in zip(state, (*model.optimizer.variables, *model.weights), strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(again.optimizer.iterations) == STEPS + 1


@pytest.mark.fast_cases("LazyDPFTRL-None")
@EVERY_WAY
def test_a_clone_loads_weights_and_trains_by_itself(kind, rule, trained, tmp_path):
    model, path = trained(kind, rule), tmp_path / "model.weights.h5"
    model.save_weights(path)
    clone = keras.models.clone_model(model)
    assert isinstance(clone, tfdp_rec.PrivateModel) and clone.optimizer is not model.optimizer
    assert clone.optimizer.get_config() == model.optimizer.get_config()
    clone.compile(clone.optimizer, loss="mse", run_eagerly=True)
    clone.prepare(next(iter(batches())))
    clone.load_weights(path)
    before = model.get_weights()
    assert int(clone.optimizer.iterations) == STEPS
    for one, two in zip(clone.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)
    clone.train_on_batch(*next(iter(batches())))
    assert int(clone.optimizer.iterations) == STEPS + 1 and int(model.optimizer.iterations) == STEPS
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@EVERY
def test_untrained_models_are_saved_too(kind, tmp_path):
    model_of(kind).save(tmp_path / "new.keras")
    again = keras.models.load_model(tmp_path / "new.keras")
    assert type(again.optimizer) is kind and not again.optimizer.built


def test_an_optimizer_does_not_train_two_models(trained):
    other = model_of(tfdp_rec.DPSGD)
    other.compile(trained(tfdp_rec.DPSGD).optimizer, loss="mse", run_eagerly=True)
    with pytest.raises(ValueError, match="another model"):
        other.train_on_batch(*next(iter(batches())))


@pytest.mark.fast_cases("LazyDPSGD-None")
@EVERY_WAY
def test_files_hold_no_noise_key(kind, rule, trained, loaded, tmp_path):
    for name, one in (("keyed", trained(kind, rule)), ("entropy", loaded(kind, rule)[0])):
        one.save(tmp_path / f"{name}.keras")
        one.save_weights(tmp_path / f"{name}.weights.h5")
    state = np.asarray(loaded(kind, rule)[0].optimizer.noise._generator.state)
    secrets = [int(word).to_bytes(8, "little", signed=True) for word in state if abs(int(word)) > 2**40]
    secrets += [state.tobytes(), SEED.to_bytes(8, "little"), str(SEED).encode()]
    assert len(secrets) >= 4 and len(list(tmp_path.iterdir())) == 4
    for content in bytes_in(Path(tmp_path)):
        assert not any(secret in content for secret in secrets)


@pytest.mark.fast_cases("LazyDPSGD")
@EVERY
def test_seeding_keras_does_not_repeat_the_noise(kind, loaded):
    first, second = loaded(kind, None)[::2], loaded(kind, None, 2)[::2]
    for one, other in zip(first[1], second[1], strict=True):  # from the same weights
        np.testing.assert_array_equal(one, other)
    for one, other in zip(first[0].get_weights(), second[0].get_weights(), strict=True):
        assert np.any(one != other)


@pytest.mark.fast_cases("LazyDPSGD-None", "AdaFEST-None", "LazyDPFTRL-None")
@EVERY_WAY
def test_no_tensor_of_a_step_has_the_tables_shape(kind, rule, trained):
    graph = trained(kind, rule).optimizer.noise.graph
    assert tensors_of_shape(graph, [3]) or tensors_of_shape(graph, [])  # the walk sees tensors
    assert any(o.type == "ResourceScatterUpdate" for o in operations(graph))  # of the step that writes the tables
    assert tensors_of_shape(graph, [ROWS, WIDTH]) == []
