"""Timelines of activities with three features each: entities of a knowledge graph, unigrams and bigrams.

Two file formats with one schema, one individual a record:

    JSON lines   {"id": "p1", "activities": [{"time": 1600000000, "entities": ["Q42"],
                                              "unigrams": ["towel"], "bigrams": ["dont panic"]}, ...]}
    Parquet      id: string, activities: list<struct<time: int64, entities: list<string>,
                                                     unigrams: list<string>, bigrams: list<string>>>

A feature that is left out is empty. Activities may come in any order; they are sorted by time. An example is
one individual's: a random activity's entity as label, the activities before it, newest first, as context.

**A vocabulary read off private data is itself a release**: a term in it shows that it was used. So it comes from
a file (a public list), or from `tfdp_rec.privacy.private_terms`, which counts under differential privacy:

    held = distinct_terms(timelines, "entities")
    vocabulary = Vocabulary(*private_terms(held, size=1000, noise_multiplier=4.0, threshold_delta=1e-7))
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from numpy.typing import ArrayLike, NDArray

from experiments.generated.knowledge_graph import FEATURES, SyntheticKG, pad_window

_FIRST_TIME, _STEP_TIME = 1_600_000_000, 86_400


@dataclass(frozen=True)
class Activity:
    """What one individual did at one time: terms for each of `FEATURES`."""

    time: int
    terms: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Timeline:
    """All activities of one individual, oldest first."""

    id: str
    activities: Sequence[Activity]


def read_timelines(path: str | Path) -> Iterator[Timeline]:
    """Timelines of a .jsonl or .parquet file, one at a time: memory stays bounded.

    Args:
        path: The file; the suffix decides the format.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the suffix is unknown, or a record breaks the schema; names file and record.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No timelines at {path}.")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: timelines are read from .jsonl or .parquet, not '{path.suffix}'.")
    for number, record in enumerate(readers[path.suffix](path), start=1):
        yield _timeline(record, f"{path}, record {number}")


def write_timelines(timelines: Iterable[Timeline], path: str | Path, chunk: int = 1000) -> Path:
    """Write timelines to a .jsonl or .parquet file, `chunk` at a time.

    Args:
        timelines: Timelines to write.
        path: The file; the suffix decides the format.
        chunk: Parquet row group size.

    Returns:
        The path.

    Raises:
        ValueError: the suffix is unknown.
    """
    path = Path(path)
    records = (
        {"id": t.id, "activities": [{"time": a.time, **_all_features(a.terms)} for a in t.activities]}
        for t in timelines
    )
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    elif path.suffix == ".parquet":
        _write_parquet(records, path, chunk)
    else:
        raise ValueError(f"{path}: timelines are written as .jsonl or .parquet, not '{path.suffix}'.")
    return path


@dataclass(frozen=True)
class Vocabulary:
    """Terms of one feature with ids 1, 2, ...; 0 is padding and stands for every other term.

    Attributes:
        terms: Terms in the order of their ids.
        event: Cost of reading it off private data; None for a public list.

    Example:
        >>> Vocabulary(("Q1", "Q42")).ids(["Q42", "Q7", "Q1"]).tolist()
        [2, 0, 1]
    """

    terms: tuple[str, ...]
    event: DpEvent | None = None

    def __post_init__(self) -> None:
        index = {term: number for number, term in enumerate(self.terms, start=1)}
        if len(index) != len(self.terms):
            raise ValueError("A vocabulary lists each term once.")
        object.__setattr__(self, "_index", index)

    @property
    def size(self) -> int:
        """Rows a table needs: the terms and padding."""
        return len(self.terms) + 1

    def ids(self, terms: Iterable[str]) -> NDArray[np.int64]:
        """The id of each term, 0 for unknown ones."""
        index: dict[str, int] = self._index  # type: ignore[attr-defined]
        return np.fromiter((index.get(term, 0) for term in terms), np.int64)

    @classmethod
    def from_file(cls, path: str | Path) -> Vocabulary:
        """A public list: one term a line.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a term is listed twice.
        """
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        return cls(tuple(line for line in lines if line))


def distinct_terms(timelines: Iterable[Timeline], feature: str) -> Iterator[list[str]]:
    """Each individual's distinct terms of `feature` in `timelines`: what `tfdp_rec.privacy.private_terms` counts.

    Raises:
        ValueError: there is no such feature.
    """
    if feature not in FEATURES:
        raise ValueError(f"feature must be one of {FEATURES}, got {feature!r}.")
    return (_distinct(timeline, feature) for timeline in timelines)


def named_timelines(kg: SyntheticKG, start: int = 0, stop: int | None = None, chunk: int = 1024) -> Iterator[Timeline]:
    """The individuals of a generated graph as named terms, oldest activity first, made `chunk` at a time.

    Args:
        kg: Graph and population.
        start, stop: Range of individuals; all if left out.
        chunk: Number of individuals in memory at once.
    """
    stop = kg.num_individuals if stop is None else stop
    for first in range(start, stop, chunk):
        chosen = np.arange(first, min(first + chunk, stop))
        walk, lengths = kg.walk(chosen)
        shown = kg.shown(walk, chosen)
        for row, individual in enumerate(chosen):
            yield Timeline(f"p{individual}", [
                Activity(_FIRST_TIME + _STEP_TIME * p, {
                    feature: [f"{feature[0]}{term}" for term in shown[feature][row, p] if term]
                    for feature in FEATURES
                })
                for p in range(lengths[row])
            ])  # fmt: skip


class TimelineStore:
    """Timelines as ids in flat arrays: any individual's example at any time.

    Individuals without an example (fewer than 2 activities, or no known entity after the first) are left out;
    `num_individuals` counts those kept.

    Args:
        timelines: Timelines, read once, one at a time.
        vocabularies: One `Vocabulary` for each of `FEATURES`.
        labels: Vocabulary of the labels; that of the entities if left out.
        context_length: Number of activities in a context.
        values_per_activity: Largest number of values kept of one activity, by feature.

    Raises:
        ValueError: a feature has no vocabulary, or no individual has an example.
    """

    def __init__(
        self,
        timelines: Iterable[Timeline],
        vocabularies: Mapping[str, Vocabulary],
        labels: Vocabulary | None = None,
        context_length: int = 20,
        values_per_activity: Mapping[str, int] | None = None,
    ):
        if missing := set(FEATURES) - set(vocabularies):
            raise ValueError(f"Features without a vocabulary: {sorted(missing)}.")
        self.context_length = context_length
        self.values_per_activity = dict(values_per_activity or {"entities": 4, "unigrams": 8, "bigrams": 8})
        labels = labels or vocabularies["entities"]
        self._pack(timelines, vocabularies, labels)
        if self.num_individuals == 0:
            raise ValueError("No timeline has an example: 2 activities, of which a later one has a known entity.")

    def _pack(self, timelines: Iterable[Timeline], vocabularies: Mapping[str, Vocabulary], labels: Vocabulary) -> None:
        values = {feature: array("i") for feature in FEATURES}
        label_ids, label_counts, lengths = array("q"), array("q"), array("q")
        for timeline in timelines:
            candidates = [labels.ids(a.terms.get("entities", ())) for a in timeline.activities]
            candidates = [c[c > 0] for c in candidates]
            if not any(c.size for c in candidates[1:]):
                continue
            lengths.append(len(candidates))
            for activity, labelled in zip(timeline.activities, candidates, strict=True):
                label_counts.append(labelled.size)
                label_ids.extend(labelled.tolist())
                for feature in FEATURES:
                    ids = vocabularies[feature].ids(activity.terms.get(feature, ()))
                    values[feature].extend(_row(ids, self.values_per_activity[feature]))
        self.num_individuals = len(lengths)
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
        self._values = {f: np.asarray(values[f]).reshape(-1, self.values_per_activity[f]) for f in FEATURES}
        self._label_counts = np.asarray(label_counts, np.int64)
        self._label_starts = np.concatenate([[0], np.cumsum(self._label_counts)])
        self._labels = np.asarray(label_ids, np.int64)

    def fetch(self, individuals: ArrayLike, seed: int | None = None) -> dict[str, NDArray[Any]]:
        """One example for each individual: see `SyntheticKG.fetch`.

        Args:
            individuals: Indices [batch] below `num_individuals`; may be empty.
            seed: Seed of the choice of labels; without it the system's entropy decides.
        """
        chosen = np.asarray(individuals, dtype=np.int64)
        if chosen.ndim != 1 or np.any((chosen < 0) | (chosen >= self.num_individuals)):
            raise IndexError(f"Individuals must be a list of indices in [0, {self.num_individuals:,}).")
        rng = np.random.default_rng(seed)
        starts, ends = self._starts[chosen], self._starts[chosen + 1]
        labelled = np.array([self._choose_label(a, b, rng) for a, b in zip(starts, ends, strict=True)], np.int64)
        window, present = pad_window(starts, labelled, self.context_length)
        batch: dict[str, NDArray[Any]] = {
            f: np.where(present[:, :, None], self._values[f][window], 0).astype(np.int32) for f in FEATURES
        }
        offset = (rng.random(chosen.size) * self._label_counts[labelled]).astype(np.int64)
        batch["label"] = self._labels[self._label_starts[labelled] + offset]
        return batch

    def _choose_label(self, start: int, end: int, rng: np.random.Generator) -> int:
        """A random activity after the first that has a known entity."""
        return int(rng.choice(start + 1 + np.flatnonzero(self._label_counts[start + 1 : end])))


def split_individuals(
    num_individuals: int, train_share: float = 0.9, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training and of the test individuals, each in random order.

    Args:
        num_individuals: Number of individuals.
        train_share: Share that trains, between 0 and 1.
        seed: Seed of the split.

    Raises:
        ValueError: one side would be empty.

    Example:
        >>> train, test = split_individuals(100)
        >>> train.size, test.size
        (90, 10)
    """
    cut = round(num_individuals * train_share)
    if not 0 < cut < num_individuals:
        raise ValueError(f"A share of {train_share} leaves one side of {num_individuals} individuals empty.")
    order = np.random.default_rng(seed).permutation(num_individuals)
    return order[:cut], order[cut:]


def _timeline(record: Any, where: str) -> Timeline:
    try:
        activities = [_activity(entry, where) for entry in record["activities"]]
        return Timeline(str(record["id"]), sorted(activities, key=lambda activity: activity.time))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: expected an object with 'id' and 'activities' ({error!r}).") from error


def _activity(entry: Any, where: str) -> Activity:
    if isinstance(entry["time"], bool) or not isinstance(entry["time"], int):
        raise ValueError(f"{where}: 'time' must be an integer, got {entry['time']!r}.")
    for feature in FEATURES:
        values = entry.get(feature) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{where}: '{feature}' must be a list of strings, got {values!r}.")
    return Activity(entry["time"], {feature: list(entry.get(feature) or []) for feature in FEATURES})


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error


def _read_parquet(path: Path) -> Iterator[Any]:
    with _parquet().ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1000):
            yield from batch.to_pylist()


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f"Parquet files need a pyarrow that works with NumPy {np.__version__} ({error}): beside NumPy 1 "
            "install 'pyarrow<26', or use .jsonl files."
        ) from error
    return pyarrow.parquet


def _write_parquet(records: Iterable[Any], path: Path, chunk: int) -> None:
    parquet = _parquet()
    import pyarrow

    strings = pyarrow.list_(pyarrow.string())
    activity = pyarrow.struct([("time", pyarrow.int64()), *((feature, strings) for feature in FEATURES)])
    schema = pyarrow.schema([("id", pyarrow.string()), ("activities", pyarrow.list_(activity))])
    source = iter(records)
    with parquet.ParquetWriter(path, schema) as writer:
        while rows := list(itertools.islice(source, chunk)):
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _all_features(terms: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {feature: list(terms.get(feature, ())) for feature in FEATURES}


def _distinct(timeline: Timeline, feature: str) -> list[str]:
    return sorted({term for activity in timeline.activities for term in activity.terms.get(feature, ())})


def _row(ids: NDArray[np.int64], width: int) -> list[int]:
    known = ids[ids > 0][:width].tolist()
    return known + [0] * (width - len(known))
