"""Fair comparisons on a machine whose speed drifts: contestants take turns, and a ratio is taken within a round.

A time is a pair: milliseconds of the clock, and of processor time over all cores, which other work hardly touches.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Time = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one contestant, in milliseconds; `processor` sums over all cores."""

    median: float
    lowest: float
    highest: float
    processor: float


def timed(run: Callable[[], object]) -> Time:
    """Milliseconds of wall and of processor time that a call takes.

    Args:
        run: must return when its work is done.
    """
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)


def rounds(contestants: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3) -> dict[str, list[Time]]:
    """The time of every contestant in every round, in turn.

    Args:
        contestants: what to run, by name.
        repeats: rounds that count, at least 1.
        warm_up: rounds before them, for compilation and first allocations.

    Raises:
        ValueError: if repeats is not positive.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    times: dict[str, list[Time]] = {name: [] for name in contestants}
    for _ in range(warm_up + repeats):
        for name, run in contestants.items():
            times[name].append(timed(run))
    return {name: found[warm_up:] for name, found in times.items()}


def alternate(contestants: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 2) -> dict[str, Timing]:
    """As `rounds`, summed up.

    Args:
        contestants: as there.
        repeats: as there.
        warm_up: as there.

    Example:
        >>> alternate({"sleep": lambda: time.sleep(0.01)}, repeats=3)["sleep"].median > 9
        True
    """
    return {name: summary(times) for name, times in rounds(contestants, repeats, warm_up).items()}


def summary(times: Sequence[Time]) -> Timing:
    """Median, lowest and highest of the clock, and the median of processor time."""
    wall, processor = zip(*times)
    return Timing(statistics.median(wall), min(wall), max(wall), statistics.median(processor))


def ratio(own: Sequence[float], other: Sequence[float], apart: bool = False) -> tuple[float, float, float]:
    """Median, least and most of the ratios within a round.

    Args:
        own: a time for each round.
        other: what they are compared with, of the same rounds.
        apart: nothing was alternated, so that only the whole can be compared.

    Example:
        >>> ratio([2.0, 6.0, 2.0], [1.0, 3.0, 2.0])
        (2.0, 1.0, 2.0)
    """
    if apart:
        own, other = [statistics.median(own)], [statistics.median(other)]
    ratios = [one / another for one, another in zip(own, other)]
    return statistics.median(ratios), min(ratios), max(ratios)


def processor_ns(processes: Iterable[int]) -> int:
    """Processor time that processes have used so far, all threads and both modes."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
