"""The card of a run: a folder whose every number is public, was paid for, or is computed from those.

    RUN/card/ledger.jsonl    a copy of what the run paid for, with the private figures of held-out users, if any
    RUN/card/privacy.json    all that is claimed, computed from that copy
    RUN/card/README.md       the same in words, written from privacy.json
    RUN/card/attack.png      what an observer can find out at most; not without matplotlib

So a card is verified by making it again from its own ledger. What cannot be computed, versions and the hash of the
picture, is covered by the hash of privacy.json, which notices an edit and is no signature.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import tfdp_rec
from tfdp_rec.core.claim import events, statement
from tfdp_rec.core.claim.attack_rates import most_true_positives, profile_of
from tfdp_rec.core.claim.gaussian_release import gaussian_mu
from tfdp_rec.core.claim.ledger import Chain, canonical, read
from tfdp_rec.core.ground.files import Path, digest, replace_atomically
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.held_out import kept_figures
from tfdp_rec.job.run_folder import LEDGER, RELEASED, STATEMENT, find
from tfdp_rec.sums.private_metrics import Figure

FOLDER, README, PRIVACY, PICTURE = "card", "README.md", "privacy.json", "attack.png"
_RATES = (0.01, 0.05, 0.1)  # of false positives
_HEAD = """---
library_name: tfdp-rec
tags:
- recommendation
- differential-privacy
datasets:
- unknown
---
"""
_LICENSE = re.compile(r"^license(_name|_link)?: .*\n", re.MULTILINE)  # the publisher's to add, at the head


def write(run: Path) -> pathlib.Path:
    """Writes the card of a finished run, in place of an earlier one; returns its folder."""
    for name in (LEDGER, STATEMENT, RELEASED):
        if not find(run, name).is_file():
            raise FileNotFoundError(f"{find(run, name)} is not there: give the folder of a run that has ended.")
    folder = pathlib.Path(run) / FOLDER
    with replace_atomically(folder) as temporary:
        os.mkdir(temporary)
        made = pathlib.Path(temporary)
        shutil.copyfile(find(run, LEDGER), made / LEDGER)
        chain = read(made / LEDGER)
        versions = {"tfdp_rec": tfdp_rec.__version__, "dp-accounting": importlib.metadata.version("dp-accounting")}
        describe(chain, versions, {})  # refuses before it draws
        pictures = {PICTURE: digest(made / PICTURE)} if _draw(chain, made / PICTURE) else {}
        said = describe(chain, versions, pictures)
        (made / PRIVACY).write_text(_text(said), encoding="utf-8")
        (made / README).write_text(_HEAD + words(said), encoding="utf-8")
    return folder


def verify(folder: Path) -> dict[str, Any]:
    """The claims of a card, if they are what its own files say; else raises a `ValueError`."""
    path = pathlib.Path(folder)
    chain = read(path / LEDGER)
    try:
        text, shown = ((path / name).read_text(encoding="utf-8") for name in (PRIVACY, README))
        found = json.loads(text)
        said = describe(chain, found["versions"], found["pictures"])
        told = _HEAD + words(said)
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path} was changed: {PRIVACY} lacks a field, or a file is no text.") from problem
    for name, value in said.items():
        if found.get(name) != value:
            raise ValueError(
                f"{path / PRIVACY} was changed, or its ledger was: {name} is {str(found.get(name))[:80]!r} there, and "
                f"{str(value)[:80]!r} by the ledger."
            )
    if text != _text(said):
        raise ValueError(f"{path / PRIVACY} was changed: it has more than its ledger says. Get a new copy.")
    head, mark, body = shown.partition("\n---\n")
    if _LICENSE.sub("", head + mark) + body != told:
        raise ValueError(f"{path / README} was changed: it is not what {PRIVACY} says. Only a license may be added.")
    for name, value in said["pictures"].items():
        if name != PICTURE or digest(path / name) != value:
            raise ValueError(f"{path / name} was changed: it is not the picture of {PRIVACY}. Get a new copy.")
    return said


def describe(chain: Chain, versions: Mapping[str, str], pictures: Mapping[str, str]) -> dict[str, Any]:
    """All that a card claims, from a ledger; versions and hashes of pictures as they are given."""
    delta, last = Budget.read(chain).delta, chain.last_paid
    epsilon = statement.round_up(chain.epsilon(delta))
    if last is None or chain.limit is not None or not 0 < epsilon < math.inf:
        raise ValueError(
            f"{chain.path} has no epsilon that a card could tell: what was released has none, or is of a filter. Give "
            "a run that released a private recommender."
        )
    deltas, (figures, why) = profile_of(chain.paid), kept_figures(chain)
    times = dict[tuple[str, str], int]()
    for paid in chain.paid:
        key = paid.label, events.describe(paid.event)
        times[key] = times.get(key, 0) + paid.attempts
    said = {
        "format": "tfdp_rec card 1", "unit": last.unit, "adjacency": last.adjacency,
        "public": chain.lines[last.number]["data"], "epsilon": epsilon, "delta": delta,
        "mechanisms": [{"label": label, "mechanism": event, "times": n} for (label, event), n in times.items()],
        "accountant": "PLD", "versions": versions, "composition": f"{chain.kind}, added up for one {last.unit}",
        "true_positive_rate_at_most": {
            f"{rate:g}": _up(found) for rate, found in zip(_RATES, most_true_positives(deltas, _RATES).tolist())
        },
        "right_guess_at_even_odds_at_most": _up((1 + float(deltas[0])) / 2),
        "gaussian_mu": statement.round_up(gaussian_mu(epsilon, delta)),
        "odds_factor": statement.round_up(math.exp(min(epsilon, 700.0))),
        "posterior_of_even_odds": _up(1 / (1 + math.exp(-epsilon))),
        "metrics": figures, "no_metrics": why,
        "not_covered": [statement.CHOICE, statement.LOOKED_AT, statement.FIXED, *_NOT_COVERED],
        "observers": {"covered": _COVERED, "not_covered": statement.OBSERVERS},
        "ledger": {"id": chain.id, "lines": len(chain.lines), "head": chain.head}, "pictures": pictures,
    }  # fmt: skip
    return {**said, "hash": hashlib.sha256(canonical(said).encode()).hexdigest()}


_COVERED = "any reader of this card and of release/, with any other knowledge and any computing power"
_NOT_COVERED = (
    "the report, and whatever else is in the run's private/",
    "other runs, and further releases, from the same users: their costs add up",
    "people with several user ids: they lose as much for each",
    "histories that are sent to the recommender",
)


_WORDS = """
# A private recommender

**ε = {epsilon:g} at δ = {delta:g}**, for one {unit} with all of their rows ({adjacency}: with them, or without).
It is the cost of everything that the ledger here holds, figures included.

## What it means for one person

Someone wants to find out whether a person's data were used, from all that was released and whatever else they know.

| if they accuse this share of those who were not in | they find at most this share of those who were |
| --- | --- |
{rates}
A guess at even odds is right with probability {guess:g} at most.
But for a chance of {delta:g}, no odds change by more than a factor of {odds_factor:g}: 50% become {posterior} at most.
The Gaussian mechanism of this ε at this δ has μ = {gaussian_mu:g}: to tell N(0, 1) from N(μ, 1) by one draw is as hard.

{picture}

## How well it does

{figures}

## What was paid for

| release | times | mechanism |
| --- | --- | --- |
{kinds}
Accountant: {accountant} ({made_by}). Composition: {composition}.
Public: the number of {unit}s, {public[units]}, and what a row holds ({public[schema]}).

## Who is kept from learning what

Covered: {observers[covered]}.

Not covered: {observers[not_covered]}; {others}.

## How to check it

`tfdp-rec card --verify FOLDER` makes all of this again from `ledger.jsonl`.
It is the ledger {ledger[id]}, of {ledger[lines]} lines, and its last hash is {ledger[head]}.
"""
_FIGURES = """| figure | value and 95% interval |
| --- | --- |
{0}
The intervals hold both the noise and the choice of the held-out users. The figures were paid for, in the ε above."""


def words(said: Mapping[str, Any]) -> str:
    """A card's claims for a reader who is no engineer."""
    rates = {f"{float(rate):.0%}": _percent(most) for rate, most in said["true_positive_rate_at_most"].items()}
    shown = {name: figure_of(kept) for name, kept in said["metrics"].items()}
    plot = f"![True-positive rate at most, by false-positive rate]({PICTURE})"
    return _WORDS.format(
        **said, rates=_rows(rates.items()), guess=said["right_guess_at_even_odds_at_most"],
        posterior=_percent(said["posterior_of_even_odds"]), others="; ".join(said["not_covered"]),
        picture=plot if said["pictures"] else "There is no plot: matplotlib was not there when this was written.",
        figures=_FIGURES.format(_rows(shown.items())) if shown else f"No figures: {said['no_metrics']}.",
        kinds=_rows((each["label"], each["times"], each["mechanism"]) for each in said["mechanisms"]),
        made_by=", ".join(f"{name} {version}" for name, version in said["versions"].items()),
    )  # fmt: skip


def _rows(cells: Iterable[Iterable[Any]]) -> str:
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in cells)


def _text(said: Mapping[str, Any]) -> str:
    return json.dumps(said, indent=1, ensure_ascii=False) + "\n"


def _up(rate: float) -> float:
    return min(1.0, statement.round_up(rate))


def _percent(rate: float) -> str:
    return f"{100 * rate:.4g}%"  # all four digits, since fewer could round a bound down


def figure_of(kept: Mapping[str, Any]) -> Figure:
    """A figure as a ledger keeps it, where infinity is a word."""
    return Figure(**{name: float(value) for name, value in kept.items()})


def _draw(chain: Chain, path: pathlib.Path) -> bool:
    """Draws the bound on attacks, if matplotlib is there."""
    try:
        optional("matplotlib", "job")
        from tfdp_rec.job.report import draw
    except ImportError:
        return False
    rates = np.linspace(0, 1, 201)
    curve = most_true_positives(profile_of(chain.paid), rates)
    path.write_bytes(draw(functools.partial(_plot, rates, curve)))
    return True


def _plot(rates: Any, curve: Any, axes: Any) -> None:
    axes.plot(rates, curve, label="any attack, at most")
    axes.plot(rates, rates, label="a guess without any data", color="gray", linestyle="--")
    axes.set(xlabel="false-positive rate", ylabel="true-positive rate", xlim=(0, 1), ylim=(0, 1))
