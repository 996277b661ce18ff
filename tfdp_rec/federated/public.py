"""Public training data for the user encoder: pseudo-readers made from the catalogue alone.

A pseudo-reader likes one or two categories. Its history is news of those; its training clicks are one such news
among candidates of the whole catalogue. No clicks are used, so training on pseudo-readers costs no privacy
and needs no consent. They teach the encoders and the basis vectors what the categories are; what readers want of
them is learned from private clicks afterwards.
"""

from __future__ import annotations

import numpy as np

from tfdp_rec.datasets.mind.files import NewsCatalogue
from tfdp_rec.federated.cohort import Client


def pseudo_readers(
    catalogue: NewsCatalogue,
    count: int,
    history_length: int = 20,
    clicks: int = 4,
    candidates: int = 20,
    seed: int = 0,
) -> list[Client]:
    """Readers with invented interests.

    Args:
        catalogue: The public news.
        count: Number of readers.
        history_length: Number of clicks in each history.
        clicks: Number of training clicks of each reader.
        candidates: Number of news shown with each training click.
        seed: Seed of everything that is random.

    Raises:
        ValueError: If the catalogue is smaller than an impression.

    Example:
        >>> import numpy as np
        >>> from tfdp_rec.datasets.mind.files import NewsCatalogue
        >>> topics = {"category": np.array([0, 1, 1, 2, 2], dtype=np.int32)}
        >>> news = NewsCatalogue(("", "a", "b", "c", "d"), topics, (), ("", "x", "y"), ())
        >>> len(pseudo_readers(news, 3, history_length=2, clicks=1, candidates=3)[0].history)
        2
    """
    if len(catalogue) - 1 < candidates:
        raise ValueError(f"candidates must be at most the {len(catalogue) - 1} news, got {candidates}.")
    rng = np.random.default_rng(seed)
    category = catalogue.features["category"]
    present = np.unique(category[1:])
    readers = []
    for _ in range(count):
        liked = rng.choice(present, size=min(len(present), int(rng.integers(1, 3))), replace=False)
        pool = np.flatnonzero(np.isin(category, liked) & (np.arange(len(category)) > 0))
        history = tuple(catalogue.ids[row] for row in rng.choice(pool, size=history_length))
        shown = [_impression(rng, pool, catalogue.ids, candidates) for _ in range(clicks)]
        readers.append(Client(history, tuple(shown)))
    return readers


def _impression(
    rng: np.random.Generator, pool: np.ndarray, ids: tuple[str, ...], candidates: int
) -> tuple[tuple[str, ...], int]:
    clicked = int(rng.choice(pool))
    others = rng.choice(np.delete(np.arange(1, len(ids)), clicked - 1), size=candidates - 1, replace=False)
    return tuple(ids[row] for row in (clicked, *others)), 0
