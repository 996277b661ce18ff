"""`python -m experiments.spectral ablations`: what helps a two-tower that is trained privately, alone and together."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

HELP = """\
  python -m experiments.spectral ablations --data ml-100k.inter LastFM.txt --epsilon 8 3 1 --seeds 3

Data as for `quality`; a fifth of the users is asked. How far a training goes is chosen with a fifth of the other users
held back; that choice is not paid for. Noise and draws are fresh each time. Everything goes into one
folder; run it again to go on where it stopped.
"""
DELTA = 1e-6
METRICS = ("recall@20", "nDCG@10")
BEGINNING, ALL = "plain", "together"
TOGETHER: dict[str, dict[str, Any]] = {
    "head of 150": {"head": 150},
    "up to 20 labels an example": {"labels": 20},
    "all users at every step": {"sampled": 1.0},
    "clip 0.05": {"clip": 0.05},
    "items weighed, count^¼": {"item_power": 0.25},
    "width 16": {"width": 16},
    "10 steps": {"steps": 10},
    "queries halved": {"temperature": 0.5},
    "average of the last half": {"averaged": 0.5},
}
BESIDE: dict[str, dict[str, Any]] = {
    "context of 200": {"history": 200},
    "context weighed, count^¼": {"context_power": 0.25},
    "context weighed, count^-½": {"context_power": -0.5},
    "queries of length 4": {"unit": True, "temperature": 4.0},
    "rate falls to nothing": {"decay": True},
    "momentum 0.9": {"momentum": 0.9},
    "Adam": {"adam": True},
    "a quarter for the counts": {"share": 0.25},
    "half for the counts": {"share": 0.5},
}
ALONE: dict[str, dict[str, Any]] = {
    "300 candidates, uniformly": {"candidates": 300},
    "300 candidates, half by counts": {"candidates": 300, "by_count": True},
}
SIZES: dict[str, dict[str, Any]] = {
    "head of 75": {"head": 75},
    "head of 300": {"head": 300},
    "clip 0.01": {"clip": 0.01},
    "clip 0.2": {"clip": 0.2},
}
METHODS = ("popularity", "DP popularity", "spectral")


@dataclasses.dataclass(frozen=True)
class Row:
    """Of the table: a training, and the one that it is compared with.

    Attributes:
        name: of the training.
        recipe: of it, without its path.
        beside: the other's name.
        packaged: whether the package's optimizer trains, not `quick`.
    """

    name: str
    recipe: Any
    beside: str = "spectral"
    packaged: bool = False


def rows() -> list[Row]:
    """All trainings, in the order of the table."""
    from experiments.spectral.baskets import Recipe

    plain, change = Recipe(), dataclasses.replace
    every = {key: value for new in TOGETHER.values() for key, value in new.items()}
    found = [Row(BEGINNING, plain), Row(f"{BEGINNING}, by DPSGD", plain, BEGINNING, packaged=True)]
    alone = {**TOGETHER, **BESIDE, **ALONE}
    found += [Row(f"{BEGINNING} + {name}", change(plain, **new), BEGINNING) for name, new in alone.items()]
    together = change(plain, **every)
    found += [Row(ALL, together), Row(f"{ALL}, by DPSGD", together, ALL, packaged=True)]
    for name in TOGETHER:
        rest = {key: value for key, value in every.items() if key not in TOGETHER[name]}
        found.append(Row(f"{ALL} − {name}", change(plain, **rest), ALL))
    further = {**BESIDE, **SIZES}
    return found + [Row(f"{ALL} + {name}", change(together, **new), ALL) for name, new in further.items()]


def chosen(words: Sequence[str] | None) -> list[Row]:
    """Those whose name has one of these words in it, and those that they are compared with; or all."""
    found = [row for row in rows() if not words or any(word in row.name for word in words)]
    return [row for row in rows() if row in found or row.name in {each.beside for each in found}]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ablations`."""
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="files, or names of generated shapes")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--seeds", type=int, default=3, help="noises for each training; default: %(default)s")
    parser.add_argument("--paths", nargs="+", type=float, default=[6.0, 20.0, 60.0, 200.0],
                        help="Σ η C, of which the held-back users choose; default: %(default)s")  # fmt: skip
    parser.add_argument("--choices", type=int, default=4, help="noises of each to choose by; default: %(default)s")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="trainings whose name has one of these in it")
    parser.add_argument("--users", type=int, help="at most so many of the data's users, drawn from a seed")
    parser.add_argument("--out", default="runs/ablations", metavar="FOLDER", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measures every cell and writes the tables."""
    from experiments.spectral.data import held_back, users_apart
    from experiments.spectral.methods import Problem
    from experiments.study import Study

    settings = {"delta": DELTA, **{key: getattr(args, key) for key in ("paths", "choices", "seeds", "users")}}
    study = Study(args.out, settings)
    wanted = chosen(args.only)
    pages = []
    for source in args.data:
        split = users_apart(source, users=args.users)
        test, choice = Problem.of(split), Problem.of(held_back(split))
        found = study.cells(works(test, choice, wanted, args))
        study.write(f"{split.name}.json", {name: summary(cell) for name, cell in found.items()})
        pages.append(page(split.name, test, found, wanted, args))
    study.report("\n".join(["# What helps a two-tower that is trained privately", "", *pages]))
    return 0


def works(test: Any, choice: Any, wanted: Sequence[Row], args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """What finds each cell of a data set."""
    cell = functools.partial
    found: dict[str, Callable[[], Any]] = {}
    for epsilon in args.epsilon:
        for method in METHODS:
            found[name_of(test, epsilon, method)] = cell(of_method, test, method, epsilon, args.seeds)
        for row in wanted:
            found[name_of(test, epsilon, row.name)] = cell(of_training, test, choice, row, epsilon, args)
    return found


def name_of(test: Any, epsilon: float, name: str) -> str:
    """Of a cell's file."""
    return f"{test.split.name}-{epsilon:g}-{name}".replace(" ", "-").replace("/", "-")


def of_method(test: Any, method: str, epsilon: float, seeds: int) -> dict[str, Any]:
    """What a method that trains nothing is worth."""
    from experiments.spectral import methods
    from tfdp_rec.noise.words import seeded

    make = getattr(methods, method.replace(" ", "_").lower())
    private = [] if method == "popularity" else [epsilon, DELTA]
    return {"values": [values(make(test, *private, *([seeded(s)] if private else [])), test) for s in range(seeds)]}


def of_training(test: Any, choice: Any, row: Row, epsilon: float, args: argparse.Namespace) -> dict[str, Any]:
    """What a training is worth: its path chosen by held-back users, then some noises for the asked ones."""
    from experiments.spectral import quick
    from experiments.spectral.baskets import Budget

    def trained(problem: Any, path: float, seed: int, train: Callable[..., Any] = quick.train) -> Any:
        recipe = dataclasses.replace(row.recipe, path=_path(row.recipe, path))
        return values(train(problem, recipe, budget_of(problem), seed), problem)

    budget_of = lambda problem: Budget.of(row.recipe, len(problem.histories), epsilon, DELTA)  # noqa: E731
    tried = {path: [trained(choice, path, seed)[METRICS[0]] for seed in range(args.choices)] for path in args.paths}
    worth = {path: float(np.mean(found)) for path, found in tried.items()}
    path = max(worth, key=lambda path: worth[path])
    found = [trained(test, path, seed, _train_of(row)) for seed in range(args.seeds)]
    budget = budget_of(test)
    return {"path": path, "held back": worth, "epsilon": budget.epsilon, "noise": budget.noise, "values": found}


def _train_of(row: Row) -> Callable[..., Any]:
    from experiments.spectral import quick

    if not row.packaged:
        return quick.train
    from experiments.spectral import towers

    return towers.train


def _path(recipe: Any, path: float) -> float:
    return path / 50 if recipe.adam else path  # of weights, not of clipped gradients


def values(answer: Any, problem: Any) -> dict[str, list[float]]:
    """Of each asked user."""
    from tfdp_rec import metrics

    answers, relevant = answer(problem.split.given, 20), problem.split.relevant
    found = metrics.recall_at_k(answers, relevant), metrics.ndcg_at_k(answers[:, :10], relevant)
    return {name: each.tolist() for name, each in zip(METRICS, found)}


def summary(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell without its users."""
    means = {metric: str(mean_of(cell, metric)) for metric in METRICS}
    return {**{key: value for key, value in cell.items() if key != "values"}, **means}


def mean_of(cell: Mapping[str, Any], metric: str, other: Mapping[str, Any] | None = None) -> Any:
    """Mean, or difference from another cell on the same users; its error over users and, in squares, over noises."""
    from tfdp_rec.metrics import Mean

    both = (cell,) if other is None else (cell, other)
    cells = [np.array([noise[metric] for noise in each["values"]]) for each in both]
    by_user = cells[0].mean(axis=0) - (cells[1].mean(axis=0) if other is not None else 0)
    noises = [found.mean(axis=1).std(ddof=1) ** 2 / len(found) if len(found) > 1 else 0.0 for found in cells]
    over_users = Mean.of(by_user)
    return dataclasses.replace(over_users, error=float(np.sqrt(over_users.error**2 + sum(noises))))


def page(name: str, test: Any, found: Mapping[str, Any], wanted: Sequence[Row], args: argparse.Namespace) -> str:
    """The tables of a data set."""
    from experiments.tables import markdown

    users = f"{len(test.histories)} counted users, {len(test.split.given)} asked, {test.split.num_items} items"
    lines = [f"## {name}", "", f"{users}; δ = {DELTA:g}; {args.seeds} noises; differences on the same users.", ""]
    for metric in METRICS:
        heading = [metric, *(text for e in args.epsilon for text in (f"ε = {e:g}", "difference from"))]
        table = []
        for row in [*(Row(method, None, "DP popularity") for method in METHODS), *wanted]:
            table.append([row.name, *(text for e in args.epsilon for text in _texts(test, found, row, e, metric))])
        lines += [*markdown(heading, table), ""]
    stated = {e: max(found[name_of(test, e, row.name)]["epsilon"] for row in wanted) for e in args.epsilon}
    spent = ", ".join(f"{most:.4f} of {e:g}" for e, most in stated.items())
    return "\n".join([*lines, f"ε by the accountant, counts and steps, at most: {spent}.", ""])


def _texts(test: Any, found: Mapping[str, Any], row: Row, epsilon: float, metric: str) -> tuple[str, str]:
    cell, other = found[name_of(test, epsilon, row.name)], found.get(name_of(test, epsilon, row.beside))
    if other is None or row.name == row.beside:
        return str(mean_of(cell, metric)), "–"
    difference = mean_of(cell, metric, other)
    return str(mean_of(cell, metric)), f"{difference.value:+.4f} ± {difference.error:.4f}".replace("0.", ".")
