"""Counts of a server's requests, in the text form of Prometheus.

    tfdp_rec_requests_total{status="200"}         answers, by status
    tfdp_rec_predictions{state="running"}         predictions now; `waiting`: for one of the places
    tfdp_rec_connections                          open now
    tfdp_rec_prediction_seconds_bucket{le="0.1"}  predictions that took so long or less, in all

**Nothing tells what a request contains.** A longer history takes longer: so a prediction's time is known by its bucket
alone. `_sum` adds the bounds of the buckets (10 above the last), since two scrapes would tell the time that it grew by.

Reference:
    Prometheus, exposition formats, text format version 0.0.4.
"""

from __future__ import annotations

import bisect
import collections
import itertools

PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds


class Traffic:
    """The counts of one server."""

    def __init__(self) -> None:
        self.answers = collections.Counter[int]()  # by status
        self._predictions = [0] * (len(BOUNDS) + 1)  # by bucket, the last without a bound

    def note_prediction(self, seconds: float) -> None:
        """Counts a prediction that took so long."""
        self._predictions[bisect.bisect_left(BOUNDS, seconds)] += 1

    def describe(self, running: int, waiting: int, connections: int) -> bytes:
        """All counts, with those of the moment."""
        counted = list(itertools.accumulate(self._predictions))
        total = sum(bound * count for bound, count in zip((*BOUNDS, BOUNDS[-1]), self._predictions))
        lines = [
            "# TYPE tfdp_rec_requests_total counter",
            *(f'tfdp_rec_requests_total{{status="{status}"}} {n}' for status, n in sorted(self.answers.items())),
            "# TYPE tfdp_rec_predictions gauge",
            f'tfdp_rec_predictions{{state="running"}} {running}',
            f'tfdp_rec_predictions{{state="waiting"}} {waiting}',
            "# TYPE tfdp_rec_connections gauge",
            f"tfdp_rec_connections {connections}",
            "# TYPE tfdp_rec_prediction_seconds histogram",
            *(f'tfdp_rec_prediction_seconds_bucket{{le="{le}"}} {n}' for le, n in zip((*BOUNDS, "+Inf"), counted)),
            f"tfdp_rec_prediction_seconds_sum {total:.3f}",
            f"tfdp_rec_prediction_seconds_count {counted[-1]}",
        ]
        return "\n".join([*lines, ""]).encode()
