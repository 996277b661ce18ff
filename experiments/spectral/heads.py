"""`python -m experiments.spectral heads`: recall by the size of the head, multiples of the rule's and the wide one.

  python -m experiments.spectral heads --data ml-100k.inter citeulike.txt

Any pairs; data, folder and noise are as in `quality`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

import numpy as np

DELTA = 1e-6
SIZES = {"wide": None, "1/2": 0.5, "1": 1.0, "2": 2.0, "4": 4.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `heads`."""
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="files, or names of generated shapes")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[8.0, 3.0, 1.0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="noises for each budget; default: %(default)s")
    parser.add_argument("--out", default="runs/heads", metavar="FOLDER", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measures every cell and writes the table."""
    from experiments.spectral import data, methods
    from experiments.study import Study
    from experiments.tables import markdown

    study, rows = Study(args.out, {"delta": DELTA}), []
    for source, epsilon in itertools.product(args.data, args.epsilon):
        problem = methods.Problem.of(data.users_apart(source))
        works = {
            f"{problem.split.name}-{epsilon:g}-{name.replace('/', ':')}-{seed}":
            functools.partial(measured, problem, epsilon, SIZES[name], seed)
            for seed, name in itertools.product(range(args.seeds), args.sizes)
        }  # fmt: skip
        found = [list(study.cells(works).values())[place :: len(args.sizes)] for place in range(len(args.sizes))]
        usual = found[args.sizes.index("1")]
        rows.append([problem.split.name, f"{epsilon:g}", *(cell(each, usual) for each in found)])
    study.report("\n".join(markdown(["data", "ε", *args.sizes], rows)))
    return 0


def measured(problem: Any, epsilon: float, times: float | None, seed: int) -> dict[str, Any]:
    """The head's size, and recall@10 and @20 of each user that is asked; None times is the wide head."""
    from tfdp_rec import metrics
    from tfdp_rec.core.mechanism.noise.words import seeded
    from tfdp_rec.spectral import SpectralRecommender, rules

    items = len(problem.catalogue)
    size: rules.Size = "wide"
    if times:
        # The same words give the same counts, whatever the head.
        first = SpectralRecommender(problem.catalogue.ids, epsilon, DELTA, head=2, words=seeded(seed))
        first.release_sums(problem.histories, verbose=0)
        usual = rules.head_of(first.released.counts, len(problem.histories), first.split.gram)
        size = min(max(round(times * len(usual)), rules.LEAST_HEAD), rules.MOST_HEAD, items)
    made = SpectralRecommender(problem.catalogue.ids, epsilon, DELTA, head=size, words=seeded(seed))
    answers, _ = made.fit(problem.histories, verbose=0).recommend(problem.split.given, 20)
    recalls = {k: metrics.recall_at_k(answers[:, :k], problem.split.relevant).tolist() for k in (10, 20)}
    return {"head": len(made.released.head), **{f"recall@{k}": values for k, values in recalls.items()}}


def cell(found: list[dict[str, Any]], usual: list[dict[str, Any]]) -> str:
    """Recall@10 and @20, and their change in percent against the rule's head, ± over users of the mean over noises."""
    said = [f"{np.mean([each['head'] for each in found]):.0f}:"]
    for metric in ("recall@10", "recall@20"):
        mine, theirs = (np.mean([each[metric] for each in some], axis=0) for some in (found, usual))
        gain, error = np.mean(mine - theirs), np.std(mine - theirs) / len(mine) ** 0.5
        said.append(f"{np.mean(mine):.4f} ({gain / theirs.mean():+.1%} ± {error / theirs.mean():.1%})")
    return " ".join(said)
