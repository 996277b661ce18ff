"""Layers and models that are saved as the arguments of their constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras


class SavedByArguments:
    """`get_config` and `from_config` of a layer or a model; to stand before Keras' class among the bases."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls, *args, **kwargs)
        given = inspect.signature(cls.__init__).bind_partial(made, *args, **kwargs)
        given.apply_defaults()
        del given.arguments["self"]
        given.arguments.pop("kwargs", None)  # Keras' own, which Keras saves
        vars(made)["_given"] = given  # no dict, whose layers Keras would save a second time
        return made

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        return {**super().get_config(), **_plain(vars(self)["_given"].arguments)}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """The object of a config, layers among its arguments included."""
        return cls(**{name: _make(value, custom_objects) for name, value in config.items()})


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return keras.saving.serialize_keras_object(value) if hasattr(value, "get_config") else value


def _make(value: Any, custom_objects: Any) -> Any:
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value, custom_objects)
    return value
