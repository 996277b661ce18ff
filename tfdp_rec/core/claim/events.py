"""Privacy events: as text, as JSON, and whether they have a guarantee at all.

The other rooms take all classes of events from here, dp_accounting's too: they name an event, and this room prices it.

An event whose class is not in `KINDS` is refused. A new event needs a class, and a row in `KINDS`, whose `priced_as`
names an event that costs at least as much and has a price.

Five classes are this package's, since dp_accounting has none for

- releases of a person's own items: `PureDpEvent`, `PaddedDpEvent` (priced in `profiles.py`);
- a step of a training whose cost is that of the whole: `PlannedDpEvent` (`core/claim/orders.py` prices it);
- an epoch of steps, each unit in exactly one of them: `RandomAllocationDpEvent` (priced in `allocation.py`);
- a failure with a small probability: `FailingDpEvent`, whose probability is subtracted from δ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent

REPLACE = "replace-one"
"""Relation of data sets of which one has another item, or label, in the place of one of the other's."""


@dataclasses.dataclass(frozen=True)
class PureDpEvent(DpEvent):
    """A release with pure ε, whatever its form: a permuted label, Laplace noise on a vector."""

    epsilon: float  # infinite: no guarantee


@dataclasses.dataclass(frozen=True)
class PaddedDpEvent(DpEvent):
    """A release of items, each replaced by a fixed item with probability `padding`, anew for every release."""

    event: DpEvent  # the release without padding, between any two lists of items
    padding: float


@dataclasses.dataclass(frozen=True)
class FailingDpEvent(DpEvent):
    """A release that may reveal everything with probability `delta`, and nothing otherwise: (0, δ)-DP."""

    delta: float


@dataclasses.dataclass(frozen=True)
class PlannedDpEvent(DpEvent):
    """A step of a planned training, whose price is that of the whole training, even if few steps are made."""

    event: DpEvent  # cost of the whole training: a Gaussian, or none
    steps: int
    separation: int  # least number of steps between two steps of one unit
    participations: int  # largest number of steps of one unit
    plan: str  # id of the plan, and of its entry: a plan is paid for once


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(DpEvent):
    """An epoch of steps, each of which is `event` on its batch, each unit in one batch that is uniformly random."""

    event: DpEvent
    steps_per_epoch: int


class Kind(NamedTuple):
    """Text and guarantee of the events of one class."""

    words: str  # part of a sentence, with the event's fields, and the text of inner events, in braces
    has_guarantee: Callable[[Any], bool] = lambda event: True  # without regard to inner events
    priced_as: Callable[[Any], DpEvent] | None = None  # for classes that no accountant knows


_LEAST_TO_ALLOCATE = 0.1  # noise multiplier
_LEAST_NOISE = 1e-100  # of less the square is no number to divide by

KINDS: dict[type, Kind] = {
    GaussianDpEvent: Kind(
        "Gaussian noise of multiplier {noise_multiplier:g}", lambda event: event.noise_multiplier >= _LEAST_NOISE
    ),
    LaplaceDpEvent: Kind(
        "Laplace noise of multiplier {noise_multiplier:g}", lambda event: event.noise_multiplier >= _LEAST_NOISE
    ),
    NoOpDpEvent: Kind("nothing"),
    NonPrivateDpEvent: Kind("a mechanism without a formal guarantee", lambda event: False),
    ComposedDpEvent: Kind("{events}"),
    SelfComposedDpEvent: Kind("{count} times {event}"),
    PoissonSampledDpEvent: Kind("{event} on a Poisson sample with probability {sampling_probability:.6g}"),
    PureDpEvent: Kind("a release of pure epsilon {epsilon:g}", lambda event: event.epsilon < math.inf),
    PaddedDpEvent: Kind("{event} on items padded with probability {padding:g}"),
    FailingDpEvent: Kind("what fails with probability {delta:g}"),
    PlannedDpEvent: Kind(
        "noise correlated over a training of {steps} steps, planned for units in at most {participations} of them, at "
        "least {separation} apart, which as a whole is {event}"
    ),
    RepeatAndSelectDpEvent: Kind("the best of {mean:g} runs on average, whose number is drawn, of {event} each"),
    RandomAllocationDpEvent: Kind(
        "an epoch of {steps_per_epoch} steps of {event}, each unit in one of them, which is random"
    ),
}


def _kinds_by_name() -> dict[str, type]:
    return {kind.__name__: kind for kind in KINDS}


class _Range(NamedTuple):
    type: type
    holds: Callable[[Any], bool]
    words: str


# By name of the field: a name has one meaning in all events.
_RANGES = {
    "noise_multiplier": _Range(float, lambda value: 0 <= value <= 1e100, "from 0 to 10^100"),
    "epsilon": _Range(float, lambda value: value >= 0, "at least 0"),
    "delta": _Range(float, lambda value: 0 <= value < 1, "in [0, 1)"),
    "padding": _Range(float, lambda value: 0 <= value < 1, "in [0, 1)"),
    "sampling_probability": _Range(float, lambda value: 0 <= value <= 1, "in [0, 1]"),
    "count": _Range(int, lambda value: 0 <= value == int(value), "a whole number, at least 0"),
    "mean": _Range(float, lambda value: 1.01 <= value <= 1000, "from 1.01 to 1,000"),
    "shape": _Range(float, lambda value: 0 <= value <= 100, "from 0 to 100"),
    "steps_per_epoch": _Range(int, lambda value: 1 <= value == int(value), "a whole number, at least 1"),
}


def _fields(event: DpEvent) -> dict[str, Any]:
    """Arguments of an event's constructor."""
    kind: Any = type(event)
    # dp_accounting's classes are made by attrs, those of this package are dataclasses.
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else getattr(kind, "__attrs_attrs__", ())
    return {field.name: getattr(event, field.name) for field in fields}


def _inner(event: DpEvent) -> list[DpEvent]:
    events = getattr(event, "events", None) or [getattr(event, "event", None)]
    return [inner for inner in events if inner is not None]


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as JSON-able nested dicts, each with the name of its class as `type`.

    Args:
        event: Event whose class, and those of its parts, are in `KINDS`.

    Raises:
        ValueError: A class is unknown, a field is out of its range, or a failure is within a sampling.
    """
    name = type(event).__name__
    if isinstance(event, PoissonSampledDpEvent | RandomAllocationDpEvent) and split_failures(event.event)[1] > 0:
        what = describe(event)
        raise ValueError(f"What fails within a sampling has no price here: {what}. Pay for it as if unsampled.")
    if type(event) not in KINDS:
        raise ValueError(f"{event!r} is not an event this accountant knows; known are {', '.join(_kinds_by_name())}.")
    return {"type": name} | {field: _plain(field, value) for field, value in _fields(event).items()}


def _plain(field: str, value: Any) -> Any:
    if field == "event":
        return to_json(value)
    if field == "events":
        return [to_json(part) for part in value]
    if field not in _RANGES:
        return value
    within = _RANGES[field]
    if not within.holds(value):
        raise ValueError(f"{field} must be {within.words}, got {value!r}.")
    return within.type(value)


def from_json(fields: dict[str, Any]) -> DpEvent:
    """The inverse of `to_json`.

    Args:
        fields: Result of `to_json`.

    Raises:
        ValueError: A class is unknown.
    """
    arguments = dict(fields)
    name = arguments.pop("type", None)
    known = _kinds_by_name()
    if name not in known:
        raise ValueError(f"Unknown event type {name!r}; known are {', '.join(known)}.")
    if "event" in arguments:
        arguments["event"] = from_json(arguments["event"])
    if "events" in arguments:
        arguments["events"] = [from_json(part) for part in arguments["events"]]
    try:
        return known[name](**arguments)
    except TypeError as problem:
        raise ValueError(f"A {name} of another version of tfdp_rec, which has other fields: {problem}.") from problem


def describe(event: DpEvent) -> str:
    """The event as part of a sentence, such as "3 times Gaussian noise of multiplier 2".

    Args:
        event: Event to describe.
    """
    fields = _fields(event)
    inner = " and ".join(describe(part) for part in _inner(event))
    unknown = KINDS[NonPrivateDpEvent]
    return KINDS.get(type(event), unknown).words.format(**fields | {"event": inner, "events": inner})


def is_private(event: DpEvent) -> bool:
    """Whether the event has a finite guarantee: no non-private part, and noise in every part that needs it."""
    kind = KINDS.get(type(event))
    return kind is not None and kind.has_guarantee(event) and all(map(is_private, _inner(event)))


def is_release(event: DpEvent) -> bool:
    """Whether an event has a part that only `profiles.py` can price."""
    return isinstance(event, PureDpEvent | PaddedDpEvent) or any(map(is_release, _inner(event)))


def has_plan(event: DpEvent) -> bool:
    """Whether an event contains single steps of a planned training."""
    return isinstance(event, PlannedDpEvent) or any(map(has_plan, _inner(event)))


def parts_of(event: DpEvent, times: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """(event, count) of the parts that an event is composed of, without those of count 0."""
    if isinstance(event, ComposedDpEvent):
        for part in event.events:
            yield from parts_of(part, times)
    elif isinstance(event, SelfComposedDpEvent):
        yield from parts_of(event.event, times * event.count)
    elif times and not isinstance(event, NoOpDpEvent) and getattr(event, "sampling_probability", 1) > 0:
        yield event, times


def split_failures(event: DpEvent) -> tuple[DpEvent, float]:
    """An event without its failures, and the sum of their probabilities δ', which adds to the δ of the rest."""
    # Failures under Poisson sampling stay, unless they never come: no pricing of them is known, and accountants refuse
    # the event.
    if isinstance(event, FailingDpEvent):
        return NoOpDpEvent(), event.delta
    if isinstance(event, ComposedDpEvent):
        parts = [split_failures(part) for part in event.events]
        lost = math.fsum(delta for _, delta in parts)
        kept = [part for part, _ in parts]
        same = all(new is old for new, old in zip(kept, event.events))
        return (event, 0.0) if same else (ComposedDpEvent(kept), lost)
    if isinstance(event, SelfComposedDpEvent):
        part, delta = split_failures(event.event)
        same = part is event.event
        return (event, 0.0) if same else (SelfComposedDpEvent(part, event.count), event.count * delta)
    if isinstance(event, RepeatAndSelectDpEvent):
        part, delta = split_failures(event.event)
        same = part is event.event
        return (event, 0.0) if same else (RepeatAndSelectDpEvent(part, event.mean, event.shape), event.mean * delta)
    if isinstance(event, PoissonSampledDpEvent):
        part, delta = split_failures(event.event)
        if part is event.event or delta > 0:
            return event, 0.0
        # Accountants know no sample of nothing.
        left = [one if times == 1 else SelfComposedDpEvent(one, times) for one, times in parts_of(part)]
        rest = left[0] if len(left) == 1 else ComposedDpEvent(left)
        sampled = PoissonSampledDpEvent(event.sampling_probability, rest)
        return (sampled if left else NoOpDpEvent()), 0.0
    return event, 0.0


def as_priced(event: DpEvent) -> DpEvent:
    """The event in classes that have a price."""
    substitute = KINDS[type(event)].priced_as if type(event) in KINDS else None
    if substitute is not None:
        return as_priced(substitute(event))
    if isinstance(event, ComposedDpEvent):
        return ComposedDpEvent([as_priced(part) for part in event.events])
    if isinstance(event, SelfComposedDpEvent):
        return SelfComposedDpEvent(as_priced(event.event), event.count)
    if isinstance(event, PoissonSampledDpEvent):
        return PoissonSampledDpEvent(event.sampling_probability, as_priced(event.event))
    if isinstance(event, RepeatAndSelectDpEvent):
        return RepeatAndSelectDpEvent(as_priced(event.event), event.mean, event.shape)
    if isinstance(event, RandomAllocationDpEvent):
        event = dataclasses.replace(event, event=as_priced(event.event))
        # One step of hardly any noise costs as much as the epoch, within what matters, and more.
        return event.event if getattr(event.event, "noise_multiplier", 1.0) < _LEAST_TO_ALLOCATE else event
    return event
