"""`tune`: what a run may do, what is paid and told, and a search that goes on after a crash."""

import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent

import tfdp_rec
from tfdp_rec.core.ground.keras_internals import numbered_from, object_numbers
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.privacy import Ledger, epsilon_of
from tfdp_rec.training import tuning

ROWS, HELD_OUT, STEPS = 60, 50, 3
IDS = np.arange(ROWS) % 6
SAMPLING = tfdp_rec.data.PoissonSampling(ROWS, 20, unit="row")
SPACE = {"learning_rate": [0.25, 0.5, 1.0]}


def build():
    model = keras.Sequential([keras.layers.Embedding(6, 2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fetch(drawn):
    return IDS[drawn], IDS[drawn][:, None] / 6.0


def train(plan, learning_rate):
    model = tfdp_rec.training.private_form.private_form(build(), fetch(np.arange(ROWS)))
    model.compile(tfdp_rec.LazyDPSGD(learning_rate, plan=plan), "mse")
    model.fit(plan.batches(fetch), callbacks=[plan.budget()], verbose=0)
    return model


def rate_of(model):
    """A score that tells the learning rate, so that the largest one is the best."""
    return np.full(HELD_OUT, min(1.0, float(model.optimizer.learning_rate)))


def tune(run=train, space=SPACE, score=rate_of, held_out=HELD_OUT, **options):
    options = {
        "sampling": SAMPLING, "delta": 1e-3, "steps": STEPS, "epsilon": 8.0, "runs": 4.0, "verbose": 0,
        "accountant": "rdp",
    } | options  # fmt: skip
    return tfdp_rec.tune(run, space, score=score, held_out=held_out, **options)


@pytest.fixture(autouse=True)
def three_runs(monkeypatch):
    """Three runs, of 0.5, 1.0 and 0.25; gives how often functions were numbered anew, which takes half a second."""
    rounded = []
    monkeypatch.setattr(tuning, "number_of_runs", lambda gamma, shape: 3)
    monkeypatch.setattr(tuning, "uniform_numbers", lambda count, below: np.array([1, 2, 0])[:count] % below)
    monkeypatch.setattr(tuning, "round_up_function_numbers", lambda: rounded.append(True))
    return rounded


@pytest.mark.slow
def test_the_best_model_tells_the_price_of_all(tmp_path):
    noises = []

    def run(plan, learning_rate):
        noises.append(plan.noise_multiplier)
        return train(plan, learning_rate)

    found = tune(run, score_noise=4.0)
    assert found.settings == {"learning_rate": 1.0} and 0 < abs(found.score - 1.0) < 0.4
    assert len(noises) == 3 and len(set(noises)) == 1
    steps = SAMPLING.compose_history([(GaussianDpEvent(noises[0]), STEPS)])
    whole = RepeatAndSelectDpEvent(ComposedDpEvent([steps, GaussianDpEvent(4.0)]), 4.0, 1.0)
    [entry] = found.model.privacy_history.snapshot()
    assert entry.event == whole and entry.label == "the best of several trainings"
    assert 7.99 < epsilon_of(whole, 1e-3, "rdp") == found.epsilon <= 8.0
    found.model.save(tmp_path / "best.keras")
    loaded = keras.models.load_model(tmp_path / "best.keras")
    assert [each.event for each in loaded.privacy_history.snapshot()] == [whole]
    told = found.statement()
    assert "who learns how many trainings there were" in told.replace("\n" + " " * 16, " ")
    assert "choosing hyper-parameters" not in told


@pytest.mark.slow
def test_a_search_is_priced_by_losses_too():
    found, by_divergences = tune(accountant="pld"), tune()
    assert 7.99 < found.epsilon <= 8.0
    assert found.model.optimizer.noise_multiplier < by_divergences.model.optimizer.noise_multiplier


@pytest.mark.slow
def test_a_score_that_costs_little_leaves_more_for_the_training(monkeypatch):
    monkeypatch.setattr(tuning, "number_of_runs", lambda gamma, shape: 1)
    noises = []

    def run(plan, learning_rate):
        noises.append(plan.noise_multiplier)
        return train(plan, learning_rate)

    for noise in (3.0, 50.0):
        tune(run, score_noise=noise, runs=2.0)
    assert noises[1] < noises[0]


@pytest.mark.slow
def test_the_best_one_trains_no_further_step_at_its_plan():
    found = tune()
    plan = found.model.optimizer.plan
    with pytest.raises(ValueError, match="exceed the budget|No step fits"):
        found.model.fit(plan.batches(fetch), callbacks=[plan.budget()], verbose=0)
    told = found.epsilon
    # What is trained on is counted beside it.
    more = tfdp_rec.PrivatePlan(sampling=SAMPLING, delta=1e-3, steps=2, epsilon=20.0, accountant="rdp")
    found.model.compile(tfdp_rec.LazyDPSGD(0.1, plan=more), "mse")
    found.model.fit(more.batches(fetch), callbacks=[more.budget()], verbose=0)
    assert more.accountant.steps >= 1 and more.accountant.epsilon() == found.epsilon > told > 7.99


def test_all_is_paid_before_the_first_training(tmp_path, three_runs):
    path = tmp_path / "ledger.jsonl"
    lines = []

    def run(plan, learning_rate):
        lines.append(path.read_text().count('"the best of several trainings"'))
        return train(plan, learning_rate)

    with Ledger(path, "row", tfdp_rec.privacy.Snapshot(ROWS, "row")) as ledger:
        ledger.pay(GaussianDpEvent(4.0), label="counts")
        found = tune(run, ledger=ledger)
        assert lines == [1, 1, 1] and len(three_runs) == 2  # before the runs, and after them
        assert ledger.epsilon(1e-3, "rdp") == pytest.approx(found.epsilon) and 7.99 < found.epsilon <= 8.0
        with pytest.raises(ValueError, match="No noise multiplier"):
            tune(run, ledger=ledger)
        assert len(lines) == 3


def earlier_weights(plan, learning_rate, kept=[]):  # noqa: B006  # kept from run to run, as a careless user does
    model = kept[0] if kept else train(plan, learning_rate)
    if kept:
        model.compile(tfdp_rec.LazyDPSGD(learning_rate, plan=plan), "mse")
        model.fit(plan.batches(fetch), verbose=0)
    kept[:] = [model]
    return model


def other_noise(plan, learning_rate):
    model = train(plan, learning_rate)
    other = tfdp_rec.PrivatePlan(sampling=SAMPLING, delta=1e-3, steps=1, epsilon=1.0, accountant="rdp")
    model.compile(tfdp_rec.LazyDPSGD(learning_rate, plan=other), "mse")
    model.fit(other.batches(fetch), callbacks=[other.budget()], verbose=0)
    return model


def more_steps(plan, learning_rate):
    return train(
        tfdp_rec.PrivatePlan(
            sampling=SAMPLING, delta=1e-3, steps=2 * STEPS, noise_multiplier=plan.noise_multiplier, accountant="rdp"
        ),
        learning_rate,
    )


def no_step(plan, learning_rate):
    model = tfdp_rec.training.private_form.private_form(build(), fetch(np.arange(ROWS)))
    model.compile(tfdp_rec.LazyDPSGD(learning_rate, plan=plan), "mse")
    return model


def counts_too(plan, learning_rate):
    plan.accountant.spend(GaussianDpEvent(2.0), "counts")
    return train(plan, learning_rate)


def plain_steps(plan, learning_rate):
    model = train(plan, learning_rate)
    model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensors(fetch(np.arange(ROWS))), verbose=0)
    return model


def by_hand(plan, learning_rate):
    model = tfdp_rec.training.private_form.private_form(build(), fetch(np.arange(ROWS)))
    model.compile(tfdp_rec.LazyDPSGD(learning_rate, l2_norm_clip=1.0, noise_multiplier=plan.noise_multiplier,
                                     expected_batch_size=20), "mse")  # fmt: skip
    model.fit(*fetch(np.arange(ROWS)), batch_size=20, verbose=0)
    return model


@pytest.mark.fast_cases(
    "plain_steps-spent", "no_step-spent: nothing", "by_hand-no sampling drew", "<lambda>-no privacy history"
)  # fmt: skip
@pytest.mark.parametrize(
    ("run", "said"),
    [(earlier_weights, "spent"), (other_noise, "spent"), (no_step, "spent: nothing"),
     (more_steps, "spent: 6 steps"), (counts_too, "spent: counts"),
     (plain_steps, "spent"), (by_hand, "no sampling drew"),
     (lambda plan, learning_rate: build(), "no privacy history")],
)  # fmt: skip
def test_a_run_that_does_anything_else_is_refused(run, said):
    with pytest.raises((NotPrivate, TypeError, ValueError), match=said):
        tune(run)


def trains_by_hand(model):
    kept = model.optimizer
    model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_tensors(fetch(np.arange(ROWS))), verbose=0)
    model.compile(kept, "mse")
    return rate_of(model)


def trains_on(model):
    other = tfdp_rec.PrivatePlan(sampling=SAMPLING, delta=1e-3, steps=20, noise_multiplier=0.05, accountant="rdp")
    model.compile(tfdp_rec.LazyDPSGD(0.1, plan=other), "mse")
    model.fit(other.batches(fetch), callbacks=[other.budget()], verbose=0)
    return rate_of(model)


def pays(model):
    model.optimizer.plan.accountant.spend(GaussianDpEvent(0.3), "a look at them")
    return rate_of(model)


@pytest.mark.slow_cases("trains_on-steps")
@pytest.mark.parametrize(("score", "said"), [(trains_by_hand, "SGD"), (trains_on, "steps"), (pays, "a look at them")])
def test_a_score_that_uses_the_data_is_refused(score, said):
    with pytest.raises(NotPrivate, match=said):
        tune(score=score)


@pytest.mark.slow
def test_the_model_of_an_earlier_run_is_refused_also_if_that_was_not_the_best():
    kept = []

    def run(plan, learning_rate):
        if len(kept) == 2:
            return kept[1]  # of 0.5, after 1.0
        kept.append(train(plan, learning_rate))
        return kept[-1]

    with pytest.raises(NotPrivate, match="spent: 3 steps"):
        tune(run, space={"learning_rate": [0.25, 1.0, 0.5]})
    assert len(kept) == 2


@pytest.mark.slow
def test_the_best_one_does_not_tell_how_many_came_before_or_after(tmp_path):
    base, names = object_numbers(), []
    for best in (0.5, 0.25):  # the first, and the last
        folder = tmp_path / f"{best}"
        with numbered_from(base):
            found = tune(
                score=lambda model, best=best: np.full(HELD_OUT, float(float(model.optimizer.learning_rate) == best)),
                folder=folder,
            )
        assert found.settings == {"learning_rate": best}
        names.append([found.model.name, found.model.optimizer.name, *(layer.name for layer in found.model.layers)])
        assert sorted(path.suffix for path in folder.glob("*.*")) == [".json", ".keras"]
        assert json.loads((folder / "search.json").read_text())["state"]["runs"] == []
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_folder_is_for_its_owner_and_for_one_search_at_a_time(tmp_path):
    (tmp_path / "search").mkdir(mode=0o755)

    def run(plan, learning_rate):
        with pytest.raises(ValueError, match="in use by another search"):
            tune(folder=tmp_path / "search")
        assert (tmp_path / "search").stat().st_mode & 0o77 == 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(run, folder=tmp_path / "search")
    assert tune(run=train, folder=tmp_path / "other").settings == {"learning_rate": 1.0}


@pytest.mark.slow
def test_of_copies_of_a_search_one_gives_a_model(tmp_path):
    made = []

    def run(plan, learning_rate):
        made.append(learning_rate)
        if len(made) == 2:
            raise KeyboardInterrupt
        return train(plan, learning_rate)

    folder, ledger = tmp_path / "search", tmp_path / "ledger.jsonl"
    with pytest.raises(KeyboardInterrupt):
        tune(run, folder=folder, ledger=ledger)
    shutil.copytree(folder, tmp_path / "copy")
    tune(run, folder=folder, ledger=ledger).accountant.close()
    with pytest.raises(RuntimeError, match="Another run has gone on"):
        tune(run, folder=tmp_path / "copy", ledger=ledger)
    tune(run, folder=folder, ledger=ledger).accountant.close()  # the same model again
    lines = ledger.read_text().splitlines()
    assert sum('"state kept"' in line for line in lines) == 2  # whatever the number of runs


@pytest.mark.slow_cases("values0", "values3")
@pytest.mark.parametrize(
    "values", [np.full(HELD_OUT, 1.01), np.full(HELD_OUT, -0.1), np.full(HELD_OUT, np.nan), np.ones(HELD_OUT - 1), 0.5]
)
def test_scores_that_one_unit_could_move_by_more_are_refused(values):
    with pytest.raises(ValueError, match="one number from 0 to 1"):
        tune(score=lambda model: values)


def test_a_score_is_a_sum_with_the_noise_that_is_priced():
    drawn = np.array([tuning._noisy_mean(np.full(200, 0.5), 200, 8.0) for _ in range(2000)])
    assert abs(drawn.mean() - 0.5) < 5 * 0.04 / 2000**0.5
    assert 0.93 < drawn.std() / (8.0 / 200) < 1.07  # a scale that is wrong by a tenth fails


@pytest.mark.parametrize(
    ("options", "said"),
    [({"space": {}}, None), ({"space": []}, "no settings"), ({"space": {"learning_rate": 0.5}}, "list of values"),
     ({"space": {"learning_rate": "0.5"}}, "list of values"), ({"space": {"learning_rate": []}}, "no settings"),
     ({"held_out": 0}, "held_out"), ({"held_out": 2.5}, "held_out"), ({"runs": 1.0}, "mean must be"),
     ({"runs": 1e6}, "mean must be"), ({"distribution": "poisson"}, "geometric"), ({"score_noise": 0.0}, "positive"),
     ({"epsilon": -1.0}, "epsilon"), ({"steps": 0}, "steps"), ({"delta": 0.5}, "delta")],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_first_training(options, said):
    def run(plan, **settings):
        raise KeyboardInterrupt

    if said is None:  # a search over nothing is one setting, tried several times
        with pytest.raises(KeyboardInterrupt):
            tune(run, **options)
        return
    with pytest.raises((ValueError, TypeError), match=said):
        tune(run, **options)


@pytest.mark.slow
def test_a_search_goes_on_after_a_crash(tmp_path):
    made = []

    def run(plan, learning_rate):
        made.append((learning_rate, plan.noise_multiplier))
        if len(made) == 3:
            raise KeyboardInterrupt
        return train(plan, learning_rate)

    folder, ledger = tmp_path / "search", tmp_path / "ledger.jsonl"
    with pytest.raises(KeyboardInterrupt):
        tune(run, folder=folder, ledger=ledger)
    assert oct((folder / "search.json").stat().st_mode)[-3:] == "600"
    with pytest.raises(ValueError, match="other arguments"):
        tune(run, folder=folder, epsilon=2.0)
    found = tune(run, folder=folder, ledger=ledger)
    assert [rate for rate, _ in made] == [0.5, 1.0, 0.25, 0.25] and len({noise for _, noise in made}) == 1
    assert found.settings == {"learning_rate": 1.0} and found.epsilon <= 8.0
    assert ledger.read_text().count('"the best of several trainings"') == 1
    found.accountant.close()
    again = tune(run, folder=folder, ledger=ledger)
    assert len(made) == 4 and again.score == found.score and again.epsilon == found.epsilon
    assert len(list(folder.glob("*.keras"))) == 1


@pytest.mark.slow
def test_make_private_takes_a_plan():
    def run(plan, learning_rate):
        private = tfdp_rec.make_private(build(), (IDS, IDS[:, None] / 6.0), plan=plan, learning_rate=learning_rate)
        private.fit(verbose=0)
        return private

    assert tune(run).settings == {"learning_rate": 1.0}
    plan = tfdp_rec.PrivatePlan(sampling=SAMPLING, delta=1e-3, steps=3, epsilon=3.0, l2_norm_clip=0.5)
    for given, used in (({}, 0.5), ({"l2_norm_clip": 0.25}, 0.25), ({"l2_norm_clip": 1.0}, 1.0)):
        private = tfdp_rec.make_private(build(), (IDS, IDS[:, None] / 6.0), plan=plan, **given)
        assert private.model.optimizer.l2_norm_clip == used
    with pytest.raises(TypeError, match="plan= decides"):
        tfdp_rec.make_private(build(), (IDS, IDS[:, None] / 6.0), plan=plan, epsilon=3.0)
    with pytest.raises(ValueError, match="The data are of 59 units"):
        tfdp_rec.make_private(build(), (IDS[1:], IDS[1:, None] / 6.0), plan=plan)
    with pytest.raises(TypeError, match="needs epsilon="):
        tfdp_rec.make_private(build(), (IDS, IDS[:, None] / 6.0))
