"""A tally says how many steps more of one kind were made, or that something else was done too."""

import dataclasses

import keras
import pytest
from dp_accounting import GaussianDpEvent

import tfdp_rec
from tfdp_rec.privacy import Accountant, PoissonSampling
from tfdp_rec.privacy.drawn import Source
from tfdp_rec.privacy.history import BY_HAND, Entry
from tfdp_rec.privacy.tally import Tally

SAMPLING = PoissonSampling(num_units=500, expected_batch_size=25)


def an_optimizer():
    return tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=25)


@dataclasses.dataclass
class Counted:
    """An optimizer, its accountant and a tally, which was begun after three steps."""

    def __post_init__(self):
        self.optimizer = an_optimizer()
        self.history = self.optimizer.privacy_history
        self.accountant = Accountant(self.optimizer.dp_event(), SAMPLING, 1e-3, "rdp")
        self.accountant.follow(self.optimizer)
        self.step(3)
        self.tally = Tally(self.accountant, self.optimizer)

    def step(self, steps, source=None):
        self.history.add(self.optimizer, source or Source(SAMPLING), steps)


def test_it_counts_what_is_of_the_kind():
    counted = Counted()
    assert counted.tally.more() == 0
    counted.step(2)
    assert counted.tally.more() == 2
    counted.step(5)
    assert counted.tally.more() == 7


def test_before_the_first_step_there_is_no_kind_yet():
    counted, optimizer = Counted(), an_optimizer()
    counted.accountant.follow(optimizer)
    tally = Tally(counted.accountant, optimizer)
    assert tally.more() == 0
    optimizer.privacy_history.add(optimizer, Source(SAMPLING), 1)
    assert tally.more() is None


def begin_again(counted):
    (counter,) = counted.history._open.values()
    counter.begun.assign_add(1)


def of_kin(counted):
    """Another model has trained what this one rests on."""
    shared, other = keras.Variable([1.0]), an_optimizer()
    for optimizer in (counted.optimizer, other):
        optimizer.privacy_history.trains([shared])
    other.privacy_history.add(other, Source(SAMPLING), 1)


def of_another_model(counted):
    other = an_optimizer()
    counted.accountant.follow(other)
    other.privacy_history.add(other, Source(SAMPLING), 1)


@pytest.mark.parametrize(
    "else_done",
    [
        lambda counted: setattr(counted.optimizer, "noise_multiplier", 2.0),
        lambda counted: counted.optimizer._noise_multiplier.assign(2.0),
        lambda counted: counted.step(1, Source(PoissonSampling(500, 50))),
        lambda counted: counted.step(1, Source()),
        lambda counted: counted.step(1, Source(SAMPLING, seeded=True)),
        lambda counted: counted.history.add_entry(Entry(GaussianDpEvent(1.0), 1, BY_HAND)),
        lambda counted: counted.accountant.record(GaussianDpEvent(1.0), 1),
        lambda counted: counted.accountant.spend(GaussianDpEvent(5.0), "counts"),
        begin_again,
        of_kin,
        of_another_model,
    ],
    ids=[
        "other noise", "other noise unannounced", "another sampling", "no sampling", "a seed", "from elsewhere", "told",
        "spent", "begun again", "shared weights", "another model",
    ],
)  # fmt: skip
def test_whatever_else_was_done_is_noticed(else_done):
    counted = Counted()
    counted.step(2)
    else_done(counted)
    assert counted.tally.more() is None
    counted.step(1)
    assert counted.tally.more() is None
