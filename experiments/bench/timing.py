"""Fair comparisons on a machine whose speed drifts: alternate the contestants in one process, take medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one contestant, in milliseconds; `processor` sums over all cores."""

    median: float
    lowest: float
    highest: float
    processor: float


Rounds = dict[str, list[tuple[float, float]]]


def rounds(contestants: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 3) -> Rounds:
    """Milliseconds of wall and of processor time of every contestant in every round, for ratios within a round.

    Args:
        contestants: as for `alternate`.
        repeats: as for `alternate`.
        warm_up: as for `alternate`.
    """
    _refuse_no_rounds(repeats)
    times: Rounds = {name: [] for name in contestants}
    for _ in range(warm_up + repeats):
        for name, run in contestants.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            times[name].append((1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)))
    return {name: found[warm_up:] for name, found in times.items()}


def _refuse_no_rounds(repeats: int) -> None:
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")


def alternate(contestants: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 2) -> dict[str, Timing]:
    """Runs every contestant in turn, `repeats` rounds, after `warm_up` rounds that do not count.

    Args:
        contestants: What to run, by name; each call must return when its work is done.
        repeats: Rounds that count, at least 1.
        warm_up: Rounds before them, for compilation and first allocations.

    Returns:
        A timing for every name.

    Raises:
        ValueError: If repeats is not positive.

    Example:
        >>> alternate({"sleep": lambda: time.sleep(0.01)}, repeats=3)["sleep"].median > 9
        True
    """
    _refuse_no_rounds(repeats)
    wall: dict[str, list[float]] = {name: [] for name in contestants}
    processor: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(warm_up + repeats):
        for name, run in contestants.items():
            began, began_processor = time.perf_counter(), time.process_time()
            run()
            if round_number >= warm_up:
                wall[name].append(1e3 * (time.perf_counter() - began))
                processor[name].append(1e3 * (time.process_time() - began_processor))
    return {
        name: Timing(statistics.median(times), min(times), max(times), statistics.median(processor[name]))
        for name, times in wall.items()
    }
