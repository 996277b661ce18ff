"""Streams: who is seated, what a plan counts on, and what happens when the events are not those of before."""

import json

import dp_accounting
import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdp_rec
from tfdp_rec.callbacks import PrivacyBudget, TrainingCheckpoint
from tfdp_rec.core.claim.events import PlannedDpEvent
from tfdp_rec.core.claim.sampling_proof import refusals_in_words
from tfdp_rec.correlated.bounded_stream import Seats
from tfdp_rec.data import FixedOrder
from tfdp_rec.privacy import (
    Accountant,
    BoundedStream,
    Ledger,
    Sampling,
    Snapshot,
    epsilon_of,
    optimised_correlation,
)

REFUSED = pytest.raises(tfdp_rec.NotPrivate)
RNG = np.random.default_rng(0)
USERS = RNG.integers(0, 60, 400)
SEATS, APART, OFTEN = 8, 5, 4


def stream(**changes):
    return BoundedStream(**{"num_units": 60, "expected_batch_size": SEATS, "separation": APART,
                            "participations": OFTEN, **changes})  # fmt: skip


def events_of(users, chunk=37):
    """Rows that say whose they are, in chunks that have nothing to do with batches."""
    rows = {"user": np.asarray(users), "row": np.arange(len(users)), "x": np.ones([len(users), 2], "float32")}
    return lambda: ({key: column[i : i + chunk] for key, column in rows.items()} for i in range(0, len(users), chunk))


def seated(of, users, **options):
    """Batch by batch, the rows that were seated."""
    return [drawn.batch["row"][drawn.draw.present].numpy().tolist()
            for drawn in of.batches(events_of(users), "user", **options)]  # fmt: skip


def by_hand(users, size, separation, most):
    batches, steps_of = [], {}
    for row, user in enumerate(users):
        if row % size == 0:
            batches.append([])
        steps = steps_of.setdefault(user, [])
        if len(steps) < most and (not steps or len(batches) - 1 - steps[-1] >= separation):
            steps.append(len(batches) - 1)
            batches[-1].append(row)
    return batches, steps_of


# Who is seated.


@pytest.mark.slow
@given(
    users=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    size=st.integers(1, 7),
    separation=st.integers(1, 5),
    most=st.one_of(st.none(), st.integers(1, 4)),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_seats_are_those_given_by_hand(users, size, separation, most):
    of = BoundedStream(10, size, separation=separation, participations=most)
    batches, steps_of = by_hand(users, size, separation, most or len(users))
    assert seated(of, users) == batches
    for steps in steps_of.values():
        assert len(steps) <= of.participations(len(batches))
        assert all(later - earlier >= separation for earlier, later in zip(steps, steps[1:]))


@pytest.mark.parametrize("user", [0, 7, 31])
def test_a_user_left_out_changes_no_other_seat(user):
    """Neighbours: the user's events count as empty, here as the events of one who is nobody else."""
    with_user, without = seated(stream(), USERS), seated(stream(), np.where(USERS == user, 999, USERS))
    theirs = set(np.flatnonzero(USERS == user))
    assert any(theirs & set(batch) for batch in with_user)
    assert [set(b) - theirs for b in with_user] == [set(b) - theirs for b in without]


def test_a_user_left_out_makes_room_for_no_other():
    """Of four users in a stream for three, a limit in order of arrival would seat 3 only where 0 is not there."""
    with_user, without = (seated(stream(num_units=3, expected_batch_size=3), [1, user, 2, 3, 4, 3]) for user in (0, 1))
    assert (with_user, without) == ([[0, 1, 2], [3, 4]], [[0, 2], [3, 4]])


@pytest.mark.parametrize("kind", ["strings", "a dataset", "a function of the batch", "tuples"])
def test_kinds_of_events(kind):
    expected = seated(stream(), USERS)
    if kind == "strings":
        assert seated(stream(), np.array([f"user {user}" for user in USERS])) == expected
        return
    columns = ({"user": np.char.encode(USERS.astype(str))}, np.arange(len(USERS)))
    data = tf.data.Dataset.from_tensor_slices(columns).batch(13)
    if kind != "tuples":
        data = data.map(lambda x, y: {**x, "row": y})
    user = (lambda rows: rows["user"]) if kind == "a function of the batch" else "user"
    rows = lambda batch: batch[1] if kind == "tuples" else batch["row"]  # noqa: E731
    found = [rows(drawn.batch)[drawn.draw.present].numpy().tolist() for drawn in stream().batches(data, user)]
    assert found == expected


def test_going_on_seats_as_before():
    of = stream()
    whole = seated(of, USERS)
    assert seated(of, USERS, position=17) == whole[17:] == seated(stream(), USERS, position=17)
    first = next(iter(of.batches(events_of(USERS), "user", position=17)))
    assert (int(first.draw.number), int(first.draw.place)) == (0, 17)


def test_parts_are_one_stream(tmp_path):
    """Day after day, in one process or several: nobody sits twice in b batches, whenever the day ended."""
    expected, _ = by_hand(USERS, SEATS, APART, OFTEN)
    of, day = stream(), 20 * SEATS
    assert seated(of, USERS[:day]) == expected[:20]
    of.next_part(20)
    of.save(tmp_path / "stream.npz")
    assert (tmp_path / "stream.npz").stat().st_mode & 0o777 == 0o600
    other = stream()
    other.load(tmp_path / "stream.npz")
    for going_on in (of, other):
        assert [[row + day for row in batch] for batch in seated(going_on, USERS[day:])] == expected[20:]
    with pytest.raises(ValueError, match="before this part, which begins at 20"):
        of.batches(events_of(USERS), "user", position=19)
    with pytest.raises(ValueError, match="not in this part, of which batches 20 to 50"):
        of.next_part(51)
    with pytest.raises(ValueError, match="handed out some already"):
        of.load(tmp_path / "stream.npz")


def test_other_events_than_before_are_refused():
    of = stream()
    seated(of, USERS)
    assert seated(of, USERS)  # the same again
    with pytest.raises(tfdp_rec.NotPrivate, match="not the one that was handed out before"), refusals_in_words():
        seated(of, USERS[::-1])
    of.next_part(20)
    assert seated(of, USERS[::-1])


def test_a_part_that_was_under_way_when_it_was_saved_goes_on_with_its_own_events_alone(tmp_path):
    """Next day's events in their place would be seated as if the users of this part had never had a seat."""
    of, again = stream(), stream()
    expected = seated(of, USERS)
    of.save(tmp_path / "stream.npz")
    again.load(tmp_path / "stream.npz")
    with pytest.raises(tfdp_rec.NotPrivate, match="not the one that was handed out before"), refusals_in_words():
        seated(again, USERS[::-1], position=20)
    assert seated(again, USERS, position=20) == expected[20:]
    again.next_part(50)  # also of a part that another process has handed out
    assert seated(again, USERS[::-1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"separation": 0}, "separation must be a positive integer"),
        ({"participations": 0}, "participations must be a positive"),
        ({"expected_batch_size": 2.5}, "expected_batch_size must be a positive integer"),
    ],
)
def test_misuse(changes, reason):
    with pytest.raises(ValueError, match=reason):
        stream(**changes)
    with pytest.raises(ValueError, match="events are empty"):
        stream().batches(lambda: iter(()), "user")
    with pytest.raises(ValueError, match="no units by number"):
        stream().index_batches()


# What it costs.


@pytest.mark.parametrize("order", [stream(), FixedOrder(20, 5)])
def test_independent_noise_has_no_price_in_an_order(order):
    with pytest.raises(ValueError, match="price for planned noise alone"):
        order.compose_history([(dp_accounting.GaussianDpEvent(2.0), 50)])
    assert order.compose(dp_accounting.NonPrivateDpEvent(), 5) == dp_accounting.NonPrivateDpEvent()


def test_a_plan_of_another_stream_is_refused():
    def planned(**changes):
        return PlannedDpEvent(
            dp_accounting.GaussianDpEvent(2.0),
            **{"steps": 50, "separation": APART, "participations": OFTEN, "plan": "a", **changes},
        )

    assert stream().compose_history([(planned(), 9)]) == dp_accounting.GaussianDpEvent(2.0)
    for changes in ({"separation": APART + 1}, {"participations": OFTEN - 1}):
        with pytest.raises(ValueError, match="at least 5 apart|in this order they are in 4, 5"):
            stream().compose_history([(planned(**changes), 9)])


def test_its_state_says_which_it_is():
    again = Sampling.from_state(json.loads(json.dumps(stream().get_state())))
    assert isinstance(again, BoundedStream) and again.get_state() == stream().get_state()
    assert again.fingerprint == stream().fingerprint != stream(separation=6).fingerprint
    assert "each user in at most 4 steps, at least 5 apart" in stream().describe()


# A training.

PLAN = optimised_correlation(steps=40, separation=APART, participations=OFTEN)


def model_of(kind=tfdp_rec.LazyDPFTRL):
    seeding.seed(0)
    row = keras.Input([], dtype="int64")
    model = tfdp_rec.PrivateModel(row, keras.layers.Dense(1)(keras.layers.Embedding(400, 3)(row)))
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 2.0, "expected_batch_size": SEATS}
    if kind is not tfdp_rec.DPSGD:
        settings["correlation"] = PLAN
    model.compile(kind(0.1, **settings), loss="mse")
    return model


def labelled(batch):
    return batch["row"], batch["x"][:, :1]


@pytest.mark.slow
def test_a_training_on_a_stream_costs_its_plan_once():
    of, model = stream(), model_of()
    expected = epsilon_of(PLAN.dp_event(2.0), 1e-3, "rdp")
    accountant = Accountant(model.optimizer.dp_event(), of, delta=1e-3, accountant="rdp")
    budget = PrivacyBudget(accountant, expected)

    def fit(steps, position):
        batches = of.batches(events_of(USERS), "user", position=position, map=labelled)
        model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[budget])

    fit(15, 0)
    with REFUSED as caught:
        fit(1, 3)
    assert "is at batch 15 of its order and was given batch 3" in str(caught.value)
    fit(25, 15)
    assert (model.optimizer.position, accountant.steps) == (40, 40)
    assert accountant.epsilon() == expected
    said = " ".join(accountant.statement().split())
    assert "each user in at most 4 steps, at least 5 apart" in said and "zero-out" in said


@pytest.mark.slow
def test_a_plan_does_not_go_on_with_a_stream_that_knows_no_seats_of_it():
    """Another object of equal settings would seat each user as often again, in steps that are as near as may be."""
    model = model_of()

    def fit(of, steps):
        accountant = Accountant(model.optimizer.dp_event(), of, delta=1e-3, accountant="rdp")
        batches = of.batches(events_of(USERS), "user", position=model.optimizer.position, map=labelled)
        model.fit(batches, steps_per_epoch=steps, verbose=0, callbacks=[PrivacyBudget(accountant, 50.0)])

    first = stream()
    fit(first, 3)
    with pytest.raises(tfdp_rec.NotPrivate, match="begun with another BoundedStream"):
        fit(stream(), 3)
    assert model.optimizer.position == 3
    fit(first, 3)
    assert model.optimizer.position == 6


@pytest.mark.slow
def test_a_plan_that_is_resumed_where_it_was_made_goes_on_with_its_stream(tmp_path):
    first, model = stream(), model_of(tfdp_rec.DPFTRL)
    ledger = Ledger(tmp_path / "ledger.jsonl", first.unit, Snapshot(first.num_units, first.unit), first.adjacency)

    def kept(folder, of):
        accountant = Accountant(model.optimizer.dp_event(), of, delta=1e-3, accountant="rdp", ledger=ledger)
        return TrainingCheckpoint(tmp_path / folder, accountant=accountant)

    checkpoint = kept("training", first)

    def fit(model, of, callback):
        batches = of.batches(events_of(USERS), "user", position=model.optimizer.position, map=labelled)
        model.fit(batches, steps_per_epoch=3, epochs=9, verbose=0, callbacks=[callback, Ends()])

    fit(model, first, checkpoint)
    assert checkpoint.resume(model).step == 3
    with pytest.raises(tfdp_rec.NotPrivate, match="begun with another BoundedStream"):
        fit(model, stream(), checkpoint)
    fit(model, first, checkpoint)
    assert model.optimizer.position == 6
    other = model_of(tfdp_rec.DPFTRL)  # another plan, as a new process makes it: its stream is made anew
    fit(other, first, kept("other", first))
    other.prepare(next(iter(first.batches(events_of(USERS), "user", map=labelled))))
    resumed = kept("training", stream())
    assert resumed.resume(other).step == 6
    fit(other, stream(), resumed)
    assert other.optimizer.position == 9


class Ends(keras.callbacks.Callback):
    """Ends the fit after its first epoch."""

    keeps_off_weights = True

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


@pytest.mark.slow
def test_ten_million_events_of_a_hundred_thousand_users():
    """In one pass; what is kept is a few numbers a user."""
    import tracemalloc

    seats, rng = 4096, np.random.default_rng(1)
    of = BoundedStream(100_000, seats, separation=300, participations=6)

    def events():
        for _ in range(1250):
            users = (100_000 * rng.random(8000) ** 3).astype(np.int64)
            yield {"user": users, "row": users}

    tracemalloc.start()
    batches = sum(1 for _ in of.batches(events, "user"))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batches == -(-10_000_000 // seats)
    assert most < 100e6, most


@pytest.mark.parametrize(
    "users",
    [
        [b"a\0", b"a", b"b"], ["a\0", "a", "b\0\0"],  # NumPy drops zeros from the ends of names
        [3, 1, 2], [2**63 + 5, 2**63 + 7, 3],  # ids below and above 2^63 in one array were rounded to floats
    ],
)  # fmt: skip
def test_no_user_is_seated_again_after_a_load(users, tmp_path):
    seats, again = Seats(1, 1), Seats(1, 1)
    assert seats.seat(users).all()
    with open(tmp_path / "seats.npz", "wb") as file:
        seats.save(file)
    again.load(str(tmp_path / "seats.npz"))
    assert not again.seat(users).any()


@pytest.mark.parametrize(
    "users",
    [[1, "1"], ["a", b"a"], [np.nan], [None], [1.5]],
    ids=["number and text", "text and bytes", "missing in numbers", "missing in objects", "no whole number"],
)
def test_users_that_could_be_seated_as_two_are_refused(users):
    """Seen with one participation planned: two steps where an id came as bytes after text, any number for NaN."""
    seats = Seats(1, 1)
    with REFUSED as caught:
        for user in users:
            seats.seat([user])
    assert "all texts, all bytes or all whole numbers" in str(caught.value)


def test_the_kind_of_a_users_id_may_not_change_from_part_to_part():
    of = stream(separation=5, participations=1, expected_batch_size=2)
    assert seated(of, np.array(["a", "b"])) == [[0, 1]]
    of.next_part(1)
    with REFUSED, refusals_in_words():
        seated(of, np.array([b"a", b"b"]))


def test_users_minus_one_and_minus_two_are_not_the_same_events():
    of = stream()
    seated(of, np.array([-1, -2]))
    with REFUSED, refusals_in_words():  # Python's hashes of -1 and -2 are equal
        seated(of, np.array([-2, -1]))


def test_batches_of_a_part_that_is_over_are_refused():
    """Its seats know nothing of the new part: user 6 came into batch 3 of the new events and batch 6 of the old."""
    of = stream(expected_batch_size=1, participations=None)
    old = of._draw(events_of(np.arange(10))(), lambda rows: rows["user"], 0)
    for _ in range(3):
        next(old)
    of.next_part(3)
    new = of._draw(events_of(np.array([6, 7, 8]))(), lambda rows: rows["user"], 3)
    assert [draw[3] for draw, _ in new] == [3, 4, 5]
    with REFUSED as caught:
        next(old)
    assert "next_part or load was called" in str(caught.value)
