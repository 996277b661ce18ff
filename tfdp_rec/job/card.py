"""The card of a run: a folder whose every number is public, was paid for, or is computed from those.

    RUN/card/ledger.jsonl    a copy of what the run paid for, with the private figures of held-out users, if any
    RUN/card/privacy.json    all that is claimed, computed from that copy
    RUN/card/README.md       the same in words, written from privacy.json
    RUN/card/attack.png      what an observer can find out at most; not without matplotlib

The words around the numbers are those of card.md beside this file. A card is verified by making it again from its own
ledger. What cannot be computed, versions and the picture, is covered by the hash of privacy.json, which notices an edit
and is no signature.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import tfdp_rec
from tfdp_rec.core.claim import events, statement
from tfdp_rec.core.claim.attack_rates import most_true_positives, profile_of
from tfdp_rec.core.claim.gaussian_release import gaussian_mu
from tfdp_rec.core.claim.ledger import Chain, line_text, read
from tfdp_rec.core.ground.files import Path, digest, replace_atomically
from tfdp_rec.core.ground.lazy_imports import optional
from tfdp_rec.job.budget import Budget
from tfdp_rec.job.held_out import figure_of, kept_figures
from tfdp_rec.job.run_folder import LEDGER, RELEASED, STATEMENT, find

FOLDER, README, PRIVACY, PICTURE = "card", "README.md", "privacy.json", "attack.png"
_TEMPLATE = pathlib.Path(__file__).with_name("card.md")
_OF_A_RUN = (LEDGER, STATEMENT, RELEASED)
_RATES = (0.01, 0.05, 0.1)  # of false positives
_COVERED = "any reader of this card and of release/, with any other knowledge and any computing power"
_NOT_COVERED = [
    statement.CHOICE, statement.LOOKED_AT, statement.FIXED,
    "exact figures (--confidential), and whatever else is in the run's private/",
    "other runs, and further releases, from the same users: their costs add up",
    "people with several user ids: they lose as much for each", "histories that are sent to the recommender",
]  # fmt: skip


def write(run: Path) -> pathlib.Path:
    """Writes the card of a finished run, in place of an earlier one; returns its folder."""
    if missing := [path for path in map(functools.partial(find, run), _OF_A_RUN) if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is not there: give the folder of a run that has ended.")
    folder = pathlib.Path(run) / FOLDER
    with replace_atomically(folder) as temporary:
        os.mkdir(temporary)
        made = pathlib.Path(temporary)
        (made / LEDGER).write_bytes(find(run, LEDGER).read_bytes())
        chain = read(made / LEDGER)
        versions = {"tfdp_rec": tfdp_rec.__version__, "dp-accounting": importlib.metadata.version("dp-accounting")}
        pictures = {PICTURE: digest(made / PICTURE)} if _draw(chain, made / PICTURE) else {}
        said = describe(chain, versions, pictures)
        (made / PRIVACY).write_text(_text(said), encoding="utf-8")
        (made / README).write_text(words(said), encoding="utf-8")
    return folder


def verify(folder: Path) -> dict[str, Any]:
    """The claims of a card, if they are what its own files say; else raises a `ValueError`."""
    path = pathlib.Path(folder)
    chain = read(path / LEDGER)
    try:
        text, shown = ((path / name).read_text(encoding="utf-8") for name in (PRIVACY, README))
        found = json.loads(text)
        said = describe(chain, found["versions"], found["pictures"])
        told = words(said)
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as problem:
        raise ValueError(f"{path} was changed: {PRIVACY} lacks a field, or a file is no text.") from problem
    if text != _text(said):
        wrong = next((name for name in said if found.get(name) != said[name]), "its form")
        raise ValueError(f"{path / PRIVACY} was changed, or its ledger was: they differ in {wrong}. Get a new copy.")
    if shown.partition("\n---\n")[2] != told.partition("\n---\n")[2]:  # the head is the publisher's, as for a license
        raise ValueError(f"{path / README} was changed: below its head it is not what {PRIVACY} says. Get a new copy.")
    if said["pictures"] and said["pictures"] != {PICTURE: digest(path / PICTURE)}:
        raise ValueError(f"{path / PICTURE} was changed: it is not the picture of {PRIVACY}. Get a new copy.")
    return said


def describe(chain: Chain, versions: Mapping[str, str], pictures: Mapping[str, str]) -> dict[str, Any]:
    """All that a card claims, from a ledger; versions and hashes of pictures as they are given."""
    delta, last, (figures, why) = Budget.read(chain).delta, chain.last_paid, kept_figures(chain)
    epsilon = statement.round_up(chain.epsilon(delta))
    if last is None or chain.limit is not None or not 0 < epsilon < math.inf:
        raise ValueError(f"{chain.path} has no epsilon that a card could tell: give the run of a private recommender.")
    deltas, times = profile_of(chain.paid), dict[tuple[str, str], int]()
    for paid in chain.paid:
        key = paid.label, events.describe(paid.event)
        times[key] = times.get(key, 0) + paid.attempts
    found = dict(zip(map("{:g}".format, _RATES), map(_up, most_true_positives(deltas, _RATES).tolist())))
    return json.loads(line_text({
        "format": "tfdp_rec card 1", "unit": last.unit, "adjacency": last.adjacency,
        "public": chain.lines[last.number]["data"], "epsilon": epsilon, "delta": delta,
        "mechanisms": [{"label": label, "mechanism": event, "times": n} for (label, event), n in times.items()],
        "accountant": "PLD", "versions": versions, "composition": f"{chain.kind}, added up for one {last.unit}",
        "true_positive_rate_at_most": found, "right_guess_at_even_odds_at_most": _up((1 + float(deltas[0])) / 2),
        "gaussian_mu": statement.round_up(gaussian_mu(epsilon, delta)),
        "odds_factor": statement.round_up(math.exp(min(epsilon, 700.0))),
        "posterior_of_even_odds": _up(1 / (1 + math.exp(-epsilon))), "metrics": figures, "no_metrics": why,
        "observers": {"covered": _COVERED, "not_covered": statement.OBSERVERS}, "not_covered": _NOT_COVERED,
        "ledger": {"id": chain.id, "lines": len(chain.lines), "head": chain.head}, "pictures": pictures,
    }))  # fmt: skip


def words(said: Mapping[str, Any]) -> str:
    """A card's claims for a reader who is no engineer."""
    rates = {f"{float(rate):.0%}": _percent(most) for rate, most in said["true_positive_rate_at_most"].items()}
    shown = {name: figure_of(kept) for name, kept in said["metrics"].items()}
    about = "The intervals hold both the noise and the choice of the held-out users; the ε above holds their price."
    plot = f"![True-positive rate at most, by false-positive rate]({PICTURE})"
    return _TEMPLATE.read_text(encoding="utf-8").format(
        **said, rates=_rows(rates.items()), guess=said["right_guess_at_even_odds_at_most"],
        posterior=_percent(said["posterior_of_even_odds"]), others="; ".join(said["not_covered"]),
        picture=plot if said["pictures"] else "There is no plot: matplotlib was not there when this was written.",
        figures=_rows([("figure", "value and 95% interval"), ("---", "---"), *shown.items()]) if shown else "",
        about=about if shown else f"No figures: {said['no_metrics']}.",
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


def _draw(chain: Chain, path: pathlib.Path) -> bool:
    """Draws the bound on attacks, if matplotlib is there."""
    try:
        optional("matplotlib", "job")
        from tfdp_rec.job.report import draw
    except ImportError:
        return False
    rates = [number / 200 for number in range(201)]
    curve = most_true_positives(profile_of(chain.paid), rates)

    def plot(axes: Any) -> None:
        axes.plot(rates, curve, label="any attack, at most")
        axes.plot(rates, rates, label="a guess without any data", color="gray", linestyle="--")
        axes.set(xlabel="false-positive rate", ylabel="true-positive rate", xlim=(0, 1), ylim=(0, 1))

    path.write_bytes(draw(plot))
    return True
