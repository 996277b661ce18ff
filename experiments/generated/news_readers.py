"""Generated news readers, in the files of the MIND dataset.

    news      one of K topics (category), a subtopic (subcategory), a popularity, and words: most from the
              topic's own part of the vocabulary, the rest from a part all topics share
    readers   a sparse mix of topics; every day a reader's mix is drawn anew with probability `drift`
    clicks    of the C candidates shown, one, with probability proportional to
              exp(strength * interest in its topic + log popularity)

Everything is drawn from one seed, so the files repeat; nothing in them is a person's data.
"""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.core.ground.refused import refuse_below

_START = datetime.datetime(2024, 1, 1, 6)


@dataclasses.dataclass(frozen=True)
class SyntheticNews:
    """Settings of the generator.

    Args:
        num_users: Number of readers.
        num_news: Number of news in the catalogue.
        num_topics: Number of topics K.
        num_days: Number of days, each with one impression a reader; the last is meant for evaluation.
        history_length: Clicks every reader has before the first day.
        candidates: News shown in an impression.
        interest_strength: Strength of interests in clicks; 0 means popularity alone.
        drift: Probability that a reader's interests change from one day to the next.
        seed: Seed of everything that is random.

    Raises:
        ValueError: On a value out of range.

    Example:
        >>> import tempfile
        >>> from tfdp_rec.datasets.mind import files as mind
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     SyntheticNews(num_users=5, num_news=60, num_days=2).write(folder)
        ...     len(mind.read(folder).impressions)
        10
    """

    num_users: int = 2000
    num_news: int = 1000
    num_topics: int = 8
    num_days: int = 5
    history_length: int = 20
    candidates: int = 20
    interest_strength: float = 4.0
    drift: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below(1, num_users=self.num_users, num_days=self.num_days)
        refuse_below(1, history_length=self.history_length, candidates=self.candidates)
        refuse_below(2, num_topics=self.num_topics)
        if self.num_news < max(self.candidates, self.num_topics):
            raise ValueError(f"num_news must be at least candidates and num_topics, got {self.num_news}.")
        if not 0 <= self.drift <= 1:
            raise ValueError(f"drift must be in [0, 1], got {self.drift}.")

    def write(self, folder: str | Path) -> None:
        """Write news.tsv and behaviors.tsv.

        Args:
            folder: Folder for the files; made if missing.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(self.seed)
        topics = rng.permutation(np.arange(self.num_news) % self.num_topics)
        (path / "news.tsv").write_text("\n".join(self._news_lines(rng, topics)) + "\n", encoding="utf-8")
        lines = self._behaviour_lines(rng, topics)
        (path / "behaviors.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _news_lines(self, rng: np.random.Generator, topics: NDArray[np.int64]) -> list[str]:
        lines = []
        for news, topic in enumerate(topics):
            subtopic = int(rng.integers(3))
            title, body = self._text(rng, topic, subtopic, 8), self._text(rng, topic, subtopic, 16)
            columns = (f"N{news}", f"topic{topic}", f"topic{topic}.{subtopic}", title, body, "", "[]", "[]")
            lines.append("\t".join(columns))
        return lines

    def _text(self, rng: np.random.Generator, topic: int, subtopic: int, length: int) -> str:
        own = rng.random(length) < 0.6
        special = rng.random(length) < 0.5
        # Zipf-like ranks inside each part of the vocabulary
        ranks = np.minimum((20 ** rng.random(length)).astype(int), 19)
        shared = np.minimum((100 ** rng.random(length)).astype(int), 99)
        return " ".join(
            (f"t{topic}s{subtopic}w{rank}" if narrow else f"t{topic}w{rank}") if mine else f"common{common}"
            for mine, narrow, rank, common in zip(own, special, ranks, shared)
        )

    def _behaviour_lines(self, rng: np.random.Generator, topics: NDArray[np.int64]) -> list[str]:
        popularity = 0.7 * rng.standard_normal(self.num_news)
        interests = self._interests(rng, self.num_users)
        histories = [
            [self._click(rng, interests[user], topics, popularity)[1] for _ in range(self.history_length)]
            for user in range(self.num_users)
        ]
        lines: list[str] = []
        for day in range(self.num_days):
            moved = rng.random(self.num_users) < self.drift
            interests[moved] = self._interests(rng, int(moved.sum()))
            for user in range(self.num_users):
                shown, clicked = self._click(rng, interests[user], topics, popularity)
                moment = _START + datetime.timedelta(days=day, seconds=int(rng.integers(60_000)))
                past = " ".join(f"N{news}" for news in histories[user])
                candidates = " ".join(f"N{news}-{int(news == clicked)}" for news in shown)
                when = moment.strftime("%m/%d/%Y %I:%M:%S %p")
                lines.append(f"{len(lines)}\tU{user}\t{when}\t{past}\t{candidates}")
                histories[user] = [*histories[user], clicked]
        return lines

    def _interests(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        """Sparse topic mixes, each scaled to a largest weight of 1."""
        mixes = rng.dirichlet(np.full(self.num_topics, 0.15), size=count)
        return mixes / mixes.max(axis=1, keepdims=True)

    def _click(
        self,
        rng: np.random.Generator,
        interest: NDArray[np.float64],
        topics: NDArray[np.int64],
        popularity: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], int]:
        shown = rng.choice(self.num_news, size=self.candidates, replace=False)
        appeal = self.interest_strength * interest[topics[shown]] + popularity[shown]
        clicked = int(shown[np.argmax(appeal + rng.gumbel(size=self.candidates))])
        return shown, clicked
