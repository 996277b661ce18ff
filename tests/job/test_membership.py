"""`tfdp-rec audit --run`: a page of the private folder, whose numbers are those of the users' own losses."""

import json
import re
import shutil

import numpy as np
import pytest
from scipy.stats import norm

from tfdp_rec.cli import main
from tfdp_rec.core.claim.ledger import read
from tfdp_rec.job import membership
from tfdp_rec.job.evaluation import NewItemExamples


@pytest.fixture
def attacked(run, tmp_path):
    """A copy of the run, and what its page says: (reached, low, high, most) by row."""
    folder = shutil.copytree(run, tmp_path / "run")

    def attack():
        assert main(["audit", "--run", str(folder)]) == 0
        page = (folder / "private" / "membership.md").read_text()
        rows = re.findall(r"^\| (.+) \| ([\d.]+) \(([\d.]+)–([\d.]+)\) \| ([\d.]+) \|$", page, re.MULTILINE)
        return page, {name: [float(each) for each in numbers] for name, *numbers in rows}

    attack.folder = folder
    return attack


def test_the_page_is_for_the_owner_alone_and_says_so(attacked, capsys):
    before = {path: path.read_bytes() for path in (attacked.folder / "release").rglob("*") if path.is_file()}
    page, rows = attacked()
    assert "not private" in page.lower() and "for you alone" in capsys.readouterr().out
    assert (attacked.folder / "private" / "membership.md").stat().st_mode & 0o777 == 0o600
    assert {path: path.read_bytes() for path in before} == before  # nothing is paid, and nothing of it is released
    assert len(rows) == 4 and not re.search(r"person-\d", page)


@pytest.mark.slow
def test_the_numbers_are_those_of_each_users_ranks(attacked):
    _, rows = attacked()
    log, users, ask = membership._reopen(attacked.folder)
    sides = []
    for side in (users.train, users.test):
        losses = []
        for place in range(4):
            draws = log.uniforms(f"tfdp-rec audit {place}")
            contexts, labels = NewItemExamples(log, side).by_own_rows(draws)
            answers = ask(contexts, log.num_items)
            ranks = [[*mine, label].index(label) if label > 0 else len(mine) for mine, label in zip(answers, labels)]
            losses.append(np.where(labels < 0, np.nan, np.log1p(ranks)))
        mean = np.mean(losses, axis=0)
        sides.append(mean[~np.isnan(mean)])
    inside, outside = sides
    area = np.mean((inside[:, None] < outside) + 0.5 * (inside[:, None] == outside))
    assert rows["area under the curve"][0] == pytest.approx(area, abs=6e-4)
    low, high = rows["area under the curve"][1:3]
    assert low < area < high and low < 0.52
    mu = sum(paid.event.noise_multiplier ** -2 for paid in read(attacked.folder / "release" / "ledger.jsonl").paid
             if hasattr(paid.event, "noise_multiplier")) ** 0.5  # fmt: skip
    assert rows["named, at 5% of the others"][3] > norm.sf(norm.isf(0.05) - mu)


def test_a_recommender_that_remembers_is_found_out(attacked, monkeypatch):
    log, users, _ = membership._reopen(attacked.folder)
    told = {}
    for place in range(4):
        contexts, labels = NewItemExamples(log, users.train).by_own_rows(log.uniforms(f"tfdp-rec audit {place}"))
        told |= {context.tobytes(): label for context, label in zip(contexts, labels)}

    def ask(contexts, k):
        lists = np.zeros((len(contexts), k), np.int32)
        lists[:, 0] = [told.get(context.tobytes(), 0) for context in contexts]
        return lists

    monkeypatch.setattr(membership, "_reopen", lambda run: (log, users, ask))
    _, rows = attacked()
    assert rows["area under the curve"][1] > 0.9 and rows["named, at 5% of the others"][1] > 0.7


@pytest.mark.parametrize("change, words", [({"days": 30}, "of several days"), ({"num_users": 9}, "other users")])
def test_what_cannot_be_attacked_is_refused_in_one_line(attacked, change, words, capsys):
    path = attacked.folder / "private" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert main(["audit", "--run", str(attacked.folder)]) == 2
    assert words in capsys.readouterr().err and not (attacked.folder / "private" / "membership.md").exists()
