"""Random trainings: kills, resumptions, copies, loads, second models, new data. None is told less than was spent.

The objects are the real ones that count, price and pay (`Meter`, `Accountant`, `Allowance`, `Payments`, `Ledger`). A
model is its weights and its optimizer, a file what such a file holds. The oracle knows nothing of entries: it gives
each step that was made an id, and has them go wherever the weights go.
"""

import dataclasses
import json
import random
from collections import Counter

import dp_accounting
import keras
import pytest
import tensorflow as tf

import tfdp_rec
from tfdp_rec.core.claim.allowance import Allowance
from tfdp_rec.core.claim.entries import Entries, new_id
from tfdp_rec.core.claim.events import to_json
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.meter import Meter
from tfdp_rec.core.claim.sampling_proof import Source
from tfdp_rec.privacy import Accountant, Ledger, PoissonSampling, Snapshot, Unaccounted, Use

DELTA, TARGET = 1e-4, 40.0
NOISES = (1.0, 2.0)


@dataclasses.dataclass
class Model:
    """Weights with all that was spent on them, and the optimizer that trains them."""

    weights: list
    spent: set  # the oracle's: ids of steps and uses, shared with all models of the same weights
    optimizer: object = None
    meter: Meter = None

    def compile(self, noise):
        """As `PrivateTraining.optimizer` and `build` do."""
        options = {"l2_norm_clip": 1.0, "noise_multiplier": noise, "expected_batch_size": 10}
        self.optimizer = tfdp_rec.DPSGD(0.1, **options)
        self.optimizer.privacy_history.replace(self.meter)
        self.meter = self.optimizer.privacy_history
        self.meter.add_weights(self.weights)
        self.meter.attach(self.weights)


class World:
    """A program that is killed and run again, on one disk."""

    def __init__(self, folder, rng, has_ledger):
        self.rng, self.path, self.has_ledger = rng, folder / "ledger.jsonl", has_ledger
        self.units, self.made, self.files, self.kinds = 100, [], {}, {}
        self.counts = Counter()  # of what was done
        self.begin()

    def begin(self):
        """A new process: nothing is left but the disk."""
        self.sampling = PoissonSampling(self.units, 10)
        ledger = None
        if self.has_ledger:
            ledger = Ledger(self.path, "example", Snapshot(self.units, "example"), data_changed=True)
        self.accountant = Accountant(dp_accounting.GaussianDpEvent(1.0), self.sampling, DELTA, "rdp", ledger=ledger)
        self.plan = Allowance(self.accountant, TARGET)  # as a plan's, for steps by hand
        self.models = [self.new_model()]

    def new_model(self):
        model = Model([keras.Variable([0.0]), keras.Variable([0.0])], set())
        model.compile(self.rng.choice(NOISES))
        self.accountant.follow(model.optimizer)
        return model

    def kill(self):
        if self.has_ledger:
            self.accountant.spending.payments.ledger.close()
        self.begin()

    def spend(self, model, kind):
        """The oracle's record."""
        id = new_id()
        self.kinds[id] = kind
        for each in self.models:
            if any(one is other for one in each.weights for other in model.weights):
                each.spent.add(id)

    # What a program does.

    def fit(self, model, by_hand=False):
        self.accountant.follow(model.optimizer)
        allowance = Allowance(self.accountant, TARGET, in_fit=True)
        wanted, killed_at = self.rng.randint(1, 5), self.rng.choice([None, None, None, 0, 1, 2])
        try:
            for number in range(wanted):
                if number == killed_at:
                    return self.kill()
                if not by_hand:
                    allowance.pay(model.optimizer, 1, self.rng.choice([1, 2, 100]))
                model.meter.count(Source(self.sampling))
                model.optimizer.iterations.assign_add(1)
                step = to_json(model.optimizer.dp_event()), self.sampling.get_state()
                self.spend(model, json.dumps(step, sort_keys=True))
                self.counts["steps"] += 1
                if self.rng.random() < 0.1 and len(self.models) > 1:  # a callback trains another model
                    self.try_step(self.rng.choice(self.models))
        except (Unaccounted, ValueError, tf.errors.InvalidArgumentError):
            self.counts["refused"] += 1
        self.accountant.give_back_rest()
        model.meter.lift()
        return None

    def try_step(self, model, paid=False):
        try:
            if paid:
                self.plan.pay(model.optimizer, 1)
            model.meter.count(Source(self.sampling))
        except (Unaccounted, ValueError, tf.errors.InvalidArgumentError):
            self.counts["refused"] += 1
            return
        model.optimizer.iterations.assign_add(1)
        step = to_json(model.optimizer.dp_event()), self.sampling.get_state()
        self.spend(model, json.dumps(step, sort_keys=True))

    def take_turns(self, model):
        """Steps by hand under one plan, of several models."""
        for _ in range(self.rng.randint(1, 6)):
            self.try_step(self.rng.choice([model, *self.models]), paid=True)

    def use(self, model):
        use = Use(dp_accounting.GaussianDpEvent(5.0), "counts")
        self.accountant.spend(*use, id=use.id)
        model.meter.add_entry(use.entry, use.id)
        self.spend(model, "use")

    def share(self, model):
        """A second model on one of the weights, with its own head."""
        other = Model([model.weights[0], keras.Variable([0.0])], set(model.spent))
        self.models.append(other)
        other.compile(self.rng.choice(NOISES))
        self.accountant.follow(other.optimizer)

    def save(self, model):
        self.files[self.rng.choice("ab")] = model.meter.snapshot().dumps(), set(model.spent)

    def load(self, model):
        """Weights of a file, into a model of this process or a new one."""
        if self.files:
            text, spent = self.rng.choice([*self.files.values()])
            model.meter.merge(Entries.loads(text))
            for each in self.models:
                if any(one is other for one in each.weights for other in model.weights):
                    each.spent |= spent

    def grow(self, model):
        """Data of more units."""
        self.units += 50
        self.kill()

    def walk(self, length):
        acts = [(self.fit, 6), (self.use, 1), (self.share, 1), (self.save, 2), (self.load, 2), (self.grow, 0.5)]
        acts += [(lambda model: model.compile(self.rng.choice(NOISES)), 1), (lambda model: self.kill(), 0.7)]
        acts += [(lambda model: self.fit(model, by_hand=True), 0.5), (self.take_turns, 2)]
        acts += [(lambda model: self.models.append(self.new_model()), 0.5)]
        for _ in range(length):
            model, act = self.rng.choice(self.models), self.rng.choices(*zip(*acts, strict=True))[0]
            act(model)
            self.check()

    # What is told.

    def check(self):
        for model in self.models:
            due = Counter(self.kinds[id] for id in model.spent)
            told = told_by(model.meter.snapshot())
            assert not due - told, (due, told)
            self.counts["exact"] += told == due
            self.counts["checked"] += 1
        everything = Counter(self.kinds[id] for id in set().union(*(model.spent for model in self.models)))
        try:
            self.accountant.spending.refuse()
        except Unaccounted:
            self.counts["unaccounted"] += 1
            return
        told = told_by(self.accountant.entries)
        assert not everything - told, (everything, told)
        if self.has_ledger:
            assert self.accountant.steps <= read(self.path).steps


def told_by(entries):
    found = Counter()
    for entry in entries:
        step = json.dumps([to_json(entry.event), entry.sampling], sort_keys=True)
        found["use" if entry.label else step] += entry.steps
    return +found


def walk(folder, seed, has_ledger):
    rng = random.Random(seed)
    world = World(folder, rng, has_ledger)
    world.walk(rng.randint(4, 14))
    if has_ledger:
        world.accountant.spending.payments.ledger.close()
    return world.counts


MANY = [pytest.param(first, marks=pytest.mark.slow) for first in range(10, 1000, 10)]


@pytest.mark.fast_cases("0-True")
@pytest.mark.parametrize("has_ledger", [False, True])
@pytest.mark.parametrize("first", [0, *MANY])
def test_no_training_is_told_less_than_it_spent(tmp_path, first, has_ledger):
    counts = Counter()
    for seed in range(first, first + 10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        counts += walk(folder, seed, has_ledger)
    assert counts["steps"] > 15 and counts["exact"] > 0.8 * counts["checked"], counts
