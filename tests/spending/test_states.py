"""What an accountant writes and reads again, and copies of it: each expense once, and none less."""

import contextlib
import copy
import pickle

import keras
import pytest
import trainings
from counting import count
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from trainings import after_step, rows

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget
from tfdp_rec.core.claim.composition import epsilon_of
from tfdp_rec.core.claim.entries import Entries
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.sampling_proof import source_of
from tfdp_rec.privacy import Accountant, PoissonSampling

DELTA, UNITS = 1e-4, 1000
STEP = GaussianDpEvent(1.0)
POISSON = PoissonSampling(UNITS, 50)


def accountant(sampling=POISSON, **options):
    return Accountant(STEP, sampling, DELTA, "rdp", **options)


def of_histories(*histories):
    made = accountant()
    for history in histories:
        made.spending.merge(Entries.loads(history))
    return made


def model_of():
    return trainings.model_of(trainings.optimizer_of(batch=50), run_eagerly=False)


def gaussians(*sigmas):
    return epsilon_of(ComposedDpEvent([GaussianDpEvent(sigma) for sigma in sigmas]), DELTA, "rdp")


# Uses.


def test_uses_whose_ids_end_like_those_of_old_versions_stay_several():
    made = accountant()
    for day in ("Monday", "Tuesday", "Wednesday"):
        made.spend(GaussianDpEvent(2.0), "popularity counts", id=f"{day}: popularity counts")
    again = of_histories(made.spending.history.dumps())
    assert made.epsilon() == again.epsilon() == pytest.approx(gaussians(2.0, 2.0, 2.0))


def test_an_id_in_use_is_refused_before_anything_is_paid(tmp_path):
    made = accountant(ledger=tmp_path / "ledger.jsonl")
    made.spend(GaussianDpEvent(5.0), "counts", id="x")
    with pytest.raises(ValueError, match="Two expenses have the id 'x'"):
        made.spend(GaussianDpEvent(2.0), "other counts", id="x")
    assert len(read(tmp_path / "ledger.jsonl").paid) == 1
    made.close()


def test_a_plan_that_is_made_again_pays_for_its_counts_again(tmp_path):
    for number in (1, 2):
        plan = tfdp_rec.PrivatePlan(
            sampling=POISSON, epsilon=8.0, delta=DELTA, steps=5, accountant="rdp", ledger=tmp_path / "ledger.jsonl",
            spent=[(GaussianDpEvent(5.0), "counts")],
        )  # fmt: skip
        plan.accountant.close()
        assert len(read(tmp_path / "ledger.jsonl").paid) == number


COUNTS = GaussianDpEvent(5.0), "counts"


def plan_of(*spent, **options):
    settings = {"epsilon": 8.0, "delta": DELTA, "steps": 5, "accountant": "rdp", **options}
    return tfdp_rec.PrivatePlan(sampling=POISSON, spent=spent, **settings)


def told(model, **options):
    made = accountant(**options)
    made.follow(model)
    return made.epsilon()


@pytest.mark.fast_cases("add_uses")
@pytest.mark.parametrize("by", ["add_uses", "plan"])
def test_an_equal_use_of_three_days_costs_three(tmp_path, by):
    """It was told as one, .674 of 1.244."""
    model = model_of()
    for _ in range(3):
        if by == "add_uses":
            model.add_uses([COUNTS])
        else:
            model.compile(tfdp_rec.DPSGD(0.01, plan=plan_of(COUNTS)), "mse")
            model.prepare(rows(range(9)))
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    assert told(model) == pytest.approx(gaussians(5.0, 5.0, 5.0))


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("ledger", [False, True])
def test_one_use_that_is_declared_in_several_places_costs_one(tmp_path, ledger):
    counted, path = tfdp_rec.privacy.Use(*COUNTS), tmp_path / "ledger.jsonl"
    for use in (counted, copy.deepcopy(counted), pickle.loads(pickle.dumps(counted))):
        plan, model = plan_of(use, use, **({"ledger": path} if ledger else {})), model_of()
        model.add_uses([use])
        model.compile(tfdp_rec.DPSGD(0.01, plan=plan), "mse")
        model.prepare(rows(range(9)))
        assert plan.accountant.epsilon() == told(model) == pytest.approx(gaussians(5.0))
        plan.accountant.close()
    assert not ledger or len(read(path).paid) == 1


def test_a_use_and_its_copies_cost_one():
    use = tfdp_rec.privacy.Use(*COUNTS)
    plan = plan_of(use, copy.copy(use), copy.deepcopy(use), pickle.loads(pickle.dumps(use)))
    assert plan.accountant.epsilon() == pytest.approx(gaussians(5.0))


def test_a_program_that_is_run_again_counts_a_pair_again_and_a_use_with_an_id_once(tmp_path):
    for number in (1, 2):
        plan = plan_of(COUNTS, tfdp_rec.privacy.Use(*COUNTS, id="of Monday"), ledger=tmp_path / "ledger.jsonl")
        assert plan.accountant.epsilon() == pytest.approx(gaussians(*[5.0] * (1 + number)))
        plan.accountant.close()


def test_a_plan_with_a_use_that_is_made_again_when_its_budget_is_spent_warns(tmp_path):
    """Its program came back for its checkpoint."""
    for number in (1, 2):
        declared = {"ledger": tmp_path / "ledger.jsonl"}
        with contextlib.nullcontext() if number == 1 else pytest.warns(UserWarning, match="The budget is spent"):
            plan = plan_of(tfdp_rec.privacy.Use(*COUNTS, id="of Monday"), **declared)
        if number == 1:
            count(plan.accountant, plan.accountant.event, 5)
        plan.accountant.close()


@pytest.mark.parametrize("ledger", [False, True])
def test_two_uses_of_one_id_are_refused_before_anything_is_paid(tmp_path, ledger):
    """The last of them alone was counted: told .052 of 9.65."""
    counts = [tfdp_rec.privacy.Use(GaussianDpEvent(noise), "counts", id="counts") for noise in (0.5, 50.0)]
    with pytest.raises(ValueError, match="Two expenses have the id 'counts'"):
        plan_of(*counts, **({"ledger": tmp_path / "ledger.jsonl"} if ledger else {}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("label", ["", None])
def test_a_use_needs_a_label(label):
    model = model_of()
    for spend in (
        lambda: accountant().spend(STEP, label),
        lambda: model.add_uses([(STEP, label)]),
        lambda: tfdp_rec.PrivatePlan(sampling=POISSON, epsilon=2.0, delta=DELTA, steps=5, spent=[(STEP, label)]),
    ):
        with pytest.raises(ValueError, match="A use of the data needs a label"):
            spend()


def test_uses_are_added_to_a_model_that_is_built():
    class Unbuilt(tfdp_rec.PrivateTraining, keras.Model):
        pass

    with pytest.raises(ValueError, match="Build the model before add_uses"):
        Unbuilt().add_uses([(STEP, "counts")])


# Steps.


@pytest.mark.parametrize("by", ["history", "pickle"])
def test_two_that_go_on_from_one_history_are_both_counted(by):
    first = accountant()
    count(first, STEP, 50)
    history = lambda: of_histories(first.spending.history.dumps())  # noqa: E731
    ways = {"history": history, "pickle": lambda: pickle.loads(pickle.dumps(first))}
    one, other = ways[by](), ways[by]()
    for each in (one, other):
        count(each, STEP, 200)
        count(each, STEP, 1)
    both = of_histories(one.spending.history.dumps(), other.spending.history.dumps())
    assert both.steps == 50 + 2 * 201
    assert both.epsilon() == pytest.approx(accountant().epsilon(steps=both.steps))


def test_an_epsilon_is_of_the_present_delta():
    made = accountant()
    count(made, STEP, 20)
    made.epsilon()
    made.delta = 1e-9
    assert made.epsilon() == pytest.approx(Accountant(STEP, POISSON, 1e-9, "rdp").epsilon(steps=20))


# Copies.


def test_trials_with_copied_callbacks_share_one_account():
    budget = PrivacyBudget(accountant(), 2.0)
    one = copy.deepcopy([budget])[0]
    assert one is not budget and one.accountant is budget.accountant
    plan = tfdp_rec.PrivatePlan(sampling=POISSON, epsilon=2.0, delta=DELTA, steps=20, accountant="rdp")
    for trial in range(2):
        model = model_of()
        model.compile(tfdp_rec.DPSGD(0.1, plan=plan), "mse")
        callbacks = copy.deepcopy([plan.budget()])
        if trial:
            with pytest.raises(ValueError, match="would exceed the budget"):
                model.fit(plan.batches(rows), steps_per_epoch=20, verbose=0, callbacks=callbacks)
        else:
            model.fit(plan.batches(rows), steps_per_epoch=20, verbose=0, callbacks=callbacks)
    assert plan.accountant.steps == 20 and plan.accountant.epsilon() <= 2.0


# Payments given back within a fit.


@pytest.mark.parametrize("how", ["close", "give_back_rest"])
def test_no_step_follows_whose_payment_was_given_back(tmp_path, how):
    path = tmp_path / "ledger.jsonl"
    made, model = accountant(ledger=path), model_of()
    seen = []

    def act(batch):
        if batch == 2:
            getattr(made, how)()
            seen.append(read(path).steps)

    callbacks = [PrivacyBudget(made, 50.0), after_step(act)]
    fit = lambda: model.fit(POISSON.batches(rows), steps_per_epoch=6, verbose=0, callbacks=callbacks)  # noqa: E731
    if how == "close":
        with pytest.raises(ValueError, match="is not open in this process any more"):
            fit()
    else:
        fit()
        made.close()
    assert seen == [3]
    assert int(model.optimizer.iterations) == read(path).steps == (3 if how == "close" else 6)


def test_a_loop_by_hand_makes_no_step_whose_payment_was_given_back(tmp_path):
    made, model, batches = accountant(ledger=tmp_path / "ledger.jsonl"), model_of(), iter(POISSON.batches(rows))
    budget = PrivacyBudget(made, 50.0)
    model.feeding = source_of(POISSON.batches(rows).element_spec)
    budget.set_model(model)
    budget.set_params({"steps": 5, "epochs": 1})
    budget.on_train_begin()
    budget.on_train_batch_begin(0)
    model.train_on_batch(next(batches))
    made.give_back_rest()
    with pytest.raises(Exception, match="The privacy budget is spent"):
        model.train_on_batch(next(batches))
    assert read(tmp_path / "ledger.jsonl").steps == 1
    made.close()


# Files of other versions.


@pytest.mark.parametrize("saved", ['[["0123", {"event": {}}]]', '{"format": "tfdp_rec entries 3", "entries": []}'])
def test_a_history_of_another_version_is_refused(saved):
    """An empty one too: what it leaves out is not known."""
    with pytest.raises(ValueError, match="written by another version of tfdp_rec"):
        Entries.loads(saved)
