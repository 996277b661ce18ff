"""Paths on which the record said less than was spent: each test told a smaller ε before its mending."""

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.pricing.composition import epsilon_of
from tfdp_rec.privacy import (
    Accountant,
    FixedOrder,
    Ledger,
    PoissonSampling,
    ShuffledEpochs,
    Snapshot,
    Unaccounted,
    optimised_correlation,
)
from tfdp_rec.refused import NotPrivate
from tfdp_rec.spending.ledger import read
from tfdp_rec.spending.statement import rounded_up

DELTA = 1e-3


def accountant_of(**options):
    return Accountant(GaussianDpEvent(1.0), PoissonSampling(500, 25), DELTA, "rdp", **options)


# Ids.


def test_two_uses_with_one_id_are_refused():
    """The second was left out: ε = .3 was told for 4.3."""
    counted = accountant_of()
    counted.spend(GaussianDpEvent(20.0), "counts", id="of Monday")
    with pytest.raises(ValueError, match="Two expenses have the id 'of Monday'"):
        counted.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    other = accountant_of()
    other.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    with pytest.raises(ValueError, match="Two expenses have the id 'of Monday'"):
        counted.set_state(other.get_state())


def test_a_payment_pays_for_the_event_that_it_names(tmp_path):
    """A use of multiplier 1 was taken for paid by a payment for multiplier 20 with the same id."""
    with accountant_of(ledger=tmp_path / "ledger.jsonl").payments.ledger as ledger:
        ledger.pay(GaussianDpEvent(20.0), label="counts", id="of Monday")
    other = accountant_of()
    other.spend(GaussianDpEvent(1.0), "terms", id="of Monday")
    counted = accountant_of(ledger=tmp_path / "ledger.jsonl")
    state = other.get_state()
    counted.set_state(state)
    with pytest.raises(Unaccounted, match="1 steps or uses .'terms'. were made"):
        counted.epsilon()
    counted.pay_for_history()
    assert counted.epsilon() > other.epsilon()


def test_a_state_that_was_counted_in_a_ledger_is_not_read_without_it(tmp_path):
    """What the ledger holds besides the state was left out: ε = 0 for a paid count."""
    counted = accountant_of(ledger=tmp_path / "ledger.jsonl")
    counted.payments.ledger.pay(GaussianDpEvent(2.0), label="counts")
    with pytest.raises(ValueError, match="counted in a ledger"):
        accountant_of().set_state(counted.get_state())


# Plans.

UNITS, BATCH, STEPS, SIGMA = 20, 4, 15, 3.0
PLAN = optimised_correlation(steps=STEPS, separation=5, participations=3)


def rows(indices):
    return np.ones([len(indices), 1], np.float32), np.ones([len(indices), 1], np.float32)


def planned_model():
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": SIGMA, "expected_batch_size": BATCH, "correlation": PLAN}
    model.compile(tfdp_rec.DPFTRL(0.1, **settings), "mse", run_eagerly=True)
    return model


def planned(tmp_path):
    """A ledger, a model, an order, and a function that makes accountants on them."""
    order, model = FixedOrder(UNITS, BATCH), planned_model()
    ledger = Ledger(tmp_path / "ledger.jsonl", order.unit, Snapshot(UNITS, order.unit), order.adjacency)
    return ledger, model, order, lambda: Accountant(model.optimizer.dp_event(), order, 1e-2, "rdp", ledger=ledger)


def test_the_price_of_a_plan_does_not_come_back_while_others_go_on_from_it(tmp_path):
    """Two accountants of one ledger: the first gave back what the second stood on, and ε = 0 was told for 5 steps."""
    ledger, model, order, accountant = planned(tmp_path)
    first, second = accountant(), accountant()
    first.follow(model)
    first.pay_ahead(1, 5, model.optimizer, order.name)
    model.fit(order.batches(rows), steps_per_epoch=5, verbose=0, callbacks=[PrivacyBudget(second, 100.0)])
    first.give_back_unused()
    once = epsilon_of(PLAN.dp_event(SIGMA), 1e-2, "rdp")
    assert ledger.epsilon(1e-2, "rdp") == pytest.approx(once) == pytest.approx(second.epsilon())
    second.close()


def test_a_plan_whose_steps_all_came_back_keeps_its_price(tmp_path):
    """The ledger's total was right; the accountant's was 0."""
    ledger, model, order, accountant = planned(tmp_path)
    counted = accountant()
    counted.payments.pay_steps(model.optimizer.dp_event(), STEPS)
    ledger.give_back(ledger.paid[-1].number, 0, STEPS)
    assert counted.epsilon() == pytest.approx(read(ledger.path).epsilon(1e-2, "rdp")) and counted.epsilon() > 1.0
    counted.close()


# Shuffled epochs.


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_each_restart_that_is_recorded_by_hand_counts(restarts):
    """One of them was taken for the first iteration: 2 participations were told for 3."""
    counted = Accountant(GaussianDpEvent(4.0), ShuffledEpochs(1000, 10), 1e-4, "rdp")
    counted.record(counted.event, 150, restarts=restarts)
    assert counted.ledger().events[-1].count == 2 + restarts


class BeginsAnew(keras.callbacks.Callback):
    """Makes one step on a new iteration of the batches, at one step of the fit."""

    def __init__(self, batches, at):
        super().__init__()
        self.batches, self.at = batches, at

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.at:
            self.model.train_on_batch(next(iter(self.batches)))


def test_iterations_that_were_not_foreseen_count_against_a_budget():
    """They were counted, and the budget was not priced anew: ε passed the target."""
    sampling = ShuffledEpochs(40, 10)
    counted = Accountant(GaussianDpEvent(4.0), sampling, 1e-2, "rdp")
    target = counted.epsilon(12) * 1.0001  # three epochs
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 10}
    model.compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
    batches = sampling.batches(rows)
    with pytest.raises((NotPrivate, tf.errors.InvalidArgumentError), match="another iteration of the batches"):
        model.fit(
            batches, steps_per_epoch=30, verbose=0,
            callbacks=[BeginsAnew(batches, {2, 4}), PrivacyBudget(counted, target)],
        )  # fmt: skip
    assert counted.epsilon() <= target and counted.steps == 3
    model.fit(batches, steps_per_epoch=30, verbose=0, callbacks=[PrivacyBudget(counted, target)])
    assert counted.epsilon() <= target and counted.steps == 3 + 5, "three participations of a unit"


def test_each_fit_on_asserted_batches_begins_an_epoch():
    """Two fits of two steps each were told as one epoch of four."""
    counted = Accountant(GaussianDpEvent(4.0), ShuffledEpochs(40, 10), 1e-2, "rdp", asserted="a loader that shuffles")
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 10}
    model.compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
    counted.follow(model)
    for fits in (1, 2):
        model.fit(*rows(range(20)), batch_size=10, verbose=0)
        assert counted.ledger().events[-1].count == fits


def test_draws_that_another_model_takes_count_against_a_budget():
    """A model that shares the sampling makes every draw begin a stretch, and the budget was not priced anew."""
    sampling = ShuffledEpochs(40, 10)
    counted = Accountant(GaussianDpEvent(4.0), sampling, 1e-2, "rdp")
    target = counted.epsilon(5 * 4) * 1.0001
    models = []
    for _ in range(2):
        inputs = keras.Input([1])
        models.append(tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs)))
        settings = {"l2_norm_clip": 1.0, "noise_multiplier": 4.0, "expected_batch_size": 10}
        models[-1].compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
        counted.follow(models[-1])
    shared = iter(sampling.batches(rows))
    other = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: models[1].train_on_batch(next(shared))
    )
    models[0].fit(
        sampling.batches(rows), steps_per_epoch=30, verbose=0, callbacks=[other, PrivacyBudget(counted, target)]
    )
    assert counted.epsilon() <= target and counted.steps > 4


def test_epsilon_is_never_rounded_down():
    assert rounded_up(2.7120000004) == 2.713 and rounded_up(0.1 + 0.2) == 0.3 and rounded_up(8.0) == 8.0


# Data that grow.


def asserting(num_units, **options):
    sampling = PoissonSampling(num_units, 25)
    return Accountant(GaussianDpEvent(1.0), sampling, 1e-4, "rdp", asserted="a job draws q = B/n", **options)


def private_model():
    inputs = keras.Input([1])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 25}
    model.compile(tfdp_rec.DPSGD(0.1, **settings), "mse", run_eagerly=True)
    return model


def a_day(model, accountant, steps=4):
    budget = PrivacyBudget(accountant, 100.0)
    model.fit(*rows(range(25 * steps)), batch_size=25, verbose=0, callbacks=[budget])


def of_both_days():
    first, second = PoissonSampling(500, 25), PoissonSampling(5000, 25)
    events = [each.compose(GaussianDpEvent(1.0), 4) for each in (first, second)]
    return epsilon_of(dp_accounting.ComposedDpEvent(events), 1e-4, "rdp")


@pytest.mark.parametrize("way", ["same", "grown", "saved"])
def test_steps_that_were_asserted_keep_the_sampling_that_was_asserted(tmp_path, way):
    """The second day's accountant priced the first day's steps by its own number of units: 5.1 became .12."""
    model = private_model()
    a_day(model, asserting(500))
    if way == "grown":
        inputs = keras.Input([1])
        model = model.grow_into(tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs)))
    elif way == "saved":
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    second = asserting(5000)
    a_day(model, second)
    assert second.steps == 4 and second.epsilon() == pytest.approx(of_both_days())
    first = asserting(500)
    first.follow(model)  # which asserts as much of all of them
    assert first.epsilon() == second.epsilon() == pytest.approx(asserting(500).epsilon(8))
    unasserted = Accountant(GaussianDpEvent(1.0), PoissonSampling(500, 25), 1e-4, "rdp")
    unasserted.follow(model)
    with pytest.raises(Unaccounted, match="8 steps were made on batches that no sampling drew"):
        unasserted.epsilon()


def a_day_alone(model):
    model.fit(*rows(range(100)), batch_size=25, verbose=0)


@pytest.mark.parametrize("saved", [False, True])
def test_steps_that_were_followed_after_their_fit_keep_the_sampling_too(tmp_path, saved):
    """The second day's accountant took them for its own: .61 for 1.44."""
    model = private_model()
    a_day_alone(model)
    first = asserting(500)
    first.follow(model)
    assert first.epsilon() == pytest.approx(asserting(500).epsilon(4))
    if saved:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    second = asserting(5000)
    a_day(model, second)
    assert second.epsilon() == pytest.approx(of_both_days())


def test_of_two_samplings_that_are_asserted_the_dearer_counts():
    """The accountant that followed last decided for all: .53 for 1.44."""
    for order in ((500, 5000), (5000, 500)):
        model, accountants = private_model(), [asserting(number) for number in order]
        for accountant in accountants:
            accountant.follow(model)
        a_day_alone(model)
        for accountant in accountants:
            assert accountant.epsilon() == pytest.approx(asserting(500).epsilon(4))
    model, first, second = private_model(), asserting(5000), asserting(500)
    a_day(model, first)
    second.follow(model)
    first.follow(model)  # again, to print a statement
    a_day_alone(model)
    assert first.epsilon() == second.epsilon() == pytest.approx(asserting(500).epsilon(8))


def test_an_accountant_tells_no_less_than_it_asserts_itself():
    """A budget of another accountant, for ten times the units, had the fit priced by its own: .61 for 1.44."""
    model, own, of_the_fit = private_model(), asserting(500), asserting(5000)
    own.follow(model)
    a_day(model, of_the_fit)
    assert own.steps == 4 and own.epsilon() == pytest.approx(asserting(500).epsilon(4))
    assert of_the_fit.epsilon() == pytest.approx(asserting(5000).epsilon(4))


def test_steps_of_another_model_on_the_layers_are_asserted_too():
    model = private_model()
    inputs = keras.Input([1])
    other = tfdp_rec.PrivateModel(inputs, model.layers[-1](inputs))
    other.compile(model.optimizer.from_config(model.optimizer.get_config()), "mse", run_eagerly=True)
    first, second = asserting(500), asserting(5000)
    for each in (model, other):
        each.prepare(rows(range(4)))
    first.follow(model)
    a_day_alone(other)
    assert first.epsilon() == pytest.approx(asserting(500).epsilon(4))
    a_day(model, second)
    assert second.epsilon() == pytest.approx(of_both_days())


def test_samplings_that_cannot_be_compared_are_not_asserted_of_one_model():
    model = private_model()
    asserting(500).follow(model)
    orders = Accountant(GaussianDpEvent(1.0), ShuffledEpochs(500, 25), 1e-4, "rdp", asserted="a loader that shuffles")
    users = Accountant(GaussianDpEvent(1.0), PoissonSampling(500, 25, "user"), 1e-4, "rdp", asserted="a job")
    for other in (orders, users):
        with pytest.raises(ValueError, match="Two samplings are asserted to have drawn the batches of a model"):
            other.follow(model)


def test_two_files_of_one_training_tell_the_dearer_sampling(tmp_path):
    model = private_model()
    a_day_alone(model)
    asserting(5000).follow(model)
    model.save(tmp_path / "cheaper.keras")
    asserting(500).follow(model)
    model.save(tmp_path / "dearer.keras")
    for names in (("cheaper", "dearer"), ("dearer", "cheaper")):
        loaded = keras.models.load_model(tmp_path / f"{names[0]}.keras")
        loaded.load_weights(tmp_path / f"{names[1]}.keras")
        counted = asserting(5000)
        counted.follow(loaded)
        assert counted.epsilon() == pytest.approx(asserting(500).epsilon(4))
    cheaper, counted = keras.models.load_model(tmp_path / "cheaper.keras"), asserting(5000)
    asserting(500).follow(cheaper)
    counted.follow(cheaper)
    assert counted.epsilon() == pytest.approx(asserting(500).epsilon(4))


def test_a_payment_under_a_cheaper_sampling_is_not_enough(tmp_path):
    model = private_model()
    a_day_alone(model)
    for number, told in ((5000, asserting(5000).epsilon(4)), (500, of_both_days())):  # both were paid for
        with Ledger(tmp_path / "l.jsonl", "example", Snapshot(number, "example"), data_changed=True) as ledger:
            counted = asserting(number, ledger=ledger)
            counted.follow(model)
            with pytest.raises(Unaccounted, match="4 steps were made that"):
                counted.epsilon()
            counted.pay_for_history()
            assert counted.epsilon() == pytest.approx(told)


def test_steps_that_a_ledger_has_paid_for_under_two_samplings_stand_under_both(tmp_path):
    """The first sampling's accountant found nothing: .097 was told, and 5.15 paid."""

    def day(num_units, model=None):
        ledger = Ledger(tmp_path / "ledger.jsonl", "example", Snapshot(num_units, "example"), data_changed=True)
        accountant = asserting(num_units, ledger=ledger)
        if model:
            accountant.follow(model)
            accountant.pay_for_history()
        found = accountant.epsilon(), ledger.epsilon(1e-4, "rdp"), accountant.steps
        ledger.close()
        return found

    model = private_model()
    model.fit(*rows(range(100)), batch_size=25, verbose=0)  # no accountant follows
    day(500, model)
    model.privacy_history._asserted = None  # as in earlier versions, whose entries had no sampling
    for counter in model.privacy_history._counters.values():
        counter.sampling = None
    model.fit(*rows(range(100)), batch_size=25, verbose=0)
    told = day(5000, model)
    assert told[0] == pytest.approx(told[1]) == pytest.approx(of_both_days()) and told[2] == 4
    told = day(500)
    assert told[0] == pytest.approx(told[1]) == pytest.approx(of_both_days()) and told[2] == 4


@pytest.mark.parametrize("ledger", [False, True])
def test_steps_for_one_unit_are_not_stated_for_another(tmp_path, ledger):
    """Row-level steps were told as (2.95, 1e-6) for one user, who had 200 rows: at least 83."""
    model, by_row = private_model(), PoissonSampling(500, 25)
    model.fit(by_row.batches(rows), steps_per_epoch=4, verbose=0)
    model.add_uses([(GaussianDpEvent(5.0), "counts of rows")])
    by_user = PoissonSampling(50, 25, unit="user")
    kept = {"ledger": Ledger(tmp_path / "ledger.jsonl", "user", Snapshot(50, "user"))} if ledger else {}
    counted = Accountant(GaussianDpEvent(1.0), by_user, DELTA, "rdp", **kept)
    counted.follow(model)
    for tell in (counted.epsilon, counted.statement, counted.pay_for_history):
        if tell != counted.pay_for_history or ledger:
            with pytest.raises(Unaccounted, match="made for another unit, one example, and this accountant"):
                tell()
    with pytest.raises(Unaccounted, match="another unit"):
        model.fit(by_user.batches(rows), steps_per_epoch=1, verbose=0, callbacks=[PrivacyBudget(counted, 100.0)])
    assert not ledger or not kept["ledger"].paid, "a use was paid for before the steps were refused"
    own = Accountant(GaussianDpEvent(1.0), by_row, DELTA, "rdp")
    own.follow(model)
    assert own.epsilon() > 0


def test_what_prices_a_step_is_fixed_once_batches_were_drawn():
    """A sampling of 50,000 units drew from 1,000, for .1003 told and 5.1 spent."""
    for sampling in (PoissonSampling(500, 25), ShuffledEpochs(500, 25), FixedOrder(500, 25)):
        sampling.batches(rows)
        for name in ("num_units", "expected_batch_size", "unit", "name"):
            with pytest.raises(AttributeError, match=f"{name} of a {type(sampling).__name__} is fixed"):
                setattr(sampling, name, 1000)
    graph = PoissonSampling(500, 25)
    graph.graph_batches(lambda indices: {"id": indices})
    with pytest.raises(AttributeError, match="is fixed"):
        graph.num_units = 1000


def test_a_sampling_of_ones_own_keeps_what_it_likes():
    class Counting(PoissonSampling):
        def __init__(self):
            self.unit, self.drawn = "user", 0
            super().__init__(500, 25)
            self.unit = "user"

        def index_batches(self, seed=None, position=0):
            for batch in super().index_batches(seed, position):
                self.drawn += 1
                yield batch

    sampling = Counting()
    next(iter(sampling.batches(rows)))
    assert sampling.drawn >= 1 and sampling.unit == "user"
