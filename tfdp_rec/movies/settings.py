"""What `tfdp-rec train` needs to know: where timelines come from, what to train on them, and where."""

from __future__ import annotations

import dataclasses
import os

from tfdp_rec.movies.contestants import USUAL
from tfdp_rec.settings import BETWEEN_0_AND_1, NOT_NEGATIVE, POSITIVE, option, refuse_wrong

POISSON, SHUFFLED = "poisson", "shuffled"
_PRIVACY, _DATA, _TRAINING = "privacy", "data", "model and training"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the watch timelines come from: files, or a generator of so many users and movies."""

    data: tuple[str, ...] = option(
        (), "folder with MovieLens files, or files of a log of your own; generated timelines if left out",
        metavar="PATH", group=_DATA,
    )  # fmt: skip
    users: int = option(138_493, "generated users", POSITIVE, group=_DATA)
    movies: int = option(27_278, "generated movies", POSITIVE, group=_DATA)
    events: int | None = option(
        None, "generated events; default: as many a user as MovieLens-20M, or fewer", POSITIVE, group=_DATA
    )

    def __post_init__(self) -> None:
        for folder in self.data:
            if not os.path.isdir(folder):
                raise FileNotFoundError(
                    f"--data: there is no folder {folder}; for files of your own say --user and --item, too."
                )
        if len(self.data) > 1:
            raise ValueError("--data takes one MovieLens folder; for files of your own say --user and --item, too.")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run trains: in this process, on a cluster that is up, or on one that is started for it.

    Attributes:
        local: so many workers and servers to start on this machine; empty for none.
        cluster: the cluster's description: a file, or TF_CONFIG; empty for none.
    """

    local: tuple[int, ...] = ()
    cluster: str = ""

    def refuse_other(self, other: Place, directory: str | os.PathLike[str]) -> None:
        """Raises if a run that began here cannot go on there.

        Args:
            other: where it is to go on.
            directory: of its checkpoints.

        Raises:
            ValueError: their checkpoints are of two kinds, or of another number of servers.
        """
        if self._option == other._option and self.local[1:] == other.local[1:]:
            return
        raise ValueError(
            f"The run in {directory} trains {self._words}, and a checkpoint of that cannot go on {other._words}: leave "
            "--local and --cluster out, or begin another run in another --checkpoint."
        )

    @property
    def _option(self) -> str:
        return "local" if self.local else "cluster" if self.cluster else ""

    @property
    def _words(self) -> str:
        if self.local:
            return f"on {self.local[1]} servers of its own"
        return f"on the cluster of {self.cluster}" if self.cluster else "in one process"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Who takes part and how; the defaults are the main job's."""

    mechanisms: tuple[str, ...] = USUAL
    export: str | None = option(
        None, "who is released; default: the first that takes part of spectral, lazydpftrl, lazydpsgd", metavar="NAME"
    )
    epsilon: float = option(8.0, "the budget of each private one; never exceeded", POSITIVE, group=_PRIVACY)
    delta: float | None = option(None, "default: 1e-6, or 1/users if that is less", BETWEEN_0_AND_1, group=_PRIVACY)
    noise_multiplier: float | None = option(
        None, "train with this noise; the budget may then stop training early", POSITIVE, group=_PRIVACY
    )
    sampling: str = option(
        POISSON, "how two-towers see users: drawn anew for every batch, or in one order that anybody may know",
        choices=(POISSON, SHUFFLED), group=_PRIVACY,
    )  # fmt: skip
    clip: float = option(1.0, "bound on an example's gradient norm", POSITIVE, group=_PRIVACY)
    steps: int = option(600, "training steps", POSITIVE, group=_TRAINING)
    batch_size: int = option(4096, "users in a batch, on average", POSITIVE, group=_TRAINING)
    width: int = option(32, "of the embedding tables", POSITIVE, group=_TRAINING)
    hidden: int = option(32, "units of the hidden layer; 0 for none", NOT_NEGATIVE, group=_TRAINING)
    learning_rate: float | None = option(
        None, "of the private mechanisms; default: 25 at clip 1, less where their noise would drown a row", POSITIVE,
        group=_TRAINING,
    )  # fmt: skip
    adam_learning_rate: float = option(0.005, "of Adam without privacy", POSITIVE, group=_TRAINING)
    sgd_learning_rate: float = option(
        16.0, "of the SGD without privacy, which does not clip", POSITIVE, group=_TRAINING
    )
    recency: float = option(
        0.25, "of spectral: a movie followed by j others weighs (1 + j)^-recency", NOT_NEGATIVE, group=_TRAINING
    )
    negatives: int | None = option(
        None, "shared uniform negatives a batch; default: 4,000, or all movies", POSITIVE, group=_TRAINING
    )
    step_at: tuple[int, ...] = option(
        (), "also time a step with so many movies, private and not; 1.8 GB of memory for every million", POSITIVE,
        metavar="MOVIES", group=_TRAINING,
    )  # fmt: skip
    history: int = 20
    test_users: int = 8000
    evaluations: int = 6
    seed: int = option(0, "of the generated data, split and first weights; never of noise", group=_DATA)
    top_k: int = option(10, "movies the exported model returns", POSITIVE)

    def __post_init__(self) -> None:
        refuse_wrong(self)
