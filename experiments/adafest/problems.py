"""What the AdaFEST study learns: clicks on generated or real logs, and the sentiment of generated sentences.

A problem is where examples come from, a model with embedding tables, and a score on examples it was not trained on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from experiments.adafest.criteo_files import concatenated, day_files, read_chunks
from experiments.adafest.sentence_files import SentenceFiles
from experiments.adafest.sentences import SyntheticText
from experiments.adafest.text_classifier import TextClassifier
from experiments.generated.clicks import KAGGLE_BUCKETS, CriteoExamples, auc
from tfdp_rec.models.pctr import PCTR

_PUBLIC_RATE, _PUBLIC_EPOCHS = 1e-3, 4


class Examples(Protocol):
    """Labelled examples in memory."""

    @property
    def labels(self) -> np.ndarray: ...  # noqa: D102

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray | slice) -> tuple[Any, np.ndarray]: ...  # noqa: D102


class Source(Protocol):
    """Where examples come from: generated, or files."""

    def examples(self, num_examples: int, day: int = 0, part: str = "train") -> Any: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something to learn.

    Attributes:
        source: of the examples; its parts are "train", "validation" (for choosing learning rates) and "test".
        metric: what the score is called.
        make_model: an untrained model.
        loss: on its outputs.
        tables: its embedding layers.
        reads: (model, features) -> table path -> the rows that examples read, [examples] or [examples, reads].
        score: (labels, outputs) -> how good the outputs are.
    """

    source: Source
    metric: str
    make_model: Callable[[], Any]
    loss: keras.losses.Loss
    tables: Callable[[Any], Sequence[keras.layers.Embedding]]
    reads: Callable[[Any, Any], Mapping[str, np.ndarray]]
    score: Callable[[np.ndarray, np.ndarray], float]

    def rows(self, model: Any) -> dict[str, int]:
        """Table path -> how many rows it has."""
        return {table.embeddings.path: table.input_dim for table in self.tables(model)}

    def values(self, model: Any) -> int:
        """How many values all tables have."""
        return sum(table.input_dim * table.output_dim for table in self.tables(model))


def clicks(logs: Any, hidden: Sequence[int]) -> Problem:
    """Predicted click-through on logs of Criteo's schema, judged by AUC.

    Args:
        logs: a `SyntheticCriteo` or `FileLogs`: `buckets` beside `examples`.
        hidden: widths of the model's hidden layers.
    """
    return Problem(
        source=logs,
        metric="AUC",
        make_model=lambda: PCTR(buckets=logs.buckets, hidden=hidden),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        tables=lambda model: model.tables,
        reads=lambda model, features: dict(zip(model.table_paths, features["categorical"].T)),
        score=lambda labels, logits: auc(labels, logits[:, 0]),
    )


def sentences(text: SyntheticText | SentenceFiles, width: int = 32, public: int = 0) -> Problem:
    """The sentiment of sentences by a small transformer, judged by accuracy.

    Args:
        text: the generator, or files.
        width: of the token vectors.
        public: how many public sentences the model is trained on before, without privacy.
    """
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def untrained() -> TextClassifier:
        return TextClassifier(text.vocabulary_size, text.max_length, width, heads=2, blocks=1)

    @functools.cache
    def trained_before() -> list[np.ndarray]:
        model = untrained()
        model.compile(keras.optimizers.Adam(_PUBLIC_RATE), loss=loss)
        tokens, labels = text.examples(public, part="public").fetch(slice(None))
        model.fit(tokens, labels, batch_size=256, epochs=_PUBLIC_EPOCHS, verbose=0)
        return model.get_weights()

    def make_model() -> TextClassifier:
        model = untrained()
        if public:
            model.set_weights(trained_before())
        return model

    return Problem(
        source=text,
        metric="accuracy",
        make_model=make_model,
        loss=loss,
        tables=lambda model: [model.tokens],
        reads=lambda model, tokens: {model.tokens.embeddings.path: tokens},
        score=lambda labels, logits: float(np.mean(np.argmax(logits, axis=1) == labels)),
    )


class FileLogs:
    """The logs in a file, or in a folder of day files.

    Args:
        path: as `criteo_files.read` or `day_files` takes it.
        buckets: 26 bucket counts.

    Raises:
        FileNotFoundError: there is no such file, or no day files in the folder.
    """

    def __init__(self, path: str, buckets: Sequence[int] = KAGGLE_BUCKETS):
        self.buckets = buckets
        self.files = day_files(path) if Path(path).is_dir() else [Path(path)]

    def examples(self, num_examples: int, day: int = 0, part: str = "train") -> CriteoExamples:
        """So many of a day: its first; or, of its first ten million, the last ("test") or those before these."""
        if day >= len(self.files):
            raise ValueError(f"there are {len(self.files)} days of logs; the study asks for day {day}.")
        read, found = [], 0
        for chunk in read_chunks(self.files[day], self.buckets):
            read.append(chunk)
            found += len(chunk)
            if found >= (num_examples if part == "train" else 10_000_000):
                break
        whole = concatenated(read)
        needed = 2 * num_examples if part == "validation" else num_examples
        if len(whole) < needed:
            raise ValueError(f"{self.files[day]} has {len(whole)} examples; the study asks for {needed}.")
        end = {"train": num_examples, "validation": len(whole) - num_examples, "test": len(whole)}[part]
        features, labels = whole.fetch(slice(end - num_examples, end))
        return CriteoExamples(labels, features["numeric"], features["categorical"])


def bucket_frequencies(examples: CriteoExamples, buckets: Sequence[int]) -> list[np.ndarray]:
    """How often each of the `buckets` of each feature occurs in `examples`: 26 int64 arrays. Private: add noise."""
    columns = examples.categorical.T
    return [np.bincount(column, minlength=size) for column, size in zip(columns, buckets)]
