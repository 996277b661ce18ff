"""What a run says of itself: the report, and the model card, which may be handed on; and a page for the owner alone.

Figures of the report and of the card are private, and paid for in the run's ledger. Exact results of tests, which no ε
covers, are on the confidential page alone. What is said of the guarantee is read from the statement's fields, so that
none of them can promise something else.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tfdp_rec
from tfdp_rec.core.claim.statement import Statement, round_up
from tfdp_rec.job import page
from tfdp_rec.job.evaluation import HISTORY, KS
from tfdp_rec.job.recommenders import names
from tfdp_rec.job.recommenders.names import is_trained, look_up
from tfdp_rec.job.run_folder import CARD, CONFIDENTIAL, MODEL, RELEASE, RunFolder
from tfdp_rec.job.settings import JobSettings
from tfdp_rec.job.sources import LogSource
from tfdp_rec.metrics import Mean
from tfdp_rec.sums.private_metrics import Figure

SHOWN = ("recall@10", "recall@20", "nDCG@10")
NO_GUARANTEE = Statement({"Guarantee": "none: this is not private, and no epsilon holds for it"})
_WARNING = (
    "> **Not private.** Losses, recalls and nDCG below were computed from users' data without noise. They are for "
    "those who may see the log; the ε of the table covers what is released, not this page."
)
_OF_THE_FIGURES = (
    "Each held-out user is asked for an item that was new to them, after up to 20 rows before it. Brackets hold 95% "
    "intervals, of the noise and of the choice of these users; their price is part of the ε."
)
_HISTORIES = "A question holds a history, and no ε covers that: keep it between the user and you."
_LIMITS = (
    "It knows the items of its list alone: others are ignored in a history, and never recommended.",
    "Tested at most once, offline, on other users of the same data: later performance, other places, and differences "
    "between groups of users were not measured.",
    "Noise hides what few users have in common: rare items, and users with rare tastes, gain the least.",
    _HISTORIES,
)
_GENERATED = "The timelines were generated: the results compare methods, and say nothing of real users."
_OF_THE_TESTS = (
    "For each of {users:,} held-out users the recommender sees up to {history} rows and ranks all other items; the "
    "label is an item that was new to the user, and items that are not in the catalogue count as not found. Brackets "
    "hold 95% intervals of the mean over such users: 1.96 standard errors on either side. All lines have the same "
    "users, so that differences are surer than these. Exact popularity has no privacy; DP popularity is the released "
    "counts alone."
)
_RELEASED_FILES = (
    ("`servable/`", "the SavedModel, which takes and gives the ids of the log"),
    ("`statement.txt`", "what is promised, as above"),
    ("`card.md`", "the model card: what this is, and what is promised"),
    ("`ledger.jsonl`", "what was paid: `tfdp-rec ledger show`; public numbers alone"),
    ("`model.keras`", "the model, by number of item, to load in Python or to export anew"),
    ("`released.npz`", "items and titles; of private sums, the sums as they were released, for days that follow"),
)
_PRIVATE_FILES = (
    "Hand on `release/` alone. In `private/` are this report and settings (`config.json`), with the names of the log's "
    "files; the ledgers of recommenders that were only compared (`ledgers/`); and what no ε covers: the days on which "
    "users' rows counted (`seats.parquet`), and, of runs with --confidential, exact figures, losses and curves "
    "(`confidential/`)."
)


_KINDS = {
    names.spectral.name: "counts of items and of pairs of them, summed over users with noise; nothing is trained",
    names.exact.name: "counts of items and of pairs of them, without noise",
    names.from_sums.name: "counts of items and of pairs, summed over users with noise, and tables that are trained "
    "upon them",
    names.auto.name: "counts of items and of pairs, summed over users with noise; and tables that are trained upon "
    "them, unless the statement says that these sums leave alone",
}


@dataclasses.dataclass(frozen=True)
class RunReport:
    """The content of the report and of the card."""

    folder: RunFolder
    source: LogSource
    config: Mapping[str, Any]  # settings, sizes and name of the released recommender
    results: Sequence[dict[str, Any]]  # a record for each recommender
    others: Mapping[str, Statement]  # of the recommenders that were only compared, by name
    said: str | None  # the statement of the released one
    answers: Sequence[tuple[Any, str]]  # ids and titles of the first items recommended for an empty history
    figures: Mapping[str, Figure]  # private ones, of held-out users
    no_figures: str  # why there are none

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """Records by recommender."""
        return {result["recommender"]: result for result in self.results}

    @property
    def recommender(self) -> names.Recommender:
        """The recommender that leaves the run."""
        return look_up(self.config["released"])


def table(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table of results, the heading first."""
    rows = [["recommender", *SHOWN, "ε (user-level)", "steps"]]
    for result in results:
        label = "two-tower, " * names.is_two_tower(result["recommender"]) + look_up(result["recommender"]).label
        means = [f"{result['recalls'][metric]:.4f} {_interval(result, metric, 4)}" for metric in SHOWN]
        rows.append([label, *means, _epsilon(result["epsilon"]), str(result["steps"] or "–")])
    return rows


def text(figures: Mapping[str, Figure]) -> str:
    """Private figures for a terminal."""
    return "\n".join(f"{name:18}{figure}" for name, figure in figures.items())


def write(report: RunReport) -> None:
    """Writes the model card; and the report, as `report.html` and `report.md`."""
    config, folder = report.config, report.folder
    begins = "# A private recommender\n\n> What this folder holds is covered by the ε below, all of it."
    if not report.recommender.claims_epsilon:
        begins = "# A recommender\n\n> **Not private.**"
    card = "\n\n".join(_card(report, RELEASE, False))
    folder.write(CARD, f"{begins} {_HISTORIES}\n\n{card}\n")
    day = f", day {config['day']} of at most {config['days']}" if config["days"] > 1 else ""
    title = f"Run of {config['when'].replace('T', ', ')}{day}"
    others = [f"### {look_up(name).label}\n\n{page.verbatim(said)}" for name, said in report.others.items()]
    blocks = [
        f"# {title}", _summary(report),
        page.section("Model card", _describe_release(report), _PRIVATE_FILES),
        *_card(report, folder.path.resolve().name, True),
        *([page.section("What each of the others has cost", *others)] if others else []),
    ]  # fmt: skip
    _write_page(folder, "", title, blocks, {})


def write_confidential(report: RunReport) -> None:
    """Writes the page of exact figures, for those who may see the log."""
    title, pictures = "Exact figures, for those who may see the log", dict[str, bytes]()
    blocks = [f"# {title}", _WARNING, *_tests(report)]
    if report.records[report.recommender.name]["test_users"]:
        pictures = {"recall_at_k.png": draw(functools.partial(_plot_recalls, report.records))}
        blocks.append("![recall@k of all, for each k, with 95% intervals](recall_at_k.png)")
    _write_page(report.folder, f"{CONFIDENTIAL}/", title, blocks, pictures)


def _write_page(folder: RunFolder, part: str, title: str, blocks: list[str], pictures: dict[str, bytes]) -> None:
    markdown = "\n\n".join(blocks) + "\n"
    for file, png in pictures.items():
        folder.write(part + file, png)
    folder.write(f"{part}report.md", markdown)
    folder.write(f"{part}report.html", page.render_html(title, markdown, pictures))


# Sections.


def _summary(report: RunReport) -> str:
    """The few figures that one looks for first."""
    config, result = report.config, report.records[report.recommender.name]
    cost = "- ε, user-level: **∞** (not private)"
    if report.recommender.claims_epsilon:
        cost = f"- ε, user-level: **{_epsilon(result['epsilon'])}** (at δ = {config['delta']:g}, of what is released)"
    found = [f"- {name} of what is released: **{figure}**" for name, figure in [*report.figures.items()][:1]]
    held_out = config["num_users"] - config["train_users"]
    users = f"- users: **{config['train_users']:,}** (trained on; {held_out:,} others held out)"
    return "\n".join([cost, *found, users])


def _figures(report: RunReport) -> str:
    """Private figures of held-out users, or why there are none."""
    if not report.figures:
        return page.section("How well it does", f"No figures: {report.no_figures}.")
    rows = [(name, str(figure)) for name, figure in report.figures.items()]
    shown = page.table(("of held-out users", "with noise"), rows)
    return page.section("How well it does", shown, _OF_THE_FIGURES)


def _tests(report: RunReport) -> list[str]:
    """The table of all exact results."""
    users = report.records[report.recommender.name]["test_users"]
    if not users:
        return ["No held-out user has two different items: nothing was tested."]
    heading, *rows = table(report.results)
    return [
        page.table(heading, rows, list(report.records).index(report.recommender.name)),
        _OF_THE_TESTS.format(users=users, history=HISTORY),
    ]


def _epsilon(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{round_up(value):g}"


def _interval(result: Mapping[str, Any], metric: str, digits: int) -> str:
    low, high = Mean(result["recalls"][metric], result["errors"][metric], result["test_users"]).interval()
    return f"[{max(low, 0.0):.{digits}f}, {min(high, 1.0):.{digits}f}]"


# Plots, as PNG files.


def _plot_recalls(results: Mapping[str, Mapping[str, Any]], axes: Any) -> None:
    """recall@k for each k that was tested, with 95% intervals."""
    for number, (name, result) in enumerate(results.items()):
        # A little apart, so that intervals do not hide each other.
        places = [place + 0.05 * (number - (len(results) - 1) / 2) for place in range(len(KS))]
        means, errors = ([result[kind][f"recall@{k}"] for k in KS] for kind in ("recalls", "errors"))
        bars = [1.96 * error if _is_finite(error) else 0.0 for error in errors]
        axes.errorbar(places, means, bars, label=look_up(name).label, color=look_up(name).colour, marker=".")
    axes.set_xticks(range(len(KS)), [str(k) for k in KS])
    axes.set(xlabel="k", ylabel="recall@k")
    axes.set_ylim(bottom=0)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def draw(plot: Callable[[Any], None]) -> bytes:
    """A plot upon fresh axes, as PNG."""
    from matplotlib.figure import Figure  # no window opens, and no setting of matplotlib stays

    figure, file = Figure(figsize=(5.6, 4.2), layout="constrained"), io.BytesIO()
    axes = figure.subplots()
    plot(axes)
    axes.grid(alpha=0.2)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


# The card.


def _card(report: RunReport, folder: str, private: bool) -> list[str]:
    """What may be handed on: private figures alone, and names of files and folders only if `private`."""
    released = report.recommender
    kind = _KINDS.get(released.name, "a two-tower, trained by this mechanism")
    files = [row for row in _RELEASED_FILES if row[0] != "`model.keras`" or (report.folder.release / MODEL).exists()]
    return [
        page.bullets([
            f"**Recommender**: **{released.label}**: {kind}",
            f"**Made from**: {report.source.words(private)}", f"**Made by**: tfdp_rec {tfdp_rec.__version__}",
        ]),
        _sizes(report),
        page.section("What is promised", page.verbatim(report.said or NO_GUARANTEE)),
        _figures(report),
        page.section("Files to be handed on", page.table(("file", "what it is"), files)),
        _questions(report, folder),
        page.section("Limits", page.bullets([*([_GENERATED] if report.source.generated else []), *_LIMITS])),
    ]  # fmt: skip


def _sizes(report: RunReport) -> str:
    """How many users and items there are, and how much was trained."""
    config, name = report.config, report.recommender.name
    items = "from a public list" if config["public"] else "found privately"
    trained = "are trained on"
    if config["days_per_user"]:
        trained = "may be counted, those with a seat on the day,"
        trained = f"are trained on, and {trained}" if is_trained(name) else trained
    said = (
        f"{config['num_users']:,} users, of whom {config['train_users']:,} {trained} and the others held out. "
        f"{config['num_items']:,} items, {items}. Rows {'in order of time' if config['ordered'] else 'without order'}."
    )
    said += f" {config['why']}" * bool(config["why"])
    if is_trained(name) and report.records[name]["steps"]:
        made, clip = report.records[name]["steps"], JobSettings.from_config(config).clip_of(name)
        said += f" Trained: {made} steps of {config['batch_size']} users on average, clip {clip:g}."
    return said


def _describe_release(report: RunReport) -> str:
    """Which recommender the folder holds, and what the release of another would cost."""
    there = f"**{report.recommender.label}** is in `release/servable/`"
    if not report.recommender.claims_epsilon:
        return f"{there}. It is not private: no ε holds for it."
    made = [look_up(name) for name in report.records if name in (report.recommender.name, *report.others)]
    private = [each.label for each in made if each.claims_epsilon]
    alone = f"{there}, and it alone; it was chosen by its name before training, so that the choice costs no privacy."
    if len(private) < 2:
        return alone
    return (
        f"{alone} ε is stated per recommender, and {', '.join(private)} were made from the same users: a release of "
        "several of them, or of one more from another run on these users, costs the sum of their ε, at the sum of "
        "their δ."
    )


def _questions(report: RunReport, folder: str) -> str:
    """How to ask the recommender, and what it recommends for an empty history."""
    ids = [item for item, _ in report.answers if not str(item).startswith("-")][:2]
    name, typed = shlex.quote(folder), " ".join(shlex.quote(str(item)) for item in ids) or "ID ID"
    asked = shlex.quote(json.dumps({"instances": [{"history": ids}]}, ensure_ascii=False))
    commands = (
        f"tfdp-rec recommend {name} --history {typed}\n"
        f"tfdp-rec serve {name}\n"
        f"curl -d {asked} http://127.0.0.1:8501/v1/models/recommender:predict"
    )
    shown = [(page.escape(item), page.escape(title)) for item, title in report.answers]
    return page.section(
        "How to ask it", "From the folder that this run's folder is in, here and over HTTP:", page.verbatim(commands),
        "Recommendations for an empty history:", page.table(("id", "title"), shown),
    )  # fmt: skip
