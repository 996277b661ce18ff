"""What a run on a log of one's own is asked for. Options that the movies' run has too are declared there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tfdp_rec.files import Path, matching
from tfdp_rec.movies.kept import refuse_changed
from tfdp_rec.settings import BETWEEN_0_AND_1, NOT_NEGATIVE, POSITIVE, Check, option

GROUP = "a log of your own, instead of movies (docs/logs.md)"


@dataclasses.dataclass(frozen=True)
class Columns:
    """What a log's columns mean, and the public files beside it."""

    user: str = option("", "its column of users' ids", metavar="COLUMN", group=GROUP)
    item: str = option("", "its column of items' ids", metavar="COLUMN", group=GROUP)
    time: str = option("", "its column of times; left out, a user's rows have no order", metavar="COLUMN", group=GROUP)
    items: str = option(
        "", "public list of items: a file with a column of them, or .txt with one a line; left out, those that many "
        "users have are found privately", metavar="FILE", group=GROUP,
    )  # fmt: skip
    titles: str = option("", "public file of items and their titles", metavar="FILE", group=GROUP)
    items_epsilon: float | None = option(
        None, "what finding items costs by itself, of --epsilon (default: a quarter)", POSITIVE, metavar="E",
        group=GROUP,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Days:
    """How long it is to last."""

    days: int = option(
        1, "how many days --epsilon is for: this one, and others that are added by --continue", POSITIVE, group=GROUP
    )
    keep: float = option(
        1.0, "what a further day keeps of the sums of those before it; below 1 where tastes change",
        Check("must be above 0 and at most 1", lambda value: 0 < value <= 1), group=GROUP,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Terms:
    """The rest, by the names that the movies' run gave its options."""

    data: tuple[str, ...] = option((), "files of the log")
    epsilon: float = option(8.0, "the budget of all that is released; never exceeded", POSITIVE)
    delta: float | None = option(None, "default: 1e-6, or 1/users if that is less", BETWEEN_0_AND_1)
    recency: float | None = option(None, "default: 0.25 with times, 0 without", NOT_NEGATIVE)
    top_k: int = option(10, "items of an answer where nobody says", POSITIVE)
    seed: int = option(0, "of the split of users and of what they are asked; never of noise")


@dataclasses.dataclass(frozen=True)
class Asked:
    """All of it.

    Raises:
        ValueError: something is missing, or does not go together.
        FileNotFoundError: a file is not there.
    """

    columns: Columns = Columns()
    terms: Terms = Terms()
    days: Days = Days()

    def checked(self) -> Asked:
        """Itself, with files where they are from anywhere."""
        columns, terms = self.columns, self.terms
        for name in ("user", "item"):
            if not getattr(columns, name):
                raise ValueError(f"--{name} is missing: say which column of the log holds the {name}s' ids.")
        if not terms.data:
            raise ValueError("--data is missing: say which files hold the log, such as --data logs/*.parquet.")
        if columns.items and columns.items_epsilon is not None:
            raise ValueError("--items-epsilon is spent on finding items, and --items gives them: leave one out.")
        if columns.items_epsilon is not None and columns.items_epsilon >= terms.epsilon:
            raise ValueError(
                f"--items-epsilon must be less than --epsilon {terms.epsilon:g}, got {columns.items_epsilon:g}."
            )
        paths = {name: getattr(columns, name) for name in ("items", "titles") if getattr(columns, name)}
        for name, path in paths.items():
            if not os.path.isfile(path):
                raise FileNotFoundError(f"--{name}: there is no file {path}.")
        for path in terms.data:
            if not matching(path):
                raise FileNotFoundError(f"--data: there is nothing at {path}.")
        return Asked(
            dataclasses.replace(columns, **{name: os.path.abspath(path) for name, path in paths.items()}),
            dataclasses.replace(terms, data=tuple(map(os.path.abspath, terms.data))),
            self.days,
        )

    def refuse_other(self, before: Asked, free: Mapping[str, Any], directory: Path) -> None:
        """Raises if something was decided already, and is asked for otherwise now.

        Args:
            before: what was asked for.
            free: what may be asked for anew.
            directory: of the run.

        Raises:
            ValueError: naming the option.
        """
        for name in ("columns", "terms", "days"):
            mine, now = getattr(before, name), getattr(self, name)
            chosen_anew = {field: value for field, value in free.items() if hasattr(mine, field)}
            refuse_changed(dataclasses.replace(mine, **chosen_anew), now, directory)

    def as_config(self) -> dict[str, Any]:
        """All of it, by name."""
        return {**dataclasses.asdict(self.columns), **dataclasses.asdict(self.terms), **dataclasses.asdict(self.days)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Asked:
        """The inverse of `as_config`, through JSON; what else there is is left out."""
        kinds = (Columns, Terms, Days)
        parts = [{field.name: config[field.name] for field in dataclasses.fields(kind)} for kind in kinds]
        parts[1]["data"] = tuple(parts[1]["data"])
        return cls(*(kind(**part) for kind, part in zip(kinds, parts)))
