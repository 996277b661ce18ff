"""What every run says of the recommender that it lets out, whatever it was made from: figures, the promise, the limits.

What is said of the guarantee is read from the statement, so that the card cannot promise something else.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import tfdp_rec
from tfdp_rec.metrics import Mean
from tfdp_rec.page import Block, Code, Figures, Items, Piece, Section, Table, Text, Verbatim, Words
from tfdp_rec.run_folder import PRIVATE, RELEASE
from tfdp_rec.spending.statement import fields_of, rounded_up

_OF_THE_STATEMENT = ("Guarantee", "Days", "Protected unit", "Adjacency", "Public", "Covers", "Does not cover")
NOT_ASKED = "Whoever asks it sends a history, and no ε covers that: keep it between the user and you."
_LIMITS: tuple[Words, ...] = (
    "Tested once, offline, on other users of the same data: how it does later, elsewhere, or for one group of users "
    "beside another was not looked at.",
    "Noise hides what few users have in common: items that few have, and users whose taste few share, get the least "
    "from it.",
    NOT_ASKED,
)


def figures(epsilon: float, delta: float, learnt_from: int, result: Mapping[str, Any] | None, popular: float) -> Block:
    """What one looks for first.

    Args:
        epsilon: ε of what is released; infinite if it is not private.
        delta: its δ.
        learnt_from: so many users.
        result: of what is released; None if nothing was tested.
        popular: recall@10 of popularity.
    """
    private = math.isfinite(epsilon)
    cost = (f"{rounded_up(epsilon):g}", f"at δ = {delta:g}, of what is released") if private else ("∞", "not private")
    shown = [("ε, user-level", *cost)]
    if result is not None:
        low, high = _mean(result, "recall@10").interval()
        found = f"95%: {max(low, 0.0):.3f} to {min(high, 1.0):.3f}; exact popularity {popular:.3f}"
        shown.append(("recall@10 of what is released", f"{result['recalls']['recall@10']:.3f}", found))
    tested = f"learnt from; {result['test_users']:,} others tested on" if result is not None else "learnt from"
    return Figures([*shown, ("users", f"{learnt_from:,}", tested)])


def with_interval(result: Mapping[str, Any], metric: str) -> str:
    """A mean and its 95% interval.

    Args:
        result: a line of results.json.
        metric: its name.
    """
    mean = _mean(result, metric)
    low, high = mean.interval()
    return f"{mean.value:.4f} [{max(low, 0.0):.4f}, {min(high, 1.0):.4f}]"


def _mean(result: Mapping[str, Any], metric: str) -> Mean:
    return Mean(result["recalls"][metric], result["errors"][metric], result["test_users"])


def promised(statement: str) -> list[tuple[str, Words]]:
    """The lines of a statement that say who is protected, and from what.

    Args:
        statement: of what is released; empty where nothing is private.

    Example:
        >>> promised("")
        [('Guarantee', 'none: this is not private, and no ε holds for it.')]
    """
    if not statement:
        return [("Guarantee", "none: this is not private, and no ε holds for it.")]
    said = fields_of(statement)
    return [(name, said[name]) for name in _OF_THE_STATEMENT if name in said]


def made_by() -> tuple[str, Words]:
    """Which program made it."""
    return "Made by", f"tfdp_rec {tfdp_rec.__version__}"


def files(
    released: Sequence[tuple[str, Words]], private: Sequence[tuple[Words, Words]] = (), covered: str = ""
) -> Section:
    """What is in a run folder, or in its released part, and what of it the guarantee covers.

    Args:
        released: names of files that may be handed on, and what they are.
        private: files that may not; left out where the released part is meant alone.
        covered: whether ε covers what is released.
    """
    if not private:
        rows = [(Code(name), what) for name, what in released]
        return Section("What is in this folder", [Table("Files", ("file", "what it is"), rows)])
    several: list[tuple[Words, Words, str]] = [(Code(f"{RELEASE}/{name}"), what, covered) for name, what in released]
    several += [((Code(f"{PRIVATE}/"), ": ", *_pieces(name)), what, "no") for name, what in private]
    shown = Table("Files of the run", ("file", "what it is", "covered by ε"), several)
    parts: Words = ("Hand on ", Code(f"{RELEASE}/"), " alone. No ε covers what is in ", Code(f"{PRIVATE}/"), ".")
    return Section("What is in this folder", [Text(parts), shown])


def _pieces(words: Words) -> tuple[Piece, ...]:
    return words if isinstance(words, tuple) else (words,)


def asking(run: str, known: Sequence[str | int], answers: Sequence[Sequence[Words]]) -> Section:
    """How to have it answer, and what it answers whom nobody knows.

    Args:
        run: name of the run's folder.
        known: ids of two items, for an example.
        answers: id and title of the first items that it answers.
    """
    name, ids = shlex.quote(run), [item for item in known if not str(item).startswith("-")][:2]
    typed = " ".join(shlex.quote(str(item)) for item in ids) or "ID ID"
    asked = shlex.quote(json.dumps({"instances": [{"history": ids}]}, ensure_ascii=False))
    commands = (
        f"tfdp-rec recommend {name} --history {typed}\n"
        f"tfdp-rec serve {name}\n"
        f"curl -d {asked} http://127.0.0.1:8501/v1/models/recommender:predict"
    )
    where = "From the folder that this run's folder is in, here and over HTTP:"
    blocks: list[Block] = [Text(where), Verbatim(commands)]
    if answers:
        blocks.append(Text("Somebody who has had nothing yet is answered:"))
        blocks.append(Table("First answers", ("id", "title"), answers))
    return Section("How to ask it", blocks)


def limits(more: Sequence[Words] = ()) -> Section:
    """What not to expect of it.

    Args:
        more: that hold for this run.
    """
    return Section("Limits", [Items([*more, *_LIMITS])])
