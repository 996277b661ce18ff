"""The MIND news dataset: `news.tsv` and `behaviors.tsv`.

    news.tsv        id  category  subcategory  title  abstract  url  title entities  abstract entities
    behaviors.tsv   impression  user  time  history ("N1 N2")  candidates ("N3-0 N4-1", or "N3 N4" untold)

`read` gives a `NewsDataset`: a catalogue of public news features, whose row 0 is the anonymous news (padding
tokens only), and impressions that refer to catalogue rows. What does not fit is named, never passed over:

* a malformed line raises with file and line number, or with `malformed="skip"` is counted in the report;
* a history item or candidate that news.tsv lacks is left out and counted;
* an impression whose click was left out, or that has no click at all, is left out of the training samples and
  counted; an empty history stays, with no items.

Reference:
    Wu et al., "MIND: a large-scale dataset for news recommendation", ACL 2020.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

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
        vocabulary: Words by token id ("" for padding, "?" for unknown words).
        categories: Category names by category id ("" for padding).
    """

    ids: tuple[str, ...]
    features: dict[str, NDArray[np.int32]]
    vocabulary: tuple[str, ...]
    categories: tuple[str, ...]
    subcategories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def category_of(self, rows: NDArray[np.int64]) -> list[str]:
        """Category names of the given rows."""
        return [self.categories[i] for i in self.features["category"][rows]]


@dataclasses.dataclass(frozen=True)
class Impression:
    """What one user was shown at one time, and clicked.

    Args:
        user: User id.
        time: When.
        history: Catalogue rows clicked before, oldest first.
        candidates: Catalogue rows shown.
        clicks: Positions in `candidates` that were clicked.
    """

    user: str
    time: datetime.datetime
    history: tuple[int, ...]
    candidates: tuple[int, ...]
    clicks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class NewsDataset:
    """A catalogue, the impressions of its readers, and what was left out on the way.

    Args:
        catalogue: Public features.
        impressions: In file order.
        report: Counts of what did not fit, by kind.
    """

    catalogue: NewsCatalogue
    impressions: tuple[Impression, ...]
    report: dict[str, int]

    def by_user(self) -> dict[str, list[Impression]]:
        """Impressions grouped by user, each group in time order."""
        groups: dict[str, list[Impression]] = {}
        for impression in sorted(self.impressions, key=lambda shown: shown.time):
            groups.setdefault(impression.user, []).append(impression)
        return groups


def words(text: str) -> list[str]:
    """Lower-case words and punctuation of a text.

    Example:
        >>> words("Don't panic: 42!")
        ["don't", 'panic', '42', '!']
    """
    return _WORD.findall(text.lower())


def read(
    folder: str | Path,
    title_length: int = 30,
    body_length: int = 50,
    min_word_count: int = 2,
    malformed: Literal["raise", "skip"] = "raise",
    catalogue: NewsCatalogue | None = None,
) -> NewsDataset:
    """Read a folder that holds news.tsv and behaviors.tsv.

    Args:
        folder: Where the two files are.
        title_length: Tokens kept of a title.
        body_length: Tokens kept of an abstract.
        min_word_count: Rarer words become the unknown word.
        malformed: Whether a line that does not parse raises or is counted.
        catalogue: A catalogue read before (of the training split) to refer to instead of this news.tsv.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: On a malformed line (file and line number named) or a bad argument.
    """
    if malformed not in ("raise", "skip"):
        raise ValueError(f"malformed must be 'raise' or 'skip', got {malformed!r}.")
    for name, value in (("title_length", title_length), ("body_length", body_length)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    report: Counter[str] = Counter()
    if catalogue is None:
        lines = list(_rows(Path(folder) / "news.tsv", _NEWS_COLUMNS, malformed, report))
        catalogue = _catalogue([row for _, row in lines], title_length, body_length, min_word_count, report)
    rows = {news: row for row, news in enumerate(catalogue.ids) if row}
    impressions = []
    path = Path(folder) / "behaviors.tsv"
    for where, columns in _rows(path, _BEHAVIOUR_COLUMNS, malformed, report):
        try:
            impressions.append(_impression(columns, rows, report))
        except ValueError as error:
            _malformed(f"{where}: {error}", malformed, report)
    return NewsDataset(catalogue, tuple(impressions), dict(report))


def _rows(path: Path, columns: int, malformed: str, report: Counter[str]) -> Iterator[tuple[str, list[str]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            row = line.rstrip("\n").split("\t")
            if len(row) == columns:
                yield f"{path.name} line {number}", row
            elif line.strip():
                problem = f"{path.name} line {number}: {len(row)} columns where {columns} belong"
                _malformed(problem, malformed, report)


def _malformed(problem: str, malformed: str, report: Counter[str]) -> None:
    if malformed == "raise":
        raise ValueError(f"{problem}; pass malformed='skip' to leave such lines out.")
    report["malformed lines"] += 1


def _catalogue(
    rows: list[list[str]], title_length: int, body_length: int, min_word_count: int, report: Counter[str]
) -> NewsCatalogue:
    unique = {row[0]: row for row in rows}
    report["repeated news"] += len(rows) - len(unique)
    rows = list(unique.values())
    counts = Counter(word for row in rows for word in words(row[3]) + words(row[4]))
    vocabulary = ("", "?", *sorted(word for word, count in counts.items() if count >= min_word_count))
    token = {word: index for index, word in enumerate(vocabulary)}
    categories = ("", *sorted({row[1] for row in rows}))
    subcategories = ("", *sorted({row[2] for row in rows}))
    features = {
        "title": _tokens([row[3] for row in rows], token, title_length),
        "body": _tokens([row[4] for row in rows], token, body_length),
        "category": np.array([0, *(categories.index(row[1]) for row in rows)], dtype=np.int32),
        "subcategory": np.array([0, *(subcategories.index(row[2]) for row in rows)], dtype=np.int32),
    }
    return NewsCatalogue(("", *unique), features, vocabulary, categories, subcategories)


def _tokens(texts: list[str], token: dict[str, int], length: int) -> NDArray[np.int32]:
    table = np.zeros((len(texts) + 1, length), dtype=np.int32)
    for row, text in enumerate(texts, start=1):
        ids = [token.get(word, 1) for word in words(text)[:length]]
        table[row, : len(ids)] = ids
    return table


def _impression(columns: list[str], rows: dict[str, int], report: Counter[str]) -> Impression:
    _, user, time, history, shown = columns
    moment = datetime.datetime.strptime(time, _TIME)
    known = [rows[news] for news in history.split() if news in rows]
    report["history items not in news.tsv"] += len(history.split()) - len(known)
    candidates: list[int] = []
    clicks: list[int] = []
    for item in shown.split():
        news, label = _candidate(item)
        if news not in rows:
            report["candidates not in news.tsv"] += 1
            continue
        if label == "1":
            clicks.append(len(candidates))
        candidates.append(rows[news])
    if not known:
        report["empty histories"] += 1
    if not clicks:
        report["impressions without a known click"] += 1
    return Impression(user, moment, tuple(known), tuple(candidates), tuple(clicks))


def _candidate(item: str) -> tuple[str, str]:
    news, dash, label = item.rpartition("-")
    if not dash:
        return item, ""
    if label not in ("0", "1"):
        raise ValueError(f"candidate {item!r} has no label 0 or 1.")
    return news, label
