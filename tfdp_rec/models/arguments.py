"""Layers and models that are saved as the arguments of their constructor, each kept under its own name."""

from __future__ import annotations

import inspect
from typing import Any

import keras


class SavedByArguments:
    """`get_config` and `from_config` of a layer or a model; to stand before Keras' class among the bases."""

    def get_config(self) -> dict[str, Any]:
        """Every constructor argument."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "kwargs")]
        return {**super().get_config(), **{name: _plain(getattr(self, name)) for name in names}}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """What a config describes, layers among its arguments included."""
        return cls(**{name: _made(value, custom_objects) for name, value in config.items()})


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return keras.saving.serialize_keras_object(value) if hasattr(value, "get_config") else value


def _made(value: Any, custom_objects: Any) -> Any:
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value, custom_objects)
    return value
