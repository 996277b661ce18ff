"""What `tfdp-rec train` needs to know: where timelines come from, and what to train on them."""

from __future__ import annotations

import dataclasses
import os

from tfdp_rec import mechanisms
from tfdp_rec.settings import BETWEEN_0_AND_1, NOT_NEGATIVE, POSITIVE, option, refuse_wrong

MECHANISMS = mechanisms.names((mechanisms.sgd, *mechanisms.COMMON))
_PRIVACY, _DATA, _TRAINING = "privacy", "data", "model and training"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the watch timelines come from: files, or a generator of so many users and movies."""

    data: str = option("", "folder with MovieLens files; generated timelines if left out", group=_DATA)
    users: int = option(138_493, "generated users", POSITIVE, group=_DATA)
    movies: int = option(27_278, "generated movies", POSITIVE, group=_DATA)
    events: int | None = option(
        None, "generated events; default: as many a user as MovieLens-20M, or fewer", POSITIVE, group=_DATA
    )

    def __post_init__(self) -> None:
        if self.data and not os.path.isdir(self.data):
            raise FileNotFoundError(f"--data: there is no folder {self.data}.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train and how; the defaults are the main job's."""

    mechanisms: tuple[str, ...] = MECHANISMS
    epsilon: float = option(8.0, "the budget; never exceeded", POSITIVE, group=_PRIVACY)
    delta: float | None = option(None, "default: 1e-6, or 1/users if that is less", BETWEEN_0_AND_1, group=_PRIVACY)
    noise_multiplier: float | None = option(
        None, "use this noise; the budget may then stop training early", POSITIVE, group=_PRIVACY
    )
    clip: float = option(1.0, "bound on an example's gradient norm", POSITIVE, group=_PRIVACY)
    steps: int = option(600, "training steps", POSITIVE, group=_TRAINING)
    batch_size: int = option(4096, "users in a batch, on average", POSITIVE, group=_TRAINING)
    width: int = option(32, "of the embedding tables", POSITIVE, group=_TRAINING)
    hidden: int = option(32, "units of the hidden layer; 0 for none", NOT_NEGATIVE, group=_TRAINING)
    learning_rate: float = option(25.0, "of the private mechanisms", POSITIVE, group=_TRAINING)
    sgd_learning_rate: float = option(
        16.0, "of the SGD without privacy, which does not clip", POSITIVE, group=_TRAINING
    )
    negatives: int | None = option(
        None, "shared uniform negatives a batch; default: 4,000, or all movies", POSITIVE, group=_TRAINING
    )
    history: int = 20
    prior_noise: float = 4.0
    test_users: int = 8000
    evaluations: int = 6
    seed: int = option(0, "of the generated data, split and first weights; never of noise", group=_DATA)
    top_k: int = option(10, "movies the exported model returns", POSITIVE)

    def __post_init__(self) -> None:
        refuse_wrong(self)
