"""Labelled sentences in files, as GLUE's SST-2 has them: train.tsv, dev.tsv, and public.csv to train on before.

A file has a header. Its text is in the column "sentence" or "text", its label in "label" or "airline_sentiment": 1 or
positive, 0 or negative; rows with another label are left out. A tenth of the training sentences are for choosing
settings. Words that are public, those of public.csv that it has twice, have an id each; all other words share
`HASHED` ids by a hash, so that no id comes from private text.
"""

from __future__ import annotations

import collections
import csv
import functools
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from experiments.adafest.sentences import TextExamples

HASHED = 20_000
_TEXT, _LABEL = ("sentence", "text"), ("label", "airline_sentiment")
_LABELS = {"0": 0, "negative": 0, "1": 1, "positive": 1}


class SentenceFiles:
    """Sentences of a folder of files.

    Args:
        folder: Folder with train.tsv, dev.tsv and, if models are trained on public text before, public.csv.
        max_length: Length L of the longest sentence, in words; others are cut.

    Raises:
        FileNotFoundError: train.tsv or dev.tsv is missing.
    """

    def __init__(self, folder: str, max_length: int = 32):
        self.folder, self.max_length = Path(folder), max_length
        for name in ("train.tsv", "dev.tsv"):
            if not (self.folder / name).is_file():
                raise FileNotFoundError(f"{self.folder} has no {name}: give the folder of SST-2's files.")

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, padding included."""
        return 1 + HASHED + len(self._known)

    def examples(self, num_examples: int, day: int = 0, part: str = "train") -> TextExamples:
        """Examples of one part, "train" or "public"; of "validation" and "test" no more than there are."""
        found = self._whole(part)
        if len(found) < num_examples and part in ("train", "public"):
            raise ValueError(f"{self.folder} has {len(found)} {part} sentences; the study asks for {num_examples}.")
        tokens, labels = found.fetch(slice(num_examples))
        return TextExamples(labels, tokens)

    @functools.cache  # noqa: B019
    def _whole(self, part: str) -> TextExamples:
        rows = self._rows({"test": "dev.tsv", "public": "public.csv"}.get(part, "train.tsv"))
        order = np.random.default_rng(0).permutation(len(rows))
        if part in ("train", "validation"):
            tenth = len(rows) // 10
            order = order[tenth:] if part == "train" else order[:tenth]
        tokens = np.zeros([len(order), self.max_length], np.int32)
        for row, number in enumerate(order):
            ids = [self._id(word) for word in rows[number][0][: self.max_length]]
            tokens[row, : len(ids)] = ids
        return TextExamples(np.array([rows[number][1] for number in order], np.int32), tokens)

    def _id(self, word: str) -> int:
        return self._known.get(word) or 1 + zlib.crc32(word.encode()) % HASHED

    @functools.cached_property
    def _known(self) -> dict[str, int]:
        if not (self.folder / "public.csv").is_file():
            return {}
        counts = collections.Counter(word for words, _ in self._rows("public.csv") for word in words)
        return {word: 1 + HASHED + i for i, word in enumerate(sorted(w for w, n in counts.items() if n > 1))}

    def _rows(self, name: str) -> list[tuple[list[str], int]]:
        path = self.folder / name
        with path.open(encoding="utf-8", errors="replace", newline="") as lines:
            tabs: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
            rows = csv.DictReader(lines, **tabs)
            text, label = (next((c for c in names if c in (rows.fieldnames or ())), None) for names in (_TEXT, _LABEL))
            if not text or not label:
                raise ValueError(f"{path} has no column of {' or '.join(_TEXT)}, or none of {' or '.join(_LABEL)}.")
            return [
                (_words(row[text]), _LABELS[row[label]]) for row in rows if row[label] in _LABELS and _words(row[text])
            ]


def _words(text: str) -> list[str]:
    spaced = "".join(c if c.isalnum() or c in "'@" else f" {c} " for c in text.lower())
    return [word for word in spaced.split() if not word.startswith("@")]
