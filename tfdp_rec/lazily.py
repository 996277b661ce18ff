"""Imports at first use: names of a package, so that TensorFlow is loaded only if needed, and libraries of an extra."""

from __future__ import annotations

import difflib
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any


def imported_when_asked(
    package: str, homes: Mapping[str, str], elsewhere: Mapping[str, str] = types.MappingProxyType({})
) -> Callable[[str], Any]:
    """A package's `__getattr__` (PEP 562), from each name's module; a name that is its own home is a module.

    Args:
        package: Name of the package.
        homes: Module of each name.
        elsewhere: Names of other libraries, and what to write here instead.
    """

    def hint_of(name: str) -> str:
        if name in elsewhere:
            return f"; write {elsewhere[name]}"
        known = {each.lower(): each for each in homes}
        near = [] if name.startswith("_") else difflib.get_close_matches(name.lower(), known, 1, cutoff=0.8)
        return f"; did you mean {known[near[0]]}?" if near else ""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint_of(name)}")
        module = importlib.import_module(f"{package}.{homes[name]}")
        return module if homes[name] == name else getattr(module, name)

    return __getattr__


def optional(module: str, extra: str) -> Any:
    """A module of an extra, or one sentence that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise ImportError(f"{module} is missing; install it with  pip install 'tfdp-rec[{extra}]'.") from problem
