"""How units (users, or examples) come into batches, and what that means for the privacy they get.

A *unit* is what the guarantee protects. It gives at most one row to a batch.

**Poisson sampling.** Every unit is in every batch independently with probability q = B/n. The size of a batch
is then Binomial(n, q), and given its size m every set of m units is equally likely:

    P(S) = q^|S| (1 - q)^(n - |S|) = P(|S|) · 1 / C(n, |S|)

so drawing the size and then a set of that size without replacement is the same distribution as n coin flips,
at a cost of the batch rather than of the data set. A step whose event is E costs PoissonSampled(q, E).

**Neighbours are zero-out**, for every scheme: the number of units n is public, so D' has as many units as D, one of
which *contributes nothing* in D': its row is there, and whatever it holds, no gradient, loss or vote for a row comes of
it (`present`; a loss of zero has the same effect). A row of zeros is a row of data like any other. A Poisson-sampled
step then gives, with s the sum over the other units that were drawn and g the gradient of the one in question,

    D:  (1 - q) N(s, σ²) + q N(s + g, σ²)          D':  N(s, σ²)

which is the mixture that `dp_accounting` prices as ADD_OR_REMOVE_ONE, in both directions: ε is the same number.

**Random allocation.** Every unit is in exactly one of the T batches of an epoch, and which is uniform, independently of
the other units and of other epochs: a shuffle whose batch sizes vary. An epoch of steps whose event is E costs
RandomAllocation(E, T) (`allocation.py`), less than T Poisson-sampled steps in most cases. A single step has no price:
parts of two epochs may hold a unit twice, where one epoch of as many steps holds it once. So an epoch is counted, and
paid for, at its first step, and a step of an epoch that was not begun is refused (`open_epoch.py`).

A shuffle into batches of equal size is neither, since one unit's place then tells of others': to account it as if it
were is a common mistake, and it has no price with independent noise. Data in one order have one under planned noise
(`orders.py`).

Several Gaussians on one batch are one Gaussian: scaled to unit noise, N(f_i/σ_i) stacked has squared
sensitivity Σ 1/σ_i², so noise multipliers σ_1, σ_2, ... together equal (Σ σ_i^-2)^(-1/2). This is exact also
when they are chosen adaptively.

The randomness comes from the operating system's entropy (`secret_draws.py`). Which units were sampled is secret:
amplification holds only against an attacker that does not know it. So there is no generator whose state could be
found, and a resumed run draws afresh.
"""

from __future__ import annotations

import abc
import functools
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent

from tfdp_rec.core.claim.events import FailingDpEvent, RandomAllocationDpEvent
from tfdp_rec.core.claim.fetch import Fetch, Shared, join, require_rows, signature_of, spec_of_rows
from tfdp_rec.core.claim.names import NAMED, new_iteration
from tfdp_rec.core.claim.secret_draws import poisson_sample, uniform_numbers
from tfdp_rec.core.ground.files import Path
from tfdp_rec.core.ground.refused import NotPrivate, refuse_no_number

Run = tuple[DpEvent, int]
ZERO_OUT = "zero-out"

_RARE_OVERFLOW = 1e-12  # chance of a batch, to which "auto" fits the capacity

_SCHEMES: dict[str, type[Sampling]] = {}


class Sampling(abc.ABC):
    """A public number of units, how they are drawn, and how a step's event composes under that.

    Each training has an object of its own: a draw is used for one step only.

    Args:
        num_units: Number of units; treated as public.
        expected_batch_size: Average number of units in a batch.
        unit: Name of a unit in a privacy statement, such as "user".
        capacity: Number of rows that every batch has: rows beyond those drawn contribute nothing. None for as many rows
            as were drawn; "auto" for the least with which a batch overflows with a chance of 10^-12 at most.

    Raises:
        ValueError: `num_units` is not a positive integer, the batch size is not between 0 and `num_units`, or the
            capacity is below it.
    """

    adjacency = ZERO_OUT  # of every scheme: the number of units is public
    positioned = False  # whether batches have places in an order, from one of which `position` continues

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _SCHEMES[cls.__name__] = cls

    def __init__(
        self, num_units: int, expected_batch_size: float, unit: str = "example", capacity: int | str | None = None
    ):
        self.num_units = integer("num_units", num_units)
        refuse_no_number("expected_batch_size", expected_batch_size)
        if not 0 < expected_batch_size < math.inf:
            raise ValueError(f"expected_batch_size must be positive, got {expected_batch_size!r}.")
        if expected_batch_size > num_units:
            raise ValueError(
                f"expected_batch_size ({expected_batch_size!r}) is larger than num_units ({num_units!r}): "
                f"there are fewer units than a batch should hold, here {unit}s. Give at most a tenth of them."
            )
        whole = int(expected_batch_size) == expected_batch_size
        self.expected_batch_size = int(expected_batch_size) if whole else float(expected_batch_size)
        self.unit = unit
        self.capacity: int | None = None if capacity is None else self._fit_capacity(capacity)
        self.name = secrets.token_hex(8)
        self.graph_streams = 0
        NAMED[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Sampling.from_state, (self.get_state(),)  # a copy is another sampling: its draws have its own price

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_in_use") and name in ("name", "expected_batch_size", "capacity", *self.get_state()):
            raise AttributeError(
                f"{name} of a {type(self).__name__} is fixed once it has drawn batches, since its steps are priced by "
                "it: make another sampling, and batches and an accountant of that one."
            )
        super().__setattr__(name, value)

    def _fit_capacity(self, capacity: int | str) -> int:
        from scipy import stats  # slow to import

        others, probability = self.num_units - 1, self.expected_batch_size / self.num_units
        if capacity == "auto":
            return min(self.num_units, 1 + int(stats.binom.isf(_RARE_OVERFLOW, others, probability)))
        if isinstance(capacity, str) or integer("capacity", capacity) < self.expected_batch_size:
            raise ValueError(
                f"capacity must be at least the expected batch size, {self.expected_batch_size:g}, got {capacity!r}: "
                'the number of rows of every batch, or "auto".'
            )
        return min(self.num_units, int(capacity))

    @property
    def overflow(self) -> float:
        """A bound on the chance that a batch draws a unit and more than the capacity; the rest of it is left out."""
        if self.capacity is None:
            return 0.0
        from scipy import stats

        # A unit is in no full batch while the others are fewer than the capacity.
        chance = stats.binom.sf(self.capacity - 1, self.num_units - 1, self.expected_batch_size / self.num_units)
        return min(1.0, 1.001 * float(chance))

    @abc.abstractmethod
    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Endless batches of unit indices; arguments as in `batches`."""

    @property
    def steps_at_once(self) -> int:
        """Number of successive steps that are counted, and paid for, at the first of them."""
        return 1

    def refuse_parts(self, steps: int) -> None:
        """Raises for a number of steps in which some are left of those that are paid for together."""
        if rest := int(steps) % self.steps_at_once:
            less, more = steps - rest, steps - rest + self.steps_at_once
            raise ValueError(
                f"steps={steps} must be whole epochs of {self.steps_at_once} steps, each of which is paid for as a "
                f"whole: {less or more}, say."
            )

    def price(self, event: DpEvent) -> DpEvent | None:
        """The event of `steps_at_once` steps, each of which is `event` on its batch; None if steps have no price."""
        return None

    def compose_history(self, runs: Sequence[Run]) -> DpEvent:
        """The event of a training.

        Args:
            runs: Pairs (event of one step, number of steps) in order.
        """
        return compose_all(
            dp_accounting.SelfComposedDpEvent(self._whole_price(event), -(-steps // self.steps_at_once))
            for event, steps in runs
        )

    def _whole_price(self, event: DpEvent) -> DpEvent | None:
        # Where no batch overflows, what is left out of one is nothing: a failure with the chance of the others.
        price, overflow = self.price(event), self.overflow * self.steps_at_once
        return dp_accounting.ComposedDpEvent([price, FailingDpEvent(overflow)]) if overflow else price

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for a privacy statement."""

    def compose(self, event: DpEvent, steps: int) -> DpEvent:
        """The event of a number of steps, each of which is `event` on its batch."""
        return self.compose_history([(event, steps)])

    def batches(
        self,
        fetch: Fetch,
        seed: int | None = None,
        position: int = 0,
        output_signature: Any = None,
        *,
        shared: Shared | None = None,
        map: Callable[..., Any] | None = None,  # noqa: A002
        present: Callable[[Any], Any] | None = None,
    ) -> Any:
        """An endless tf.data.Dataset of `Drawn(batch, draw)`: batches that prove to a private step how they were drawn.

        Args:
            fetch: Function from an int64 array of unit indices (perhaps empty) to features: NumPy arrays in any nest of
                dicts and tuples, each with one row for each index, in their order.
            seed: Seed for tests alone; batch k is a function of (seed, k), and ε is infinite. None for the operating
                system's entropy, which privacy needs.
            position: Number of batches that were already trained on. It matters in a fixed order, or together with a
                seed to continue a test; otherwise a resumed run draws afresh.
            output_signature: Nest of tf.TensorSpec of what `fetch` returns. By default it is found by fetching 0, 1 and
                2 units; dimensions that change between them are left open.
            shared: Function without arguments that makes what all examples of a batch share (negatives, say), as a
                dict; the drawn units are hidden from it. Its entries join the dict that `fetch` returns, or the first
                entry of a tuple.
            map: TensorFlow function from batch to batch that works row by row, which is read: row i of its result is
                made of row i alone. Python code and random numbers belong into `fetch`.
            present: Function from an array of unit indices to booleans: whether each unit has data. The rows of the
                others contribute nothing, whatever they hold. None if all units have data.

        Raises:
            NotPrivate: `fetch` does not return one row for each index, or `map` mixes rows.
            ValueError: `fetch` returns different structures or dtypes for different indices (often an empty array
                that became float64).
        """
        import tensorflow as tf

        from tfdp_rec.core.claim import sampling_proof

        if seed is None and position and not self.positioned:
            raise ValueError("position means nothing without a seed: a resumed run draws fresh batches. Omit it.")
        self._in_use = True
        signature = output_signature or signature_of(fetch, self.num_units, self.capacity)
        drawn = lambda: self._fetch_draws(fetch, seed, position, present)  # noqa: E731
        dataset = sampling_proof.generate(drawn, signature, self, shared, map, seeded=seed is not None)
        return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)).prefetch(1)

    def _fetch_draws(self, fetch: Fetch, seed: int | None, position: int, present: Any) -> Iterator[Any]:
        iteration = new_iteration()
        for number, drawn in enumerate(self.index_batches(seed, position)):
            indices, seated = self._seat(drawn)
            there = seated if present is None else np.asarray(present(indices), bool)
            if there.shape != seated.shape:
                raise NotPrivate(f"Refused batch: present must give a boolean for each index, got {list(there.shape)}.")
            draw = iteration, number, len(indices), position + number, there & seated
            yield draw, require_rows(fetch(indices), len(indices))

    def _seat(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As many rows as the capacity, the others zeros; and whether each of them was drawn."""
        if self.capacity is None:
            return rows, np.ones(len(rows), bool)
        seats = np.full([self.capacity, *rows.shape[1:]], b"" if rows.dtype == object else 0, rows.dtype)
        seats[: len(rows)] = rows[: self.capacity]
        return seats, np.arange(self.capacity) < len(rows)

    def get_state(self) -> dict[str, Any]:
        """Settings of the sampling; nothing about the units that were sampled."""
        size: dict[str, Any] = {"expected_batch_size": self.expected_batch_size}
        return {"scheme": type(self).__name__, "num_units": self.num_units, **size, "unit": self.unit, **self._seats}

    @property
    def _words_of_capacity(self) -> str:
        if self.capacity is None:
            return ""
        return f"; {self.capacity} rows a batch, more with a chance of {self.overflow:.2g}, which counts as a failure"

    @property
    def _seats(self) -> dict[str, Any]:
        return {} if self.capacity is None else {"capacity": self.capacity}

    @staticmethod
    def from_state(state: dict[str, Any]) -> Sampling:
        """A sampling with the settings that `get_state` returned.

        Example:
            >>> Sampling.from_state(PoissonSampling(100, 10, unit="user").get_state()).unit
            'user'
        """
        if state.get("scheme") not in _SCHEMES:
            raise ValueError(f"Unknown sampling scheme {state.get('scheme')!r}; known are {', '.join(_SCHEMES)}.")
        settings = {name: value for name, value in state.items() if name != "scheme"}
        try:
            return _SCHEMES[state["scheme"]](**settings)
        except TypeError:
            raise ValueError(f"{state['scheme']} does not have these settings: {settings}.") from None


class PoissonSampling(Sampling):
    """Every unit in every batch independently with probability q = expected_batch_size / num_units.

    Batches vary in size and may be empty. Guarantee: a step with event E costs PoissonSampled(q, E), however the steps
    are interrupted and resumed. The number of units is public: a unit without data is drawn as any other, and has a row
    that contributes nothing, so that no shape depends on the data.

    Args:
        num_units: Number of units; treated as public.
        expected_batch_size: Average number of units in a batch.
        unit: Name of a unit in a privacy statement.
        capacity: Number of rows that every batch has, or "auto", as in `Sampling`.

    Example:
        >>> sampling = PoissonSampling(num_units=138_493, expected_batch_size=1024, unit="user")
        >>> sampling.probability
        0.00739
        >>> len(next(sampling.index_batches(seed=0)))
        1064
    """

    @property
    def probability(self) -> float:
        """q, the chance that a unit is in a given batch."""
        return self.expected_batch_size / self.num_units

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Endless Poisson samples of range(num_units), as int64 arrays in no particular order."""
        while seed is None:
            yield poisson_sample(self.num_units, self.probability)
        for number in itertools.count(position):
            generator = np.random.default_rng([seed, number])
            size = generator.binomial(self.num_units, self.probability)
            yield generator.choice(self.num_units, size, replace=False, shuffle=False)

    def graph_batches(
        self,
        fetch: Callable[[Any], Any],
        *,
        shared: Callable[[], dict[str, Any]] | None = None,
        map: Callable[..., Any] | None = None,  # noqa: A002
        present: Callable[[Any], Any] | None = None,
    ) -> Any:
        """`batches` made of TensorFlow operations alone, for the workers of a cluster.

        A worker on another machine runs no Python, so that `batches` does not work there. The draws come from that
        machine's entropy and cannot be seeded.

        Args:
            fetch: Function from an int64 tensor of unit indices, shape [None], perhaps empty, to a nest of tensors,
                each with one row for each index.
            shared: Function without arguments that makes what all examples of a batch share, as a dict of tensors; the
                drawn units are hidden from it.
            map: Function from batch to batch, as in `batches`.
            present: Function from a tensor of unit indices to booleans, as in `batches`.

        Example:
            >>> sampling = PoissonSampling(num_units=4, expected_batch_size=4)
            >>> batches = sampling.graph_batches(lambda indices: {"id": indices})
            >>> next(iter(batches)).batch["id"].numpy().tolist()
            [0, 1, 2, 3]
        """
        import tensorflow as tf

        from tfdp_rec.core.claim import sampling_proof
        from tfdp_rec.core.claim.graph_sampling import make_draws

        self.graph_streams += 1
        self._in_use = True
        keys: set[str] = set()

        def fetch_batch(iteration: Any, number: Any, drawn: Any) -> Any:
            indices, seated = drawn, tf.ones_like(drawn, tf.bool)
            if self.capacity is not None:
                rest = tf.maximum(self.capacity - tf.size(drawn), 0)
                indices = tf.ensure_shape(tf.pad(drawn[: self.capacity], [[0, rest]]), [self.capacity])
                seated = tf.range(self.capacity) < tf.size(drawn)
            rows = fetch(indices)
            if shared is not None:
                made = shared()
                keys.update(made)
                rows = join(rows, made)
            there = seated if present is None else tf.ensure_shape(present(indices), seated.shape)
            there = there if self.capacity is None else there & seated
            return (iteration, number, tf.size(indices, tf.int64), number, there), rows

        dataset = make_draws(self.num_units, self.probability).map(fetch_batch)
        return sampling_proof.dataset_of(dataset, self, False, sorted(keys), map).prefetch(2)

    def price(self, event: DpEvent) -> DpEvent:
        """PoissonSampled(q, event)."""
        return dp_accounting.PoissonSampledDpEvent(self.probability, fold_gaussians(event))

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"Poisson: every {self.unit} is in every batch independently with probability "
            f"q = {self.expected_batch_size}/{self.num_units} = {self.probability:.6g}{self._words_of_capacity}"
        )


class RandomAllocation(Sampling):
    """Every unit in one batch of every epoch of `steps_per_epoch` batches; which one is uniformly random.

    Batches vary in size and may be empty. Guarantee: an epoch with steps of event E costs RandomAllocation(E, T), once
    its first step is made. What is left of an epoch when a fit ends, or a process, is not made: the next fit begins
    another one.

    Args:
        num_units: Number of units; treated as public.
        steps_per_epoch: Number T of batches in an epoch.
        unit: Name of a unit in a privacy statement.
        capacity: Number of rows that every batch has, or "auto", as in `Sampling`.

    Example:
        >>> sampling = RandomAllocation(num_units=138_493, steps_per_epoch=135, unit="user")
        >>> epoch = sampling.index_batches(seed=0)
        >>> sum(len(next(epoch)) for _ in range(135))
        138493
    """

    def __init__(
        self, num_units: int, steps_per_epoch: int, unit: str = "example", capacity: int | str | None = None
    ):
        self.steps_per_epoch = integer("steps_per_epoch", steps_per_epoch)
        super().__init__(num_units, integer("num_units", num_units) / self.steps_per_epoch, unit, capacity)

    @property
    def steps_at_once(self) -> int:
        return self.steps_per_epoch

    def index_batches(self, seed: int | None = None, position: int = 0) -> Iterator[np.ndarray]:
        """Endless epochs of batches of unit indices, as int64 arrays in no particular order."""
        epoch, skipped = divmod(position, self.steps_per_epoch)
        while True:
            batches = np.split(*self._allocate(None if seed is None else np.random.default_rng([seed, epoch])))
            yield from batches[skipped:]
            epoch, skipped = epoch + 1, 0

    def file_batches(
        self, rows: Iterable[Any], seed: int | None = None, *, shared: Shared | None = None,
        map: Callable[..., Any] | None = None, folder: Path | None = None, memory: int = 2**28,  # noqa: A002
    ) -> Any:
        """`batches` of rows that are read from front to back, once in each epoch, whose rows lie on disk by batch then.

        Each row is a unit. What is on disk is readable by its owner alone, and goes with the epoch.

        Args:
            rows: Stretches of rows, as often as they are iterated: a `tfdp_rec.data.RowFiles`, a `tf.data.Dataset` of
                batches of any size, or an object of yours whose `__iter__` gives nests of arrays with a row each.
            seed: Seed for tests alone, as in `batches`.
            shared: Function without arguments that makes what all examples of a batch share, as in `batches`.
            map: TensorFlow function from batch to batch that works row by row, as in `batches`.
            folder: Folder for the rows; by default the system's, for temporary files.
            memory: Number of bytes that rows take in memory at most, about.

        Raises:
            TypeError: `rows` can be iterated once only.
            ValueError: Before the first batch of an epoch: there are more or fewer rows than `num_units`.
        """
        import tensorflow as tf

        from tfdp_rec.core.claim import sampling_proof
        from tfdp_rec.core.ground.spread import spread

        if isinstance(rows, dict | np.ndarray) or not isinstance(rows, Iterable):
            raise TypeError(
                "rows are stretches of rows: tfdp_rec.data.RowFiles, or a tf.data.Dataset of batches. For arrays in "
                "memory call batches(lambda indices: ...)."
            )
        if iter(rows) is rows:
            raise TypeError("rows are read once in each epoch, an iterator once alone: give what can be read again.")
        if self.unit not in ("row", "example"):
            raise NotPrivate(
                f"Here each row of files is a unit, and this sampling's are {self.unit}s, who may have several: "
                'RandomAllocation(..., unit="row") has an epsilon for one row.'
            )
        self._in_use = True

        def allocate_epochs() -> Iterator[Any]:
            for epoch in itertools.count():
                generator = None if seed is None else np.random.default_rng([seed, epoch])
                numbers = functools.partial(self._draw_numbers, generator)
                yield from spread(rows, numbers, self.num_units, self.steps_per_epoch, folder, memory)

        def draw_batches() -> Iterator[Any]:
            iteration = new_iteration()
            try:
                for number, batch in enumerate(allocate_epochs()):
                    _, seated = self._seat(tf.nest.flatten(batch)[0])
                    batch = tf.nest.map_structure(lambda rows: self._seat(rows)[0], batch)
                    yield (iteration, number, len(seated), number, seated), batch
            except (ValueError, OSError) as problem:  # in words that a step passes on
                raise NotPrivate(f"Refused batch: {problem}") from problem

        spec = spec_of_rows(rows, self.capacity)
        dataset = sampling_proof.generate(draw_batches, spec, self, shared, map, seeded=seed is not None)
        return dataset.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    def _allocate(self, generator: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """The units by their batches, and where each batch but the first begins."""
        numbers = self._draw_numbers(generator, self.num_units)
        return np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers, minlength=self.steps_per_epoch))[:-1]

    def _draw_numbers(self, generator: np.random.Generator | None, count: int) -> np.ndarray:
        """The batches of so many units; from a generator in tests."""
        most = self.steps_per_epoch
        return uniform_numbers(count, most) if generator is None else generator.integers(0, most, count)

    def price(self, event: DpEvent) -> DpEvent:
        """RandomAllocation(event, T)."""
        return RandomAllocationDpEvent(fold_gaussians(event), self.steps_per_epoch)

    def get_state(self) -> dict[str, Any]:
        """Settings of the sampling; nothing about the units that were sampled."""
        size: dict[str, Any] = {"steps_per_epoch": self.steps_per_epoch}
        return {"scheme": type(self).__name__, "num_units": self.num_units, **size, "unit": self.unit, **self._seats}

    def describe(self) -> str:
        """One line for a privacy statement."""
        return (
            f"random allocation: every {self.unit} is in one of the {self.steps_per_epoch} batches of each epoch, "
            f"which is uniformly random{self._words_of_capacity}"
        )


def fold_gaussians(event: DpEvent) -> DpEvent:
    """Gaussians on one batch as the single equal Gaussian; any other event unchanged."""
    if isinstance(event, GaussianDpEvent):
        return GaussianDpEvent(float(event.noise_multiplier))
    precision = _precision(event)
    return event if precision is None else GaussianDpEvent(1 / math.sqrt(precision) if precision else math.inf)


def _precision(event: DpEvent) -> float | None:
    """Σ σ^-2 of a nest of Gaussians; None if there is anything else in it, or a Gaussian without noise."""
    if isinstance(event, GaussianDpEvent):
        return None if event.noise_multiplier <= 0 else float(event.noise_multiplier) ** -2
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        inner = _precision(event.event)
        return None if inner is None else event.count * inner
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [_precision(part) for part in event.events]
        return None if None in parts else math.fsum(part for part in parts if part is not None)
    return None


def integer(name: str, value: Any) -> int:
    """A setting as a positive integer."""
    if not 0 < value < math.inf or int(value) != value:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    return int(value)


def compose_all(events: Any) -> DpEvent:
    """Several events as one."""
    parts = list(events)
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)
