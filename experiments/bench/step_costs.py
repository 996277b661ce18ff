"""What a step will cost on a cluster, from a few constants measured on one machine.

A step looks up n = batch × ids rows of D values; all n are taken to be different, which is the most it can be. On S
servers and W workers, each with a network of G bits a second and K cores:

=============== ================ ========== ===============================================================
mechanism       to servers       to workers servers, core-nanoseconds
=============== ================ ========== ===============================================================
sgd             8n + (8 + 4D)n   4Dn        (read + add) nD
eana            8n + (8 + 4D)n   4Dn        (read + draw + read + replace) nD
lazydpsgd       8n + (8 + 4D)n   4Dn        (read + add) nD + (draw + read + replace) nD + mark n
dpsgd           8n + (8 + 4D)n   4Dn        read nD + dense RD, where dense is to draw, read and write
dpsgd-on-worker 8n + 4DR         4Dn        read nD + write RD, and draw RD on the worker
=============== ================ ========== ===============================================================

to which come the dense weights (4 bytes each, both ways), for every step and for every call of a server a fixed number
of bytes and microseconds, and for every byte the processor time that sends and receives it. R is the number of rows;
only the last two lines have it.

The steps a second are the least of: W ÷ the time of one step from end to end (workers do not wait for each other); the
servers' cores ÷ what a step needs of them; the servers' network ÷ its bytes; what one coordinator can hand out.

Where the constants come from: `python -m experiments.bench constants`. How far off all this is:
docs/scaling.md.
"""

from __future__ import annotations

import dataclasses
import math

from tfdp_rec import mechanisms
from tfdp_rec.mechanisms import named, names, sgd
from tfdp_rec.refused import refuse_below

ON_WORKER = "dpsgd-on-worker"  # DPSGD whose noise is drawn where the gradient is, and sent: what nobody should do
MECHANISMS = (*names([sgd, *(mechanism for mechanism in mechanisms.MECHANISMS if mechanism.served)]), ON_WORKER)
ID_BYTES, VALUE_BYTES, MARK_BYTES, TOTALS_BYTES = 8, 4, 4, 16


@dataclasses.dataclass(frozen=True)
class Constants:
    """What this package's operations cost: core-nanoseconds a value unless the name says otherwise.

    The defaults are of `python -m experiments.bench constants` on 2 cores of an AMD EPYC with AVX-512 (21 November
    2026); those from `example` on that it does not measure are of the two-tower benchmark.

    Attributes:
        draw: a unit Gaussian.
        read: a value of a row gathered.
        add: a value added to a row, ids may repeat.
        replace: a value of a distinct row replaced.
        mark: a row's mark read, compared and written.
        dense: DPSGD's step of a value: drawn, read, changed, written.
        write: a value of a whole-table gradient added.
        settle: LazyDPSGD's release of a value.
        example: one example's forward and backward pass on the worker; it depends on the model.
        clip: what a private step adds to that: norms, weights, the clipped sum.
        wire: sending and receiving a byte, both ends together.
        call_us: one call of a server, both ends together, in core-microseconds.
        step_us: everything else in a step, in core-microseconds.
        dispatch_us: of that, what the coordinator's one thread needs to hand a step out.
        round_trip_us: what the network adds to a call and its answer.
        call_bytes: what one call of a server adds to the bytes.
        step_bytes: what a step without tables sends.
    """

    draw: float = 3.5
    read: float = 1.8
    add: float = 7.2
    replace: float = 1.4
    mark: float = 24.0
    dense: float = 4.9
    write: float = 1.3
    settle: float = 4.7
    example: float = 30_000.0
    clip: float = 40_000.0
    wire: float = 2.8
    call_us: float = 1_600.0
    step_us: float = 4_000.0
    dispatch_us: float = 1_700.0
    round_trip_us: float = 100.0
    call_bytes: float = 500.0
    step_bytes: float = 2_000.0


@dataclasses.dataclass(frozen=True)
class Deployment:
    """A model's tables, its batches, and a cluster.

    Args:
        rows: of all tables together.
        dim: values a row.
        batch: examples a step.
        ids: rows that an example looks up, all tables together.
        dense_weights: weights outside the tables.
        workers: W.
        servers: S.
        cores: K, of each machine; a worker or server has one to itself.
        gbps: G, of each machine, in units of 10^9 bits a second.
        steps: of the whole training, for the history of totals.

    Raises:
        ValueError: for what is not positive.
    """

    rows: int
    dim: int
    batch: int
    ids: int = 1
    dense_weights: int = 0
    workers: int = 2
    servers: int = 2
    cores: int = 8
    gbps: float = 10.0
    steps: int = 1_000_000

    def __post_init__(self) -> None:
        counts = {name: value for name, value in dataclasses.asdict(self).items() if name != "gbps"}
        refuse_below(0, dense_weights=counts.pop("dense_weights"))
        refuse_below(1, **counts)
        if not 0 < self.gbps < math.inf:
            raise ValueError(f"gbps must be positive, got {self.gbps}.")

    @property
    def lookups(self) -> int:
        """n: rows that a step reads."""
        return self.batch * self.ids

    @property
    def table_bytes(self) -> int:
        """Of the weights of all tables."""
        return self.rows * self.dim * VALUE_BYTES


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one mechanism.

    Attributes:
        mechanism: one of `MECHANISMS`.
        to_servers: bytes from workers to servers, all servers together.
        to_workers: bytes from servers to the worker.
        server: core-seconds on all servers together.
        worker: core-seconds on the worker.
        coordinator: core-seconds of the coordinator.
        seconds: from end to end, with nobody else on the cluster.
        steps_per_second: of the whole cluster.
        bound: what holds it there.
        server_bytes: memory that a server needs for tables, marks and totals.
        settle_seconds: to release the model; 0 if nothing is owed.
    """

    mechanism: str
    to_servers: float
    to_workers: float
    server: float
    worker: float
    coordinator: float
    seconds: float
    steps_per_second: float
    bound: str
    server_bytes: float
    settle_seconds: float

    @property
    def bytes(self) -> float:
        """On the wire, both ways."""
        return self.to_servers + self.to_workers


def plan(mechanism: str, at: Deployment, known: Constants = Constants()) -> Step:
    """What a step costs.

    Args:
        mechanism: one of `MECHANISMS`.
        at: tables, batches and cluster.
        known: measured constants.

    Raises:
        ValueError: for an unknown mechanism.

    Example:
        >>> small, large = (Deployment(rows=rows, dim=64, batch=64, ids=20) for rows in (100_000, 100_000_000))
        >>> plan("lazydpsgd", small).bytes == plan("lazydpsgd", large).bytes
        True
        >>> plan("dpsgd", small).steps_per_second > 100 * plan("dpsgd", large).steps_per_second
        True
    """
    up, down = traffic(mechanism, at, known)
    server, worker = work(mechanism, at, known)
    coordinator = known.dispatch_us * 1e-6
    to_bytes = at.gbps * 1e9 / 8
    seconds = (
        coordinator + server / (at.servers * at.cores) + worker / at.cores
        + (up + down) / to_bytes + _ROUNDS * known.round_trip_us * 1e-6
    )  # fmt: skip
    limits = {
        "latency": at.workers / seconds,
        "servers' cores": at.servers * at.cores / server,
        "servers' network": at.servers * to_bytes / max(up, down),
        "coordinator": 1 / coordinator,
    }
    bound = min(limits, key=limits.__getitem__)
    return Step(
        mechanism, up, down, server, worker, coordinator, seconds, limits[bound], bound,
        memory(mechanism, at), settling(mechanism, at, known),
    )  # fmt: skip


def traffic(mechanism: str, at: Deployment, known: Constants) -> tuple[float, float]:
    """Bytes to servers and to the worker in one step."""
    n, row = at.lookups, at.dim * VALUE_BYTES
    fixed = (known.step_bytes + _calls(at) * known.call_bytes) / 2 + at.dense_weights * VALUE_BYTES
    gradient = at.rows * row if _checked(mechanism) == ON_WORKER else n * (ID_BYTES + row)
    return n * ID_BYTES + gradient + fixed, n * row + fixed


def work(mechanism: str, at: Deployment, known: Constants) -> tuple[float, float]:
    """Core-seconds on all servers and on the worker in one step."""
    touched, every = at.lookups * at.dim, at.rows * at.dim
    touch = known.draw + known.read + known.replace
    on_worker = _checked(mechanism) == ON_WORKER
    update = known.write * every if on_worker else {
        "none": known.add * touched,
        "touched": touch * touched,
        "owed": (known.add + touch) * touched + known.mark * at.lookups,
        "every": known.dense * every,
    }[named(mechanism).rows]  # fmt: skip
    drawn = known.draw * every if on_worker else 0.0
    transport = sum(traffic(mechanism, at, known)) * known.wire
    calls = (_calls(at) * known.call_us + known.step_us - known.dispatch_us) * 1e3
    server = known.read * touched + update + (transport + calls) / 2
    passes = known.example + (0.0 if mechanism == sgd.name else known.clip)
    worker = passes * at.batch + drawn + (transport + calls) / 2
    return server * 1e-9, worker * 1e-9


def memory(mechanism: str, at: Deployment) -> float:
    """Bytes that a server needs for its shards: weights, and for LazyDPSGD marks and a history of totals."""
    weights = at.table_bytes / at.servers
    if not _owes(mechanism):
        return weights
    return weights + at.rows * MARK_BYTES / at.servers + at.steps * TOTALS_BYTES


def settling(mechanism: str, at: Deployment, known: Constants) -> float:
    """Seconds until all rows are settled, all cores of all servers at it."""
    if not _owes(mechanism):
        return 0.0
    return known.settle * at.rows * at.dim * 1e-9 / (at.servers * at.cores)


def on_one_machine(step: Step, at: Deployment) -> Step:
    """The same step where coordinator, workers and servers all share one machine: its cores are what bounds it.

    Args:
        step: as planned for machines of their own.
        at: what it was planned for; its cores are the machine's.
    """
    total = step.server + step.worker + step.coordinator
    return dataclasses.replace(
        step,
        seconds=total / min(at.cores, at.servers),
        steps_per_second=at.cores / total,
        bound="shared cores",
        server_bytes=step.server_bytes * at.servers,
        settle_seconds=step.settle_seconds * at.servers,
    )


def _calls(at: Deployment) -> int:
    """Calls of servers in a step: every server is asked for rows once, and gets the step once."""
    return 2 * at.servers


_ROUNDS = 3  # calls that wait for each other's answer: the function on the worker, its rows, its step


def _owes(mechanism: str) -> bool:
    """Whether rows owe noise, which is kept track of and paid at release."""
    return _checked(mechanism) != ON_WORKER and named(mechanism).rows == "owed"


def _checked(mechanism: str) -> str:
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {mechanism!r}.")
    return mechanism
