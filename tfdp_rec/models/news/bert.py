"""BERT's encoder, from a published checkpoint: a folder with `config.json` and `model.safetensors`.

    x_t ← LN(word_t + place_t)
    x   ← LN(x + heads(x)),   x ← LN(x + W' act(W x + b) + b')         in each layer: the norm comes after the sum

Nothing is dropped out. What is frozen stays so when it is saved and loaded.

Names of BERT's tensors: embeddings.{word,position,token_type}_embeddings, embeddings.LayerNorm, and for each layer i
encoder.layer.i.{attention.self.{query,key,value}, attention.output.{dense,LayerNorm}, intermediate.dense,
output.{dense,LayerNorm}}. They may begin with "bert.", and a norm's may end in `gamma` and `beta`: both are published.
A title is one sentence, so all its tokens are of type 0, whose vector is added to those of the places once, here.

`tfdp_rec.datasets.mind.wordpiece` reads the same folder's `vocab.txt`.

Reference:
    Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", NAACL 2019.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.models.arguments import SavedByArguments

_GELU_BY_TANH = functools.partial(ops.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "gelu": functools.partial(ops.gelu, approximate=False),
    "gelu_new": _GELU_BY_TANH,
    "gelu_pytorch_tanh": _GELU_BY_TANH,
    "relu": ops.relu,
}
"""By the names that configurations have for them."""


@keras.saving.register_keras_serializable(package="tfdp_rec")
class BertEmbeddings(SavedByArguments, keras.layers.Layer):
    """Vectors of words and places, normalised."""

    def __init__(self, vocabulary_size: int, length: int, width: int, epsilon: float = 1e-12, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length, self.width = length, width
        self.words = keras.layers.Embedding(vocabulary_size, width, name="words")
        self.norm = keras.layers.LayerNormalization(epsilon=epsilon, name="norm")

    def build(self, input_shape: Any) -> None:
        self.words.build(input_shape)
        self.places = self.add_weight(name="places", shape=(self.length, self.width), initializer="zeros")
        self.norm.build((*input_shape, self.width))
        _freeze_with(self, self.words, self.norm)

    def call(self, tokens: Any) -> Any:
        """Token ids [N, T] -> [N, T, width]."""
        return self.norm(self.words(tokens) + self.places)


@keras.saving.register_keras_serializable(package="tfdp_rec")
class BertLayer(SavedByArguments, keras.layers.Layer):
    """One layer of the encoder."""

    def __init__(
        self, num_heads: int, inner: int, activation: str = "gelu", epsilon: float = 1e-12, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.inner = num_heads, inner
        self.wide = keras.layers.Dense(inner, activation=ACTIVATIONS[activation], name="wide")
        self.mixed_norm = keras.layers.LayerNormalization(epsilon=epsilon, name="mixed_norm")
        self.norm = keras.layers.LayerNormalization(epsilon=epsilon, name="norm")

    def build(self, states_shape: Any, padding_mask_shape: Any) -> None:
        width = states_shape[-1]
        self.heads = keras.layers.MultiHeadAttention(self.num_heads, width // self.num_heads, name="heads")
        self.narrow = keras.layers.Dense(width, name="narrow")
        self.heads.build(states_shape, states_shape)
        for layer in (self.mixed_norm, self.wide, self.norm):
            layer.build(states_shape)
        self.narrow.build((*states_shape[:-1], self.inner))
        _freeze_with(self, self.heads, self.mixed_norm, self.wide, self.narrow, self.norm)

    def call(self, states: Any, padding_mask: Any) -> Any:
        """[N, T, h], and which places are read [N, T] -> [N, T, h]."""
        mixed = self.heads(states, states, attention_mask=padding_mask[:, None, :])
        states = self.mixed_norm(states + mixed)
        return self.norm(states + self.narrow(self.wide(states)))


def _freeze_with(whole: keras.layers.Layer, *parts: keras.layers.Layer) -> None:
    """A layer that is made frozen, as a loaded one is, does not by itself freeze the parts that it makes later."""
    for part in parts:
        part.trainable = whole.trainable


Array = NDArray[np.float32]


def pretrained_bert(folder: str | Path, length: int = 30, trainable_layers: int = 0) -> keras.Model:
    """A text encoder for `PLMEncoder`, from a folder in the published form of BERT's checkpoints.

    Needs the extra `bert` (the library `safetensors`). Nothing in the folder is run.

    Args:
        folder: Folder with config.json and model.safetensors.
        length: Tokens of a title, [CLS] and [SEP] included.
        trainable_layers: Number of layers, the last ones, that are trained. The embeddings and the other layers stay as
            they are: clients neither compute nor send gradients of theirs.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If the configuration is not that of a BERT encoder, a tensor is missing, misshapen or damaged, or an
            argument is out of range.
        ImportError: If the extra is missing.
    """
    config = Config.read(Path(folder) / "config.json")
    _refuse_beyond("length", length, 1, config.max_position_embeddings)
    _refuse_beyond("trainable_layers", trainable_layers, 0, config.num_hidden_layers)
    checkpoint = Checkpoint(Path(folder) / "model.safetensors", config)
    tokens = keras.Input((length,), dtype="int32", name="token_ids")
    mask = keras.Input((length,), dtype="bool", name="padding_mask")
    embeddings = BertEmbeddings(
        config.vocab_size, length, config.hidden_size, config.layer_norm_eps, name="embeddings", trainable=False
    )
    states, layers = embeddings(tokens), []
    for index in range(config.num_hidden_layers):
        trained = index >= config.num_hidden_layers - trainable_layers
        layers.append(BertLayer(
            config.num_attention_heads, config.intermediate_size, config.hidden_act, config.layer_norm_eps,
            name=f"layer_{index}", trainable=trained,
        ))  # fmt: skip
        states = layers[-1](states, mask)
    checkpoint.fill_embeddings(embeddings)
    for index, layer in enumerate(layers):
        checkpoint.fill_layer(layer, f"encoder.layer.{index}")
    return keras.Model({"token_ids": tokens, "padding_mask": mask}, states, name="bert")


def _refuse_beyond(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be in [{least}, {most}] for this checkpoint, got {value}.")


@dataclasses.dataclass(frozen=True)
class Config:
    """The fields of `config.json`, under their own names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not (type(value) is int and value > 0):
                raise ValueError(f"{field.name} must be a positive whole number, got {value!r}.")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size}.")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {', '.join(ACTIVATIONS)}, got {self.hidden_act!r}.")
        if not 0 <= self.layer_norm_eps < math.inf:
            raise ValueError(f"layer_norm_eps must be finite and not negative, got {self.layer_norm_eps}.")

    @classmethod
    def read(cls, path: Path) -> Config:
        """The configuration in a file; that of another kind of model is refused."""
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise ValueError(f"{path} is no JSON: it is damaged, or of another format.") from problem
        if not isinstance(said, dict) or said.get("model_type") != "bert":
            raise ValueError(f"{path} does not say that its model_type is bert, which alone can be read here.")
        for name, only in (("position_embedding_type", "absolute"), ("pad_token_id", 0), ("is_decoder", False)):
            if said.get(name, only) != only:
                raise ValueError(f"{path} has {name} {said[name]!r}, and only {only!r} can be read here.")
        known = {field.name: said[field.name] for field in dataclasses.fields(cls) if field.name in said}
        try:
            return cls(**known)
        except TypeError as problem:
            raise ValueError(f"{path} does not say all sizes, or says one that is no number ({problem}).") from problem


class Checkpoint:
    """The tensors of a safetensors file, as float32 of the expected shape, put where Keras' layers have them."""

    def __init__(self, path: Path, config: Config):
        library = optional("safetensors", "bert")
        self.path, self.config = path, config
        try:
            self._file = library.safe_open(path, framework="numpy")
        except library.SafetensorError as problem:
            reason = str(problem)[:200]
            raise ValueError(f"{path} is damaged or cut short, or of another format ({reason}).") from problem
        self._names = frozenset(self._file.keys())
        self._prefix = "bert." if "bert.embeddings.word_embeddings.weight" in self._names else ""

    def fill_embeddings(self, layer: BertEmbeddings) -> None:
        """Sets the weights of the embeddings."""
        c = self.config
        rows = {"word": c.vocab_size, "position": c.max_position_embeddings, "token_type": c.type_vocab_size}
        words, places, kinds = (
            self.read(f"embeddings.{name}_embeddings.weight", count, c.hidden_size) for name, count in rows.items()
        )
        layer.words.set_weights([words])
        layer.places.assign(places[: layer.length] + kinds[0])
        layer.norm.set_weights(self._norm("embeddings.LayerNorm"))

    def fill_layer(self, layer: BertLayer, name: str) -> None:
        """Sets the weights of one layer."""
        width, inner = self.config.hidden_size, self.config.intermediate_size
        layer.heads.set_weights(self._heads(f"{name}.attention"))
        layer.mixed_norm.set_weights(self._norm(f"{name}.attention.output.LayerNorm"))
        layer.wide.set_weights(self._linear(f"{name}.intermediate.dense", width, inner))
        layer.narrow.set_weights(self._linear(f"{name}.output.dense", inner, width))
        layer.norm.set_weights(self._norm(f"{name}.output.LayerNorm"))

    def _heads(self, name: str) -> list[Array]:
        """Kernels and biases of query, key, value and output, with an axis for the head."""
        width, heads = self.config.hidden_size, self.config.num_attention_heads
        found: list[Array] = []
        for part in ("query", "key", "value"):
            kernel, bias = self._linear(f"{name}.self.{part}", width, width)
            found += [kernel.reshape(width, heads, -1), bias.reshape(heads, -1)]
        kernel, bias = self._linear(f"{name}.output.dense", width, width)
        return [*found, kernel.reshape(heads, -1, width), bias]

    def _linear(self, name: str, inputs: int, outputs: int) -> list[Array]:
        """Kernel and bias; the file has the kernel the other way round."""
        return [self.read(f"{name}.weight", outputs, inputs).T, self.read(f"{name}.bias", outputs)]

    def _norm(self, name: str) -> list[Array]:
        old = f"{self._prefix}{name}.gamma" in self._names
        return [self.read(f"{name}.{part}", self.config.hidden_size) for part in _NORM[old]]

    def read(self, name: str, *shape: int) -> Array:
        """One tensor; what is missing, of another shape or type, or not finite is refused."""
        name = self._prefix + name
        if name not in self._names:
            raise ValueError(f"{self.path} lacks the tensor {name}: it is a checkpoint of another model.")
        about = self._file.get_slice(name)
        kind, stored = about.get_dtype(), tuple(about.get_shape())
        if kind not in _TYPES:
            raise ValueError(f"{name} in {self.path} is of type {kind}: publish it as one of {', '.join(_TYPES)}.")
        if stored != shape:
            raise ValueError(f"{name} in {self.path} has shape {list(stored)} where {list(shape)} belongs.")
        values = self._file.get_tensor(name).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"{name} in {self.path} has numbers that are not finite: the file is damaged.")
        return values


_TYPES = ("F64", "F32", "F16", "BF16")
_NORM = (("weight", "bias"), ("gamma", "beta"))  # as they are called now, and as they were
