"""Settings of a job: one set of options for every source of a log and every recommender."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from tfdp_rec.core.ground.files import Path
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.recommenders.names import NAMES, UPON_SUMS, USUAL, auto, from_sums
from tfdp_rec.settings import BETWEEN_0_AND_1, NOT_NEGATIVE, POSITIVE, Check, flag, option, refuse_wrong

POISSON, ALLOCATION, SHUFFLED = "poisson", "allocation", "shuffled"
SPARK = "spark"
ELSEWHERE = "in other folders (--out, --checkpoint)"  # for messages
CLIP, CLIP_FROM_SUMS = 1.0, 0.05
_NEGATIVES, _NEGATIVES_FROM_SUMS = 4000, 1000  # where there are so many items; from sums all are scored at each place
_SEED = Check("must be from 0 to 4294967295", lambda value: 0 <= value < 2**32)
_NUMBER = Check("must be positive and at most 100,000,000", lambda value: 0 < value <= 10**8)
_UNITS = Check("must be from 0 to 100,000,000", lambda value: 0 <= value <= 10**8)
_LOG, _GENERATED, _PRIVACY = "a log of your own (docs/logs.md)", "generated timelines", "privacy"
_TRAINING, _DAYS, _CLUSTER = "recommenders", "day after day", "parameter servers"


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """All options of `tfdp-rec train` that a run keeps; the defaults are the main job's."""

    data: tuple[str, ...] = option(
        (), "files of a log (with --user and --item), or one folder with MovieLens files; generated timelines if left "
        "out", metavar="PATH",
    )  # fmt: skip
    mechanism: tuple[str, ...] = option(
        (), f"recommenders to make, of {', '.join(NAMES)}; default: spectral for a log of your own, else "
        f"{', '.join(USUAL)}", choices=NAMES, metavar="NAME",
    )  # fmt: skip
    export: str | None = option(
        None, "the recommender to release; default: the first made of spectral, auto, upon-sums, lazydpftrl, lazydpsgd",
        metavar="NAME",
    )  # fmt: skip
    top_k: int = option(10, "items in an answer unless the question says", _NUMBER)
    seed: int = option(0, "seed of generated data, of the split and of first weights; never of noise", _SEED)

    user: str = option("", "column of users' ids", metavar="COLUMN", group=_LOG)
    item: str = option("", "column of items' ids", metavar="COLUMN", group=_LOG)
    time: str = option("", "column of times; without one, a user's rows have no order", metavar="COLUMN", group=_LOG)
    items: str = option(
        "", "public list of items: a file with a column called as in the log, or item, or its first one; or .txt with "
        "one a line; without it, items that many users have are found privately", metavar="FILE", group=_LOG,
    )  # fmt: skip
    titles: str = option("", "public file of items and their titles", metavar="FILE", group=_LOG)
    features: str = option(
        "", "of spectral: public file of items and their features, in any columns, several in a cell separated "
        "by vertical bars; they cost no epsilon", metavar="FILE", group=_LOG,
    )  # fmt: skip
    engine: str = option(
        "", "where the log is grouped and private sums are added up, if not here: on the Spark that spark-submit gives "
        "(docs/spark.md); --data is then what Spark reads", choices=("", SPARK), group=_LOG,
    )  # fmt: skip
    items_epsilon: float | None = option(
        None, "cost of finding items, by itself, of --epsilon (default: a quarter)", POSITIVE, metavar="E", group=_LOG
    )

    users: int = option(138_493, "generated users", _NUMBER, group=_GENERATED)
    movies: int = option(27_278, "generated movies", _NUMBER, group=_GENERATED)

    epsilon: float = option(8.0, "budget of all that is released; never exceeded", POSITIVE, group=_PRIVACY)
    delta: float | None = option(None, "default: 1e-6, or 1/users if that is less", BETWEEN_0_AND_1, group=_PRIVACY)
    noise_multiplier: float | None = option(
        None, "noise of trainings; the budget may then end training early", POSITIVE, group=_PRIVACY
    )
    metrics_epsilon: float | None = option(
        None, "cost of private figures of the held-out users, by themselves, within --epsilon; 0 for no figures "
        "(default: so much that they add 5% of it at most)", NOT_NEGATIVE, metavar="E", group=_PRIVACY,
    )  # fmt: skip
    confidential: bool = option(
        False, "also write exact figures, losses and curves, which no epsilon covers, into private/confidential/",
        group=_PRIVACY,
    )  # fmt: skip
    sampling: str = option(
        POISSON, "how users come into the batches of trainings: drawn anew for each batch, allocated anew in each "
        "epoch, or in one public order", choices=(POISSON, ALLOCATION, SHUFFLED), group=_PRIVACY,
    )  # fmt: skip
    clip: float | None = option(
        None, f"bound on an example's gradient norm; default: {CLIP:g}, and {CLIP_FROM_SUMS:g} of upon-sums, where it "
        "is a mean over places", POSITIVE, group=_PRIVACY,
    )  # fmt: skip

    steps: int = option(600, "training steps", _NUMBER, group=_TRAINING)
    batch_size: int = option(4096, "users in a batch, on average", _NUMBER, group=_TRAINING)
    width: int = option(32, "width of embedding tables", _NUMBER, group=_TRAINING)
    hidden: int = option(32, "units of the hidden layer; 0 for none", _UNITS, group=_TRAINING)
    learning_rate: float | None = option(
        None, "of private trainings; default: 25 / clip, 100 / clip upon sums, less where noise would drown a row",
        POSITIVE, group=_TRAINING,
    )  # fmt: skip
    order: str = option(
        "auto", "of spectral: whether pairs count that are near each other in time, or any two items of a user; auto "
        "asks the users, privately, if there are times", choices=("auto", "yes", "no"), group=_TRAINING,
    )  # fmt: skip
    recency: float | None = option(
        None, "of sums: an item followed by j others weighs (1 + j)^-recency; default: 1 if order counts, else 0",
        NOT_NEGATIVE, group=_TRAINING,
    )  # fmt: skip
    negatives: int | None = option(
        None, "negatives shared by a batch; default: 4,000, upon sums 1,000, or all items", _NUMBER,
        group=_TRAINING,
    )  # fmt: skip

    days: int = option(
        1, "days that --epsilon is for: this one, and others that are added by --continue", _NUMBER, group=_DAYS
    )
    days_per_user: int | None = option(
        None, "most of these days on which a user's rows count in sums, popularity and found items, for less noise on "
        "each; needs a private list of users, which the run folder keeps (default: all days)", _NUMBER, metavar="K",
        group=_DAYS,
    )  # fmt: skip
    keep: float = option(
        1.0, "share of the earlier sums that a further day keeps; below 1 where tastes change",
        Check("must be above 0 and at most 1", lambda value: 0 < value <= 1), group=_DAYS,
    )  # fmt: skip

    local: tuple[int, ...] = option(
        (), "start so many on this machine, and end them", metavar=("WORKERS", "SERVERS"), group=_CLUSTER, several=2
    )
    cluster: str = option("", "the cluster's JSON, or TF_CONFIG for that variable's", metavar="FILE", group=_CLUSTER)

    def __post_init__(self) -> None:
        refuse_wrong(self)

    def clip_of(self, name: str) -> float:
        """Bound on the norm of an example's gradient, for a recommender.

        Example:
            >>> JobSettings().clip_of("lazydpsgd"), JobSettings().clip_of("upon-sums")
            (1.0, 0.05)
        """
        usual = CLIP_FROM_SUMS if name in UPON_SUMS else CLIP
        return usual if self.clip is None else self.clip

    def negatives_of(self, name: str, num_items: int) -> int:
        """Number of negatives that a batch of a recommender shares."""
        usual = _NEGATIVES_FROM_SUMS if name in UPON_SUMS else _NEGATIVES
        return min(self.negatives or usual, num_items)

    @property
    def servers(self) -> str:
        """Which kind of parameter servers trains two-towers: "local", "cluster", or "" for this process."""
        return "local" if self.local else "cluster" if self.cluster else ""

    @property
    def released_name(self) -> str:
        """Name of the recommender that leaves the run."""
        return names.choose_released(self.mechanism, self.export)

    @property
    def has_figures(self) -> bool:
        """Whether private figures of held-out users can be made."""
        # Those of several days would be of the last one alone, and Spark brings some of the users here.
        return self.days == 1 and not self.engine and names.look_up(self.released_name).claims_epsilon

    def refuse_contradictions(self, continues: bool) -> None:
        """Raises for options that do not go together, before a log is read."""
        self._refuse_metrics()
        self._refuse_servers()
        self._refuse_trainings()
        self._refuse_engine()
        self._refuse_days(continues)

    def _refuse_metrics(self) -> None:
        cost = self.metrics_epsilon or 0.0
        if cost and not self.has_figures:
            raise ValueError(
                "--metrics-epsilon is of private runs of one day that are not on Spark, and others have no private "
                "figures: leave it out."
            )
        if cost >= self.epsilon:
            raise ValueError(f"--metrics-epsilon must be less than --epsilon {self.epsilon:g}, got {cost:g}.")

    def _refuse_servers(self) -> None:
        if self.servers and names.adam.name in self.mechanism:
            raise ValueError(
                "--mechanism adam keeps state for each weight, which parameter servers do not: take --mechanism sgd "
                f"with --{self.servers}, or leave --{self.servers} out."
            )
        if self.local and self.cluster:
            raise ValueError("--local starts a cluster, --cluster names one that is up: leave one out.")
        if self.servers and self.sampling != POISSON:
            raise ValueError(f"--sampling {self.sampling} trains in one process: a cluster's workers draw users anew.")
        if self.local and min(self.local) < 1:
            workers, servers = self.local
            raise ValueError(f"--local needs at least one worker and one server, got {workers} and {servers}.")

    def _refuse_engine(self) -> None:
        if not self.engine:
            return
        trained = next(filter(names.is_trained, self.mechanism), None)
        if trained:
            raise ValueError(
                f"--engine {SPARK} adds up private sums, and {trained} is trained: write the log by user with "
                "tfdp_rec.sums.spark.SparkLog.write_grouped, read it with Interactions.from_grouped, and train on that."
            )
        if not self.user:
            raise ValueError(f"--engine {SPARK} reads a log of your own: give --user and --item.")
        if self.days_per_user is not None:
            raise ValueError(f"--days-per-user keeps a list of users on one machine: leave it or --engine {SPARK} out.")

    def _refuse_trainings(self) -> None:
        against = {f"--{self.servers}": self.servers, "--sampling shuffled": self.sampling == SHUFFLED}
        if from_sums.name in self.mechanism:  # auto is private sums alone then
            against |= {"--order no": self.order == "no", "no --time": self.user and not self.time}
        wrong = [option for option, is_asked in against.items() if is_asked]
        if wrong and (upon := [name for name in UPON_SUMS if name in self.mechanism]):
            raise ValueError(
                f"--mechanism {upon[0]} predicts what comes next, in one process, with users drawn anew for "
                f"each batch: it does not go with {wrong[0]}."
            )
        priced = [name for name in self.mechanism if names.is_trained(name) and names.look_up(name).claims_epsilon]
        planned = list(filter(names.is_planned, priced))
        others = [name for name in priced if name not in planned]
        if others and self.sampling == SHUFFLED:
            in_order = " or ".join(each.name for each in names.IN_ORDER)
            raise ValueError(
                f"--sampling shuffled has a price for planned noise alone, and {others[0]} has noise of its own in "
                f"each step: take --mechanism {in_order}."
            )
        if planned and self.sampling != SHUFFLED:
            elsewhere = f", without --{self.servers}" if self.servers else ""
            raise ValueError(
                f"--mechanism {planned[0]} plans its noise for users in one order: add --sampling "
                f"shuffled{elsewhere}, or take --mechanism lazydpsgd."
            )

    def _refuse_days(self, continues: bool) -> None:
        released, k = self.released_name, self.days_per_user
        is_priced = names.look_up(released).claims_epsilon
        if k is not None and k > self.days:
            raise ValueError(
                f"--days-per-user must be at most --days, {self.days}, got {k}: it is how many of those days a user's "
                "rows count on."
            )
        others = set(self.mechanism) - {released, names.exact.name}
        # One list of seats, one ledger that says which of them are taken.
        if k is not None and (others or not is_priced):
            made = " and ".join(sorted(others | {released}))
            raise ValueError(
                f"--days-per-user is of one private recommender, and {made} would be made: name one by --mechanism, "
                "such as spectral, or leave it out."
            )
        can_go_on = names.is_trained(released) and is_priced and not names.is_planned(released)
        can_go_on &= released != auto.name
        if (self.days > 1 or continues) and released != names.spectral.name and not can_go_on:
            raise ValueError(
                "--days and --continue go with private sums, and with trainings of independent noise: "
                f"leave them out, or release another than {released}, such as --mechanism spectral."
            )

    def refuse_changes(self, before: JobSettings, directory: Path, free: Collection[str]) -> None:
        """Raises if something but `free` is asked for otherwise than the run in a directory began with."""
        for name, value in dataclasses.asdict(before).items():
            now = getattr(self, name)
            # A checkpoint is of so many servers; how many workers there are, and where they are, may change.
            moved = now and value and (name == "cluster" or name == "local" and now[1:] == value[1:])
            if now != value and name not in free and not moved:
                raise ValueError(
                    f"The run in {directory} has {flag(name)} {_words(value)}, and is asked to go on with "
                    f"{_words(now)}: leave {flag(name)} out, or begin another run {ELSEWHERE}."
                )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> JobSettings:
        """Settings from their fields as JSON keeps them; other entries are left out."""
        fields = {field.name for field in dataclasses.fields(cls)}
        known: dict[str, Any] = {name: value for name, value in config.items() if name in fields}
        known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known)


def _words(value: Any) -> str:
    if value in ("", None, ()):
        return "left out"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
