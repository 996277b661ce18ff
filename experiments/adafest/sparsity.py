"""How many of a batch's gradient values are zero, by batch size: the tables' rows that no example of the batch reads.

No training is needed: which rows a batch reads does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.adafest.trainings import Trainings

BATCH_SIZES = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
LARGEST = 5
ALL = "all tables"


def gradient_sparsity(trainings: Trainings, batches: int = 50) -> list[dict[str, Any]]:
    """The share of zero gradient values, by batch size: of all tables, and of the largest.

    Args:
        trainings: their model and examples.
        batches: number of batches, drawn at random, that a share is the mean of.
    """
    model, examples = trainings.model(), trainings.problem.source.examples(trainings.sizes.examples)
    widths = {table.embeddings.path: table.output_dim for table in trainings.problem.tables(model)}
    rows, rng = trainings.problem.rows(model), np.random.default_rng(0)
    found = []
    for size in (size for size in BATCH_SIZES if size <= len(examples)):
        drawn = (examples.fetch(rng.choice(len(examples), size, replace=False))[0] for _ in range(batches))
        shares = [zero_shares(trainings.problem.reads(model, features), rows, widths) for features in drawn]
        found.append({"batch size": size} | {name: float(np.mean([s[name] for s in shares])) for name in shares[0]})
    return found


def zero_shares(
    reads: Mapping[str, np.ndarray], rows: Mapping[str, int], widths: Mapping[str, int]
) -> dict[str, float]:
    """The share of one batch's gradient values that are zero.

    Args:
        reads: table path -> the rows that its examples read.
        rows: table path -> its number of rows.
        widths: table path -> its number of columns.

    Example:
        >>> zero_shares({"a": np.array([0, 0, 1]), "b": np.array([[3, 3]])}, {"a": 4, "b": 10}, {"a": 2, "b": 1})
        {'all tables': 0.722222, 'b': 0.9, 'a': 0.5}
    """
    unread = {path: rows[path] - len(np.unique(ids)) for path, ids in reads.items()}
    zeros, values = (sum(count[path] * widths[path] for path in reads) for count in (unread, rows))
    largest = sorted(reads, key=lambda path: -rows[path])[:LARGEST] if len(reads) > 1 else []
    shares = {ALL: zeros / values} | {path.rsplit("/", 1)[0]: unread[path] / rows[path] for path in largest}
    return {name: round(share, 6) for name, share in shares.items()}
