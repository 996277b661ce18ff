"""A page about a finished run: can those it was made of be told from held-out users, by what was released?

A user's loss is the mean of ln(1 + rank) of some of their items, each asked for with the user's rows before it; ranks
below the first thousand are one. No recommender is made again, so that this is the attack by losses alone.

It is computed from users' data without noise: for the log's owner.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tfdp_rec.audit import attack_membership
from tfdp_rec.core.claim.attack_rates import most_true_positives, profile_of
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.datasets.logs.interactions import Interactions
from tfdp_rec.job.evaluation import NewItemExamples
from tfdp_rec.job.held_out import Ask, load_released
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.run_folder import CONFIG, LEDGER, RunFolder, find
from tfdp_rec.job.run_state import WarmStart
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources import choose_source
from tfdp_rec.job.users import Users, split_users

PAGE = "membership.md"
_PLACES, _MOST_USERS, _DEEPEST, _AT_ONCE = 4, 5000, 1000, 500
_TEXT = """# Membership, by the losses of the released recommender

**Not private: computed from users' data without noise. No ε covers this page; it stays in this folder.**

{members} users that it was made of, {others} held out; 95% intervals are over these users.

| | reached | at most, by the ledger |
|---|---|---|
{rows}
An interval above the right column is a reason to look for a fault. That an attack finds nothing proves nothing: others,
with shadow models (`tfdp_rec.audit.attack_membership`), find more.
"""


def write_page(run: Path) -> Path:
    """Attacks a run's released recommender; returns the page, in its private folder."""
    limit = functools.partial(most_true_positives, profile_of(read(find(run, LEDGER)).paid))
    log, users, ask = _reopen(run)
    chosen = [np.random.default_rng(0).permutation(each)[:_MOST_USERS] for each in (users.train, users.test)]
    examples = NewItemExamples(log, np.concatenate(chosen))
    asked = [examples.by_own_rows(log.uniforms(f"tfdp-rec audit {place}")) for place in range(_PLACES)]
    there, members = asked[0][1] >= 0, len(chosen[0])  # by a user's own rows: the others have no example
    losses = np.mean([_ranks(ask, *each, min(_DEEPEST, log.num_items)) for each in asked], axis=0)
    inside, outside = np.flatnonzero(there[:members]), members + np.flatnonzero(there[members:])
    if not len(inside) or not len(outside):
        raise ValueError("No training user, or no held-out user, has two different items: the attack needs both.")
    found = attack_membership(losses.__getitem__, inside, outside, limit=limit)["loss"]
    named = {f"named, at {rate:.0%} of the others": reached for rate, reached in found.true_positives.items()}
    rows = "".join(
        f"| {name} | {each.value:.3f} ({each.low:.3f}–{each.high:.3f}) | {each.most:.3f} |\n"
        for name, each in {**named, "area under the curve": found.auc}.items()
    )
    RunFolder(run).write(PAGE, _TEXT.format(members=len(inside), others=len(outside), rows=rows))
    return find(run, PAGE)


def _reopen(run: Path) -> tuple[Interactions, Users, Ask]:
    """The log of a finished run with its items, the users' split, and what was released."""
    config = json.loads(find(run, CONFIG).read_text(encoding="utf-8"))
    settings = JobSettings.from_config(config)
    # Of all mechanisms `auto` alone changes which users are tested on; the others would ask for a sampling.
    settings = dataclasses.replace(settings, mechanism=tuple({names.auto.name}.intersection(settings.mechanism)))
    if settings.days > 1 or settings.engine:
        raise ValueError("A run of several days or on Spark is not attacked: its log is elsewhere or of one day.")
    source = choose_source(settings)
    source.check_settings()
    rows, columns = source.rows()
    items = WarmStart.load(run).items
    log, ask = Interactions.read(rows, **columns).with_items(items), load_released(run, items)
    users = split_users(log, settings)
    if len(log) != config["num_users"] or not len(users.test):
        raise ValueError("The log has other users than the run had, or none held out: put its files back.")
    return log, users, ask


def _ranks(ask: Ask, contexts: NDArray[np.int32], labels: NDArray[np.int64], k: int) -> NDArray[np.float64]:
    """ln(1 + rank) of each user's item; that of k where it is not among the first k, or is not known."""
    parts = [slice(start, start + _AT_ONCE) for start in range(0, len(labels), _AT_ONCE)]
    hit = [(ask(contexts[part], k) == labels[part][:, None]) & (labels[part] > 0)[:, None] for part in parts]
    places = [np.where(each.any(axis=1), each.argmax(axis=1), k) for each in hit]
    return np.log1p(np.concatenate(places))
