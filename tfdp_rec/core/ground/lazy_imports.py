"""Imports at first use: names of a package, so that TensorFlow is loaded only if needed, and libraries of an extra."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import types
from collections.abc import Callable, Mapping
from typing import Any


def names_for_checkers(package: str) -> dict[str, str]:
    """The module of each name that a `package` imports under `if TYPE_CHECKING`, read from the package's source.

    So the names stand once: a type checker and an editor see ordinary imports, and nothing is imported until used.

    Example:
        >>> names_for_checkers("tfdp_rec.distribute")["ServerLost"]
        'tfdp_rec.distribute.connection'
    """
    spec: Any = importlib.util.find_spec(package)
    block = next(node for node in ast.parse(spec.loader.get_source(package)).body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def lazy_getattr(
    package: str, elsewhere: Mapping[str, str] = types.MappingProxyType({})
) -> tuple[Callable[[str], Any], list[str]]:
    """A package's `__getattr__` (PEP 562) and `__all__`, for the names that it imports under `if TYPE_CHECKING`.

    Args:
        package: Name of the package.
        elsewhere: Names of other libraries, and what to write here instead.
    """
    homes = names_for_checkers(package)

    def hint_of(name: str) -> str:
        if name in elsewhere:
            return f"; write {elsewhere[name]}"
        known = {each.lower(): each for each in homes}
        near = [] if name.startswith("_") else difflib.get_close_matches(name.lower(), known, 1, cutoff=0.8)
        return f"; did you mean {known[near[0]]}?" if near else ""

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint_of(name)}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__, [*homes]


def optional(module: str, extra: str) -> Any:
    """A `module` of an `extra`, or one sentence that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise ImportError(f"{module} is missing; install it with  pip install 'tfdp-rec[{extra}]'.") from problem
