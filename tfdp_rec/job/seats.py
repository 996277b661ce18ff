"""Which users have a seat on a day: their rows count on that day, on at most k of T days (`--days-per-user`).

A user may be in the log of every day, and noise of T days must then cover T of them. With at most k seats each it needs
to cover k: it falls by √(k/T), and of users who come on few days nothing is lost. Up to day t a user has at most

    1 + ⌊(k - 1) (t - 1) / (T - 1) + φ⌋

seats, φ from 0 to 1 by a hash of the user's id: the first day of a user counts, whenever it is, further seats come one
by one, and not to all users at once. What a user gets depends on the days of that user alone, so that the logs of two
neighbours differ in one user's rows on at most k days. All else that a day releases, found items included, is of the
users who have a seat. How many these are is private.

**The list.** RUN/private/seats.parquet has a row for each seat that was ever taken. It is written before anything of a
day is paid for, and then noted in the ledger by an id that is drawn for each writing. So an older list, or another
run's, is found out and refused: it would give seats twice. Between the two writings the list names the one that it
follows. Seats of a day on which nothing was paid for are free again.

    list of day t-1 written, noted  ->  list of day t written  ->  noted in the ledger  ->  the day's first payment

A day that is resumed has the seats that it took, unless another day has taken seats since.
"""

from __future__ import annotations

import dataclasses
import pathlib
import secrets
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from numpy.typing import NDArray

from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.files import writing
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.run_folder import SEATS
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.spending.ledger import Ledger

LABEL = "seats of a day"
_ID, _AFTER, _DAY = b"list", b"after", b"day"


@dataclasses.dataclass(frozen=True)
class DaySeats:
    """The seats of one day.

    Attributes:
        of_users: Whether each user of the log has one.
        id: The list that they are in.
    """

    of_users: NDArray[np.bool_]
    id: str

    @classmethod
    def taken(cls, folder: pathlib.Path, ledger: Ledger, budget: Budget, log: Interactions, mine: str = "") -> DaySeats:
        """Takes the seats of a day, durably, before anything of it is paid for."""
        # mine: id of the list in which this day has taken its seats before, if it has; folder: private
        note = _last_note(ledger)
        last, day = note["list"], note["day"]
        held, kept = _read(folder / SEATS, last)
        if held.num_rows:
            _refuse_other_kind(held, log)
        paid = any(payment.number > note["number"] for payment in ledger.paid)
        if mine and mine != last:
            raise ValueError(
                "Another day has taken seats (--days-per-user) since this one was cut off, and both would count the "
                "same users: begin this one again with --continue."
            )
        if mine and (paid or kept):
            ids = held.filter(pc.equal(held["day"], day))["user"].combine_chunks()
            return cls(_is_in(log, ids), last)
        if not paid:
            held, day = held.filter(pc.not_equal(held["day"], day)), max(0, day - 1)
        if day == budget.days:
            raise ValueError(f"{ledger.path}: all of the {day} days that the first one decided on (--days) are over.")
        return _take(folder / SEATS, ledger, budget, log, held, last, day + 1)


def refuse_unfit(settings: JobSettings) -> None:
    """Raises if `--days-per-user` is given where it means nothing, or where what is made does not heed it."""
    if settings.days_per_user is None:
        return
    if settings.days_per_user > settings.days:
        raise ValueError(
            f"--days-per-user must be at most --days, {settings.days}, got {settings.days_per_user}: it is how many of "
            "those days a user's rows count on."
        )
    others = set(settings.mechanism) - {names.spectral.name, names.exact.name}
    if others or settings.mechanism == (names.exact.name,):
        raise ValueError(
            f"--days-per-user is of spectral, and {' and '.join(sorted(others)) or names.exact.name} would be made, "
            "too: add --mechanism spectral, or leave it out."
        )


def allowed(budget: Budget, day: int, phases: NDArray[np.float64]) -> NDArray[np.int64]:
    """Most seats that users of phases φ can have had by a day, that day included."""
    assert budget.days_per_user is not None
    most, between = budget.days_per_user, max(1, budget.days - 1)
    # Whole numbers apart from φ: a sum just below a whole number must not be rounded to it.
    whole, rest = divmod((most - 1) * (day - 1), between)
    return np.minimum(most, 1 + whole + (rest / between + phases >= 1))


def _take(
    path: pathlib.Path, ledger: Ledger, budget: Budget, log: Interactions, held: pa.Table, last: str, day: int
) -> DaySeats:
    had = held.group_by("user").aggregate([("day", "count")])
    place = pc.index_in(log.unit_ids, value_set=had["user"].combine_chunks().cast(log.unit_ids.type))
    before = np.append(had["day_count"].to_numpy(), 0)[place.fill_null(-1).to_numpy()]
    mine = before < allowed(budget, day, log.uniforms("seats"))
    users = log.unit_ids.filter(pa.array(mine))
    rows = pa.table({"user": users, "day": pa.array(np.full(int(mine.sum()), day), pa.int32())})
    seats = secrets.token_hex(8)
    table = pa.concat_tables([held.cast(rows.schema), rows]) if held.num_rows else rows
    about = {_ID: seats.encode(), _AFTER: last.encode(), _DAY: str(day).encode()}
    with writing(path, "wb", private=True) as file:
        pa.parquet.write_table(table.replace_schema_metadata(about), file)
    ledger.note(LABEL, {"day": day, "list": seats})
    return DaySeats(mine, seats)


def _last_note(ledger: Ledger) -> dict[str, Any]:
    notes = [line for line in ledger.lines if line["kind"] == "note" and line["label"] == LABEL]
    return {"number": notes[-1]["number"], **notes[-1]["settings"]} if notes else {"number": 0, "list": "", "day": 0}


def _read(path: pathlib.Path, last: str) -> tuple[pa.Table, bool]:
    """The list as the ledger's last note knows it; and whether it was written by that note's day."""
    empty = pa.table({"user": pa.array([], pa.string()), "day": pa.array([], pa.int32())})
    if not path.exists() and not last:
        return empty, False
    try:
        table = pa.parquet.read_table(path)
        about = {name: table.schema.metadata[name].decode() for name in (_ID, _AFTER, _DAY)}
        day = int(about[_DAY])
    except (FileNotFoundError, KeyError, TypeError, ValueError, pa.ArrowException) as problem:
        raise ValueError(f"{path} {_LOST} ({problem}).") from None
    if about[_ID] == last:
        return table, True
    if about[_AFTER] == last:  # what was written when a process was killed, before it was noted
        return table.filter(pc.not_equal(table["day"], day)), False
    raise ValueError(f"{path} {_LOST}: it is an older one, or of another run.")


_LOST = (
    "is not the list that this run's ledger has noted last, so that it is not known on which days users' rows counted; "
    "put the newest one back, or begin another run"
)


def _refuse_other_kind(held: pa.Table, log: Interactions) -> None:
    kinds = [pa.types.is_integer(kind) for kind in (held["user"].type, log.unit_ids.type)]
    if kinds[0] != kinds[1]:
        words = ["whole numbers" if number else "text" for number in kinds]
        raise ValueError(
            f"--user: the ids of users were {words[0]} on the days before, and are {words[1]} here, so that a user "
            "would not be known again: write them as they were."
        )


def _is_in(log: Interactions, ids: pa.Array) -> NDArray[np.bool_]:
    return pc.is_in(log.unit_ids, value_set=ids.cast(log.unit_ids.type)).to_numpy().astype(bool)
