"""Settings of a command: one dataclass gives their names, defaults, command-line options and checks.

A field made by `option` is the command-line option `--its-name`; other fields have none.

Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class Sizes:
    ...     steps: int = option(600, "training steps", POSITIVE)
    ...     rates: tuple[float, ...] = option((1.0,), "learning rates to try", POSITIVE)
    >>> parser = argparse.ArgumentParser()
    >>> add_options(parser, Sizes)
    >>> choose(parser.parse_args("--rates 0.1 0.2".split()), Sizes(steps=60))
    Sizes(steps=60, rates=(0.1, 0.2))
    >>> choose(parser.parse_args("--steps 0".split()), Sizes())
    Traceback (most recent call last):
    ValueError: --steps must be positive, got 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

AnySettings = TypeVar("AnySettings")


class Check(NamedTuple):
    """A condition on a value: its words ("must be …"), and a function that tells whether a value meets it."""

    words: str
    holds: Callable[[Any], bool]


POSITIVE = Check("must be positive", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Check("must not be negative", lambda value: 0 <= value < math.inf)
BETWEEN_0_AND_1 = Check("must be between 0 and 1", lambda value: 0 < value < 1)


def option(
    default: Any, words: str, check: Check | None = None, choices: Sequence[str] | None = None,
    metavar: str | tuple[str, ...] | None = None, group: str = "", several: str | int = "+",
) -> Any:  # fmt: skip
    """A field of a settings dataclass that can be given on the command line.

    Args:
        default: Value unless one is given.
        words: Line of help.
        check: Rule that the value, or each of several, must keep.
        choices: All values that there are.
        metavar: Words that stand for the value in the help.
        group: Heading of the help that the option stands under.
        several: Number of values of a field that takes several: "+", at least one, "*", or a number.
    """
    known = types.SimpleNamespace(
        words=words, check=check, choices=choices, metavar=metavar, group=group, several=several
    )  # fmt: skip
    return dataclasses.field(default=default, metadata={"option": known})


def _options(settings: Any) -> Iterator[tuple[dataclasses.Field[Any], types.SimpleNamespace]]:
    """The fields of settings, or of their class, that are options, each with what `option` was given."""
    yield from ((field, field.metadata["option"]) for field in dataclasses.fields(settings) if field.metadata)


def add_options(parser: argparse.ArgumentParser, settings: type, only: Collection[str] | None = None) -> None:
    """Adds the options of a settings class, or those named, to a parser; what is not given stays None."""
    hints, groups = typing.get_type_hints(settings), dict[str, Any]({"": parser})
    for field, known in _options(settings):
        if only is not None and field.name not in only:
            continue
        if known.group not in groups:
            groups[known.group] = parser.add_argument_group(known.group)
        # Of `float | None` and of `tuple[int, ...]` the type of one value.
        several = typing.get_origin(hints[field.name]) is tuple
        kind = next(iter(typing.get_args(hints[field.name])), hints[field.name])
        more: dict[str, Any] = {"type": integer if kind is int else kind, "choices": known.choices}
        more |= {"metavar": known.metavar, **({"nargs": known.several, "action": "extend"} if several else {})}
        if kind is bool:
            more = {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
        unusual = field.default not in (None, "", False, ())
        words = known.words + (f" (default: {_show(field.default)})" if unusual else "")
        groups[known.group].add_argument(flag(field.name), default=None, help=words.replace("%", "%%"), **more)


def integer(text: str) -> int:
    """A whole number as people write it: 100000 or 1e5.

    Example:
        >>> integer("1e5"), integer("12")
        (100000, 12)
    """
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not value.is_integer():
        raise ValueError(f"{text} is no whole number.")
    return int(value)


integer.__name__ = "int"  # as argparse's errors call it


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_show, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag(name: str) -> str:
    """The option of a field: `--batch-size` for batch_size."""
    return "--" + name.replace("_", "-")


def choose(args: argparse.Namespace, base: AnySettings) -> AnySettings:
    """The settings with what was given on the command line; `base` holds where nothing was given."""
    given = {field.name: getattr(args, field.name, None) for field, _ in _options(base)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = dataclasses.replace(  # type: ignore[type-var]
        base, **{name: value for name, value in given.items() if value is not None}
    )
    refuse_wrong(settings)
    return settings


def refuse_wrong(settings: Any) -> None:
    """Refuses the first value that is not what its check asks for, by a `ValueError` that names the option."""
    for field, known in _options(settings):
        value = getattr(settings, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and known.check is not None and not known.check.holds(one):
                raise ValueError(f"{flag(field.name)} {known.check.words}, got {one}.")
            if known.choices is not None and one not in known.choices:
                raise ValueError(f"{flag(field.name)} must be one of {', '.join(known.choices)}, got {one!r}.")
