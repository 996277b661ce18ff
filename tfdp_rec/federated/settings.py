"""What a federated run needs to know: the options of `tfdp-rec federate`, and the run configuration of its Flower app.

A run's settings travel as one value; Flower carries its fields as the app's configuration. What clients allow is not
among them: that is each node's own (`Nodes`), and the submitter of a run has no say in it. Sizes have limits, checked
where a device reads the settings: before it builds a model, pays or computes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdp_rec.settings import BETWEEN_0_AND_1, Check, option, refuse_wrong

METHODS = ("private", "private+user", "gradient")
ENCODERS = ("nrms", "naml", "plm")
ABOVE_0 = Check("must be positive", lambda value: value > 0)


def _size(most: int, least: int = 1) -> Check:
    words = f"must be a whole number from {least} to {most}"
    return Check(words, lambda value: isinstance(value, int) and least <= value <= most)


@dataclasses.dataclass(frozen=True)
class FederatedSettings:
    """A federated run."""

    data: str = option("", "folder with news.tsv and behaviors.tsv; every user of it is a client")
    output: str = option("federated.npz", "where the trained weights go")
    initial: str = option("", "weights to start from, as such a run writes them; left out, new ones, kept beside")
    method: str = option("private", "private, private+user or gradient (DP-FedRec)", choices=METHODS)
    encoder: str = option("nrms", "nrms, naml or plm (a small transformer)", choices=ENCODERS)
    dim: int = option(32, "width of a news vector", _size(1_024))
    num_basis: int = option(5, "basis vectors B", _size(1_024, 2))
    temperature: float = option(0.1, "temperature of the attention")
    epsilon: float = option(10.0, "privacy of one round's attention (or gradient); inf for none")
    delta: float = option(1e-5, "failure probability of one round")
    padding: float = option(0.2, "probability that a click is padded")
    label_epsilon: float = option(10.0, "privacy of one label; inf for none")
    negatives: int = option(4, "negatives with each label", _size(1_000))
    history: int = option(20, "clicks of history", _size(1_000))
    samples: int = option(4, "training clicks used of each client", _size(1_000))
    l2_norm_clip: float = option(0.05, "clip of noised gradients")
    rounds: int = option(3, "rounds")
    clients: int = option(4, "clients that must be there")
    fraction: float = option(1.0, "share of them asked in a round")
    eta: float = option(0.01, "server learning rate")
    secure: bool = option(False, "SecAgg+ masks what clients send")
    seed: int = option(0, "seed of the initial weights (not of any noise)", _size(2**32 - 1, 0))

    def __post_init__(self) -> None:
        refuse_wrong(self)
        if not self.output.endswith(".npz"):
            raise ValueError(f"--output must end in .npz, got {self.output!r}.")

    def as_toml(self) -> str:
        """The fields as lines of TOML, for Flower."""
        return "".join(f"{name} = {toml(value)}\n" for name, value in dataclasses.asdict(self).items())

    @classmethod
    def from_run(cls, config: Mapping[str, Any]) -> FederatedSettings:
        """The settings that Flower carried, its run configuration."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in config.items() if name in known})


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What the clients that this machine starts allow: each node's own configuration, never the run's."""

    budget_epsilon: float = option(math.inf, "the most that one client's training may cost in all", ABOVE_0)
    budget_delta: float = option(1e-5, "delta at which that is measured", BETWEEN_0_AND_1)
    round_epsilon: float = option(math.inf, "the most that one round may cost a client: the least noise", ABOVE_0)
    methods: tuple[str, ...] = option(
        (), f"what clients compute, of {', '.join(METHODS)}; left out, the run's --method", choices=METHODS,
        metavar="NAME",
    )  # fmt: skip
    ledgers: str = option("", "folder of the clients' training ledgers; left out, beside --output")

    def complete_from(self, settings: FederatedSettings) -> Nodes:
        """With what was left out taken from the run that the same person starts."""
        beside = str(Path(settings.output).with_suffix(".ledgers"))
        return dataclasses.replace(
            self, methods=self.methods or (settings.method,), ledgers=str(Path(self.ledgers or beside).resolve())
        )

    def config(self, settings: FederatedSettings, partition: int) -> dict[str, Any]:
        """One node's configuration, as Flower's --node-config takes it."""
        return {
            "partition-id": partition,
            "data": settings.data,
            "ledger": str(Path(self.ledgers) / f"client-{partition}.jsonl"),
            "budget-epsilon": self.budget_epsilon,
            "budget-delta": self.budget_delta,
            "round-epsilon": self.round_epsilon,
            "methods": " ".join(self.methods),
        }


def refuse_more_than(users: int, clients: int) -> None:
    """Refuses more clients than users: one user behind two clients would have two budgets."""
    if clients > users:
        raise ValueError(
            f"The data have {users} users, and {clients} clients were asked for: a user behind two of them would spend "
            "two budgets. Ask for fewer."
        )


def toml(value: Any) -> str:
    """A number, a truth value or a text as TOML has it."""
    return str(value) if isinstance(value, float) else json.dumps(value)
