"""Events: what was done, as data. In words, as JSON, and whether it has a guarantee at all.

The set is closed: an event that is not in `KINDS` is refused, not guessed. To add one: a class, and a row there.

Four are ours, since dp_accounting has none for

- what a person releases of their own items: `PureDpEvent`, `PaddedDpEvent` (`profiles.py` prices them);
- a step of a training that costs as a whole: `PlannedDpEvent` (an order turns such steps into their Gaussian);
- what goes wrong with some probability: `FailingDpEvent`, which is taken off δ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dp_accounting
from dp_accounting import DpEvent


@dataclasses.dataclass(frozen=True)
class PureDpEvent(DpEvent):
    """A release with pure ε, whatever its form: a permuted label, Laplace noise on a vector."""

    epsilon: float


@dataclasses.dataclass(frozen=True)
class PaddedDpEvent(DpEvent):
    """A release of items each of which was replaced by a fixed one with probability `padding`, anew for this release."""

    event: DpEvent
    padding: float


@dataclasses.dataclass(frozen=True)
class FailingDpEvent(DpEvent):
    """Something that may tell all with a small probability, and tells nothing else: (0, δ)-DP."""

    delta: float


@dataclasses.dataclass(frozen=True)
class PlannedDpEvent(DpEvent):
    """A step of a training that is planned, and costs, as a whole, however few of its steps are made."""

    event: DpEvent
    steps: int
    separation: int
    participations: int
    plan: str
    part: str = ""
    after: str = ""
    start: int = 0


class Kind(NamedTuple):
    """How events of one class are written, and when one has a finite guarantee by itself.

    Attributes:
        words: part of a sentence, with the event's fields in braces; inner events are in words, too.
        has_guarantee: of an event, its inner events aside.
    """

    words: str
    has_guarantee: Callable[[Any], bool] = lambda event: True


KINDS: dict[type, Kind] = {
    dp_accounting.GaussianDpEvent: Kind(
        "Gaussian noise of multiplier {noise_multiplier:g}", lambda event: event.noise_multiplier > 0
    ),
    dp_accounting.LaplaceDpEvent: Kind(
        "Laplace noise of multiplier {noise_multiplier:g}", lambda event: event.noise_multiplier > 0
    ),
    dp_accounting.NoOpDpEvent: Kind("nothing"),
    dp_accounting.NonPrivateDpEvent: Kind("a mechanism without a formal guarantee", lambda event: False),
    dp_accounting.ComposedDpEvent: Kind("{events}"),
    dp_accounting.SelfComposedDpEvent: Kind("{count} times {event}"),
    dp_accounting.PoissonSampledDpEvent: Kind(
        "{event} on a Poisson sample with probability {sampling_probability:.6g}"
    ),
    PureDpEvent: Kind("a release of pure epsilon {epsilon:g}", lambda event: event.epsilon < math.inf),
    PaddedDpEvent: Kind("{event} on items padded with probability {padding:g}"),
    FailingDpEvent: Kind("what fails with probability {delta:g}"),
    PlannedDpEvent: Kind(
        "noise correlated over a training of {steps} steps, planned for units in at most {participations} of them, at "
        "least {separation} apart, which as a whole is {event}"
    ),
}
_BY_NAME = {kind.__name__: kind for kind in KINDS}


class _Range(NamedTuple):
    type: type
    holds: Callable[[Any], bool]
    words: str


# By field, whichever event has it: a name means one thing.
_RANGES = {
    "noise_multiplier": _Range(float, lambda value: 0 <= value <= math.inf, "at least 0"),
    "epsilon": _Range(float, lambda value: value >= 0, "at least 0"),
    "delta": _Range(float, lambda value: 0 <= value < 1, "in [0, 1)"),
    "padding": _Range(float, lambda value: 0 <= value < 1, "in [0, 1)"),
    "sampling_probability": _Range(float, lambda value: 0 <= value <= 1, "in [0, 1]"),
    "count": _Range(int, lambda value: 0 <= value == int(value), "a whole number, at least 0"),
}


def _fields(event: DpEvent) -> dict[str, Any]:
    """What an event is constructed from: dp_accounting's classes are of attrs, ours are dataclasses."""
    kind: Any = type(event)
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else getattr(kind, "__attrs_attrs__", ())
    return {field.name: getattr(event, field.name) for field in fields}


def _inner(event: DpEvent) -> list[DpEvent]:
    """The events that an event is made of."""
    events = getattr(event, "events", None) or [getattr(event, "event", None)]
    return [inner for inner in events if inner is not None]


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as JSON-able nested dicts.

    Example:
        >>> to_json(dp_accounting.GaussianDpEvent(1.1))
        {'type': 'GaussianDpEvent', 'noise_multiplier': 1.1}
    """
    name = type(event).__name__
    if _BY_NAME.get(name) is not type(event):
        raise ValueError(f"{event!r} is not an event this accountant knows; known are {', '.join(_BY_NAME)}.")
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

    Example:
        >>> from_json({"type": "GaussianDpEvent", "noise_multiplier": 1.1})
        GaussianDpEvent(noise_multiplier=1.1)
    """
    arguments = dict(fields)
    name = arguments.pop("type", None)
    if name not in _BY_NAME:
        raise ValueError(f"Unknown event type {name!r}; known are {', '.join(_BY_NAME)}.")
    if "event" in arguments:
        arguments["event"] = from_json(arguments["event"])
    if "events" in arguments:
        arguments["events"] = [from_json(part) for part in arguments["events"]]
    return _BY_NAME[name](**arguments)


def in_words(event: DpEvent) -> str:
    """The event as part of a sentence.

    Example:
        >>> in_words(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 3))
        '3 times Gaussian noise of multiplier 2'
    """
    fields = _fields(event)
    inner = " and ".join(in_words(part) for part in _inner(event))
    unknown = KINDS[dp_accounting.NonPrivateDpEvent]
    return KINDS.get(type(event), unknown).words.format(**fields | {"event": inner, "events": inner})


def is_private(event: DpEvent) -> bool:
    """Whether the event has any finite guarantee: no non-private part, and noise wherever noise is due."""
    kind = KINDS.get(type(event))
    return kind is not None and kind.has_guarantee(event) and all(map(is_private, _inner(event)))


def planned_in(event: DpEvent) -> bool:
    """Whether single steps of a planned training are among the parts of an event."""
    return isinstance(event, PlannedDpEvent) or any(map(planned_in, _inner(event)))


def parts_of(event: DpEvent, times: int = 1) -> Iterator[tuple[DpEvent, int]]:
    """The events that an event is composed of, and how often each is made; none that is made never.

    Example:
        >>> list(parts_of(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 3)))
        [(GaussianDpEvent(noise_multiplier=2.0), 3)]
    """
    if isinstance(event, dp_accounting.ComposedDpEvent):
        for part in event.events:
            yield from parts_of(part, times)
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        yield from parts_of(event.event, times * event.count)
    elif times and not isinstance(event, dp_accounting.NoOpDpEvent) and getattr(event, "sampling_probability", 1) > 0:
        yield event, times


def without_failures(event: DpEvent) -> tuple[DpEvent, float]:
    """An event without what fails, and the δ that all its failures come to.

    (ε, δ) of what is left and failures of probability δ' are together (ε, δ + δ').

    Example:
        >>> twice = dp_accounting.SelfComposedDpEvent(FailingDpEvent(1e-7), 2)
        >>> without_failures(dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(4.0), twice]))[1]
        2e-07
    """
    if isinstance(event, FailingDpEvent):
        return dp_accounting.NoOpDpEvent(), event.delta
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [without_failures(part) for part in event.events]
        lost = math.fsum(delta for _, delta in parts)
        return (dp_accounting.ComposedDpEvent([part for part, _ in parts]), lost) if lost else (event, 0.0)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        part, delta = without_failures(event.event)
        return (dp_accounting.SelfComposedDpEvent(part, event.count), event.count * delta) if delta else (event, 0.0)
    return event, 0.0
