"""`python -m experiments.eana movielens`: next-movie prediction, precision and exposure (EANA paper, section 4.1).

  python -m experiments.eana movielens --quick                  ten minutes on two cores
  python -m experiments.eana movielens --data ml-20m            the paper's size on the real files; hours

SGD, DPSGD, EANA and LazyDPSGD at noise 0.001, 0.01 and that of ε = 8 train the same two-tower model on
users among whom canaries are planted; what is left is precision@k on other users, and how exposed the canaries
are. Everything goes into one folder; run it again to go on where it stopped. Noise is on the average clipped
gradient, as in the paper's algorithms: 0.01 at batches of 64 is a noise multiplier of 0.64.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from experiments.eana import command
from tfdp_rec.settings import choose


@dataclasses.dataclass(frozen=True)
class Sizes(command.Sizes):
    """Sizes of the study; the defaults are the paper's."""

    users: int = 138_493
    movies: int = 27_278
    test_users: int = 8000
    events_each: int = 144


QUICK = Sizes(
    width=16, steps=3000, per_repeat=10, negatives=200, users=30_000, movies=1000, test_users=6000, events_each=40
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `study movielens`."""
    parser.add_argument("--data", metavar="FOLDER", help="MovieLens files; left out, generated timelines like them")
    command.add_arguments(parser, Sizes, out="runs/study-movielens")


def run(args: argparse.Namespace) -> int:
    """Runs the study and writes its folder."""
    sizes = choose(args, QUICK if args.quick else Sizes())
    title = "Next movie (EANA, section 4.1)"
    return command.run(args, sizes, lambda: make_task(sizes, args.data), title, ["Figure 4", "Figure 5"])


def make_task(sizes: Sizes, data: str | None) -> Any:
    """The two-tower model on timelines with planted canaries.

    Args:
        sizes: of everything.
        data: folder of MovieLens files, or None for generated timelines.
    """
    import numpy as np

    from experiments.eana import cells
    from tfdp_rec.audit import Canaries, Uniform
    from tfdp_rec.data import NextItemExamples, PoissonSampling, movielens, synthetic
    from tfdp_rec.models import TwoTower

    timelines = (
        movielens.read(data)
        if data
        else synthetic.timelines(sizes.users, sizes.movies, events=sizes.users * sizes.events_each)
    )
    train, test = timelines.split_users(0.8)
    movies = timelines.num_movies
    examples = NextItemExamples(timelines, train, negatives=sizes.negatives)
    catalogue = {
        "context": Uniform(movies + 1, shape=(examples.history,), low=1, dtype="int32"),
        "label": Uniform(movies + 1, low=1, dtype="int32"),
    }
    canaries = Canaries.draw(catalogue, per_repeat=sizes.per_repeat, num_references=sizes.references, seed=0)
    fetch, units = canaries.insert(examples.fetch, len(examples))
    everything = {"negatives": np.arange(1, movies + 1, dtype=np.int32)}
    tested = NextItemExamples(timelines, test[: sizes.test_users], negatives=0).fixed()
    held_out = cells.held_out(tested, everything)
    return cells.Task(
        name="movielens",
        make_model=lambda seed: TwoTower(timelines.movie_ids, width=sizes.width, hidden=0),
        fetch=fetch,
        sampling=PoissonSampling(units, sizes.batch_size, unit="user"),
        canaries=canaries,
        negatives=examples.shared,
        shared=everything,
        measure=lambda model: model.recall(held_out),
        steps=sizes.steps,
        learning_rate=sizes.learning_rate,
        clip=sizes.clip,
        delta=min(1e-6, 1 / units),
    )
