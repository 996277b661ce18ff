"""What a run on a log says of itself: a table of what was tested, and what is promised.

What was tested is computed from users' data without noise. The page says so, and no ε covers it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tfdp_rec.movies import model_card, pictures
from tfdp_rec.movies.report import as_text, label
from tfdp_rec.own_log import recommend
from tfdp_rec.own_log.budget import Budget
from tfdp_rec.page import (
    Block,
    Code,
    Facts,
    Given,
    Page,
    Pictures,
    Piece,
    Section,
    Strong,
    Table,
    Text,
    Verbatim,
    Words,
)  # fmt: skip
from tfdp_rec.run_folder import RELEASE, RunFolder
from tfdp_rec.spectral import SpectralRecommender
from tfdp_rec.spending.statement import rounded_up

SHOWN = ("recall@10", "recall@20", "nDCG@10")
_WARNING = (
    Strong("Not private."), " The recalls and nDCG below were computed from users' data without noise. They are for "
    "who may see the log; the ε of the table covers what is released, not this page.",
)  # fmt: skip
_SHOWN_FILES = 3
_KNOWN = "It knows the items of its list alone: others are ignored in a history, and never answered."
_RELEASED: tuple[tuple[str, Words], ...] = (
    ("servable/", "the SavedModel, which takes and gives the ids of the log"),
    ("statement.txt", "what is promised, as below"),
    ("card.md", "the model card: what this is, and what is promised"),
    ("ledger.jsonl", ("what was paid: ", Code("tfdp-rec ledger show"), "; public numbers alone")),
    ("released.npz", "the sums as they were released, for days that follow"),
)
_PRIVATE: tuple[tuple[Words, Words], ...] = (
    ((Code("report.html"), ", ", Code("report.md"), ", a picture, ", Code("results.json")), "what was tested"),
    (Code("config.json"), "what was asked for, with the names of the log's files"),
)


def statement(budget: Budget, spent: float, recommender: SpectralRecommender, users: int) -> str:
    """What is promised, in words.

    Args:
        budget: what each release may cost.
        spent: ε of all days so far, by the ledger.
        recommender: that was released.
        users: of the log; all of them had a say in which items there are.
    """
    pairs, counts = recommender.split.gram, recommender.split.counts
    items, day = len(recommender.catalogue), recommender.released.fits
    found = f"the {items} items are a public list" if budget.items is None else (
        f"which {items} items many users have, by itself epsilon = {budget.items[0]:.4g} and delta = "
        f"{budget.items[1]:.3g}{' a day' * (budget.days > 1)}, in three rounds of a weighted Gaussian with a threshold"
    )  # fmt: skip
    lines = (
        ("Guarantee", f"(epsilon = {rounded_up(spent):g}, delta = {budget.delta:g})-differential privacy"),
        *_of_days(budget, day),
        ("Protected unit", f"one user of the log, with all of their rows{' of all days' * (budget.days > 1)}"),
        ("Adjacency", "zero-out: logs that differ by one user whose rows count as none"),
        ("Mechanism", f"{found}; then counts of these with Gaussian noise of multiplier {counts:.4g}, and pairs of "
         f"the {len(recommender.head)} that these put first, of multiplier {pairs:.4g}, over {recommender.num_users} "
         "users"),
        ("Public", f"the number of users{' of each day' * (budget.days > 1)}, {users}, and which of them were held "
         "back, by a hash of their ids"),
        ("Covers", "the folder release/: servable/ and all that it answers, the list of items in it, released.npz, "
         "ledger.jsonl, card.md and this statement"),
        ("Does not cover", "the folder private/: the report and results, whose tests look at users' data, and the "
         "names of the log's files; another run on the same users, which costs as much again; people with several user "
         "ids; what is asked of the served model"),
    )  # fmt: skip
    return "".join(f"{name + ':':<16}{text}.\n" for name, text in lines)


def _of_days(budget: Budget, day: int) -> list[tuple[str, str]]:
    if budget.days == 1:
        return []
    return [
        ("Days", f"{day} so far, of at most {budget.days}, added up as if each user were in all of them; never above "
         f"epsilon = {rounded_up(budget.epsilon):g}, as the first day decided. What follows is of the last of them"),
    ]  # fmt: skip


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table, the heading first."""
    rows = [["recommender", *SHOWN, "ε (user-level)"]]
    for result in results:
        epsilon = "∞" if result["epsilon"] is None else f"{rounded_up(result['epsilon']):g}"
        means = [model_card.with_interval(result, metric) for metric in SHOWN]
        rows.append([label(result["recommender"]), *means, epsilon])
    return rows


def text(results: list[dict[str, Any]]) -> str:
    """The table for a terminal of 80 columns: means, and half of the 95% interval."""
    shown = ("recall@10", "nDCG@10")
    rows = [["", *shown, "ε"]]
    for result in results:
        means = [f"{result['recalls'][m]:.4f} ± {1.96 * result['errors'][m]:.4f}" for m in shown]
        epsilon = "∞" if result["epsilon"] is None else f"{rounded_up(result['epsilon']):g}"
        rows.append([label(result["recommender"]), *means, epsilon])
    return as_text(rows)


def write(
    folder: RunFolder, config: dict[str, Any], results: list[dict[str, Any]], said: str, spent: float
) -> None:
    """Writes the page, `report.html` and `report.md`, and the model card.

    Args:
        folder: the run folder.
        config: what was done.
        results: a record for each recommender; none if nobody could be asked.
        said: the statement.
        spent: ε of all days so far.
    """
    by_name = {result["recommender"]: result for result in results}
    released = by_name.get("spectral")
    popular = by_name["popularity"]["recalls"]["recall@10"] if results else 0.0
    asking = _asking(folder)
    folder.release.write_text("card.md", card(config, said, asking).markdown())
    folder.private.write_page(
        Page(
            f"Run of {config['when'].replace('T', ', ')}{_day(config)}",
            _WARNING,
            [
                model_card.figures(spent, config["delta"], config["train_users"], released, popular),
                *_tests(by_name),
                Text(_made_of(config)),
            ],
            [
                Section("Model card", [Facts(_card(config, said, _names(config)))]),
                model_card.files(_RELEASED, _PRIVATE, "yes"),
                asking(folder.path.resolve().name),
                model_card.limits([_KNOWN]),
                Section("What is promised", [Verbatim(said)]),
            ],
        )
    )


def card(config: dict[str, Any], said: str, asking: Callable[[str], Section]) -> Page:
    """What may be handed on of the page: nothing that was tested, and no name of a file or folder.

    Args:
        config: what was done.
        said: the statement.
        asking: a function from a folder's name to the section on how to ask what is in it.
    """
    return Page(
        "A private recommender",
        ("What this folder holds is covered by the ε below, all of it. ", model_card.NOT_ASKED),
        [Facts(_card(config, said, f"a log of {config['users']:,} users")), Text(_made_of(config))],
        [
            model_card.files(_RELEASED), asking(RELEASE), model_card.limits([_KNOWN]),
            Section("What is promised", [Verbatim(said)]),
        ],
    )  # fmt: skip


def _tests(results: dict[str, dict[str, Any]]) -> list[Block]:
    if not results:
        return [Text("Nobody was held back who has two different items: nothing was tested.")]
    heading, *rows = table(list(results.values()))
    return [
        Table("What was tested", heading, rows, list(results).index("spectral"), figures=True),
        Text(_tested(results["spectral"]["test_users"])),
        Pictures([pictures.recalls(results)]),
    ]


def _made_of(config: dict[str, Any]) -> str:
    items = "from a public list" if config["items"] else "found privately"
    return (
        f"{config['users']:,} users, of whom {config['train_users']:,} are counted and the others held back. "
        f"{config['num_items']:,} items, {items}. Rows {'in order of time' if config['time'] else 'without order'}."
    )


def _card(config: dict[str, Any], said: str, made_from: Words) -> list[tuple[str, Words]]:
    items = "a public list" if config["items"] else "those that many users have, found privately"
    return [
        ("Recommender", (Strong("SpectralRecommender"), " in ", Code("servable/"), ": counts of items and of pairs of "
                         "them, summed over users with noise; nothing is trained")),
        ("Made from", made_from),
        ("Items", f"{config['num_items']:,}, {items}"),
        *model_card.promised(said),
        model_card.made_by(),
    ]  # fmt: skip


def _names(config: dict[str, Any]) -> tuple[Piece, ...]:
    """The first few of many files, without the folders that they are in, and the columns."""
    names: list[Piece] = [Code(os.path.basename(os.path.normpath(path))) for path in config["data"]]
    shown = [piece for name in names[:_SHOWN_FILES] for piece in (", ", name)][1:]
    shown += [f" and {len(names) - _SHOWN_FILES:,} more"] if len(names) > _SHOWN_FILES else []
    for name in ("user", "item", "time"):
        shown += [f", {name}s in ", Code(config[name])] if config[name] else []
    return (*shown, ", public items in ", Code(os.path.basename(config["items"]))) if config["items"] else tuple(shown)


def _asking(folder: RunFolder) -> Callable[[str], Section]:
    answered = recommend.first_answers(folder.path)[:5]
    shown = [(Given(str(item)), Given(title)) for item, title in answered]
    return lambda name: model_card.asking(name, [item for item, _ in answered], shown)


def _day(config: dict[str, Any]) -> str:
    return f", day {config['day']} of at most {config['days']}" if config["days"] > 1 else ""


def _tested(users: int) -> str:
    return (
        f"Tested on {users:,} users who were held back from the sums: each is told of up to 20 rows and asked for an "
        "item that was new to the user; items that the model does not know count as not found. In brackets are 95% "
        "intervals of the mean over such users: 1.96 standard errors on either side. Exact popularity has no privacy; "
        "DP popularity takes the released counts of the recommender alone, and costs what finding items and counting "
        "them cost; where days were added up, the ε of all is given for it."
    )
