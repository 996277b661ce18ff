"""What a federated run needs to know: the options of `tfdp-rec federate`, and the run configuration of its Flower app.

A run's settings travel as this one value; Flower carries its fields as the app's configuration.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from tfdp_rec.settings import option, refuse_wrong

METHODS = ("private", "private+user", "published", "gradient")
ENCODERS = ("nrms", "naml", "plm")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A federated run.

    Raises:
        ValueError: for an unknown method or encoder, and a budget that nobody would count or that cannot hold.
    """

    data: str = option("", "folder with news.tsv and behaviors.tsv; every user of it is a client")
    output: str = option("federated.npz", "where the trained weights go")
    initial: str = option("", "weights to start from, as such a run writes them; left out, new ones, kept beside")
    method: str = option("private", "private, private+user, published or gradient (DP-FedRec)", choices=METHODS)
    encoder: str = option("nrms", "nrms, naml or plm (a small transformer)", choices=ENCODERS)
    dim: int = option(32, "width of a news vector")
    num_basis: int = option(5, "basis vectors B")
    temperature: float = option(0.1, "temperature of the attention")
    epsilon: float = option(10.0, "privacy of one round's attention (or gradient); inf for none")
    delta: float = option(1e-5, "failure probability of one round")
    padding: float = option(0.2, "probability that a click is padded")
    label_epsilon: float = option(10.0, "privacy of one label; inf for none")
    negatives: int = option(4, "negatives with each label")
    history: int = option(20, "clicks of history")
    samples: int = option(4, "training clicks used of each client")
    l2_norm_clip: float = option(0.05, "clip of noised gradients")
    rounds: int = option(3, "rounds")
    clients: int = option(4, "clients that must be there")
    fraction: float = option(1.0, "share of them asked in a round")
    eta: float = option(0.01, "server learning rate")
    secure: bool = option(False, "SecAgg+ masks what clients send")
    budget_epsilon: float = option(math.inf, "the most a client will spend in all")
    ledgers: str = option("", "folder of the clients' training ledgers; left out, none are kept")
    seed: int = option(0, "seed of the initial weights (not of any noise)")

    def __post_init__(self) -> None:
        refuse_wrong(self)
        if not self.output.endswith(".npz"):
            raise ValueError(f"--output must end in .npz, got {self.output!r}.")
        if self.method == "published" and math.isfinite(self.budget_epsilon):
            raise ValueError("--method published has no privacy bound, so no --budget-epsilon can hold; leave it out.")
        if math.isfinite(self.budget_epsilon) and not self.ledgers:
            raise ValueError("--budget-epsilon needs --ledgers FOLDER: without ledgers nobody counts what is spent.")

    def as_toml(self) -> str:
        """The fields as lines of TOML, for Flower."""
        return "".join(f"{name} = {_toml(value)}\n" for name, value in dataclasses.asdict(self).items())

    @classmethod
    def of_run(cls, config: Mapping[str, Any]) -> Settings:
        """The settings that Flower carried, its run configuration."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known})


def _toml(value: Any) -> str:
    return str(value) if isinstance(value, float) else json.dumps(value)
