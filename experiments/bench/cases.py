"""What is timed, as data that goes to a worker process as JSON: a case is the same work for each of its contestants."""

from __future__ import annotations

import dataclasses

from tfdp_rec import mechanisms

RMC_WIDTH = 32
WORKLOADS = ("dlrm", "rmc1", "rmc2", "rmc3", "two-tower", "one-table", "main-job")
SERVED_TABLES = {"two-tower": 2, "kg": 4}
SERVED = mechanisms.names(one for one in mechanisms.MECHANISMS if one.served)

# How each contestant trains: its mechanism, its clipping strategy, whether every owed step is drawn by itself.
STRATEGIES = {
    "dp-sgd-book": "bookkeeping",
    "dp-sgd-f": "ghost",
    "dp-sgd-r": "reweighted",
    "dp-sgd-b": "per_example",
}
MECHANISMS = {
    **dict.fromkeys(STRATEGIES, mechanisms.dp_sgd),
    "eana": mechanisms.eana,
    "ada-fest": mechanisms.ada_fest,
    "lazy": mechanisms.lazy_dp_sgd,
    "lazy-each-step": mechanisms.lazy_dp_sgd,
    "lazy-ftrl": mechanisms.lazy_dp_ftrl,
    "dp-ftrl": mechanisms.dp_ftrl,
}
BASELINES = ("keras-sgd", "sparse-sgd", "xla-sgd")
NAMES = (*BASELINES, *MECHANISMS)
USUAL = ("keras-sgd", "sparse-sgd", "dp-sgd-f", "eana", "lazy")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its tables and a batch, trained in one process.

    Attributes:
        label: for people.
        workload: one of `WORKLOADS`.
        table_sizes: rows of each table.
        batch_size: examples a step.
        pooling: ids a bag (history of the two-tower model).
        pattern: which rows are read; see `AccessPattern.named`.
        contestants: of `NAMES`.
        width: of the table of `one-table`.

    Raises:
        ValueError: for an unknown workload or contestant.
    """

    label: str
    workload: str
    table_sizes: tuple[int, ...]
    batch_size: int = 2048
    pooling: int = 1
    pattern: str = "uniform"
    contestants: tuple[str, ...] = USUAL
    width: int = 16

    def __post_init__(self) -> None:
        _refuse_unknown("workload", [self.workload], WORKLOADS)
        _refuse_unknown("contestant", self.contestants, NAMES)


@dataclasses.dataclass(frozen=True)
class ServedCase:
    """A model on a loopback cluster.

    Attributes:
        model: `two-tower` or `kg`.
        rows: of each table.
        dim: values a row.
        batch: examples a step.
        workers: of the cluster.
        servers: parameter servers.

    Raises:
        ValueError: for an unknown model.
    """

    model: str
    rows: int
    dim: int
    batch: int = 64
    workers: int = 2
    servers: int = 2

    def __post_init__(self) -> None:
        _refuse_unknown("model", [self.model], tuple(SERVED_TABLES))

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.model} {self.rows:,}"

    @property
    def table_bytes(self) -> int:
        """Of all tables of one contestant."""
        return SERVED_TABLES[self.model] * self.rows * self.dim * 4


def _refuse_unknown(what: str, given: list[str] | tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, got {name!r}.")
