"""Trainings that are cut off, copied and resumed at random: no record tells less than the releases have spent.

The oracle follows the noise itself. A release of steps whose noise is independent and all drawn spends each of them
once, whoever releases it. Noise that is still owed, or that takes back what was added, is drawn for every state anew: a
release holds the noise of its steps in a sequence; a sequence that another one begins with is within it, and each of
the others costs its steps once more (a plan whole).
"""

import dataclasses
import math
import random
import secrets

import dp_accounting
import pytest

from tfdp_rec.core.claim.entries import Entries, Entry, new_id
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.core.claim.spending import Payments
from tfdp_rec.data import FixedOrder, PoissonSampling
from tfdp_rec.privacy import Ledger, Snapshot, Use, optimised_correlation

STEPS, ORDER, DRAWS = 30, FixedOrder(20, 4), PoissonSampling(20, 4)
PLAN = optimised_correlation(steps=STEPS, separation=5, participations=6)
COUNTS = dp_accounting.GaussianDpEvent(5.0), "counts"


@dataclasses.dataclass
class State:
    """What a checkpoint holds."""

    plan: str = dataclasses.field(default_factory=new_id)
    training: str = dataclasses.field(default_factory=new_id)
    id: str = ""
    sigma: float = 3.0
    noise: tuple = ()  # of each step: an id, the noise multiplier, the plan or training
    owed: str = ""  # id of the noise that rows owe, once it is drawn; empty if they owe none
    entries: tuple = ()  # (id, event, steps)
    uses: tuple = ()


class Process:
    """A training of a kind that begins anew, or is resumed from a checkpoint."""

    def __init__(self, path, kind):
        self.kind, self.sampling = kind, ORDER if kind == "planned" else DRAWS
        self.ledger = Ledger(path, self.sampling.unit, Snapshot(20, "rows"))
        self.payments, self.state, self.kept = Payments(self.ledger, self.sampling), State(), None

    def resume(self, checkpoint, dirs, name, killed_at=None):
        """Goes on from a checkpoint, which gets another id; False if it is refused, or the process is killed."""
        try:
            self.payments.refuse_superseded(checkpoint.training, checkpoint.id)
        except RuntimeError:
            return False
        self.state = checkpoint
        return self.save(dirs, name, killed_at)

    @property
    def event(self):
        state = self.state
        if self.kind != "planned":
            return dp_accounting.GaussianDpEvent(state.sigma)
        return PlannedDpEvent(PLAN.dp_event(state.sigma), STEPS, 5, 6, state.plan)

    def history(self):
        found = Entries()
        for id, event, steps in self.state.entries:
            found.extend(id, Entry(event, steps, self.sampling.get_state()))
        for use in self.state.uses:
            found.add(use.entry, use.id)
        return found

    def fit(self, steps, dirs, name, killed):
        """Steps that are checkpointed every second one; unless it is killed, the rest of the payment comes back."""
        left = STEPS - len(self.state.noise) if self.kind == "planned" else 2
        try:
            self.payments.refuse_superseded(self.state.training, self.state.id)
        except RuntimeError:
            return
        if left <= 0:
            return
        id, paid = self.payments.pay_steps(self.event, left), left
        for number in range(min(steps, STEPS - len(self.state.noise))):
            if number == paid:
                self.payments.pay_steps(self.event, left, id)
                paid += left
            step = (secrets.token_hex(4), self.state.sigma, self.state.plan)
            entries, owed = (*self.state.entries, (id, self.event, 1)), "owed" if self.kind == "lazy" else ""
            self.state = dataclasses.replace(self.state, noise=(*self.state.noise, step), entries=entries, owed=owed)
            if number % 2:
                self.save(dirs, name)
        if not killed and paid > steps:
            self.payments.give_back(id, paid - steps)

    def use(self):
        """Another use of the data, which the model is made of."""
        use = Use(*COUNTS)
        self.payments.pay_once(use)
        self.state = dataclasses.replace(self.state, uses=(*self.state.uses, use))

    def save(self, dirs, name, killed_at=None):
        """Writes a checkpoint, or is killed after its first note or after its file; False if that is refused."""
        id, training, stands = new_id(), self.state.training, self.state.id
        try:
            self.payments.note_checkpoint(training, stands, id, done=False)
        except RuntimeError:
            return False
        if killed_at == "first note":
            return False
        dirs[name] = dataclasses.replace(self.state, id=id)
        if killed_at == "file":
            return False
        self.payments.note_checkpoint(training, stands, id)
        self.state = self.kept = dirs[name]
        return True

    def release(self, dirs, name, released):
        """What rows owe is drawn, and what leaves is in a checkpoint first."""
        drawn = f"drawn {new_id()}" if self.state.owed == "owed" else self.state.owed
        self.state = dataclasses.replace(self.state, owed=drawn)
        if self.kept == self.state or self.save(dirs, name):
            released.append((self.state, self.history()))


def walked(path, seed, kind):
    """The releases of a random walk."""
    rng, dirs, released, process, name = random.Random(seed), {}, [], None, "training"
    for _ in range(rng.randint(4, 20)):
        act = rng.random()
        if process is None:
            process, name = Process(path, kind), rng.choice([*dirs, "training"])
            killed_at = rng.choice([None, None, None, "first note", "file"])
            if name in dirs and not process.resume(dirs[name], dirs, name, killed_at):
                process = process.ledger.close()
        elif act < 0.35:
            killed = rng.random() < 0.3
            process.fit(rng.randint(1, 4), dirs, name, killed)
            if killed:
                process = process.ledger.close()
            else:
                process.release(dirs, name, released)
        elif act < 0.5:
            process.use()
        elif act < 0.62 and dirs:
            dirs[new_id()] = rng.choice([*dirs.values()])
        elif act < 0.8:
            killed_at = rng.choice([None, None, "first note", "file"])
            process.save(dirs, name, killed_at)
            process = process.ledger.close() if killed_at else process
        elif act < 0.9:
            process.release(dirs, name, released)
        else:
            process = process.ledger.close()
    if process is not None:
        process.ledger.close()
    return released


def price(event):
    """1/σ² of an event, which adds up; of steps on a Poisson sample, as if they had none."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(price, event.events))
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * price(event.event)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return price(event.event)
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    return math.inf if isinstance(event, dp_accounting.NonPrivateDpEvent) else event.noise_multiplier**-2


def ends_of(sequences):
    """The sequences that no other one begins with."""
    several = {one for one in sequences if one}
    return [one for one in several if not any(one != each and each[: len(one)] == one for each in several)]


def spent(released, kind):
    """1/σ² of all that the releases have spent, by their noise."""
    whole = price(COUNTS[0]) * len({use.id for state, _ in released for use in state.uses})
    noises = [state.noise for state, _ in released]
    if kind == "planned":
        for plan in {one[0][2] for one in noises if one}:
            own = ends_of([one for one in noises if one and one[0][2] == plan])
            whole += len(own) * price(PLAN.dp_event(min(sigma for one in own for _, sigma, _ in one)))
        return whole
    # What rows owed was drawn apart from each other of states with one and the same steps: each costs these again.
    drawn = {(noise, state.owed) for (state, _), noise in zip(released, noises, strict=True)}
    steps = {step for noise in noises for step in noise}
    again = sum(len(noise) for noise in {each for each, _ in drawn} for _ in range(number_of(drawn, noise) - 1))
    forks = ends_of(noises) if kind == "lazy" else []
    shared = sum(len(one) for one in forks) - len({step for one in forks for step in one})
    return whole + (len(steps) + again + shared) / 9.0


def number_of(drawn, noise):
    return sum(each == noise for each, _ in drawn)


def composed_of(entries, sampling):
    steps = price(sampling.compose_history([(e.event, e.steps) for e in entries if e.steps and not e.label]))
    return steps + sum(price(event) for event, _ in entries.uses)


@pytest.mark.fast_cases("0-planned", "0-lazy", "0-eager")
@pytest.mark.parametrize("kind", ["planned", "lazy", "eager"])
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_record_tells_less_than_was_released(tmp_path, first, kind):
    exact = 0
    for seed in range(first, first + 50):
        path = tmp_path / f"{seed}.jsonl"
        released = walked(path, seed, kind)
        if not (due := spent(released, kind)):
            continue
        carried = Entries()
        for _, entries in released:
            carried.merge(entries)
        sampling = ORDER if kind == "planned" else DRAWS
        with Ledger(path, sampling.unit, Snapshot(20, "rows")) as ledger:
            payments = Payments(ledger, sampling)
            assert not payments.find_unpaid(carried)
            within = composed_of(payments.entries(), sampling)
        told = {"file": sum(price(paid.event) * paid.attempts for paid in read(path).paid), "ledger": within}
        told["history"] = composed_of(carried, sampling)
        assert min(told.values()) >= due * (1 - 1e-9), (seed, due, told)
        exact += told["history"] <= due * (1 + 1e-6)
    assert exact > 15, "most walks are honest, and tell no more"
