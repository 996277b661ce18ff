"""The plan says everything once, and what it gives away costs what it says."""

import contextlib
import copy

import dp_accounting
import keras
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from trainings import model_of, optimizer_of, rows

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.core.claim.entries import Entry
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.optimizers import Preselection
from tfdp_rec.privacy import (
    Accountant,
    BrokenLedger,
    FixedOrder,
    Ledger,
    PoissonSampling,
    Snapshot,
    Unaccounted,
    optimised_correlation,
)

USERS, BATCH, STEPS = 2_000, 50, 30


def plan_of(**options):
    options = {"epsilon": 2.0, "delta": 1e-4, "steps": STEPS, "accountant": "rdp", **options}
    return tfdp_rec.PrivatePlan(sampling=PoissonSampling(USERS, BATCH, unit="user"), **options)


@pytest.mark.slow
def test_a_plan_is_all_a_training_needs():
    plan = plan_of()
    model = model_of(optimizer_of(plan=plan))
    model.fit(plan.batches(rows), steps_per_epoch=10, epochs=9, verbose=0, callbacks=[plan.budget()])
    assert STEPS <= int(model.optimizer.iterations) == plan.accountant.steps <= STEPS + 1
    assert plan.accountant.epsilon() <= 2.0 < plan.accountant.epsilon(plan.accountant.steps + 1)
    assert f"{plan.accountant.steps} steps of Gaussian noise" in " ".join(plan.accountant.statement().split())


@pytest.mark.parametrize("kind", [tfdp_rec.DPSGD, tfdp_rec.LazyDPSGD])
def test_an_optimizer_takes_what_it_is_not_given(kind):
    plan = plan_of(noise_multiplier=1.3, epsilon=None, l2_norm_clip=0.5)
    optimizer = kind(0.1, plan=plan)
    assert (optimizer.noise_multiplier, optimizer.expected_batch_size, optimizer.l2_norm_clip) == (1.3, BATCH, 0.5)
    assert kind(0.1, plan=plan, l2_norm_clip=2.0).l2_norm_clip == 2.0
    normalising = kind(0.1, plan=plan_of(l2_norm_clip="auto"))
    assert normalising.get_config()["l2_norm_clip"] == "auto"
    assert optimizer.get_config()["plan"] is None and optimizer.get_config()["noise_multiplier"] == 1.3
    assert plan.epsilon == plan.accountant.epsilon(STEPS)
    with pytest.raises(ValueError, match="leave it out"):
        kind(0.1, plan=plan, expected_batch_size=BATCH + 1)


def test_less_noise_than_planned_is_refused_and_more_is_taken():
    plan = plan_of()
    tfdp_rec.DPSGD(0.1, plan=plan, noise_multiplier=plan.noise_multiplier * 1.1)
    with pytest.raises(ValueError, match="costs more than the plan's"):
        tfdp_rec.DPSGD(0.1, plan=plan, noise_multiplier=plan.noise_multiplier * 0.99)


def test_mechanisms_of_more_than_one_gaussian():
    plan = plan_of()
    own = {"contribution_clip": 1.0, "threshold": 5.0}
    with pytest.raises(ValueError, match="with_total_noise"):
        tfdp_rec.AdaFEST(0.1, plan=plan, contribution_noise_multiplier=5.0, **own)
    tfdp_rec.AdaFEST.with_total_noise(0.1, noise_multiplier=plan.noise_multiplier, plan=plan, **own)
    two = plan_of(make_event=lambda s: dp_accounting.ComposedDpEvent([GaussianDpEvent(5.0), GaussianDpEvent(s)]))
    optimizer = tfdp_rec.AdaFEST(0.1, plan=two, contribution_noise_multiplier=5.0, **own)
    assert two.accountant.epsilon(STEPS) <= 2.0
    assert optimizer.noise_multiplier > plan.noise_multiplier


def test_eana_has_no_epsilon_to_plan_for():
    with pytest.raises(ValueError, match="EANA has no epsilon"):
        tfdp_rec.EANA(0.1, plan=plan_of())
    plan = plan_of(noise_multiplier=1.0, epsilon=None)
    assert plan.epsilon < np.inf
    model = model_of(tfdp_rec.EANA(0.1, plan=plan))
    assert plan.epsilon == plan.accountant.epsilon(steps=10) == np.inf
    assert "none" in plan.accountant.statement(10).fields["Guarantee"]
    with pytest.raises(ValueError, match="has no finite epsilon"):
        plan.budget()
    model.fit(plan.batches(rows), steps_per_epoch=2, verbose=0)
    assert plan.accountant.epsilon() == np.inf


def test_no_noise_has_no_epsilon_to_plan_for():
    plan = plan_of(noise_multiplier=1.0, epsilon=None)
    tfdp_rec.DPSGD(0.1, plan=plan, noise_multiplier=0.0)
    assert plan.epsilon == plan.accountant.epsilon(steps=10) == np.inf


def test_what_is_spent_before_training_is_part_of_the_plan():
    rows = Preselection({"t": np.arange(4)}, noise_multiplier=20.0)
    with pytest.raises(ValueError, match="spent="):
        tfdp_rec.FEST(0.1, plan=plan_of(), preselection=rows)
    plan = plan_of(spent=[rows.use])
    assert plan.noise_multiplier > plan_of().noise_multiplier
    tfdp_rec.FEST(0.1, plan=plan, preselection=rows)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("ledger", [False, True])
def test_a_saved_model_tells_what_its_plan_has_spent_beside_its_steps(tmp_path, ledger):
    """A prior that was counted privately is in the model: another accountant that follows a file is told of it."""
    spent = [(GaussianDpEvent(5.0), "popularity counts")] * 2
    plan = plan_of(spent=spent, ledger=str(tmp_path / "plan.jsonl") if ledger else None)
    model = model_of(optimizer_of(plan=plan))
    model.fit(plan.batches(rows), steps_per_epoch=STEPS, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    other = Accountant(GaussianDpEvent(plan.noise_multiplier), plan.sampling, plan.delta, plan.accountant.accountant)
    other.follow(loaded)
    assert other.spent_besides == spent and other.epsilon() == pytest.approx(plan.accountant.epsilon(), abs=1e-6)
    plan.accountant.follow(loaded)
    assert plan.accountant.spent_besides == spent, "counted once"
    if ledger:
        assert [paid.label for paid in read(tmp_path / "plan.jsonl").paid].count("popularity counts") == 2


def test_a_plan_allows_steps_after_ordinary_ones_and_fewer_after_a_use_it_does_not_know():
    plan, batch = plan_of(spent=[(GaussianDpEvent(5.0), "popularity counts")]), rows(range(BATCH))
    model, drawn = model_of(optimizer_of(plan=plan)), iter(plan.batches(rows))
    model.train_on_batch(next(drawn))
    private = model.optimizer
    model.compile("adam", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="not private"):
        model.train_on_batch(*batch)  # on public data, say
    model.compile(private, "mse", run_eagerly=True)
    model.train_on_batch(next(drawn))
    assert plan.accountant.spending.history.ordinary == {"Adam": 1} and int(private.iterations) == 2
    again = Entry(GaussianDpEvent(5.0), 1, label="popularity counts")  # counted a second time
    model.privacy_history.add_entry(again)
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        for _ in range(STEPS):
            model.train_on_batch(next(drawn))
    assert 2 < plan.accountant.steps < STEPS and plan.accountant.epsilon() <= 2.0


def test_a_plan_pays_for_batches_of_its_sampling_alone():
    plan = plan_of()
    model = model_of(optimizer_of(plan=plan))
    with pytest.raises(tfdp_rec.NotPrivate, match="pays for batches of its sampling alone"):
        model.train_on_batch(*rows(range(BATCH)))
    with pytest.raises(ValueError, match="carry no proof that they were sampled"):
        model.fit(*rows(range(9)), verbose=0)
    assert plan.accountant.steps == int(model.optimizer.iterations) == 0 and plan.accountant.epsilon() == 0


def test_what_makes_no_plan():
    with pytest.raises(TypeError, match="either epsilon= or noise_multiplier="):
        plan_of(noise_multiplier=1.0)
    with pytest.raises(ValueError, match="steps must be"):
        plan_of(steps=0)
    with pytest.raises(ValueError, match="delta"):
        plan_of(delta=0.1)
    with pytest.raises(ValueError, match="no finite epsilon"):
        plan_of(noise_multiplier=0.0, epsilon=None).budget()


def fit(plan, steps):
    model = model_of(optimizer_of(plan=plan))
    model.fit(plan.batches(rows), steps_per_epoch=steps, verbose=0, callbacks=[plan.budget()])
    plan.accountant.close()
    return model


COUNTS = GaussianDpEvent(20.0), "popularity counts"


@pytest.mark.slow
def test_a_plan_pays_into_its_ledger_and_goes_on_with_what_is_left(tmp_path):
    path = tmp_path / "ledger.jsonl"
    plan = plan_of(ledger=path, spent=[COUNTS])
    assert [paid.label for paid in read(path).paid] == ["popularity counts"], "paid before anything is done"
    fit(plan, 10)
    again = plan_of(ledger=path)
    assert again.noise_multiplier == plan.noise_multiplier
    fit(again, STEPS + 5)
    chain = read(path)
    assert chain.steps == again.accountant.steps and STEPS <= chain.steps <= STEPS + 1
    oracle = Accountant(GaussianDpEvent(plan.noise_multiplier), again.sampling, 1e-4, "rdp")
    oracle.spend(*COUNTS)
    assert again.accountant.epsilon() == pytest.approx(oracle.epsilon(chain.steps)) == chain.epsilon(1e-4, "rdp")
    assert again.accountant.epsilon() <= 2.0


@pytest.mark.slow
def test_a_plan_whose_budget_is_gone_is_refused_and_pays_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    fit(plan_of(ledger=path), STEPS + 5)
    before = path.read_bytes()
    for options in ({"spent": [COUNTS]}, {"epsilon": 1.0}):
        with pytest.raises(ValueError, match="The budget is spent: .* holds epsilon"):
            plan_of(ledger=path, **options)
    with pytest.warns(UserWarning, match="The budget is spent: .* holds epsilon"):
        plan = plan_of(ledger=path)
    with pytest.raises(ValueError, match="more step.* would exceed the budget"):
        fit(plan, 1)
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        train(model_of(optimizer_of(plan=plan)), plan.batches(rows).take(1))
    assert path.read_bytes() == before


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("by_noise", [False, True])
def test_a_model_whose_program_ended_after_the_last_step_is_resumed_and_saved(tmp_path, by_noise):
    """It was paid for, and the plan refused to be made again."""
    options = {"ledger": tmp_path / "ledger.jsonl"} | ({"epsilon": None, "noise_multiplier": 2.0} if by_noise else {})

    def program(steps_per_epoch, epochs=2):
        plan = plan_of(**options)
        model = model_of(tfdp_rec.LazyDPSGD(0.01, plan=plan))
        model.prepare(rows(range(4)))
        checkpoint = TrainingCheckpoint(tmp_path / "checkpoint", accountant=plan.accountant)
        resumed = checkpoint.resume(model)
        model.fit(
            plan.batches(rows), steps_per_epoch=steps_per_epoch, epochs=epochs, verbose=0,
            callbacks=[checkpoint, plan.budget()],
        )
        model.save(tmp_path / f"{resumed is not None}.keras")
        plan.accountant.close()
        return model

    first = program(STEPS // 2)
    before = read(tmp_path / "ledger.jsonl").paid
    with contextlib.nullcontext() if by_noise else pytest.warns(UserWarning, match="The budget is spent"):
        again = program(STEPS // 2)
    assert read(tmp_path / "ledger.jsonl").paid == before
    for one, other in zip(first.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert again.saved_history().steps == STEPS // 2 * 2


@pytest.mark.slow
def test_another_plan_is_made_beside_what_was_spent(tmp_path):
    """A larger budget, for as many steps again: more noise than it would take alone, since the first's steps count."""
    path = tmp_path / "ledger.jsonl"
    first = plan_of(ledger=path)
    fit(first, STEPS)
    second = plan_of(ledger=path, epsilon=2.5)
    assert second.noise_multiplier > 1.02 * plan_of(epsilon=2.5).noise_multiplier
    made = read(path).steps
    assert 2.49 < second.accountant.epsilon(made + STEPS) <= 2.5
    fit(second, STEPS)
    assert read(path).steps == made + STEPS and read(path).epsilon(1e-4, "rdp") <= 2.5
    given = plan_of(ledger=path, epsilon=None, noise_multiplier=3.0)
    assert given.epsilon == given.accountant.epsilon(made + STEPS + STEPS) > 2.4


def test_a_plan_for_other_data_says_so(tmp_path):
    path = tmp_path / "ledger.jsonl"
    plan_of(ledger=path, spent=[COUNTS]).accountant.close()
    grown = PoissonSampling(2 * USERS, BATCH, unit="user")
    options = {"sampling": grown, "epsilon": 2.0, "delta": 1e-4, "steps": STEPS, "accountant": "rdp"}
    with pytest.raises(BrokenLedger, match="data_changed=True"):
        tfdp_rec.PrivatePlan(ledger=path, **options)
    with Ledger(path, "user", Snapshot(2 * USERS, "user"), data_changed=True) as ledger:
        plan = tfdp_rec.PrivatePlan(ledger=ledger, **options)
        assert plan.noise_multiplier > tfdp_rec.PrivatePlan(**options).noise_multiplier


def test_rows_that_were_chosen_and_paid_for_need_not_be_paid_again(tmp_path):
    rows = Preselection({"t": np.arange(4)}, noise_multiplier=20.0)
    path = tmp_path / "ledger.jsonl"
    plan_of(ledger=path, spent=[rows.use]).accountant.close()
    tfdp_rec.FEST(0.1, plan=plan_of(ledger=path), preselection=rows)
    assert len(read(path).paid) == 1


@pytest.mark.slow
def test_a_model_that_was_compiled_before_is_followed_whole():
    """The accountant followed the optimizer, whose history the model's took over when it was compiled."""
    plan = plan_of()
    model = model_of(tfdp_rec.DPSGD(0.01, l2_norm_clip=1.0, noise_multiplier=3.0, expected_batch_size=BATCH))
    model.fit(plan.batches(rows), steps_per_epoch=3, verbose=0)
    model.compile(tfdp_rec.DPSGD(0.01, plan=plan), loss="mse")
    model.fit(plan.batches(rows), steps_per_epoch=4, verbose=0, callbacks=[plan.budget()])
    assert plan.accountant.steps == 7
    assert [(event.noise_multiplier, steps) for event, steps in plan.accountant.runs()] == [
        (3.0, 3),
        (plan.noise_multiplier, 4),
    ]


# Outside `fit`


def planned(steps=12, **more):
    order = FixedOrder(num_units=40, expected_batch_size=4)
    options = {"epsilon": 3.0, "delta": 1e-3, "accountant": "rdp", "correlation": optimised_correlation(steps, 10)}
    return tfdp_rec.PrivatePlan(sampling=order, steps=steps, **options, **more)


def train(model, batches):
    for drawn in batches:
        model.train_on_batch(drawn)


def refused_anew():
    return pytest.raises(tfdp_rec.NotPrivate, match="budget is spent")


def test_iterations_by_hand_are_free_where_they_cost_nothing():
    plan = plan_of()
    model = model_of(optimizer_of(plan=plan))
    for _ in range(3):
        train(model, plan.batches(rows).take(5))
    assert plan.accountant.steps == 15 and plan.accountant.epsilon() <= 2.0


def test_steps_by_hand_are_paid_for_in_the_plan_s_ledger(tmp_path):
    path = tmp_path / "ledger.jsonl"
    plan = plan_of(ledger=path)
    model = model_of(optimizer_of(plan=plan))
    train(model, plan.batches(rows).take(3))
    assert plan.accountant.steps == 3 <= read(path).steps <= STEPS
    plan.accountant.close()
    assert read(path).steps == 3 and plan.accountant.epsilon() == pytest.approx(read(path).epsilon(plan.delta, "rdp"))
    plan = plan_of(ledger=path)
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        train(model_of(optimizer_of(plan=plan)), plan.batches(rows).take(STEPS))
    assert plan.accountant.steps == read(path).steps == STEPS and plan.accountant.epsilon() <= 2.0
    plan.accountant.close()


@pytest.mark.fast_cases("LazyDPFTRL")
@pytest.mark.parametrize("kind", [tfdp_rec.DPFTRL, tfdp_rec.LazyDPFTRL])
def test_a_plan_of_correlated_noise_is_begun_once_in_loops_by_hand(tmp_path, kind):
    """A loaded model begins its noise anew, at the whole price: five steps four times were 7.22 under a plan of 3."""
    plan = planned()
    model = model_of(kind(0.01, plan=plan))
    train(model, plan.batches(rows).take(3))
    train(model, plan.batches(rows, position=3).take(2))  # goes on
    train(model, plan.batches(rows, position=5).take(1))
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    with refused_anew():
        train(model, plan.batches(rows).take(1))
    assert plan.accountant.steps == 6 and 2.9 < plan.accountant.epsilon() <= 3.0


@pytest.mark.slow
def test_of_several_models_with_one_plan_of_correlated_noise_one_is_trained_by_hand():
    plan = planned()
    first, second = (model_of(tfdp_rec.DPFTRL(0.01, plan=plan)) for _ in range(2))
    train(first, plan.batches(rows).take(1))
    with refused_anew():
        train(second, plan.batches(rows).take(1))
    train(first, plan.batches(rows, position=1).take(11))
    assert plan.accountant.steps == 12 and plan.accountant.epsilon() <= 3.0


def test_a_resumed_plan_of_correlated_noise_goes_on_in_fit(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = model_of(tfdp_rec.DPFTRL(0.01, plan=planned(16, ledger=path)))
    plan = first.optimizer.plan
    checkpoint = TrainingCheckpoint(tmp_path / "training", accountant=plan.accountant)
    first.fit(plan.batches(rows), steps_per_epoch=4, verbose=0, callbacks=[checkpoint])
    plan.accountant.close()
    plan = planned(16, ledger=path)
    model = model_of(tfdp_rec.DPFTRL(0.01, plan=plan))
    model.prepare(rows(range(4)))
    checkpoint = TrainingCheckpoint(tmp_path / "training", accountant=plan.accountant)
    assert checkpoint.resume(model).step == 4
    batches = plan.batches(rows, position=4)
    model.fit(batches, steps_per_epoch=4, epochs=2, verbose=0, callbacks=[checkpoint])
    assert plan.accountant.steps == 8 and plan.accountant.epsilon() <= 3.0
    model.fit(plan.batches(rows, position=8), steps_per_epoch=4, verbose=0, callbacks=[plan.budget()])
    assert plan.accountant.steps == 12 and plan.accountant.epsilon() <= 3.0
    with pytest.raises(tfdp_rec.NotPrivate, match="ensured in fit alone"):
        train(model, plan.batches(rows, position=12).take(1))
    assert plan.accountant.steps == 12 and plan.accountant.epsilon() <= 3.0
    plan.accountant.close()


def test_uses_that_do_not_fit_are_refused_before_they_are_paid(tmp_path):
    with pytest.raises(ValueError, match="nothing was paid"):
        plan_of(ledger=tmp_path / "ledger.jsonl", spent=[(GaussianDpEvent(0.1), "a slip of the pen")])
    assert not read(tmp_path / "ledger.jsonl").paid


# The gate.


def gate_of(plan, model):
    model.prepare(rows(range(BATCH)))
    return model.optimizer.privacy_history


def test_a_copied_model_has_a_gate_from_the_first_moment():
    """In a loop of one's own, which asks no plan, it had none: as many steps as one likes."""
    plan = plan_of()
    model = model_of(optimizer_of(plan=plan))
    first = gate_of(plan, model)
    assert first.gate.left == STEPS
    copied = copy.deepcopy(model).optimizer.privacy_history
    assert (first.gate.left, copied.gate.left) == (0, STEPS), "one optimizer of a plan at a time"


def test_a_plan_sees_what_another_model_spends_on_a_frozen_layer():
    """It was told, and the plan went on: 10.6 for a plan of 4."""
    layer = keras.layers.Dense(3)
    layer.build([None, 2])
    inputs = keras.Input([2])
    layer.trainable = False
    plan = plan_of()
    first = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(layer(inputs)))
    first.compile(tfdp_rec.DPSGD(0.01, plan=plan), "mse", run_eagerly=True)
    train(first, plan.batches(rows).take(2))
    layer.trainable = True
    second = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(layer(inputs)))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 0.5, "expected_batch_size": BATCH}
    second.compile(tfdp_rec.DPSGD(0.01, **settings), "mse", run_eagerly=True)
    train(second, PoissonSampling(USERS, BATCH, unit="user").batches(rows).take(20))
    layer.trainable = False
    with pytest.raises(tfdp_rec.NotPrivate, match="budget is spent"):
        train(first, plan.batches(rows).take(1))
    assert int(first.optimizer.iterations) == 2 and plan.accountant.epsilon() > 2.0


def test_batches_that_can_be_drawn_again_are_refused_under_a_plan():
    plan = plan_of()
    model = model_of(optimizer_of(plan=plan))
    with pytest.raises(tfdp_rec.NotPrivate, match="price of this step is not known"):
        train(model, plan.batches(rows, seed=1).take(1))
    assert int(model.optimizer.iterations) == 0


def test_a_gate_stays_closed_where_there_is_no_price():
    plan = plan_of()
    model = model_of(optimizer_of(plan=plan))
    gate = gate_of(plan, model)
    model.optimizer.iterations.assign_add(3)  # steps that no history describes
    gate.note_change()
    gate.lift()
    assert gate.gate.left == 0
    with pytest.raises(Unaccounted):
        train(model, plan.batches(rows).take(1))


def test_a_budget_of_a_fit_counts_for_steps_by_hand_within_it(tmp_path):
    """Not what the optimizer's plan would allow, which the ledger of that budget has not paid for."""
    plan, path = plan_of(), tmp_path / "ledger.jsonl"
    model, made = model_of(optimizer_of(plan=plan)), []
    accountant = Accountant(model.optimizer.dp_event(), plan.sampling, 1e-4, "rdp", ledger=path)
    batches = iter(plan.batches(rows))

    class ByHand(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            plan.accountant.spend(GaussianDpEvent(50.0), "counts")  # the plan would look again
            with contextlib.suppress(tfdp_rec.NotPrivate):
                for _ in range(3):
                    model.train_on_batch(next(batches))
                    made.append(1)

    budget = PrivacyBudget(accountant, accountant.epsilon(5) * (1 + 1e-9))
    with contextlib.suppress(ValueError):
        model.fit(plan.batches(rows), steps_per_epoch=4, verbose=0, callbacks=[budget, ByHand()])
    assert int(model.optimizer.iterations) == accountant.steps == 4 and not made  # what was spent closed the gate
    accountant.close()
