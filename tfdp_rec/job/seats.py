"""Which users have a seat on a day: that day's releases are of their rows, on at most k of T days (`--days-per-user`).

A user may be in the log of every day, and noise of T days must then cover T of them. With at most k seats each it needs
to cover k: it falls by √(k/T), and of users who come on few days nothing is lost. Up to day t a user has at most

    1 + ⌊(k - 1) (t - 1) / (T - 1) + φ⌋

seats, φ from 0 to 1 by a hash of the user's id: the first day of a user counts, whenever it is, further seats come one
by one, and not to all users at once. What a user gets depends on the days of that user alone, so that the logs of two
neighbours differ in one user's rows on at most k days. What a day releases at once, found items and sums or popularity,
is of the users who have a seat. How many these are is private. Training steps draw from all users of the day and are
paid for on all days: seats change neither who is drawn nor what a step costs.

**The list.** RUN/private/seats.parquet has a row for each seat that was ever taken. It is written before anything of a
day is paid for, under another name, then noted in the ledger by an id that is drawn for each writing, then named so:

    seats.parquet.next written  ->  its id noted in the ledger  ->  seats.parquet  ->  the day's first payment

So a list that is older than the ledger, newer, or of another run is found out and refused: it would give seats twice.
Seats of a day on which nothing was paid for are free again.

A day that is resumed has the seats that it took, unless a later day has paid for something since.
"""

from __future__ import annotations

import bisect
import os
import pathlib
import secrets
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from tfdp_rec.core.claim.ledger import Ledger
from tfdp_rec.core.ground.files import open_atomically, remove, sync_entry
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.run_folder import SEATS
from tfdp_rec.job.users import refuse_other_kind

LABEL = "seats of a day"
_ID = b"list"
_LIST, _NEXT = SEATS


class _Note(NamedTuple):
    number: int  # of its line
    day: int
    list: str  # the id


_NONE = _Note(-1, 0, "")


def take_seats(
    folder: pathlib.Path, ledger: Ledger, budget: Budget, log: Interactions, mine: str = ""
) -> tuple[NDArray[np.bool_], str]:
    """Takes the seats of a day, durably, before anything of it is paid for: whose, and the id of their list."""
    # mine: id of the list in which this day has taken its seats before, if it has; folder: private
    notes = _notes(ledger)
    last, paid = notes[-1], _notes_with_payment(ledger, notes)
    held = _read(folder, last, _ids(log).type)
    refuse_other_kind("user", held["user"].type, log.unit_ids.type, ", so that a user would not be known again")
    if mine and mine == last.list:
        return _have_seats(log, held, last.day), mine
    own = next((note for note in notes if mine and note.list == mine), None)
    if own and any(note.number > own.number for note in paid):
        raise ValueError(
            f"A day was begun after the one that is resumed here, and has paid for something in {ledger.path}: "
            "both would count the same users (--days-per-user). Begin this day again, with --continue and, if it "
            "is refused, another --checkpoint."
        )
    days = {note.day for note in paid}
    held = held.filter(pc.is_in(held["day"], pa.array(sorted(days), pa.int32())))  # other seats are free again
    if own in paid:
        return _have_seats(log, held, own.day), _write(folder, ledger, held, own.day)
    day = max(days, default=0) + 1
    if day > budget.days:
        raise ValueError(f"{ledger.path}: all of the {budget.days} days that the first one decided on are over.")
    seated = _count_seats(log, held) < most_seats(budget, day, log.uniforms("seats"))
    users = _ids(log).filter(pa.array(seated))
    rows = pa.table({"user": users, "day": pa.array(np.full(len(users), day), pa.int32())})
    return seated, _write(folder, ledger, pa.concat_tables([held, rows]), day)


def most_seats(budget: Budget, day: int, phases: NDArray[np.float64]) -> NDArray[np.int64]:
    """Most seats that users of phases φ can have had by a day, that day included."""
    assert budget.days_per_user is not None
    most, between = budget.days_per_user, max(1, budget.days - 1)
    # Whole numbers apart from φ: a sum just below a whole number must not be rounded to it.
    whole, rest = divmod((most - 1) * (day - 1), between)
    return np.minimum(most, 1 + whole + (rest / between + phases >= 1))


def _notes(ledger: Ledger) -> list[_Note]:
    lines = [line for line in ledger.lines if line["kind"] == "note" and line["label"] == LABEL]
    return [_Note(line["number"], **line["settings"]) for line in lines] or [_NONE]


def _notes_with_payment(ledger: Ledger, notes: list[_Note]) -> list[_Note]:
    """The notes of days that have paid for something: a payment is of the day that has taken seats before it."""
    numbers = [note.number for note in notes]
    places = sorted({bisect.bisect(numbers, payment.number) for payment in ledger.paid} - {0})
    return [notes[place - 1] for place in places if notes != [_NONE]]


def _write(folder: pathlib.Path, ledger: Ledger, table: pa.Table, day: int) -> str:
    """Makes it the list of a day; returns its id."""
    found = secrets.token_hex(8)
    for left in folder.glob(f".*.{_NEXT}"):  # of a process that was killed
        remove(left)
    with open_atomically(folder / _NEXT, "wb", private=True) as file:
        pa.parquet.write_table(table.replace_schema_metadata({_ID: found.encode()}), file)
    ledger.note(LABEL, {"day": day, "list": found})
    _name(folder)
    return found


def _name(folder: pathlib.Path) -> None:
    os.replace(folder / _NEXT, folder / _LIST)
    sync_entry(os.fspath(folder))


def _read(folder: pathlib.Path, last: _Note, kind: pa.DataType) -> pa.Table:
    """The list that the ledger has noted last; an empty one, for ids of a kind, if it has noted none."""
    path, following = folder / _LIST, folder / _NEXT
    if last == _NONE and not path.exists():
        return pa.table({"user": pa.array([], kind), "day": pa.array([], pa.int32())})
    try:
        if following.exists() and _id(following) == last.list:  # a process was killed between noting and naming it
            _name(folder)
        whole = _id(path) == last.list
        table = pa.parquet.read_table(path) if whole else None
    except FileNotFoundError:
        raise ValueError(f"{path} is gone: {_LOST}.") from None
    except (TypeError, ValueError, pa.ArrowException) as problem:
        raise ValueError(f"{path} cannot be read ({problem}): {_LOST}.") from None
    if table is None:
        raise ValueError(f"{path} is older or newer than the run's ledger, or of another run: {_LOST}.")
    return table


_LOST = (
    "it is not known on which days users' rows counted. Put back the newest release/ and private/ of this run; another "
    "run on the same users costs as much again"
)


def _id(path: pathlib.Path) -> str:
    return (pa.parquet.read_schema(path).metadata or {}).get(_ID, b"").decode()


def _ids(log: Interactions) -> pa.ChunkedArray:
    # Of texts, in the type that takes more than two gigabytes of them.
    ids = log.unit_ids
    return ids.cast(pa.large_string()) if pa.types.is_string(ids.type) else ids


def _count_seats(log: Interactions, held: pa.Table) -> NDArray[np.int64]:
    """Number of seats that each user of the log has had."""
    had = held.group_by("user").aggregate([("day", "count")])
    places = pc.index_in(_ids(log), value_set=had["user"].combine_chunks())
    return np.append(had["day_count"].to_numpy(), 0)[places.fill_null(-1).to_numpy()]


def _have_seats(log: Interactions, held: pa.Table, day: int) -> NDArray[np.bool_]:
    users = held.filter(pc.equal(held["day"], day))["user"].combine_chunks()
    return pc.is_in(_ids(log), value_set=users).to_numpy().astype(bool)
