"""Random allocation: each unit once in an epoch, in a uniformly random batch; what is counted, and what is refused."""

import gc
import itertools
import os
import pathlib
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting import GaussianDpEvent
from scipy import stats

import tfdp_rec
from tfdp_rec.core.claim import secret_draws
from tfdp_rec.core.ground.refused import NotPrivate
from tfdp_rec.data import RandomAllocation

UNITS, STEPS = 60, 5
IDS = np.arange(UNITS) % 7


def epochs(sampling, count, **options):
    batches = sampling.index_batches(**options)
    return [[next(batches) for _ in range(sampling.steps_per_epoch)] for _ in range(count)]


def batch_numbers(epoch):
    """The batch of each unit."""
    found = np.full(sum(map(len, epoch)), -1)
    for number, units in enumerate(epoch):
        found[units] = number
    return found


# The draws.


@pytest.mark.parametrize("seed", [None, 3])
def test_each_unit_is_once_in_each_epoch(seed):
    for epoch in epochs(RandomAllocation(1000, 7), 5, seed=seed):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(1000))
        assert all(units.dtype == np.int64 for units in epoch)


def allocation_p_value(numbers, steps):
    """p-value of pairs of units' batches in many epochs under independent uniform draws; numbers [epochs, units]."""
    codes = numbers[:, 0] * steps**2 + numbers[:, 1] * steps + numbers[:, -1]
    return stats.chisquare(np.bincount(codes, minlength=steps**3)).pvalue


@pytest.mark.parametrize("seed", [None, 0])
def test_the_batches_of_units_are_uniform_and_independent(seed):
    numbers = np.array([batch_numbers(epoch) for epoch in epochs(RandomAllocation(9, 3), 9000, seed=seed)])
    assert allocation_p_value(numbers, 3) > 1e-6
    assert allocation_p_value(numbers.reshape(-1, 18), 3) > 1e-6  # of one epoch and the next
    assert np.var((numbers == 0).sum(axis=1)) == pytest.approx(9 * 2 / 9, rel=0.1)  # sizes are binomial


@pytest.mark.parametrize("wrong", ["batches of equal size", "a buffer's shuffle", "one order", "a word's remainder"])
def test_the_test_of_draws_rejects_other_shuffles(wrong):
    rng = np.random.default_rng(0)

    def buffered():
        held, order = [0, 1, 2], []
        for unit in [*range(3, 9), None, None, None]:
            order.append(held.pop(rng.integers(len(held))))
            held += [] if unit is None else [unit]
        return np.argsort(order) // 3

    draw = {
        "batches of equal size": lambda: rng.permutation(9) // 3,
        "a buffer's shuffle": buffered,
        "one order": lambda: np.arange(9) // 3,
        "a word's remainder": lambda: rng.integers(0, 4, 9) % 3,
    }[wrong]
    assert allocation_p_value(np.array([draw() for _ in range(9000)]), 3) < 1e-6


def test_draws_are_of_the_systems_entropy(monkeypatch):
    words = []
    entropy = secret_draws.os_entropy
    monkeypatch.setattr(secret_draws, "os_entropy", lambda count: words.append(count) or entropy(count))
    monkeypatch.setattr(np.random, "default_rng", None)
    epochs(RandomAllocation(1000, 10), 2)
    assert sum(words) >= 2000
    with pytest.raises(TypeError):
        epochs(RandomAllocation(1000, 10), 1, seed=0)


def test_no_word_prefers_a_batch(monkeypatch):
    words = [2**64 - 1, 7, 8]
    given = lambda count: np.array([words.pop(0) for _ in range(count)], np.uint64)  # noqa: E731
    monkeypatch.setattr(secret_draws, "os_entropy", given)
    assert secret_draws.uniform_numbers(2, 5).tolist() == [2, 3]


def test_a_seed_goes_on_where_it_stopped():
    straight = list(itertools.islice(RandomAllocation(50, 4).index_batches(seed=1), 12))
    resumed = list(itertools.islice(RandomAllocation(50, 4).index_batches(seed=1, position=6), 6))
    assert [batch.tolist() for batch in straight[6:]] == [batch.tolist() for batch in resumed]


def test_more_steps_than_units_and_one_step():
    sizes = [len(batch) for epoch in epochs(RandomAllocation(3, 10), 1) for batch in epoch]
    assert len(sizes) == 10 and sum(sizes) == 3
    assert [len(batch) for epoch in epochs(RandomAllocation(3, 1), 2) for batch in epoch] == [3, 3]
    assert RandomAllocation(10, 4).expected_batch_size == 2.5


def test_its_settings_are_its_state():
    sampling = RandomAllocation(100, 8, unit="user")
    copy = RandomAllocation.from_state(sampling.get_state())
    assert (copy.num_units, copy.steps_per_epoch, copy.unit) == (100, 8, "user") and copy.name != sampling.name
    with pytest.raises(ValueError, match="steps_per_epoch must be a positive integer"):
        RandomAllocation(10, 0)
    next(iter(sampling.batches(fetch)))
    with pytest.raises(AttributeError, match="is fixed once it has drawn"):
        sampling.steps_per_epoch = 4


# What a step counts.


def fetch(indices):
    return IDS[np.asarray(indices) % UNITS], np.ones([len(indices), 1], np.float32)


def make_model(plan):
    inputs = keras.Input((), dtype="int64")
    outputs = keras.layers.Dense(1)(keras.layers.Embedding(7, 2)(inputs))
    model = tfdp_rec.PrivateModel(inputs, outputs)
    model.compile(tfdp_rec.LazyDPSGD(0.1, plan=plan), loss=keras.losses.MeanSquaredError())
    return model


def make_plan(epochs=3, sampling=None, **options):
    sampling = sampling or RandomAllocation(UNITS, STEPS, unit="row")
    return tfdp_rec.PrivatePlan(
        sampling=sampling, noise_multiplier=2.0, delta=1e-3, steps=epochs * sampling.steps_per_epoch, **options
    )


def epoch_price(epochs):
    sampling = RandomAllocation(UNITS, STEPS)
    return tfdp_rec.privacy.epsilon_of(sampling.compose(GaussianDpEvent(2.0), epochs * STEPS), 1e-3)


def test_an_epoch_is_counted_at_its_first_step():
    plan = make_plan()
    model = make_model(plan)
    counted = []
    for drawn in plan.batches(fetch).take(2 * STEPS + 1):
        model.train_on_batch(drawn)
        counted.append(plan.accountant.steps)
    assert counted == [STEPS] * STEPS + [2 * STEPS] * STEPS + [3 * STEPS]
    assert int(model.optimizer.iterations) == 2 * STEPS + 1
    assert plan.accountant.epsilon() == pytest.approx(epoch_price(3), rel=1e-9) == plan.epsilon


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("with_ledger", [False, True])
def test_a_fit_that_ends_within_an_epoch_has_spent_it(with_ledger, tmp_path):
    """The next fit begins another epoch, and the budget has one less."""
    plan = make_plan(ledger=tmp_path / "ledger.jsonl" if with_ledger else None)
    model = make_model(plan)
    made = []
    for steps in (2, STEPS + 1, 4 * STEPS):
        if plan.accountant.steps < 3 * STEPS:
            model.fit(plan.batches(fetch), steps_per_epoch=steps, verbose=0, callbacks=[plan.budget()])
        made.append((int(model.optimizer.iterations), plan.accountant.steps))
    assert made == [(2, STEPS), (2 + STEPS + 1, 3 * STEPS), (2 + STEPS + 1, 3 * STEPS)]
    with pytest.raises(ValueError, match="would exceed the budget"):
        model.fit(plan.batches(fetch), steps_per_epoch=1, verbose=0, callbacks=[plan.budget()])
    assert plan.accountant.epsilon() <= plan.epsilon
    if with_ledger:
        paid = plan.accountant.spending.payments.ledger.paid
        assert sum(each.attempts for each in paid) == 3 and sum(each.steps for each in paid) == 3 * STEPS


def test_a_ledger_pays_for_whole_epochs_in_blocks(tmp_path):
    plan = make_plan(40, sampling=RandomAllocation(UNITS, 7, unit="row"), ledger=tmp_path / "ledger.jsonl")
    model, paid = make_model(plan), plan.accountant.spending.payments.ledger
    model.train_on_batch(next(iter(plan.batches(fetch))))
    assert [(each.attempts, each.steps) for each in paid.paid] == [(15, 105)]
    plan.accountant.close()
    assert [(each.attempts, each.steps) for each in paid.paid] == [(1, 7)]
    assert plan.accountant.steps == 7


def test_a_fit_uses_all_of_an_epoch_across_keras_epochs():
    plan = make_plan()
    model = make_model(plan)
    history = model.fit(plan.batches(fetch), epochs=5, steps_per_epoch=3, verbose=0, callbacks=[plan.budget()])
    assert int(model.optimizer.iterations) == 15 == plan.accountant.steps
    assert history.history["epsilon"][-1] <= plan.epsilon


def test_steps_per_execution_that_are_no_part_of_an_epoch():
    plan = make_plan(4)
    inputs = keras.Input((), dtype="int64")
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Embedding(7, 2)(inputs)))
    optimizer = tfdp_rec.LazyDPSGD(0.1, plan=plan)
    model.compile(optimizer, loss=keras.losses.MeanSquaredError(), steps_per_execution=3)
    model.fit(plan.batches(fetch), steps_per_epoch=18, verbose=0, callbacks=[plan.budget()])
    assert int(optimizer.iterations) == 18 and plan.accountant.steps == 4 * STEPS


def test_the_middle_of_an_epoch_that_another_model_began_is_refused():
    plan = make_plan()
    model, draws = make_model(plan), iter(plan.batches(fetch))
    other_plan = make_plan(sampling=plan.sampling)
    other = make_model(other_plan)
    model.train_on_batch(next(draws))
    with pytest.raises(NotPrivate, match="that this training has not begun"):
        other.train_on_batch(next(draws))
    assert other_plan.accountant.steps == 0 and int(other.optimizer.iterations) == 0


@pytest.mark.slow
def test_a_step_in_the_middle_of_another_iteration_is_refused_at_the_same_place():
    plan, other_plan = make_plan(), None
    other_plan = make_plan(sampling=plan.sampling)
    model, other = make_model(plan), make_model(other_plan)
    draws, others = iter(plan.batches(fetch)), iter(plan.batches(fetch))
    for _ in range(2):
        model.train_on_batch(next(draws))
        other.train_on_batch(next(others))
    with pytest.raises(NotPrivate, match="that this training has not begun"):
        model.train_on_batch(next(others))
    model.train_on_batch(next(draws))
    assert (plan.accountant.steps, other_plan.accountant.steps) == (STEPS, STEPS)


@pytest.mark.slow
def test_the_next_epoch_of_an_iteration_is_of_the_model_that_begins_it():
    plan = make_plan()
    other_plan = make_plan(sampling=plan.sampling)
    model, other, draws = make_model(plan), make_model(other_plan), iter(plan.batches(fetch))
    for _ in range(STEPS):
        model.train_on_batch(next(draws))
    other.train_on_batch(next(draws))
    with pytest.raises(NotPrivate, match="that this training has not begun"):
        model.train_on_batch(next(draws))
    assert (plan.accountant.steps, other_plan.accountant.steps) == (STEPS, STEPS)


@pytest.mark.slow
def test_an_epoch_that_the_gate_refused_does_not_go_on_when_it_opens():
    plan = make_plan()
    model, draws = make_model(plan), iter(plan.batches(fetch))
    for _ in range(STEPS):
        model.train_on_batch(next(draws))
    gate = model.optimizer.privacy_history.gate
    gate.close()
    with pytest.raises(NotPrivate, match="budget is spent"):
        model.train_on_batch(next(draws))
    gate.open(2 * STEPS, plan.sampling.name)
    with pytest.raises(NotPrivate, match="that this training has not begun"):
        model.train_on_batch(next(draws))
    assert plan.accountant.steps == STEPS == int(model.optimizer.iterations)


@pytest.mark.slow
def test_an_epoch_whose_first_step_was_refused_does_not_go_on():
    """The gate refuses the first step of a third epoch: none of its later steps is made for nothing."""
    plan = make_plan(2)
    model = make_model(plan)
    draws = iter(plan.batches(fetch))
    for _ in range(2 * STEPS):
        model.train_on_batch(next(draws))
    for _ in range(STEPS):
        with pytest.raises((NotPrivate, ValueError)):
            model.train_on_batch(next(draws))
    assert plan.accountant.steps == 2 * STEPS == int(model.optimizer.iterations)


@pytest.mark.slow
def test_a_batch_left_out_and_a_batch_used_twice_are_refused():
    plan = make_plan()
    model = make_model(plan)
    draws = iter(plan.batches(fetch))
    first = next(draws)
    model.train_on_batch(first)
    with pytest.raises(NotPrivate, match="trained on before"):
        model.train_on_batch(first)
    next(draws)
    with pytest.raises(NotPrivate, match="left out"):
        model.train_on_batch(next(draws))
    with pytest.raises(NotPrivate, match="went through Filter"):
        model.fit(plan.batches(fetch).filter(lambda *_: True), steps_per_epoch=2, callbacks=[plan.budget()])
    with pytest.raises(ValueError, match="position means nothing without a seed"):
        plan.batches(fetch, position=3)


@pytest.mark.slow
def test_a_budget_is_for_whole_epochs_and_a_fit_says_how_many_were_begun():
    plan = make_plan()
    with pytest.raises(ValueError, match="steps=12 must be whole epochs of 5 steps"):
        tfdp_rec.callbacks.PrivacyBudget(plan.accountant, 5.0, steps=12)
    model = make_model(plan)
    for _ in range(3):
        model.fit(plan.batches(fetch), steps_per_epoch=2, verbose=0, callbacks=[plan.budget()])
    with pytest.raises(ValueError, match="after 15 steps, of 3 epochs that were begun, the target"):
        model.fit(plan.batches(fetch), steps_per_epoch=2, verbose=0, callbacks=[plan.budget()])


def test_a_plan_is_for_whole_epochs():
    with pytest.raises(ValueError, match="steps=7 must be whole epochs of 5 steps.*: 5, say"):
        tfdp_rec.PrivatePlan(sampling=RandomAllocation(60, 5), noise_multiplier=1.0, delta=1e-3, steps=7)
    with pytest.raises(ValueError, match="steps=2 must be whole epochs of 5 steps.*: 5, say"):
        tfdp_rec.PrivatePlan(sampling=RandomAllocation(60, 5), noise_multiplier=1.0, delta=1e-3, steps=2)


@pytest.mark.slow
def test_the_least_noise_and_the_most_steps_are_of_whole_epochs():
    sampling = RandomAllocation(1000, 10)
    plan = tfdp_rec.PrivatePlan(sampling=sampling, epsilon=2.0, delta=1e-4, steps=50)
    assert 1.99 < plan.accountant.epsilon(50) <= 2.0
    assert plan.accountant.max_steps(2.0) == 50
    poisson = tfdp_rec.data.PoissonSampling(1000, 100)
    assert plan.noise_multiplier < tfdp_rec.privacy.calibrate_noise(2.0, 1e-4, poisson, 50)


def test_the_statement_names_the_allocation():
    plan = make_plan()
    said = plan.accountant.statement()
    assert "random allocation: every row is in one of the 5 batches of each epoch" in " ".join(said.split())


@pytest.mark.slow
def test_other_mechanisms_take_it():
    sampling = RandomAllocation(1000, 10)
    two = tfdp_rec.AdaFEST.with_total_noise  # a step of two Gaussians
    plan = tfdp_rec.PrivatePlan(sampling=sampling, epsilon=4.0, delta=1e-4, steps=20)
    optimizer = two(0.1, noise_multiplier=plan.noise_multiplier, plan=plan, contribution_clip=1.0, threshold=2.0)
    assert plan.accountant.epsilon(20) <= 4.0 and optimizer.expected_batch_size == 100


# Rows of files.


def rows_of(dataset, count):
    """The first batches, as arrays."""
    return [tf.nest.map_structure(lambda each: each.numpy(), drawn.batch) for drawn in dataset.take(count)]


class Rows:
    """Rows in stretches of seven, which counts how often they are read."""

    def __init__(self, count=UNITS):
        self.count, self.passes = count, 0

    def __iter__(self):
        self.passes += 1
        for first in range(0, self.count, 7):
            ids = np.arange(first, min(first + 7, self.count))
            yield {"unit": ids, "x": ids % 7}, np.ones([len(ids), 1], np.float32)


@pytest.mark.parametrize("memory", [1, 2**28])
def test_rows_of_files_are_once_in_each_epoch_and_somewhere_else_in_the_next(memory, tmp_path):
    sampling, rows = RandomAllocation(UNITS, STEPS), Rows()
    found = rows_of(sampling.file_batches(rows, folder=tmp_path, memory=memory), 2 * STEPS)
    numbers = []
    for epoch in (found[:STEPS], found[STEPS:]):
        numbers.append(batch_numbers([x["unit"] for x, _ in epoch]))
        assert sorted(np.concatenate([x["unit"] for x, _ in epoch]).tolist()) == list(range(UNITS))
    gc.collect()
    assert (numbers[0] != numbers[1]).any() and not list(tmp_path.iterdir())
    assert all((x["x"] == x["unit"] % 7).all() for x, _ in found)


@pytest.mark.slow
def test_the_batches_of_rows_are_uniform_and_independent():
    sampling = RandomAllocation(9, 3)
    units = [x["unit"] for x, _ in rows_of(sampling.file_batches(Rows(9)), 3 * 1500)]
    numbers = np.array([batch_numbers(units[first : first + 3]) for first in range(0, len(units), 3)])
    assert allocation_p_value(numbers, 3) > 1e-6


def make_row_model(plan):
    inputs = {"unit": keras.Input((), dtype="int64", name="unit"), "x": keras.Input((), dtype="int64", name="x")}
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(keras.layers.Embedding(7, 2)(inputs["x"])))
    model.compile(tfdp_rec.LazyDPSGD(0.1, plan=plan), loss=keras.losses.MeanSquaredError())
    return model


@pytest.mark.slow
def test_a_fit_on_rows_reads_them_once_an_epoch_and_has_the_price_of_units():
    plan, rows = make_plan(), Rows()
    model = make_row_model(plan)
    batches = plan.file_batches(rows)
    before = rows.passes
    model.fit(batches, epochs=3, steps_per_epoch=STEPS, verbose=0, callbacks=[plan.budget()])
    assert int(model.optimizer.iterations) == 3 * STEPS and rows.passes - before == 3
    assert plan.accountant.epsilon() == pytest.approx(epoch_price(3), rel=1e-9)
    assert "every batch carried the proof of its draw" in " ".join(plan.accountant.statement().split())


@pytest.mark.slow
@pytest.mark.parametrize("count, words", [(UNITS + 1, "more rows than num_rows=60"), (UNITS - 1, "fewer rows than")])
def test_another_number_of_rows_is_refused_before_anything_is_trained_or_paid(count, words, tmp_path):
    plan = make_plan(ledger=tmp_path / "ledger.jsonl")
    model = make_row_model(plan)
    with pytest.raises(NotPrivate, match=f"^Refused batch: There are {words}"):
        model.fit(plan.file_batches(Rows(count)), steps_per_epoch=STEPS, verbose=0, callbacks=[plan.budget()])
    assert plan.accountant.steps == 0 and int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "rows, words",
    [
        ([], "There are no rows"), ({"x": np.arange(5)}, "stretches of rows"), (np.arange(5), "stretches of rows"),
        (fetch, "stretches of rows"),
    ],
)
def test_what_is_no_stretches_of_rows_is_refused_with_a_sentence(rows, words):
    with pytest.raises((TypeError, ValueError), match=words):
        RandomAllocation(UNITS, STEPS).file_batches(rows)


def test_rows_of_users_are_refused_where_each_row_is_a_unit():
    with pytest.raises(NotPrivate, match="each row of files is a unit, and this sampling's are users"):
        RandomAllocation(UNITS, STEPS, unit="user").file_batches(Rows())


def test_a_column_of_users_is_warned_of():
    class OfUsers(Rows):
        def __iter__(self):
            for x, y in super().__iter__():
                yield {**x, "user_id": x["x"] % 3}, y

    with pytest.warns(UserWarning, match="by its name 'user_id' holds users"):
        make_plan(sampling=RandomAllocation(UNITS, STEPS)).file_batches(OfUsers())


def test_a_file_that_is_given_twice_is_refused(tmp_path):
    """A row that is read twice in an epoch is in two of its batches, at the price of one."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").symlink_to(tmp_path / "a.parquet")
    for paths in (tmp_path, [tmp_path / "a.parquet"] * 2, [f"{tmp_path}/a*", f"{tmp_path}/a.parquet"]):
        with pytest.raises(ValueError, match="a.parquet is given twice"):
            tfdp_rec.data.RowFiles(paths, ["x"])
    assert len(tfdp_rec.data.RowFiles(tmp_path / "b.parquet", ["x"])) == 2


def test_what_cannot_be_read_twice_and_samplings_that_need_rows_at_random_are_refused():
    with pytest.raises(TypeError, match="an iterator once alone"):
        RandomAllocation(UNITS, STEPS).file_batches(iter(Rows()))
    plan = tfdp_rec.PrivatePlan(
        sampling=tfdp_rec.data.PoissonSampling(60, 6), noise_multiplier=1.0, delta=1e-3, steps=7
    )
    with pytest.raises(TypeError, match="PoissonSampling needs rows at random"):
        plan.file_batches(Rows())


def test_text_and_empty_batches_of_rows():
    texts = [np.array(["a", "bb", "ü"], object)]
    batches = RandomAllocation(3, 20).file_batches(texts)
    assert batches.element_spec.batch == tf.TensorSpec([None], tf.string)
    found = rows_of(batches, 20)
    assert sorted(np.concatenate(found).tolist()) == [b"a", b"bb", "ü".encode()]
    assert any(not len(each) for each in found)


def test_a_seed_makes_the_same_batches_of_rows_and_no_guarantee():
    sampling = RandomAllocation(UNITS, STEPS)
    first, again = ([x["unit"].tolist() for x, _ in rows_of(sampling.file_batches(Rows(), seed=2), 9)] for _ in "12")
    assert first == again
    plan = make_plan()
    with pytest.raises(ValueError, match="drawn with a seed"):
        make_row_model(plan).fit(plan.file_batches(Rows(), seed=1), steps_per_epoch=2, callbacks=[plan.budget()])


def train_until_killed(folder, last):
    """Goes on from the last checkpoint, and is killed after so many steps in all."""
    plan = tfdp_rec.PrivatePlan(
        sampling=RandomAllocation(UNITS, STEPS, unit="row"), epsilon=3.0, delta=1e-3, steps=6 * STEPS,
        ledger=f"{folder}/ledger.jsonl",
    )  # fmt: skip
    model = make_row_model(plan)
    batches = plan.file_batches(Rows(), folder=folder, memory=1)
    model.prepare(batches.element_spec)
    kept = tfdp_rec.callbacks.TrainingCheckpoint(f"{folder}/kept", 3, plan.accountant)
    resumed = kept.resume(model)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == last:
                os.kill(os.getpid(), signal.SIGKILL)

    model.fit(
        batches, epochs=20, steps_per_epoch=STEPS, verbose=0, callbacks=[plan.budget(), kept, Kill()]
    )
    print(resumed.step, int(model.optimizer.iterations), plan.accountant.steps, plan.accountant.epsilon())


@pytest.mark.slow
def test_trainings_on_rows_that_are_killed_within_an_epoch_lose_it_and_no_more(tmp_path):
    program = "import sampling.test_random_allocation as t, sys; t.train_until_killed(sys.argv[1], int(sys.argv[2]))"
    tests = str(pathlib.Path(__file__).parents[1])
    for last in (7, 12, 1000):
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), str(last)], capture_output=True, text=True,
            check=False, cwd=tests, env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{tests}"},
        )  # fmt: skip
        assert run.returncode == (0 if last == 1000 else -signal.SIGKILL), run.stderr[-2000:]
    # Of the epochs 5-9 and 10-14 two steps each were made and lost, with three that were not made.
    step, made, counted, epsilon = map(float, run.stdout.split()[-4:])
    assert (step, made, counted) == (10, 20, 30) and 2.9 < epsilon <= 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "ledger.jsonl"]
