"""The page a run leaves behind: a table, plots, and what is promised to whom.

Losses and recalls are computed from users' data and no noise was added to them: the page says so, and is not covered by
the ε that it reports. Diagnostics of clipping never enter it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from tfdp_rec.movies import contestants, model_card, pictures, recommend
from tfdp_rec.page import Code, Facts, Given, Page, Picture, Pictures, Section, Strong, Table, Text, Verbatim, Words
from tfdp_rec.run_folder import RELEASE, RunFolder
from tfdp_rec.spending.statement import rounded_up

_SHOWN = ("recall@10", "nDCG@10")
_WARNING = (
    Strong("Not private."), " Losses, recalls and nDCG below were computed from users' data without noise. They are "
    "for those who may see it; the ε of the table covers the released recommender, not this page.",
)  # fmt: skip


NO_GUARANTEE = "Guarantee: none. This is not private, and no epsilon holds for it.\n"


def label(name: str) -> str:
    """What to call a line of the report."""
    return contestants.named(name).label


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the final table, the heading first."""
    rows = [["recommender", *_SHOWN, "ε (user-level)", "steps"]]
    for r in results:
        rows.append(
            [
                ("two-tower, " if contestants.is_two_tower(r["mechanism"]) else "") + label(r["mechanism"]),
                *(model_card.with_interval(r, metric) for metric in _SHOWN),
                _epsilon(r["epsilon"]),
                str(r["steps"] or "–"),
            ]
        )
    return rows


def times(seconds: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """The rows of the table of steps, the heading first.

    Args:
        seconds: number of movies -> mechanism -> of one step.
    """
    names = list(next(iter(seconds.values())))
    rows = [[f"{int(movies):,}", *(f"{of[name]:.2f} s" for name in names)] for movies, of in seconds.items()]
    return [["movies", *(f"a step of {label(name)}" for name in names)], *rows]


def _epsilon(value: float | None) -> str:
    if value is None:
        return "∞ (exact counts)"
    return "∞" if math.isinf(value) else f"{rounded_up(value):g}"


def as_text(rows: list[list[str]]) -> str:
    """Rows in columns, for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def write(
    folder: RunFolder,
    config: dict[str, Any],
    results: list[dict[str, Any]],
    statements: dict[str, str],
    seconds: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Writes the page, `report.html` and `report.md`, from a run's metrics, and the model card.

    Args:
        folder: the run folder.
        config: what the run was asked to do, and what it `released`.
        results: one record a contestant: recalls, errors, ε, steps, steps_per_second.
        statements: contestant -> its privacy statement.
        seconds: of a step as the catalogue grows, if they were taken; see `times`.
    """
    by_name, name = {result["mechanism"]: result for result in results}, config["released"]
    said = statements.get(name, "")
    marked = list(by_name).index(name)
    heading, *rows = table(results)
    figures = model_card.figures(
        by_name[name]["epsilon"], config["delta"], config["train_users"], by_name[name],
        by_name[contestants.popularity.name]["recalls"]["recall@10"],
    )  # fmt: skip
    asking = _asking(folder)
    folder.release.write_text("card.md", card(config, said, asking).markdown())
    folder.private.write_page(
        Page(
            f"Run of {config['when'].replace('T', ', ')}",
            _WARNING,
            [
                figures,
                Table("What was tested", heading, rows, marked, figures=True),
                Text(_tested(results[0]["test_users"])),
                Text(_made_of(config, results)),
                Pictures(_pictures(folder, by_name)),
            ],
            [
                Section("Model card", [Text(_released(name, statements)), Facts(_card(config, said, True))]),
                model_card.files(_files(name), _PRIVATE, "yes" if contestants.named(name).claims_epsilon else "no"),
                asking(folder.path.resolve().name),
                model_card.limits(_limits(config)),
                *_growth(config, seconds or {}),
                Section("What is promised", [], [Section(label(who), [Verbatim(t)]) for who, t in statements.items()]),
            ],
        )
    )


def card(config: dict[str, Any], said: str, asking: Callable[[str], Section]) -> Page:
    """What may be handed on of the page: nothing that was tested, and no name of a folder.

    Args:
        config: what was done.
        said: the statement; empty where nothing is private.
        asking: a function from a folder's name to the section on how to ask what is in it.
    """
    covered = "What this folder holds is covered by the ε below, all of it. " if said else "**Not private.** "
    return Page(
        "A recommender of movies",
        (covered, model_card.NOT_ASKED),
        [Facts(_card(config, said, False))],
        [
            model_card.files(_files(config["released"])), asking(RELEASE), model_card.limits(_limits(config)),
            Section("What is promised", [Verbatim(said or NO_GUARANTEE)]),
        ],
    )  # fmt: skip


def _growth(config: dict[str, Any], seconds: Mapping[str, Mapping[str, float]]) -> list[Section]:
    if not seconds:
        return []
    heading, *rows = times(seconds)
    said = (
        f"The two-tower of this run, {config['batch_size']} users a step, on ids that were drawn at random. Who is "
        "compared took turns, and a time is the median of three. DP-SGD draws noise for every movie at every step, a "
        "lazy step for those that are about to be read."
    )
    return [Section("A step, as the catalogue grows", [Table("Seconds a step", heading, rows), Text(said)])]


def _pictures(folder: RunFolder, results: Mapping[str, dict[str, Any]]) -> list[Picture]:
    """What was tested, and the curves of those that were trained."""
    lines = folder.metrics()
    trained = {line["mechanism"] for line in lines}
    flat = {name: r["recalls"]["recall@10"] for name, r in results.items() if name not in trained}
    drawn = (
        pictures.recalls(results),
        pictures.curves(lines, "recall@10", "recall@10 on held-out users", flat),
        pictures.curves(lines, "loss", "training loss", {}),
        pictures.curves(lines, "epsilon", "ε spent (user-level)", {}),
    )
    return [each for each in drawn if each is not None]


def _made_of(config: dict[str, Any], results: list[dict[str, Any]]) -> str:
    data = f"{config['users']:,} users, {config['movies']:,} movies, {config['events']:,} events. "
    if not any(contestants.is_two_tower(result["mechanism"]) for result in results):
        return f"{data}δ = {config['delta']:g}."
    return (
        f"{data}Two-towers: {config['steps']} steps of {config['batch_size']} users on average out of "
        f"{config['train_users']:,}; clip {config['clip']}. δ = {config['delta']:g}."
    )


def _card(config: dict[str, Any], said: str, named: bool) -> list[tuple[str, Words]]:
    files = [os.path.basename(os.path.normpath(path)) for path in config["data"]]
    source: Words = "MovieLens files" if files else "generated timelines, of nobody"
    if files and named:
        source = ("MovieLens files in ", Given(files[0]))
    kind = (
        f"a two-tower, trained by {label(config['released'])}" if contestants.is_two_tower(config["released"]) else
        "counts of movies and of pairs of them, summed over users; nothing is trained"
    )  # fmt: skip
    return [
        ("Recommender", (Strong(label(config["released"])), f": {kind}")),
        ("Made from", source),
        ("Learnt from", f"{config['train_users']:,} of {config['users']:,} users, drawn whatever they have watched; "
                        "some of the others were tested on"),
        *model_card.promised(said),
        model_card.made_by(),
    ]  # fmt: skip


_PRIVATE: tuple[tuple[Words, Words], ...] = (
    ((Code("report.html"), ", ", Code("report.md"), ", pictures, ", Code("results.json")), "what was tested"),
    (Code("config.json"), "what was asked for; events in it are counted without noise"),
    ((Code("metrics.jsonl"), ", ", Code("tensorboard/")), "losses and tests during training, if any"),
)


def _files(released: str) -> list[tuple[str, Words]]:
    model = "model.keras" if contestants.is_two_tower(released) else "recommender.npz"
    return [
        ("servable/", "the SavedModel that answers"),
        (model, "the same, to go on with in Python, or to export anew"),
        ("titles.json", "ids and titles of the catalogue, which is public"),
        ("statement.txt", "what is promised, as below"),
        ("card.md", "the model card: what this is, and what is promised"),
    ]


def _asking(folder: RunFolder) -> Callable[[str], Section]:
    answered, _ = recommend.answers(folder.path, [])
    titles = json.loads((folder.release / "titles.json").read_text(encoding="utf-8"))
    movies = [movie for movie, _ in answered[:5]]
    shown = [(str(i), Given(titles[str(i)])) for i in movies]
    return lambda name: model_card.asking(name, movies, shown)


def _limits(config: dict[str, Any]) -> list[Words]:
    generated = "The timelines were generated: what was tested says how the methods compare, and nothing of real users."
    return [*([] if config["data"] else [generated]), "It knows the movies of its catalogue alone; others are ignored."]


def _tested(users: int) -> str:
    return (
        f"Tested on {users:,} users from whom nobody learnt; all are asked the same, and what they were told is left "
        "out. In brackets are 95% intervals of the mean over such users: 1.96 standard errors on either side, by the "
        "Gaussian approximation. The users are the same in all lines, so that differences are surer than these."
    )


def _released(name: str, statements: dict[str, str]) -> Words:
    """Which recommender the folder holds, and what it would mean to let out another."""
    there = (Strong(label(name)), " is in ", Code("release/servable/"))
    if not contestants.named(name).claims_epsilon:
        return (*there, ". It is not private: no ε holds for it.")
    private = [each for each in statements if contestants.named(each).claims_epsilon]
    alone = (*there, ", and it alone; it was chosen by its name, not by how it tested.")
    if len(private) < 2:
        return alone
    return (
        *alone,
        f" Each ε is of one recommender by itself, and {', '.join(map(label, private))} were made from the same "
        "users: whoever lets out several of them, or one more from another run on these users, has spent the sum of "
        "their ε, at the sum of their δ.",
    )
