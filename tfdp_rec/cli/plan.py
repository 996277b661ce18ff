r"""`tfdp-rec plan DATA`: batch size, steps and sampling of `tfdp-rec train`, before anything is paid.

  tfdp-rec plan logs/*.parquet --user user_id --item sku --time ts \
      --units 50000 --num-items 8000 --epsilon 8
  tfdp-rec plan ml-20m --units 138493 --num-items 27278 --epsilon 3 \
      --json plan.json

Shows up to three settings of the two-tower (lazydpsgd), cheapest first: their noise, their share of the signal that
epsilon allows (docs/rate-clip-batch.md), and the seconds and memory of the steps, by steps that are timed here on
made-up rows.

No row of DATA is read, since how many users and which items are in it may be private: say how many users there are,
and how many items, or which (--items). Of Parquet files the names of columns are looked at.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tfdp_rec.cli import quiet
from tfdp_rec.core.ground.files import find_paths, open_atomically
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.job.settings import ALLOCATION, POISSON, JobSettings
from tfdp_rec.settings import Check, add_options, choose, option

_USERS = Check("must be from 10 to 100,000,000", lambda value: 10 <= value <= 10**8)
_ITEMS = Check("must be from 30 to 10,000,000", lambda value: 30 <= value <= 10**7)
_TWO_TOWER = "lazydpsgd"
_ASKED = (
    "units", "num_items", "user", "item", "time", "items", "items_epsilon", "epsilon", "delta", "clip", "width",
    "hidden", "negatives",
)  # fmt: skip
_MADE_UP = 1000  # users of the log that steps are timed on


@dataclasses.dataclass(frozen=True)
class PlanSettings(JobSettings):
    """Options of `tfdp-rec plan`: those of the training, and what is public of the log."""

    units: int | None = option(None, "users of the log, of whom 80% are trained on", _USERS, metavar="N")
    num_items: int | None = option(None, "items that the model will know, if not --items", _ITEMS, metavar="N")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `plan`."""
    parser.add_argument("data", nargs="+", metavar="DATA", help="files of a log, or one folder with MovieLens files")
    add_options(parser, PlanSettings, _ASKED)
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file, for machines")


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    optional("pyarrow", "job")
    settings, public = _read_public(args)
    path = None if args.json is None else os.path.abspath(args.json)
    if path is not None and os.path.lexists(path):  # it may be the log; of "" it is the folder that we are in
        raise ValueError(f"--json: {path} is there already: give another name.")
    # Opened now, for what may be wrong with it; it appears at the end.
    with contextlib.nullcontext() if path is None else open_atomically(path) as file:
        quiet.import_tensorflow()
        rows = _suggest(settings, public)
        if file:
            json.dump([row.numbers for row in rows], file, indent=2)
    print(rows)
    last = rows[-1].plan
    kind = ALLOCATION if last.sampling.steps_at_once > 1 else POISSON
    print(
        f"The last of them: tfdp-rec train --mechanism {_TWO_TOWER} --sampling {kind} --batch-size "
        f"{last.sampling.expected_batch_size:.0f} --steps {last.steps}, with the options that were given here."
    )
    return 0


def _read_public(args: argparse.Namespace) -> tuple[PlanSettings, bool]:
    """The settings, with the number of items, and whether their list is public. No row of the log is read."""
    from tfdp_rec.datasets.logs.sources import check_columns, column_names
    from tfdp_rec.job.sources import OwnFiles, choose_source

    source = choose_source(choose(args, PlanSettings(mechanism=(_TWO_TOWER,))))
    settings: Any = source.check_settings()
    if settings.units is None:
        raise ValueError(
            "--units is missing: the number of users is counted by no row here, since it may be private. Give the "
            "number that may be known."
        )
    own, columns = isinstance(source, OwnFiles), [settings.user, settings.item, *filter(None, [settings.time])]
    for path in sum(map(find_paths, settings.data), []) if own else ():
        if path.endswith(".parquet") and os.path.isfile(path):  # whose footer has the names
            check_columns(path, columns, column_names(Path(path)))
    if settings.items:
        source.rows()  # of files of one's own their names: the public list is read here
        settings = dataclasses.replace(settings, num_items=len(source.public_items() or ()))
    if settings.num_items is None:
        raise ValueError(
            "--num-items is missing: which items are in a log is private. Give a number that you expect, or the public "
            "list, --items FILE."
        )
    return settings, bool(settings.items) or not own


def _suggest(settings: PlanSettings, public: bool) -> Any:
    """The rows for the training that `tfdp-rec train` would make, beside what it spends before it."""
    from tfdp_rec.datasets.next_item import NextItemExamples
    from tfdp_rec.job.budget import LABELS, PRIOR, Budget, figures_noise
    from tfdp_rec.job.evaluation import HISTORY
    from tfdp_rec.job.recommenders.training import learning_rate_for, make_two_tower, refusals_as_wrong_arguments
    from tfdp_rec.job.sources import GeneratedTimelines
    from tfdp_rec.job.users import TRAIN
    from tfdp_rec.optimizers import LazyDPSGD
    from tfdp_rec.sums.private_metrics import LABEL as METRICS
    from tfdp_rec.training.planner import suggest

    assert settings.units is not None and settings.num_items is not None
    num_items, users = settings.num_items, round(TRAIN * settings.units)
    log = GeneratedTimelines(dataclasses.replace(settings, users=_MADE_UP, movies=num_items)).timelines()
    examples = NextItemExamples(log, None, HISTORY, settings.negatives_of(_TWO_TOWER, num_items))
    delta = min(1e-6, 1.0 / settings.units) if settings.delta is None else settings.delta
    noise, of_items = figures_noise(settings.epsilon, delta, settings.units - users), settings.items_epsilon
    budget = Budget(settings.epsilon, delta, public=public, items_epsilon=of_items, metrics_noise=noise)
    spent = [(event, LABELS[file]) for file, event in budget.releases(PRIOR).items()]

    def prepare(plan: Any) -> tuple[Any, Any]:
        model = make_two_tower(settings, num_items, np.ones(num_items))
        model.compile(LazyDPSGD(learning_rate_for(settings, _TWO_TOWER, plan.noise_multiplier), plan=plan))
        return model, plan.batches(lambda drawn: examples.fetch(drawn % _MADE_UP), shared=examples.shared)

    with refusals_as_wrong_arguments():
        return suggest(
            prepare, users, HISTORY + 1, epsilon=settings.epsilon, delta=delta, unit="user",
            spent=spent + [(event, METRICS) for event in budget.figures],
            l2_norm_clip=settings.clip_of(_TWO_TOWER), accountant="pld", verbose=int(sys.stdout.isatty()),
        )  # fmt: skip
