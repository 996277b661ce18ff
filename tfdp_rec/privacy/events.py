"""dp_accounting events as JSON and in words, and whether one has a guarantee at all.

The set is closed: an event that is not listed here is refused, not guessed. Four of them are ours: dp_accounting has
none for what a person releases of their own items, `PureDpEvent` and `PaddedDpEvent` (`profiles.py` prices them), for a
step of a training that costs as a whole, `PlannedDpEvent` (`FixedOrder` turns such steps into their Gaussian), or for
what goes wrong with some probability, `FailingDpEvent`, which is taken off δ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import dp_accounting
from dp_accounting import DpEvent


@dataclasses.dataclass(frozen=True)
class PureDpEvent(DpEvent):
    """A release with pure ε, whatever its form: a permuted label, Laplace noise on a vector.

    Args:
        epsilon: ε; infinite for none.
    """

    epsilon: float


@dataclasses.dataclass(frozen=True)
class PaddedDpEvent(DpEvent):
    """A release of items each of which was replaced by a fixed one with probability `padding`, anew for this release.

    Args:
        event: the release, without padding, between any two lists of items.
        padding: the probability.
    """

    event: DpEvent
    padding: float


@dataclasses.dataclass(frozen=True)
class FailingDpEvent(DpEvent):
    """Something that may tell all with a small probability, and tells nothing else: (0, δ)-DP.

    Args:
        delta: the probability.
    """

    delta: float


@dataclasses.dataclass(frozen=True)
class PlannedDpEvent(DpEvent):
    """A step of a training that is planned, and costs, as a whole, however few of its steps are made.

    Args:
        event: what all of it costs: a Gaussian, or none.
        steps: of the plan.
        separation: at least so many steps from one step of a unit to its next.
        participations: so many steps of a unit at most.
        plan: tells it from others.
        part: tells a stretch of it from others: who goes on from a training checkpoint begins one of their own.
        after: the part that this one went on from.
        start: the step of the plan that the part began with.
    """

    event: DpEvent
    steps: int
    separation: int
    participations: int
    plan: str
    part: str = ""
    after: str = ""
    start: int = 0


_NOISY = (dp_accounting.GaussianDpEvent, dp_accounting.LaplaceDpEvent)
_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *_NOISY,
        dp_accounting.NoOpDpEvent,
        dp_accounting.NonPrivateDpEvent,
        dp_accounting.ComposedDpEvent,
        dp_accounting.SelfComposedDpEvent,
        dp_accounting.PoissonSampledDpEvent,
        PureDpEvent,
        PaddedDpEvent,
        FailingDpEvent,
        PlannedDpEvent,
    )
}

_OF_ANOTHER = (dp_accounting.SelfComposedDpEvent, dp_accounting.PoissonSampledDpEvent, PaddedDpEvent, PlannedDpEvent)


def to_json(event: DpEvent) -> dict[str, Any]:
    """The event as JSON-able nested dicts.

    Raises:
        ValueError: an event of unknown type, or one with a noise multiplier or probability out of range.

    Example:
        >>> to_json(dp_accounting.GaussianDpEvent(1.1))
        {'type': 'GaussianDpEvent', 'noise_multiplier': 1.1}
    """
    name = type(event).__name__
    if _TYPES.get(name) is not type(event):
        raise ValueError(f"{event!r} is not an event this accountant knows; known are {', '.join(_TYPES)}.")
    fields: dict[str, Any] = {"type": name}
    if isinstance(event, _NOISY):
        if not 0 <= event.noise_multiplier <= math.inf:
            raise ValueError(f"noise_multiplier must be at least 0, got {event.noise_multiplier!r}.")
        fields["noise_multiplier"] = float(event.noise_multiplier)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        fields["events"] = [to_json(part) for part in event.events]
    elif isinstance(event, dp_accounting.SelfComposedDpEvent):
        if int(event.count) != event.count or event.count < 0:
            raise ValueError(f"count must be a whole number, at least 0, got {event.count!r}.")
        fields.update(event=to_json(event.event), count=int(event.count))
    elif isinstance(event, dp_accounting.PoissonSampledDpEvent):
        if not 0 <= event.sampling_probability <= 1:
            raise ValueError(f"sampling_probability must be in [0, 1], got {event.sampling_probability!r}.")
        fields.update(event=to_json(event.event), sampling_probability=float(event.sampling_probability))
    elif isinstance(event, PureDpEvent):
        if not event.epsilon >= 0:
            raise ValueError(f"epsilon must be at least 0, got {event.epsilon!r}.")
        fields["epsilon"] = float(event.epsilon)
    elif isinstance(event, PaddedDpEvent):
        if not 0 <= event.padding < 1:
            raise ValueError(f"padding must be in [0, 1), got {event.padding!r}.")
        fields.update(event=to_json(event.event), padding=float(event.padding))
    elif isinstance(event, FailingDpEvent):
        if not 0 <= event.delta < 1:
            raise ValueError(f"delta must be in [0, 1), got {event.delta!r}.")
        fields["delta"] = float(event.delta)
    elif isinstance(event, PlannedDpEvent):
        plan = dataclasses.asdict(dataclasses.replace(event, event=dp_accounting.NoOpDpEvent()))
        fields.update({**plan, "event": to_json(event.event)})
    return fields


def from_json(fields: dict[str, Any]) -> DpEvent:
    """The inverse of `to_json`.

    Raises:
        ValueError: an unknown type.

    Example:
        >>> from_json({"type": "GaussianDpEvent", "noise_multiplier": 1.1})
        GaussianDpEvent(noise_multiplier=1.1)
    """
    arguments = dict(fields)
    name = arguments.pop("type", None)
    if name not in _TYPES:
        raise ValueError(f"Unknown event type {name!r}; known are {', '.join(_TYPES)}.")
    if "event" in arguments:
        arguments["event"] = from_json(arguments["event"])
    if "events" in arguments:
        arguments["events"] = [from_json(part) for part in arguments["events"]]
    return _TYPES[name](**arguments)


def is_private(event: DpEvent) -> bool:
    """Whether the event has any finite guarantee: no non-private part, and noise wherever noise is due."""
    if isinstance(event, _NOISY):
        return event.noise_multiplier > 0
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return all(is_private(part) for part in event.events)
    if isinstance(event, _OF_ANOTHER):
        return is_private(event.event)
    if isinstance(event, PureDpEvent):
        return event.epsilon < math.inf
    return not isinstance(event, dp_accounting.NonPrivateDpEvent)


def planned_in(event: DpEvent) -> bool:
    """Whether single steps of a planned training are among the parts of an event."""
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return any(map(planned_in, event.events))
    return isinstance(event, PlannedDpEvent) or (isinstance(event, _OF_ANOTHER) and planned_in(event.event))


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


def in_words(event: DpEvent) -> str:
    """The event as part of a sentence.

    Example:
        >>> in_words(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 3))
        '3 times Gaussian noise of multiplier 2'
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return f"Gaussian noise of multiplier {event.noise_multiplier:g}"
    if isinstance(event, dp_accounting.LaplaceDpEvent):
        return f"Laplace noise of multiplier {event.noise_multiplier:g}"
    if isinstance(event, dp_accounting.ComposedDpEvent):
        return " and ".join(in_words(part) for part in event.events)
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return f"{event.count} times {in_words(event.event)}"
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        return (
            f"{in_words(event.event)} on a Poisson sample with probability {event.sampling_probability:.6g}"
        )
    if isinstance(event, PureDpEvent):
        return f"a release of pure epsilon {event.epsilon:g}"
    if isinstance(event, PaddedDpEvent):
        return f"{in_words(event.event)} on items padded with probability {event.padding:g}"
    if isinstance(event, FailingDpEvent):
        return f"what fails with probability {event.delta:g}"
    if isinstance(event, PlannedDpEvent):
        return (
            f"noise correlated over a training of {event.steps} steps, planned for units in at most "
            f"{event.participations} of them, at least {event.separation} apart, which as a whole is "
            f"{in_words(event.event)}"
        )
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return "nothing"
    return "a mechanism without a formal guarantee"
