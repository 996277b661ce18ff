"""The MIND news dataset: `news.tsv` and `behaviors.tsv`.

    news.tsv        id  category  subcategory  title  abstract  url  title entities  abstract entities
    behaviors.tsv   impression  user  time  history ("N1 N2")  candidates ("N3-0 N4-1", or "N3 N4" untold)

`read` gives a `NewsDataset`: a catalogue of public news features, whose row 0 is the anonymous news (padding
tokens only), and impressions, which name news by their ids. A row is a place in today's catalogue and identifies
nothing. A malformed line is an error with file and line number. A history item or candidate that news.tsv lacks stays,
under its id: whether a click is there must not depend on a catalogue that changes.

Reference:
    Wu et al., "MIND: a large-scale dataset for news recommendation", ACL 2020.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"[\w']+|[.,!?;|]")
_TIME = "%m/%d/%Y %I:%M:%S %p"
_NEWS_COLUMNS = 8
_BEHAVIOUR_COLUMNS = 5


@dataclasses.dataclass(frozen=True)
class NewsCatalogue:
    """Public features of all news; row 0 is the anonymous news.

    Args:
        ids: News ids by row ("" for row 0).
        features: Integer arrays with one row per news: title, body, category, subcategory. 0 is padding.
        vocabulary: Words by token id ("" for padding, "?" for unknown words), or what the tokenizer has in their place.
        categories: Category names by category id ("" for padding).
    """

    ids: tuple[str, ...]
    features: dict[str, NDArray[np.int32]]
    vocabulary: tuple[str, ...]
    categories: tuple[str, ...]
    subcategories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: Iterable[str]) -> list[int]:
        """Today's rows of the given news; 0, the anonymous news, for those that are not there."""
        return [self._row_of.get(news, 0) for news in ids]

    @functools.cached_property
    def _row_of(self) -> dict[str, int]:
        return {news: row for row, news in enumerate(self.ids)}


@dataclasses.dataclass(frozen=True)
class Impression:
    """What one user was shown at one time, and clicked.

    Args:
        user: User id.
        time: Time of the impression.
        history: Ids of the news clicked before, oldest first.
        candidates: Ids of the news shown.
        clicks: Positions in `candidates` that were clicked.
    """

    user: str
    time: datetime.datetime
    history: tuple[str, ...]
    candidates: tuple[str, ...]
    clicks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class NewsDataset:
    """A catalogue and the impressions of its readers.

    Args:
        catalogue: News and their public features.
        impressions: Impressions in file order.
    """

    catalogue: NewsCatalogue
    impressions: tuple[Impression, ...]

    def by_user(self) -> dict[str, list[Impression]]:
        """Impressions grouped by user, each group in time order."""
        groups: dict[str, list[Impression]] = {}
        for impression in sorted(self.impressions, key=lambda shown: shown.time):
            groups.setdefault(impression.user, []).append(impression)
        return groups


class Tokenizer(Protocol):
    """Text to token ids; 0 is padding."""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Words, or pieces of them, by token id."""

    def __call__(self, text: str, length: int) -> list[int]:
        """At most `length` ids of a text."""


class Words:
    """The words of a vocabulary as token ids; 1 is the unknown word.

    Args:
        vocabulary: Words by token id, the first for padding, the second for unknown words.
    """

    def __init__(self, vocabulary: tuple[str, ...]) -> None:
        self.vocabulary = vocabulary
        self._ids = {word: index for index, word in enumerate(vocabulary)}

    @classmethod
    def of(cls, texts: Iterable[str], min_word_count: int) -> Words:
        """Those that occur often enough in some texts."""
        counts = Counter(word for text in texts for word in _WORD.findall(text.lower()))
        return cls(("", "?", *sorted(word for word, count in counts.items() if count >= min_word_count)))

    def __call__(self, text: str, length: int) -> list[int]:
        """The first `length` words' ids."""
        return [self._ids.get(word, 1) for word in _WORD.findall(text.lower())[:length]]


def read(
    folder: str | Path,
    title_length: int = 30,
    body_length: int = 50,
    min_word_count: int = 2,
    catalogue: NewsCatalogue | None = None,
    tokenizer: Tokenizer | None = None,
) -> NewsDataset:
    """Read a folder that holds news.tsv and behaviors.tsv.

    Args:
        folder: Folder with news.tsv and behaviors.tsv.
        title_length: Tokens kept of a title.
        body_length: Tokens kept of an abstract.
        min_word_count: Least number of occurrences; rarer words become the unknown word.
        catalogue: A catalogue read before (of the training split), in place of this news.tsv.
        tokenizer: Tokenizer of titles and abstracts, such as `wordpiece.WordPiece` for a pre-trained text encoder; left
            out, the words of this news.tsv.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: On a malformed line (file and line number named) or a bad argument.
    """
    for name, value in (("title_length", title_length), ("body_length", body_length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if catalogue is None:
        rows = list({row[0]: row for _, row in _rows(Path(folder) / "news.tsv", _NEWS_COLUMNS)}.values())
        words_of = tokenizer or Words.of((text for row in rows for text in row[3:5]), min_word_count)
        catalogue = _catalogue(rows, title_length, body_length, words_of)
    impressions = []
    for where, columns in _rows(Path(folder) / "behaviors.tsv", _BEHAVIOUR_COLUMNS):
        try:
            impressions.append(_impression(columns))
        except ValueError as error:
            raise ValueError(f"{where}: {str(error).rstrip('.')}.") from error
    return NewsDataset(catalogue, tuple(impressions))


def _rows(path: Path, columns: int) -> Iterator[tuple[str, list[str]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row, where = line.rstrip("\n").split("\t"), f"{path.name} line {number}"
            if line.strip() and len(row) != columns:
                raise ValueError(f"{where}: {len(row)} columns where {columns} belong.")
            if line.strip():
                yield where, row


def _catalogue(rows: list[list[str]], title_length: int, body_length: int, tokenizer: Tokenizer) -> NewsCatalogue:
    categories = ("", *sorted({row[1] for row in rows}))
    subcategories = ("", *sorted({row[2] for row in rows}))
    features = {
        "title": _tokens([row[3] for row in rows], tokenizer, title_length),
        "body": _tokens([row[4] for row in rows], tokenizer, body_length),
        "category": np.array([0, *(categories.index(row[1]) for row in rows)], dtype=np.int32),
        "subcategory": np.array([0, *(subcategories.index(row[2]) for row in rows)], dtype=np.int32),
    }
    return NewsCatalogue(("", *(row[0] for row in rows)), features, tokenizer.vocabulary, categories, subcategories)


def _tokens(texts: list[str], tokenizer: Tokenizer, length: int) -> NDArray[np.int32]:
    table = np.zeros((len(texts) + 1, length), dtype=np.int32)
    for row, text in enumerate(texts, start=1):
        ids = tokenizer(text, length)
        table[row, : len(ids)] = ids
    return table


def _impression(columns: list[str]) -> Impression:
    _, user, time, past, shown = columns
    moment = datetime.datetime.strptime(time, _TIME)
    # Ids that the catalogue lacks stay: see above.
    history = tuple(past.split())
    labelled = [_candidate(item) for item in shown.split()]
    candidates = tuple(news for news, _ in labelled)
    clicks = tuple(place for place, (_, label) in enumerate(labelled) if label == "1")
    return Impression(user, moment, history, candidates, clicks)


def _candidate(item: str) -> tuple[str, str]:
    news, dash, label = item.rpartition("-")
    if not dash:
        return item, ""
    if label not in ("0", "1"):
        raise ValueError(f"candidate {item!r} has no label 0 or 1.")
    return news, label
