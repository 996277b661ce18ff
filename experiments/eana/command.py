"""The command line that EANA's two studies share: sizes, arguments, and what a run writes."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tfdp_rec import mechanisms

MECHANISMS = ("SGD", *(mechanism.label for mechanism in mechanisms.COMMON))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the trainings of both studies have; the defaults are the paper's."""

    width: int = 128
    batch_size: int = 64
    steps: int = 100_000
    per_repeat: int = 50
    references: int = 16_384
    negatives: int = 500
    learning_rate: float = 1.0
    clip: float = 2.0


AnySizes = TypeVar("AnySizes", bound=Sizes)


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The arguments that choose a study's sizes and cells.

    Args:
        parser: of the study.
        out: the folder, unless another is given.
    """
    parser.add_argument("--quick", action="store_true", help="small sizes, ten minutes")
    parser.add_argument("--out", default=out, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="steps of each training")
    parser.add_argument("--learning-rate", type=float, metavar="ETA", help="of each training")
    parser.add_argument("--width", type=int, metavar="D", help="of the embeddings")
    parser.add_argument(
        "--mechanisms", nargs="+", choices=MECHANISMS, default=list(MECHANISMS), metavar="NAME",
        help="default: all four",
    )  # fmt: skip
    parser.add_argument(
        "--noise", nargs="*", type=float, default=[0.001, 0.01], metavar="S", help="default: 0.001 0.01"
    )
    parser.add_argument("--epsilon", type=float, default=8.0, help="budget of one more noise; 0 for none; default: 8")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each cell; default: 1")


def sizes_of(args: argparse.Namespace, full: AnySizes, quick: AnySizes) -> AnySizes:
    """The sizes asked for.

    Raises:
        ValueError: a number is out of range, or there is nothing to add noise for.
    """
    if any(not noise > 0 for noise in args.noise):
        raise ValueError(f"--noise must be positive, got {args.noise}.")
    if not args.epsilon >= 0:
        raise ValueError(f"--epsilon must not be negative, got {args.epsilon}.")
    if not args.noise and not args.epsilon and args.mechanisms != ["SGD"]:
        raise ValueError("Give --noise or --epsilon: without either, no mechanism has anything to add.")
    fields = {field.name for field in dataclasses.fields(full)}
    given = {name: value for name, value in vars(args).items() if value is not None and name in {*fields, "seeds"}}
    for name, value in given.items():
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, got {value}.")
    return dataclasses.replace(quick if args.quick else full, **{k: v for k, v in given.items() if k in fields})


def run(
    args: argparse.Namespace,
    sizes: Sizes,
    make_task: Callable[[], Any],
    title: str,
    figures: Sequence[str],
    measure_speed: Callable[[Any], tuple[Mapping[str, Any], str]] = lambda folder: ({}, ""),
) -> int:
    """Runs a study's cells and writes its folder.

    Args:
        args: from the command line.
        sizes: of every training.
        make_task: the model and its data.
        title: of the report.
        figures: names of the plots of precision and of exposure: "Figure 4".
        measure_speed: folder -> further columns of Table 3, and their part of the report.
    """
    from experiments.eana import comparison

    folder = comparison.StudyFolder(args.out, {**dataclasses.asdict(sizes), "data": args.data})
    speeds, speed_page = measure_speed(folder)
    task = make_task()
    cells = comparison.cells_of(task, args.mechanisms, args.noise, args.epsilon, args.seeds)
    results = folder.run(task, cells)
    names = [f"{figure.lower().replace(' ', '_')}.png" for figure in figures]
    comparison.plot_precision(results, folder.path / names[0], f"{title}: precision ({figures[0]})")
    comparison.plot_exposure(results, folder.path / names[1], f"{title}: exposure ({figures[1]})")
    folder.write("table_3.json", {"study": comparison.speed_table(results), **speeds})
    page = comparison.report(results, title, names) + speed_page
    (folder.path / "report.md").write_text(page, encoding="utf-8")
    print(f"{page}\n{folder.path}/report.md")
    return 0
