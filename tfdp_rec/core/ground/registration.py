"""After `import tfdp_rec`, Keras finds the package's classes by their names in files.

Keras knows a class by name once the module that defines it was imported. Importing all of them here would load
TensorFlow for a command's help or an accountant. So the names are registered when Keras is imported, each with a
stand-in that imports its class when a file asks for it; once defined, the class takes its place.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any


def register(package: str, names: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Enters classes of a `package`, (module, class) `names`, in Keras' registry, now or once Keras is imported."""

    def enter() -> None:
        _refuse_backend(importlib.import_module("keras").config.backend())
        registry = importlib.import_module("keras").saving.get_custom_objects()
        for module, name in names():
            registry.setdefault(f"{package}>{name}", StandIn(module, name))

    _refuse_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")
    if hasattr(sys.modules.get("keras"), "saving"):
        enter()
    else:
        sys.meta_path.insert(0, _WhenImported("keras", enter))


def _refuse_backend(name: str) -> None:
    if name != "tensorflow":
        raise ImportError(
            f"{__package__} trains on TensorFlow, and Keras' backend is {name}: set KERAS_BACKEND=tensorflow before "
            "the first import of keras."
        )


class StandIn:
    """A stand-in for a class that is not imported yet: its attributes are the class's."""

    def __init__(self, module: str, name: str):
        self._module, self._name = module, name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(getattr(importlib.import_module(self._module), self._name), attribute)


class _WhenImported:
    # A finder of one module, by the other finders, that calls a function after the module's import.

    def __init__(self, module: str, act: Callable[[], None]):
        self._module, self._act = module, act

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                self._act()

            spec.loader.exec_module = load_and_act  # type: ignore[method-assign]
        return spec
