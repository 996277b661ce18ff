"""`tfdp-rec card`: every number is public, paid for or computed, and made again from its files; figures cost once."""

import errno
import hashlib
import json
import math
import resource
import runpy
import shutil
import signal
import sys

import numpy as np
import pyarrow as pa
import pytest
from checker import card_checked, checked, written
from job.conftest import COLUMNS, results_of, train
from scipy.stats import norm

from tfdp_rec.cli import main
from tfdp_rec.core.claim.events import NonPrivateDpEvent
from tfdp_rec.core.claim.ledger import Chain, Ledger, Snapshot, canonical, line_text, read
from tfdp_rec.core.claim.statement import round_up
from tfdp_rec.datasets.logs.interactions import Interactions, uniforms
from tfdp_rec.job import card, held_out
from tfdp_rec.job.evaluation import NewItemExamples

DELTA = 1e-6


def carded(*arguments):
    return main(["card", *map(str, arguments)])


@pytest.fixture(scope="module")
def plain(log, tmp_path_factory):
    """A run that has made no figures itself."""
    return made(log, tmp_path_factory.mktemp("plain") / "run", "--metrics-epsilon", "0", "--confidential")


def made(log, folder, *options):
    files = sorted(log.glob("*.parquet"))
    assert train("--data", *files, *COLUMNS, *options, "--quiet", "--out", folder) == 0
    return folder


@pytest.fixture
def fresh(plain, tmp_path):
    """A copy of the run, without a card."""
    shutil.copytree(plain, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def paid(log, tmp_path_factory):
    """A run that has paid for figures with hardly any noise, and their card."""
    folder = made(log, tmp_path_factory.mktemp("paid") / "run", "--epsilon", "400", "--metrics-epsilon", "300")
    assert carded(folder) == 0
    return folder


@pytest.fixture(scope="module")
def usual(log, tmp_path_factory):
    """The card of a run that has paid for figures of usual noise."""
    folder = made(log, tmp_path_factory.mktemp("usual") / "run")
    assert carded(folder) == 0
    return folder / "card"


@pytest.fixture
def copy(usual, tmp_path, monkeypatch):
    """A copy of it; equal payments are priced once, of hundreds of ledgers."""
    prices, price = {}, Chain.epsilon
    profiles, profile = {}, card.profile_of

    def epsilon(self, delta):
        key = f"{delta} {self.paid}"
        return prices[key] if key in prices else prices.setdefault(key, price(self, delta))

    def profile_of(paid):
        return profiles[str(paid)] if str(paid) in profiles else profiles.setdefault(str(paid), profile(paid))

    monkeypatch.setattr(Chain, "epsilon", epsilon)
    monkeypatch.setattr(card, "profile_of", profile_of)
    return shutil.copytree(usual, tmp_path / "card")


def is_whole(folder, capsys):
    """Whether the card is verified; else it is said in one sentence."""
    capsys.readouterr()
    code, said = carded("--verify", folder), capsys.readouterr().out
    assert (code, said[:8]) in ((0, said[:8]), (1, "CHANGED:")) and said.count("\n") == 1 and len(said) < 700
    return code == 0


# The numbers.


def test_verifier_accountant_and_checker_agree(usual, tmp_path):
    said = card.verify(usual)
    ledger = read(usual / "ledger.jsonl")
    assert said["epsilon"] == round_up(ledger.epsilon(DELTA)) and said["delta"] == DELTA
    assert 7.99 < said["epsilon"] <= 8.0
    assert card_checked(usual, tmp_path) == pytest.approx(ledger.epsilon(DELTA), abs=1e-3)
    assert checked(usual / "ledger.jsonl", DELTA, tmp_path) == pytest.approx(said["epsilon"], abs=2e-3)


def test_attacks_on_gaussians_find_what_one_gaussian_lets_them(usual):
    said, noises = card.verify(usual), []
    for paid in read(usual / "ledger.jsonl").paid:
        parts = getattr(paid.event, "events", [paid.event])
        noises += [part.noise_multiplier for part in parts if hasattr(part, "noise_multiplier")]
    mu = math.sqrt(sum(noise**-2 for noise in noises))
    for rate, most in said["true_positive_rate_at_most"].items():
        exact = norm.sf(norm.isf(float(rate)) - mu)
        assert exact < most < exact + 4e-4
    assert norm.cdf(mu / 2) < said["right_guess_at_even_odds_at_most"] < norm.cdf(mu / 2) + 4e-4
    assert said["gaussian_mu"] == pytest.approx(mu, rel=4e-3)  # a tenth of δ is that of the items' threshold
    assert said["odds_factor"] == pytest.approx(math.exp(said["epsilon"]), rel=2e-3)


def slow_figures(folder, log):
    """recall, nDCG, popularity share, coverage and Gini, one user after the other, by what a user would be answered."""
    rows = pa.concat_tables(pa.parquet.read_table(path) for path in sorted(log.glob("*.parquet"))).to_pylist()
    of_user = {}
    for row in rows:
        of_user.setdefault(row["user_id"], []).append(row)
    answers = main_answers(folder)
    known = answers([[]], len(answers.items))[0]
    popular, lists, hits, gains = set(known[: -(-len(known) // 10)]), [], [], []
    ids = list(of_user)
    sides, draws = uniforms(ids, "tfdp-rec train 0"), uniforms(ids, "tfdp-rec card 0")
    for user, side, draw in zip(ids, sides, draws):
        items = [row["sku"] for row in sorted(of_user[user], key=lambda row: row["ts"])]
        first = [place for place, item in enumerate(items) if item not in items[:place]]
        if side < 0.8 or len(first) < 2:
            continue
        place = first[np.random.default_rng(int(draw * 2**53)).integers(1, len(first))]
        history = items[max(0, place - 20) : place]
        found = answers([history], 10)[0]
        lists.append(found)
        hits.append(items[place] in found)
        gains.append(1 / np.log2(found.index(items[place]) + 2) if items[place] in found else 0.0)
    counts = [sum(item in found for found in lists) for item in answers.items]
    gaps = sum(abs(a - b) for number, a in enumerate(counts) for b in counts[:number])
    return {
        "recall@10": np.mean(hits), "nDCG@10": np.mean(gains),
        "popularity share": np.mean([len(popular & set(found)) / len(found) for found in lists]),
        "coverage": np.mean([count > 0 for count in counts]),
        "Gini": gaps / (sum(sides >= 0.8) * len(counts) * 10),
    }  # fmt: skip


def main_answers(folder):
    """The SavedModel, asked by ids."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(folder / "release" / "servable"))

    def answers(histories, k):
        asked = tf.constant(histories, tf.string, [1, len(histories[0])])
        found = loaded.signatures["top_k"](history=asked, k=tf.constant(k))["ids"].numpy()
        return [[item.decode() for item in row] for row in found]

    answers.items = [item.decode() for item in loaded.ids.numpy()]
    return answers


def test_figures_are_those_of_what_is_served(paid, log):
    exact = slow_figures(paid, log)
    kept = card.verify(paid / "card")["metrics"]
    assert kept.keys() == exact.keys()
    for name, value in exact.items():
        assert kept[name]["noise"] < 0.05 and kept[name]["value"] == pytest.approx(value, abs=5 * kept[name]["noise"])
    assert kept["recall@10"]["noise"] < 0.002  # so that the comparison says something


@pytest.mark.parametrize("time", ["", "time"])
def test_no_user_moves_the_question_of_another(time):
    rng = np.random.default_rng(0)
    user, item = np.repeat(np.arange(200), 6), rng.integers(0, 40, 1200)
    columns = {"user": user, "item": item} | ({"time": rng.integers(0, 5, 1200)} if time else {})
    item[:6] = np.arange(6)[::-1] if time else 39 - np.arange(6)

    def asked(of):
        log = Interactions.read({name: of(array) for name, array in columns.items()}, user="user", item="item",
                                time=time, items=list(range(40)))  # fmt: skip
        examples = NewItemExamples(log, np.arange(len(log)))
        contexts, labels = examples.by_own_rows(log.uniforms("key"))
        return dict(zip(log.unit_ids.to_pylist(), zip(contexts.tolist(), labels.tolist())))

    all_users = asked(lambda array: array)
    assert len({label for _, label in all_users.values()}) > 20
    for gone in (0, 7, 199):
        without = asked(lambda array, gone=gone: array[user != gone])
        assert without == {one: question for one, question in all_users.items() if one != gone}


# What is noticed.


def leaves(value, path=()):
    """Paths of all that is no object or list."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*path, key))
    else:
        yield path, value


def changed(said, path, value):
    """A copy with another value at a path, and a hash that fits."""
    new = json.loads(json.dumps(said))
    place = new
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if path != ("hash",):
        new["hash"] = hashlib.sha256(canonical({k: v for k, v in new.items() if k != "hash"}).encode()).hexdigest()
    return new


def test_each_line_of_the_ledger_that_is_removed_edited_or_moved_is_noticed(copy, capsys):
    assert is_whole(copy, capsys)
    lines = (copy / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    for number, line in enumerate(lines):
        fields = json.loads(line)
        edited = [line[:-2] + b" }\n", line.replace(b'"kind"', b'"kin"')]
        edited += [line_text({k: v for k, v in changed(fields, path, "7").items() if k != "hash"})
                   for path, value in leaves(fields) if path != ("hash",)]  # fmt: skip
        for each in [b"", line * 2, *edited]:
            (copy / "ledger.jsonl").write_bytes(b"".join([*lines[:number], each, *lines[number + 1 :]]))
            assert not is_whole(copy, capsys), (number, each)
    (copy / "ledger.jsonl").write_bytes(b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]))
    assert not is_whole(copy, capsys)
    (copy / "ledger.jsonl").write_bytes(b"".join(lines))
    assert is_whole(copy, capsys)


def test_each_value_of_privacy_json_that_is_edited_is_noticed_though_the_hash_fits(copy, capsys):
    said = json.loads((copy / "privacy.json").read_text())
    found = 0
    for path, value in leaves(said):
        if path[0] == "versions":  # no ledger knows these: the words and the hash have them
            continue
        others = ["", "else", None] if isinstance(value, str) else [value * 1.0001, -value, 0, None, str(value)]
        for other in (other for other in others if other != value):
            (copy / "privacy.json").write_text(card._text(changed(said, path, other)))
            assert not is_whole(copy, capsys), (path, other)
            found += 1
    assert found > 100
    for path in (("versions", "tfdp_rec"), ("versions", "dp-accounting")):
        kept = changed(said, path, "9.9") | {"hash": said["hash"]}
        (copy / "privacy.json").write_text(card._text(kept))
        assert not is_whole(copy, capsys)
    for text in ("", "{}", "[]", "null", card._text(said)[:-1], card._text(said | {"more": 1}), "\u00e9" * 9):
        (copy / "privacy.json").write_text(text)
        assert not is_whole(copy, capsys), text
    (copy / "privacy.json").write_bytes(b"\xff\xfe")
    assert not is_whole(copy, capsys)


def test_each_line_of_the_words_counts_but_for_the_head_and_the_picture_is_held(copy, capsys):
    told = (copy / "README.md").read_text()
    (copy / "README.md").write_text(told.replace("library_name", "license: mit\nlibrary_name"))
    assert is_whole(copy, capsys)
    lines = told.splitlines(keepends=True)
    for number in range(lines.index("# A private recommender\n"), len(lines)):
        (copy / "README.md").write_text("".join([*lines[:number], *lines[number + 1 :]]))
        assert not is_whole(copy, capsys), lines[number]
    (copy / "README.md").write_text(told + "license: mit\n")
    assert not is_whole(copy, capsys)
    (copy / "README.md").write_text(told)
    (copy / "attack.png").write_bytes((copy / "attack.png").read_bytes() + b"0")
    assert not is_whole(copy, capsys)


@pytest.mark.slow
def test_the_checker_of_the_page_notices_numbers_and_lines(copy, tmp_path, monkeypatch):
    written("ledger", "checker", 36, tmp_path)
    checker = written("card", "card_checker", 60, tmp_path)

    def finds():
        monkeypatch.setattr(sys, "argv", [str(checker), str(copy)])
        try:
            runpy.run_path(str(checker))
        except (SystemExit, AssertionError) as problem:
            return str(problem) or "the chain"
        return ""

    assert finds() == ""
    said, text = json.loads((copy / "privacy.json").read_text()), (copy / "privacy.json").read_text()
    numbers = [(path, value) for path, value in leaves(said) if isinstance(value, (int, float))]
    claimed = [(path, value) for path, value in numbers if path[0] not in ("public", "mechanisms")]
    assert len(claimed) == 30
    for path, value in claimed:
        (copy / "privacy.json").write_text(card._text(changed(said, path, value * 1.01 + 0.001)))
        assert finds(), path
    (copy / "privacy.json").write_text(card._text(changed(said, ("unit",), "click") | {"hash": said["hash"]}))
    assert finds()
    (copy / "privacy.json").write_text(text)
    lines = (copy / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(len(lines)):
        for other in (b"", lines[number].replace(b"0", b"1")):
            (copy / "ledger.jsonl").write_bytes(b"".join([*lines[:number], other, *lines[number + 1 :]]))
            assert finds(), number


def test_figures_without_a_payment_are_refused(fresh, capsys):
    with Ledger(fresh / "release" / "ledger.jsonl", "user", Snapshot(3000, "user, item, time")) as ledger:
        ledger.note(held_out.NOTE, {"payment": 3, "noise_multiplier": 1.0, "figures": {}})
    assert carded(fresh) == 2
    assert "did not pay for" in capsys.readouterr().err


# What is paid, and when.


def test_a_card_without_figures_says_why_and_holds_no_exact_figure(fresh, capsys):
    before = (fresh / "release" / "ledger.jsonl").read_bytes()
    assert carded(fresh) == 0 and "epsilon = 8 at delta = 1e-06" in capsys.readouterr().out
    assert (fresh / "release" / "ledger.jsonl").read_bytes() == before == (fresh / "card" / "ledger.jsonl").read_bytes()
    names = {path.name for path in (fresh / "card").iterdir()}
    assert names == {"README.md", "privacy.json", "ledger.jsonl", "attack.png"}
    told = (fresh / "card" / "README.md").read_text()
    assert "No figures: none were asked for, or paid for." in told and "recall" not in told
    holds = told + (fresh / "card" / "privacy.json").read_text()
    results = [*results_of(fresh).values()]
    exact = {value for result in results for kind in ("recalls", "errors") for value in result[kind].values()}
    assert len(exact) > 15 and not [value for value in exact if 0.001 < value < 1 and f"{value:.4f}" in holds]
    assert f" {results[0]['test_users']}" not in holds
    assert str(fresh) not in holds and "parquet" not in holds


def test_a_second_call_writes_the_same_card(usual):
    before = {path.name: path.read_bytes() for path in usual.iterdir()}
    assert carded(usual.parent) == 0
    assert {path.name: path.read_bytes() for path in usual.iterdir()} == before


# What is refused.


def test_a_run_that_is_not_there_or_not_finished_is_refused(fresh, tmp_path, capsys):
    assert carded(tmp_path / "nowhere") == 2 and "give the folder of a run that has ended" in capsys.readouterr().err
    assert carded("--verify", tmp_path / "nowhere") == 2 and "No such file" in capsys.readouterr().err
    for name in ("ledger.jsonl", "statement.txt", "released.npz"):
        kept = (fresh / "release" / name).rename(tmp_path / name)
        assert carded(fresh) == 2 and f"{name} is not there" in capsys.readouterr().err
        kept.rename(fresh / "release" / name)
    assert not (fresh / "card").exists()


def test_a_folder_that_is_full_or_read_only_fails_with_a_sentence(fresh, monkeypatch, capsys):
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        code = carded(fresh)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert code == 2 and "File too large" in capsys.readouterr().err

    def read_only(path):
        raise OSError(errno.EROFS, "Read-only file system", path)

    with monkeypatch.context() as patch:
        patch.setattr(card.os, "mkdir", read_only)
        assert carded(fresh) == 2 and "Read-only file system" in capsys.readouterr().err
    assert {path.name for path in fresh.iterdir()} == {"private", "release"}


def test_what_has_no_epsilon_has_no_card(fresh, capsys):
    path = fresh / "release" / "ledger.jsonl"
    with Ledger(path, "user", Snapshot(3000, "user, item, time")) as ledger:
        ledger.pay(NonPrivateDpEvent(), label="training without a guarantee")
    assert carded(fresh) == 2 and "has no epsilon that a card could tell" in capsys.readouterr().err
    assert not (fresh / "card").exists()


def test_without_matplotlib_there_is_no_plot_and_it_says_so(fresh, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert carded(fresh) == 0 and not (fresh / "card" / "attack.png").exists()
    assert "There is no plot: matplotlib was not there" in (fresh / "card" / "README.md").read_text()
    assert is_whole(fresh / "card", capsys)
