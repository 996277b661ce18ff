"""What a run on a log says of itself: a table of what was tested, and what is promised.

What was tested is computed from users' data without noise. The page says so, and no ε covers it.
"""

from __future__ import annotations

from typing import Any

from tfdp_rec.movies.report import as_markdown, as_text, with_interval
from tfdp_rec.movies.run_folder import RunFolder
from tfdp_rec.own_log.budget import Budget
from tfdp_rec.privacy.statement import rounded_up
from tfdp_rec.spectral import SpectralRecommender

SHOWN = ("recall@10", "recall@20", "nDCG@10")
_LABELS = {
    "popularity": "popularity (exact counts)",
    "dp-popularity": "DP popularity",
    "spectral": "SpectralRecommender",
}
_WARNING = (
    "> The recalls and nDCG below were computed from users' data without noise. They are for who may see the log;\n"
    "> the ε of the table covers what is released, not this page.\n"
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
        ("Covers", "servable/ and all that it answers, the list of items in it, config.json, this statement"),
        ("Does not cover", "report.md and results.json, whose tests look at users' data; another run on the same "
         "users, which costs as much again; people with several user ids; what is asked of the served model"),
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
        rows.append([_LABELS[result["recommender"]], *(with_interval(result, metric) for metric in SHOWN), epsilon])
    return rows


def text(results: list[dict[str, Any]]) -> str:
    """The table for a terminal of 80 columns: means, and half of the 95% interval."""
    shown = ("recall@10", "nDCG@10")
    rows = [["", *shown, "ε"]]
    for result in results:
        means = [f"{result['recalls'][m]:.4f} ± {1.96 * result['errors'][m]:.4f}" for m in shown]
        epsilon = "∞" if result["epsilon"] is None else f"{rounded_up(result['epsilon']):g}"
        rows.append([_LABELS[result["recommender"]], *means, epsilon])
    return as_text(rows)


def write(folder: RunFolder, config: dict[str, Any], results: list[dict[str, Any]], said: str) -> None:
    """Writes report.md.

    Args:
        folder: the run's.
        config: what was done.
        results: a record for each recommender; none if nobody could be asked.
        said: the statement.
    """
    tested = (
        f"{as_markdown(table(results))}\n\n{_tested(results[0]['test_users'])}" if results
        else "Nobody was held back who has two different items: nothing was tested."
    )  # fmt: skip
    items = "from a public list" if config["items"] else "found privately"
    folder.write_text(
        "report.md",
        f"# Run of {config['when']}{_day(config)}\n\n{_WARNING}\n{tested}\n\n{config['users']:,} users, of whom "
        f"{config['train_users']:,} are counted and the others held back. {config['num_items']:,} items, {items}. "
        f"Rows {'in order of time' if config['time'] else 'without order'}.\n\n## What is released\n\n"
        f"`servable/`, a SavedModel that takes histories of your ids and answers in them: `tfdp-rec recommend RUN "
        f"--history ID ...`, `tfdp-rec serve RUN`. `ledger.jsonl` says what was paid for it.\n\n## What is promised\n\n"
        f"```\n{said.strip()}\n```\n",
    )


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
