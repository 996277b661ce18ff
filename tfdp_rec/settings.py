"""Settings said once: a dataclass is what a program needs to know, its command-line options, and their checks.

A field made by `option` is asked for as `--its-name`; other fields are the program's own business.

Example:
    >>> @dataclasses.dataclass(frozen=True)
    ... class Sizes:
    ...     steps: int = option(600, "training steps", POSITIVE)
    ...     rates: tuple[float, ...] = option((1.0,), "learning rates to try", POSITIVE)
    >>> parser = argparse.ArgumentParser()
    >>> add_options(parser, Sizes)
    >>> chosen(parser.parse_args("--rates 0.1 0.2".split()), Sizes(steps=60))
    Sizes(steps=60, rates=(0.1, 0.2))
    >>> chosen(parser.parse_args("--steps 0".split()), Sizes())
    Traceback (most recent call last):
    ValueError: --steps must be positive, got 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

AnySettings = TypeVar("AnySettings")


@dataclasses.dataclass(frozen=True)
class Check:
    """What a value must be.

    Attributes:
        words: "must be …", for people.
        holds: whether a value is.
    """

    words: str
    holds: Callable[[Any], bool]


POSITIVE = Check("must be positive", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = Check("must not be negative", lambda value: value >= 0)
BETWEEN_0_AND_1 = Check("must be between 0 and 1", lambda value: 0 < value < 1)


def option(
    default: Any,
    words: str,
    check: Check | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | tuple[str, ...] | None = None,
    group: str = "",
    several: str | int = "+",
) -> Any:
    """A field of a settings dataclass that can be given on the command line.

    Args:
        default: its value unless it is given.
        words: its line of help.
        check: what it, or each of several values, must be.
        choices: the values there are.
        metavar: what stands for the value in the help.
        group: the heading of the help that it stands under.
        several: how many values a field of several takes: "+", at least one, "*", or a number.
    """
    known = {"words": words, "check": check, "choices": choices, "metavar": metavar, "group": group, "several": several}
    return dataclasses.field(default=default, metadata={"option": known})


def add_options(parser: argparse.ArgumentParser, settings: type) -> None:
    """Asks for the options of a settings class; what is not given stays None.

    Args:
        parser: of the command.
        settings: a dataclass with fields made by `option`.
    """
    hints = typing.get_type_hints(settings)
    groups: dict[str, Any] = {"": parser}
    for field in dataclasses.fields(settings):
        if "option" not in field.metadata:
            continue
        known = field.metadata["option"]
        if known["group"] not in groups:
            groups[known["group"]] = parser.add_argument_group(known["group"])
        _add(groups[known["group"]], field, hints[field.name], known)


def _add(group: Any, field: dataclasses.Field, hint: Any, known: dict[str, Any]) -> None:
    kind, several = _kind(hint)
    words: str = known["words"]
    more: dict[str, Any]
    if field.default not in (None, "", False, ()):
        words += f" (default: {_shown(field.default)})"
    if kind is bool:
        more = {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    else:
        more = {"type": whole if kind is int else kind, "choices": known["choices"], "metavar": known["metavar"]}
        more |= {"nargs": known["several"], "action": "extend"} if several else {}
    group.add_argument(flag(field.name), default=None, help=words.replace("%", "%%"), **more)


def _kind(hint: Any) -> tuple[type, bool]:
    """(the type of a value, whether there may be several of them) of an annotation."""
    if type(None) in typing.get_args(hint):
        (hint,) = [one for one in typing.get_args(hint) if one is not type(None)]
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def whole(text: str) -> int:
    """A whole number as people write it: 100000 or 1e5.

    Example:
        >>> whole("1e5"), whole("12")
        (100000, 12)
    """
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not value.is_integer():
        raise ValueError(f"{text} is no whole number.")
    return int(value)


whole.__name__ = "int"  # as argparse's errors call it


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def flag(name: str) -> str:
    """The option of a field: `--batch-size` for batch_size."""
    return "--" + name.replace("_", "-")


def chosen(args: argparse.Namespace, base: AnySettings) -> AnySettings:
    """The settings with what was given on the command line.

    Args:
        args: as parsed; None stands for what was not given.
        base: what holds where nothing was given.

    Raises:
        ValueError: a value is not what its check asks for.
    """
    given = {}
    for field in dataclasses.fields(base):  # type: ignore[arg-type]
        value = getattr(args, field.name, None)
        if "option" in field.metadata and value is not None:
            given[field.name] = tuple(value) if isinstance(value, list) else value
    settings = dataclasses.replace(base, **given)  # type: ignore[type-var]
    refuse_wrong(settings)
    return settings


def refuse_wrong(settings: Any) -> None:
    """Refuses the first value that is not what its check asks for.

    Raises:
        ValueError: naming the option.
    """
    for field in dataclasses.fields(settings):
        known, value = field.metadata.get("option", {}), getattr(settings, field.name)
        for one in value if isinstance(value, tuple) else (value,):
            _refuse_wrong(field.name, one, known.get("check"), known.get("choices"))


def _refuse_wrong(name: str, value: Any, check: Check | None, choices: Sequence[str] | None) -> None:
    if value is not None and check is not None and not check.holds(value):
        raise ValueError(f"{flag(name)} {check.words}, got {value}.")
    if choices is not None and value not in choices:
        raise ValueError(f"{flag(name)} must be one of {', '.join(choices)}, got {value!r}.")
