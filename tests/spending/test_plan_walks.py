"""Plans that are cut off, copied, forked and resumed at random: no record tells less than the releases have spent.

The oracle follows the noise itself. A release holds the noise of each step in a sequence; a sequence that another one
begins with is within it; each of the others costs the plan once, at the least noise of all.
"""

import dataclasses
import math
import random
import secrets

import dp_accounting
import pytest

from tfdp_rec.data import FixedOrder
from tfdp_rec.pricing.events import PlannedDpEvent
from tfdp_rec.privacy import Ledger, Snapshot, optimised_correlation
from tfdp_rec.spending.entries import DRAWN, Entries, Entry, new_id
from tfdp_rec.spending.ledger import read
from tfdp_rec.spending.payments import Payments

STEPS, ORDER = 30, FixedOrder(20, 4)
PLAN = optimised_correlation(steps=STEPS, separation=5, participations=6)


@dataclasses.dataclass
class State:
    """What a checkpoint holds."""

    plan: str = dataclasses.field(default_factory=new_id)
    part: str = dataclasses.field(default_factory=new_id)
    after: str = ""
    start: int = 0
    id: str = ""
    sigma: float = 3.0
    noise: tuple = ()  # of each step: an id, the noise multiplier, the plan
    entries: tuple = ()  # (id, event, steps)


class Process:
    """A training that begins anew, or is resumed from a checkpoint."""

    def __init__(self, path, checkpoint):
        self.ledger = Ledger(path, ORDER.unit, Snapshot(20, "rows"))
        self.payments, self.state, self.kept = Payments(self.ledger, ORDER), State(), ()
        if checkpoint is not None:
            made, before = len(checkpoint.noise), checkpoint
            after = (before.part, made) if made > before.start or not before.after else (before.after, before.start)
            self.state = dataclasses.replace(before, part=new_id(), after=after[0], start=after[1])
            self.payments.confirm_checkpoint(self.event, before.id)
            self.kept = before.noise

    @property
    def event(self):
        state, whole = self.state, PLAN.dp_event(self.state.sigma)
        return PlannedDpEvent(whole, STEPS, 5, 6, state.plan, state.part, state.after, state.start)

    def carried(self):
        found = Entries()
        for id, event, steps in self.state.entries:
            found.extend(id, Entry(event, steps, DRAWN, ORDER.get_state()))
        return found

    def fit(self, steps, dirs, killed):
        """Steps that are checkpointed every second one; unless it is killed, the rest of the payment comes back."""
        left = STEPS - len(self.state.noise)
        if left <= 0:
            return
        id = self.payments.pay_steps(self.event, left, stands=self.state.id, kept=True)
        for number in range(min(steps, left)):
            step = (secrets.token_hex(4), self.state.sigma, self.state.plan)
            entries = (*self.state.entries, (id, self.event, 1))
            self.state = dataclasses.replace(self.state, noise=(*self.state.noise, step), entries=entries)
            if number % 2:
                self.save(dirs)
        if not killed and left > steps:
            self.payments.give_back(id, left - steps)

    def save(self, dirs, killed_at=None):
        """Writes a checkpoint, or is killed after its first note or after its file; False if that is refused."""
        id = new_id()
        try:
            self.payments.note_checkpoint(self.event, self.carried(), self.state.id, id, done=False)
        except RuntimeError:
            return False
        if killed_at != "first note":
            dirs["training"] = dataclasses.replace(self.state, id=id)
            if killed_at != "file":
                self.payments.note_checkpoint(self.event, self.carried(), self.state.id, id)
                self.state, self.kept = dirs["training"], self.state.noise
        return True

    def release(self, dirs, released):
        """What leaves is in a checkpoint first."""
        if self.kept == self.state.noise or self.save(dirs):
            released.append((self.state.noise, self.carried()))


def walked(path, seed):
    """The releases of a random walk."""
    rng, dirs, released, process = random.Random(seed), {}, [], None
    for _ in range(rng.randint(3, 14)):
        act = rng.random()
        if process is None:
            process = Process(path, dirs.get(rng.choice([*dirs, "training"])))
        elif act < 0.35:
            killed = rng.random() < 0.3
            process.fit(rng.randint(1, 4), dirs, killed)
            if killed:
                process = process.ledger.close()
            else:
                process.release(dirs, released)
        elif act < 0.5:
            process.state = dataclasses.replace(process.state, sigma=rng.choice([2.0, 3.0, 4.0]))
        elif act < 0.6 and dirs:
            dirs[new_id()] = rng.choice([*dirs.values()])
        elif act < 0.8:
            killed_at = rng.choice([None, None, "first note", "file"])
            process.save(dirs, killed_at)
            process = process.ledger.close() if killed_at else process
        elif act < 0.9:
            process.release(dirs, released)
        else:
            process = process.ledger.close()
    if process is not None:
        process.ledger.close()
    return released


def price(event):
    """1/σ² of an event, which adds up."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return sum(map(price, event.events))
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * price(event.event)
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    return math.inf if isinstance(event, dp_accounting.NonPrivateDpEvent) else event.noise_multiplier**-2


def spent(released):
    """1/σ² of all that the releases have spent, by their noise."""
    sequences = {noise for noise, _ in released if noise}
    ends = [one for one in sequences if not any(one != each and each[: len(one)] == one for each in sequences)]
    whole = 0.0
    for plan in {one[0][2] for one in ends}:
        own = [one for one in ends if one[0][2] == plan]
        whole += len(own) * price(PLAN.dp_event(min(sigma for one in own for _, sigma, _ in one)))
    return whole


def composed_of(entries):
    return price(ORDER.compose_history([(entry.event, entry.steps) for entry in entries if entry.steps]))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_record_tells_less_than_was_released(tmp_path, first):
    exact = 0
    for seed in range(first, first + 50):
        path = tmp_path / f"{seed}.jsonl"
        released = walked(path, seed)
        if not (due := spent(released)):
            continue
        carried = Entries()
        for _, entries in released:
            carried.merge(entries)
        with Ledger(path, ORDER.unit, Snapshot(20, "rows")) as ledger:
            payments = Payments(ledger, ORDER)
            assert not payments.unpaid(carried)
            within = composed_of(payments.entries()) + sum(price(event) for event, _ in payments.others())
        told = {"file": sum(price(paid.event) * paid.attempts for paid in read(path).paid), "ledger": within}
        told["history"] = composed_of(carried)
        assert min(told.values()) >= due * (1 - 1e-9), (seed, due, told)
        exact += told["file"] <= due * (1 + 1e-6)
    assert exact > 15, "most walks are honest, and pay no more"
