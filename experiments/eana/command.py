"""The command line that EANA's two studies share: sizes, options, and what a run writes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdp_rec import mechanisms
from tfdp_rec.settings import NOT_NEGATIVE, POSITIVE, add_options, choose, option

MECHANISMS = ("SGD", *(mechanism.label for mechanism in mechanisms.COMMON))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the trainings of both studies have; the defaults are the paper's."""

    width: int = option(128, "of the embeddings", POSITIVE)
    batch_size: int = 64
    steps: int = option(100_000, "of each training", POSITIVE)
    per_repeat: int = option(50, "canaries for each number of copies", POSITIVE)
    references: int = 16_384
    negatives: int = 500
    learning_rate: float = option(1.0, "of each training", POSITIVE)
    clip: float = 2.0


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which cells a study has."""

    mechanisms: tuple[str, ...] = option(MECHANISMS, "which to train", choices=MECHANISMS, metavar="NAME")
    noise: tuple[float, ...] = option((0.001, 0.01), "on the average clipped gradient", POSITIVE, several="*")
    epsilon: float = option(8.0, "budget of one more noise; 0 for none", NOT_NEGATIVE)
    seeds: int = option(1, "trainings of each cell", POSITIVE)

    def __post_init__(self) -> None:
        if not self.noise and not self.epsilon and self.mechanisms != ("SGD",):
            raise ValueError("Give --noise or --epsilon: without either, no mechanism has anything to add.")


def add_arguments(parser: argparse.ArgumentParser, sizes: type[Sizes], out: str) -> None:
    """The options that choose a study's sizes and cells.

    Args:
        parser: of the study.
        sizes: its class of sizes.
        out: the folder, unless another is given.
    """
    parser.add_argument("--quick", action="store_true", help="small sizes, ten minutes")
    parser.add_argument("--out", default=out, metavar="FOLDER", help="default: %(default)s")
    add_options(parser, sizes)
    add_options(parser, Grid)


def run(
    args: argparse.Namespace,
    sizes: Sizes,
    make_task: Callable[[], Any],
    title: str,
    figures: Sequence[str],
    measure_speed: Callable[[Any], tuple[Mapping[str, Any], str]] = lambda study: ({}, ""),
) -> int:
    """Runs a study's cells and writes its folder.

    Args:
        args: from the command line.
        sizes: of every training.
        make_task: the model and its data.
        title: of the report.
        figures: names of the plots of precision and of exposure: "Figure 4".
        measure_speed: study -> further columns of Table 3, and their part of the report.
    """
    from experiments.eana import cells, report
    from experiments.study import Study

    grid = choose(args, Grid())
    study = Study(args.out, {**dataclasses.asdict(sizes), "data": args.data})
    speeds, speed_page = measure_speed(study)
    task = make_task()
    wanted = cells.cells_of(task, grid.mechanisms, grid.noise, grid.epsilon, grid.seeds)
    found = study.cells({cell.name: lambda cell=cell: cells.run_cell(task, cell) for cell in wanted})  # type: ignore[misc]
    results = list(found.values())
    study.write("results.json", results)
    study.write("table_3.json", {"study": report.speed_table(results), **speeds})
    names = [f"{figure.lower().replace(' ', '_')}.png" for figure in figures]
    report.plot_precision(results, study.folder / names[0], f"{title}: precision ({figures[0]})")
    report.plot_exposure(results, study.folder / names[1], f"{title}: exposure ({figures[1]})")
    study.report(report.report(results, title, names) + speed_page)
    return 0
