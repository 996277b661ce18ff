"""Correlated noise is held to its plan: order, length, whole steps, secret buffers, one event."""


import shutil

import dp_accounting
import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from helpers import bytes_in

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.core.claim.events import PlannedDpEvent, from_json, is_private, to_json
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.core.mechanism.kept import kept_variables
from tfdp_rec.noise import KeyedNoise
from tfdp_rec.privacy import (
    Accountant,
    BufferedToeplitz,
    Correlation,
    FixedOrder,
    Ledger,
    PoissonSampling,
    Snapshot,
    epsilon_of,
)
from tfdp_rec.training import training_checkpoint

UNITS, BATCH, ROWS, WIDTH = 23, 5, 30, 6  # 5 steps an epoch, the last of 3 units
RNG = np.random.default_rng(0)
IDS, LABELS = RNG.integers(0, ROWS, [UNITS, 2]).astype("int32"), RNG.normal(size=[UNITS, 1]).astype("float32")
STRATEGY = BufferedToeplitz([0.3, 0.2], [0.95, 0.5])
PLAN = Correlation(STRATEGY, steps=15, separation=5)
REFUSED = (ValueError, NotPrivate, tf.errors.InvalidArgumentError)
BOTH = pytest.mark.parametrize("kind", [tfdp_rec.LazyDPFTRL, tfdp_rec.DPFTRL])


def fetch(indices):
    return IDS[indices], LABELS[indices]


def model_of(kind=tfdp_rec.LazyDPFTRL, eagerly=True, seed=0, **options):
    seeding.seed(seed)
    ids = keras.Input([2], dtype="int32")
    table = keras.layers.Embedding(ROWS, WIDTH, name="items")
    model = tfdp_rec.PrivateModel(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))
    basics = {"l2_norm_clip": 1.0, "noise_multiplier": 2.0, "expected_batch_size": BATCH, "correlation": PLAN}
    model.compile(kind(0.3, **{**basics, **options}), loss="mse", run_eagerly=eagerly)
    return model


LEDGERS = {}  # open in this test


@pytest.fixture(autouse=True)
def ledgers():
    yield
    for ledger in LEDGERS.values():
        ledger.close()
    LEDGERS.clear()


def checkpoint_of(folder, order=None, ledger="training"):
    """A checkpoint of planned noise, with its ledger beside it."""
    order, path = order or FixedOrder(UNITS, BATCH), folder.parent / f"{ledger}.jsonl"
    if path not in LEDGERS:
        LEDGERS[path] = Ledger(path, order.unit, Snapshot(order.num_units, order.unit), order.adjacency)
    accountant = Accountant(model_of().optimizer.dp_event(), order, 1e-2, "rdp", ledger=LEDGERS[path])
    return TrainingCheckpoint(folder, every=2, accountant=accountant)


def fit(model, order, steps, position=None, callbacks=(), epochs=1):
    position = model.optimizer.position if position is None else position
    batches = order.batches(fetch, position=position)
    model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=list(callbacks), epochs=epochs)


# The order.


def test_every_unit_is_in_every_epoch_at_its_place():
    order = FixedOrder(UNITS, BATCH)
    batches = order.index_batches()
    epochs = [[next(batches).tolist() for _ in range(5)] for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2] and sum(epochs[0], []) == list(range(UNITS))
    assert [len(batch) for batch in epochs[0]] == [5, 5, 5, 5, 3]
    again = order.index_batches(position=8)
    assert next(again).tolist() == epochs[0][3]
    assert [int(d.draw.place) for d in order.batches(fetch, position=8).take(2)] == [8, 9]


@pytest.mark.slow
def test_one_training_in_two_fits_costs_its_plan_once():
    order, model = FixedOrder(UNITS, BATCH, unit="user"), model_of(eagerly=False)
    accountant = Accountant(model.optimizer.dp_event(), order, delta=1e-2, accountant="rdp")
    expected = epsilon_of(PLAN.dp_event(2.0), 1e-2, "rdp")
    fit(model, order, 7, callbacks=[PrivacyBudget(accountant, expected)])
    assert (model.optimizer.position, accountant.steps) == (7, 7)
    assert accountant.epsilon() == expected  # stopped early: covered
    with pytest.raises(REFUSED, match="batch 2 of its order and was given batch 0"):
        fit(model, order, 1, position=0)
    assert (model.optimizer.position, accountant.steps) == (7, 7)  # refused ahead of being counted
    with pytest.raises(REFUSED, match="another order"):
        fit(model, FixedOrder(UNITS + 1, BATCH), 1, position=7)
    with pytest.raises(REFUSED, match="another order, or of none that is known"):
        model.train_on_batch(*fetch(np.arange(5)))
    fit(model, order, 8, callbacks=[PrivacyBudget(accountant, expected)])
    assert (accountant.steps, accountant.epsilon()) == (15, expected)
    before = model.get_weights()
    with pytest.raises(REFUSED, match="all steps that the noise was planned for are made"):
        fit(model, order, 1)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert accountant.epsilon() == expected and accountant.epsilon(steps=16) == np.inf
    assert accountant.max_steps(expected) == 15
    said = " ".join(accountant.statement().split())
    assert "zero-out: data sets that differ by one user, which contributes nothing in one of them" in said
    assert "noise correlated over a training of 15 steps" in said
    assert "every batch carried the proof of its draw" in said


def test_batches_that_are_drawn_anew_have_no_such_epsilon():
    with pytest.raises(ValueError, match="account for it with tfdp_rec.privacy.FixedOrder"):
        Accountant(model_of().optimizer.dp_event(), PoissonSampling(UNITS, BATCH), delta=1e-2)
    with pytest.raises(ValueError, match="FixedOrder"):
        epsilon_of(model_of().optimizer.dp_event(), 1e-2)


def event_of(sigma=2.0, plan="a", **changes):
    return PlannedDpEvent(dp_accounting.GaussianDpEvent(sigma), **{"steps": 15, "separation": 5, "participations": 3,
                                                                   "plan": plan, **changes})  # fmt: skip


def test_plans_are_composed_and_a_plan_has_one_noise():
    order, gaussian = FixedOrder(UNITS, BATCH), dp_accounting.GaussianDpEvent
    assert order.compose_history([(event_of(), 4)]) == gaussian(2.0)
    assert not is_private(order.compose_history([(event_of(), 4), (event_of(1.5), 3)]))
    two = order.compose_history([(event_of(), 4), (event_of(plan="b"), 4)])
    assert two == dp_accounting.ComposedDpEvent([gaussian(2.0), gaussian(2.0)])
    assert not is_private(order.compose_history([(event_of(), 10), (event_of(), 6)]))  # 16 of 15 steps
    assert not is_private(order.compose_history([(event_of(0.0), 4)]))
    assert from_json(to_json(event_of())) == event_of()


def test_a_plan_that_begins_anew_within_a_fit_makes_no_step_before_it_is_priced(tmp_path):
    """Its steps are of another plan, whose price the budget has not seen yet."""
    order, model, tried = FixedOrder(UNITS, BATCH), model_of(tfdp_rec.DPFTRL), []
    accountant = Accountant(model.optimizer.dp_event(), order, delta=1e-2, accountant="rdp")
    model.prepare(fetch(np.arange(5)))
    model.save_weights(tmp_path / "first.weights.h5")

    def begin_anew(batch, logs):
        model.load_weights(tmp_path / "first.weights.h5")
        with pytest.raises(REFUSED, match="budget is spent"):
            model.train_on_batch(next(iter(order.batches(fetch))))
        tried.append(batch)

    anew = keras.callbacks.LambdaCallback(on_train_batch_end=begin_anew)
    fit(model, order, 1, callbacks=[PrivacyBudget(accountant, 1e3), anew])
    assert tried == [0] and accountant.steps == 1


@pytest.mark.parametrize("changes", [{"separation": 6}, {"participations": 2}])
def test_a_plan_of_another_order_is_refused(changes):
    with pytest.raises(ValueError, match="Plan for separation=5"):
        FixedOrder(UNITS, BATCH).compose_history([(event_of(**changes), 4)])


# Whole steps.


class Fails(KeyedNoise):
    """Noise that runs out once, in the middle of a step or a payment."""

    def __init__(self):
        super().__init__(1)
        self.now = tf.Variable(False)

    def draw(self, requests, step):
        check = tf.debugging.Assert(~self.now, ["no noise"]) if not tf.executing_eagerly() else None
        if check is None and bool(self.now):
            raise RuntimeError("no noise")
        with tf.control_dependencies([] if check is None else [check]):
            return [tf.identity(drawn) for drawn in super().draw(requests, step)]


@pytest.mark.fast_cases("True-DPFTRL")
@BOTH
@pytest.mark.parametrize("eagerly", [True, False])
def test_after_a_step_that_was_cut_short_nothing_is_trained_or_released(kind, eagerly):
    noise = Fails()
    model = model_of(kind, eagerly, noise=noise)
    data = fetch(np.arange(5))
    model.train_on_batch(*data)
    noise.now.assign(True)
    with pytest.raises((RuntimeError, tf.errors.InvalidArgumentError), match="no noise"):
        model.train_on_batch(*data)
    noise.now.assign(False)
    with pytest.raises(REFUSED, match="cut short"):
        model.train_on_batch(*data)
    if kind is tfdp_rec.LazyDPFTRL:
        with pytest.raises(REFUSED, match="cut short"):
            model.get_weights()


@pytest.mark.slow
def test_a_payment_that_was_cut_short_is_not_forgotten():
    noise = Fails()
    model = model_of(noise=noise)
    for _ in range(2):
        model.train_on_batch(*fetch(np.arange(3)))
    noise.now.assign(True)
    with pytest.raises(RuntimeError, match="no noise"):  # eagerly, as small tables are settled
        model.get_weights()
    noise.now.assign(False)
    with pytest.raises(REFUSED, match="cut short"):
        model.get_weights()
    with pytest.raises(REFUSED, match="cut short"):
        model.train_on_batch(*fetch(np.arange(3)))


@pytest.mark.slow
def test_what_is_refused_before_it_writes_leaves_all_as_it_was():
    """As in a graph, where one training in two fits goes on after its refusals."""
    model = model_of()
    model.train_on_batch(*fetch(np.arange(5)))
    with pytest.raises(REFUSED):
        fit(model, FixedOrder(UNITS, BATCH), 1, position=0)
    model.train_on_batch(*fetch(np.arange(5)))
    assert model.optimizer.position == 2


# The buffers.


def secrets_of(optimizer):
    """Rows of the buffers, as they would stand in a file."""
    variables = {name: v.numpy() for name, v in kept_variables(optimizer).items() if name.startswith("buffers")}
    rows = [row for values in variables.values() for row in np.atleast_2d(values) if np.any(row) and row.size > 1]
    assert len(rows) > 20
    return [np.ascontiguousarray(row, "<f4").tobytes() for row in rows]


@pytest.mark.slow
@BOTH
def test_no_file_but_a_training_checkpoint_has_them(kind, tmp_path):
    model = model_of(kind)
    checkpoint = checkpoint_of(tmp_path / "private")
    model.prepare(fetch(np.arange(5)))
    checkpoint.resume(model)
    fit(model, FixedOrder(UNITS, BATCH), 7, callbacks=[checkpoint])
    (tmp_path / "released").mkdir()
    model.save(tmp_path / "released" / "model.keras")
    model.save_weights(tmp_path / "released" / "model.weights.h5")
    model.export(tmp_path / "released" / "servable", verbose=False)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "released" / "checkpoint"))
    kept, secrets = list(bytes_in(tmp_path / "released")), secrets_of(model.optimizer)
    table = np.asarray(model.get_layer("items").embeddings)[3].tobytes()
    assert sum(table in content for content in kept) >= 3  # they would have been seen
    assert not [1 for content in kept for secret in secrets if secret in content]
    assert not [v for v in model.optimizer.variables if "buffer" in v.path]
    private = list(bytes_in(tmp_path / "private"))
    assert all(any(secret in content for content in private) for secret in secrets)


@pytest.mark.slow
@BOTH
def test_a_loaded_model_begins_a_plan_anew_which_is_composed(kind, tmp_path):
    order, model = FixedOrder(UNITS, BATCH), model_of(kind)
    fit(model, order, 3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    plans = [each.optimizer.course.plan for each in (loaded, model)]
    assert plans[0] != plans[1] and loaded.optimizer.position == 0
    assert not any(np.any(v.numpy()) for n, v in kept_variables(loaded.optimizer).items() if n.startswith("buffers"))
    accountant = Accountant(loaded.optimizer.dp_event(), order, delta=1e-2, accountant="rdp")
    accountant.follow(loaded)
    once = accountant.epsilon()
    fit(loaded, order, 2)
    assert once == epsilon_of(PLAN.dp_event(2.0), 1e-2, "rdp")
    both = dp_accounting.SelfComposedDpEvent(PLAN.dp_event(2.0), 2)
    assert accountant.epsilon() == pytest.approx(epsilon_of(both, 1e-2, "rdp"))


@pytest.mark.slow
@BOTH
def test_a_resumption_that_is_cut_short_among_the_buffers_makes_no_step(kind, tmp_path, monkeypatch):
    """Buffers of two trainings take back what was never added."""
    model, checkpoint = model_of(kind), checkpoint_of(tmp_path / "training")
    fit(model, FixedOrder(UNITS, BATCH), 3, callbacks=[checkpoint])
    again, read = model_of(kind), training_checkpoint._read
    again.prepare(fetch(np.arange(5)))

    def interrupted(variable, *rest):
        read(variable, *rest)
        if variable.name.startswith("buffer"):
            raise KeyboardInterrupt

    monkeypatch.setattr(training_checkpoint, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_of(tmp_path / "training").resume(again)
    monkeypatch.undo()
    restored = int(again.optimizer.iterations)
    with pytest.raises((*REFUSED, RuntimeError), match="cut short|was interrupted"):
        fit(again, FixedOrder(UNITS, BATCH), 1, position=0)
    assert int(again.optimizer.iterations) == restored
    checkpoint_of(tmp_path / "training").resume(again)
    fit(again, FixedOrder(UNITS, BATCH), 1)
    assert again.optimizer.position == 4


@pytest.mark.fast_cases("DPFTRL")
@BOTH
def test_weights_that_can_be_settled_no_more_do_not_leave_where_a_resumption_is_cut_short(kind, tmp_path, monkeypatch):
    model, checkpoint = model_of(kind), checkpoint_of(tmp_path / "training")
    fit(model, FixedOrder(UNITS, BATCH), 3, callbacks=[checkpoint])
    read = training_checkpoint._read
    model.optimizer.course.mark_unfinished(1)  # as a step leaves it that was cut short

    def interrupted(variable, *rest):
        read(variable, *rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(training_checkpoint, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_of(tmp_path / "training").resume(model)
    with pytest.raises((RuntimeError, *REFUSED), match="cut short"):
        model.get_weights()
    monkeypatch.undo()
    assert checkpoint_of(tmp_path / "training").resume(model).step == 3
    fit(model, FixedOrder(UNITS, BATCH), 1)
    assert model.optimizer.position == 4


@pytest.mark.slow
@BOTH
def test_interrupted_and_resumed_is_uninterrupted(kind, tmp_path):
    def setup(name, **options):
        settings = {"aggregate_noise": False} if kind is tfdp_rec.LazyDPFTRL else {}
        model = model_of(kind, noise=KeyedNoise(4), momentum=0.5, **settings, **options)
        model.prepare(fetch(np.arange(5)))
        checkpoint = checkpoint_of(tmp_path / name, ledger="whole" if name == "whole" else "parts")
        return model, checkpoint, checkpoint.resume(model)

    def train(model, checkpoint, steps, epochs=1):
        fit(model, FixedOrder(UNITS, BATCH), steps, callbacks=[checkpoint], epochs=epochs)

    whole, checkpoint, _ = setup("whole")
    train(whole, checkpoint, 9)
    first, checkpoint, _ = setup("parts")
    train(first, checkpoint, 6)
    name = first.optimizer.course.plan
    del first, checkpoint
    (tmp_path / "copy").mkdir()
    for path in (tmp_path / "parts").glob("*.training-checkpoint"):
        path.rename(tmp_path / "copy" / path.name)
    second, checkpoint, resumed = setup("copy")
    assert (resumed.step, second.optimizer.position, second.optimizer.course.plan) == (6, 6, name)
    train(second, checkpoint, 3, epochs=2)  # the first of which was done
    assert second.optimizer.position == 9
    for one, other in zip(second.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    events = {entry.event.plan for entry in second.optimizer.privacy_history.snapshot()}
    assert events == {name}
    accountant = Accountant(second.optimizer.dp_event(), FixedOrder(UNITS, BATCH), delta=1e-2, accountant="rdp")
    accountant.follow(second)
    assert accountant.dp_event().events == [PLAN.dp_event(2.0)]


# Settings.


@BOTH
@pytest.mark.parametrize("wrong", [None, STRATEGY, 3])
def test_it_needs_the_plan_of_its_noise(kind, wrong):
    with pytest.raises(ValueError, match="needs the plan of its noise"):
        model_of(kind, correlation=wrong)


@pytest.mark.slow
@BOTH
def test_one_plan_says_it_all(kind):
    settings = {"sampling": FixedOrder(UNITS, BATCH), "delta": 1e-2, "steps": 15, "accountant": "rdp"}
    plan = tfdp_rec.PrivatePlan(epsilon=2.0, correlation=PLAN, **settings)
    least = PLAN.noise_multiplier(2.0, 1e-2)
    assert least <= plan.noise_multiplier < 1.2 * least  # rdp gives away a little
    model = model_of(kind)
    model.compile(kind(0.3, plan=plan), loss="mse")
    assert (model.optimizer.correlation, model.optimizer.expected_batch_size) == (PLAN, BATCH)
    fit(model, plan.sampling, 7, callbacks=[plan.budget()])
    fit(model, plan.sampling, 20, callbacks=[plan.budget()])  # stops after the 15th
    assert (model.optimizer.position, plan.accountant.steps) == (15, 15)
    assert 1.9 < plan.accountant.epsilon() == plan.accountant.epsilon(15) <= 2.0


def test_plans_that_do_not_fit_are_refused():
    settings = {"delta": 1e-2, "accountant": "rdp", "epsilon": 2.0}
    order, anew = FixedOrder(UNITS, BATCH), PoissonSampling(UNITS, BATCH)
    plan = tfdp_rec.PrivatePlan(sampling=order, steps=15, correlation=PLAN, **settings)
    with pytest.raises(ValueError, match="correlation"):
        tfdp_rec.LazyDPSGD(0.1, plan=plan)
    with pytest.raises(ValueError, match="costs more than the plan's"):
        tfdp_rec.LazyDPFTRL(0.1, plan=plan, noise_multiplier=0.9 * plan.noise_multiplier)
    whole = tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=2 * plan.noise_multiplier, expected_batch_size=BATCH)
    with pytest.raises(ValueError, match="costs more than the plan's"):
        plan.accept(whole)  # its every step costs what the plan does once
    with pytest.raises(ValueError, match="has a price for planned noise alone"):
        tfdp_rec.PrivatePlan(sampling=order, steps=15, **settings)
    with pytest.raises(ValueError, match="account for it with tfdp_rec.privacy.FixedOrder"):
        tfdp_rec.PrivatePlan(sampling=anew, steps=15, correlation=PLAN, **settings)
    with pytest.raises(ValueError, match="steps=14 is not the correlation's 15"):
        tfdp_rec.PrivatePlan(sampling=order, steps=14, correlation=PLAN, **settings)
    with pytest.raises(TypeError, match="either correlation= or make_event="):
        tfdp_rec.PrivatePlan(sampling=order, steps=15, correlation=PLAN, make_event=lambda s: None, **settings)


@BOTH
def test_parameter_servers_are_refused(kind):
    from tfdp_rec.distribute.parameter_server import refuse_unserved

    with pytest.raises(NotPrivate, match="steps have one order"):
        refuse_unserved(model_of(kind).optimizer)
    with pytest.raises(ValueError, match="parameter servers"):
        model_of(kind, history=object())


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("eagerly", [True, False])
def test_a_step_that_was_cut_short_replaces_no_checkpoint(eagerly, tmp_path):
    noise, order = Fails(), FixedOrder(UNITS, 5)
    model = model_of(tfdp_rec.DPFTRL, eagerly, noise=noise)
    checkpoint = checkpoint_of(tmp_path / "training", order)
    fails = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: noise.now.assign(batch == 1), keeps_off_weights=True
    )
    with pytest.raises(RuntimeError, match="A step was cut short.* resume from the last checkpoint"):
        model.fit(order.batches(fetch), steps_per_epoch=6, verbose=0, callbacks=[checkpoint, fails])
    with pytest.raises(RuntimeError, match="A step was cut short"):
        model.get_weights()
    noise.now.assign(False)
    again = model_of(tfdp_rec.DPFTRL, eagerly, noise=Fails())
    again.prepare(fetch(np.arange(5)))
    resumed = checkpoint_of(tmp_path / "training", order)
    assert resumed.resume(again).step == 2
    again.fit(order.batches(fetch, position=2), steps_per_epoch=6, verbose=0, callbacks=[resumed])
    assert again.optimizer.position == 6
    shutil.rmtree(tmp_path / "training")
    with pytest.raises(RuntimeError, match="A step was cut short"):
        model.get_weights()


@BOTH
def test_the_plan_of_the_noise_is_not_exchanged(kind):
    model = model_of(kind)
    with pytest.raises(AttributeError):
        model.optimizer.correlation = Correlation(BufferedToeplitz([], []), steps=15, separation=5)


def test_a_plan_that_was_begun_with_a_seed_and_goes_on_without_one_has_no_epsilon():
    """Its steps are two entries: one of them has no guarantee."""
    order, model = FixedOrder(UNITS, BATCH), model_of(tfdp_rec.DPFTRL)
    model.fit(order.batches(fetch, seed=1), steps_per_epoch=2, verbose=0)
    fit(model, order, 3)
    accountant = Accountant(model.optimizer.dp_event(), order, delta=1e-2, accountant="rdp")
    accountant.follow(model)
    assert accountant.steps == 5 and accountant.epsilon() == np.inf


def test_a_plan_that_begins_anew_in_place_is_another_plan():
    """Its further steps were told as the first plan's: 3.7 for 5.6."""
    order, model = FixedOrder(UNITS, BATCH), model_of(tfdp_rec.DPFTRL)
    fit(model, order, 3)
    saved = {}
    model.optimizer.save_own_variables(saved)
    model.optimizer.load_own_variables(saved)
    fit(model, order, 2)
    accountant = Accountant(model.optimizer.dp_event(), order, delta=1e-2, accountant="rdp")
    accountant.follow(model)
    assert sorted(entry.steps for entry in accountant.entries) == [2, 3]
    both = dp_accounting.SelfComposedDpEvent(PLAN.dp_event(2.0), 2)
    assert accountant.epsilon() == pytest.approx(epsilon_of(both, 1e-2, "rdp"))
