"""The study of click logs: readers against small files, units drawn as they should be, and the study in little."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import tfdp_rec
from experiments.clicks import command, sources
from experiments.clicks.__main__ import main
from experiments.clicks.choices import choices
from experiments.clicks.log import ClickLog, Rows, Units, numbered, split
from experiments.clicks.model import ClickModel
from experiments.clicks.settings import Grid, Sizes
from experiments.clicks.trainings import CONTESTANTS, Trainings
from experiments.generated.clicks import auc
from experiments.generated.private_ads import SyntheticPrivateAds
from experiments.study import Study


def rows_of(units, columns=2, seed=0):
    rng, count = np.random.default_rng(seed), len(units)
    ids = rng.integers(0, 5, (count, columns)).astype(np.int32)
    return Rows(ids, np.zeros((count, 0), np.float32), rng.integers(0, 2, count).astype(np.float32), np.array(units))


def test_a_unit_gives_distinct_rows_of_its_own_each_choice_as_often_as_another():
    units = Units(rows_of([7, 3, 7, 7, 3, 9, 7]), per_unit=2)
    assert len(units) == 3
    rows, there = units.numbers_of(np.array([0, 1, 2]), np.random.default_rng(0))
    assert sorted(rows[0]) == [1, 4] and there.tolist() == [[True, True], [True, True], [True, False]]
    assert rows[2, 0] == 5
    rng, seen = np.random.default_rng(1), {}
    for _ in range(6000):
        pair = tuple(sorted(units.numbers_of(np.array([1]), rng)[0][0]))
        seen[pair] = seen.get(pair, 0) + 1
    pairs = {(0, 2), (0, 3), (0, 6), (2, 3), (2, 6), (3, 6)}
    assert set(seen) == pairs and all(abs(count - 1000) < 200 for count in seen.values())  # 6.9 deviations


def test_parts_keep_a_unit_together_and_have_their_shares():
    parts = split(rows_of(np.repeat(np.arange(1000), 3)), (7, 2, 1), seed=1)
    assert [len(rows) for rows in parts.values()] == [2100, 600, 300]
    owners = [set(rows.units) for rows in parts.values()]
    assert not owners[0] & owners[1] and not owners[0] & owners[2] and not owners[1] & owners[2]


def test_an_id_outside_its_column_is_refused():
    rows = rows_of([0, 1])
    rows.ids[1, 0] = 5
    with pytest.raises(ValueError, match="outside"):
        ClickLog("x", ("a", "b"), (5, 5), {"train": rows})
    with pytest.raises(ValueError, match="as many rows"):
        Rows(rows.ids, rows.numbers, rows.labels[:1], rows.units)


def test_sums_count_more_only_for_a_gain_and_cross_the_columns_of_most_values():
    gains = {(0,): 0.05, (1,): 0.04, (2,): 0.001, (0, 1): 0.02, (2, 3): 0.5, (0, 2): 0.002, (1, 3): 0.01, (0, 3): 0.001}
    seen = []

    def score(counted, factors, gain=0.0):
        seen.append((counted, factors))
        return sum(gains.get(each, 0) for each in counted) + (gain if factors else 0)

    assert choices((50, 40, 3, 4), score) == (((0,), (1,), (0, 1)), ())
    assert not any((2, 3) in counted for counted, _ in seen), "neither is one of the two columns of most values"
    assert (((0,), (1,)), (0, 1)) in seen, "vectors are of these two"
    assert choices((50, 40, 3, 4), lambda *each: score(*each, 0.022)) == (((0,), (1,), (0, 1)), ()), "too little gained"
    assert choices((50, 40, 3, 4), lambda *each: score(*each, 0.03)) == (((0,), (1,)), (0, 1))
    assert choices((5000, 4000), lambda counted, _: len(counted)) == (((0,), (1,)), ()), "too many pairs to count"
    assert choices((5,), lambda counted, factors: 1.0) == (((0,),), ())


@pytest.mark.slow
@pytest.mark.parametrize("by_users", [False, True])
def test_private_sums_find_what_decides_within_their_budget(tmp_path, by_users):
    rows = rows_of(np.arange(4000) // (4 if by_users else 1), seed=3)
    rows.labels[:] = rows.ids[:, 0] < 2
    parts = {"train": rows, "validation": rows, "test": rows}
    log = ClickLog("x", ("a genre", "b"), (5, 5), parts, per_unit=4 if by_users else 1)
    trainings = Trainings(log, Sizes(batch_size=100, delta=1e-4), Grid(seeds=2), Study(tmp_path, {}))
    (sums,) = [one for one in CONTESTANTS if one.make is None]
    found = trainings.best(sums, 8.0)
    assert found[0]["setting"]["counted"] == ((0,),) and len(found) == 2
    assert found[0]["test"]["auc"] > 0.99 and found[0]["test"] != found[1]["test"]


def test_the_command_names_the_logs_that_there_are():
    assert command.NAMES == tuple(sources.SOURCES)


def test_frappe_as_published(tmp_path):
    lines = "1 0:1 10:1 20:1 30:1 40:1 50:1 60:1 70:1 80:1 90:1\n-1 1:1 11:1 20:1 30:1 40:1 50:1 60:1 70:1 80:1 90:1\n"
    paths = [tmp_path / f"frappe.{part}.libfm" for part in ("train", "validation", "test")]
    for path in paths:
        path.write_text(lines)
    log = sources.frappe(paths)
    assert log.sizes == (2, 2, 1, 1, 1, 1, 1, 1, 1, 1) and log.parts["test"].labels.tolist() == [1, 0]
    assert log.parts["train"].ids[1, :3].tolist() == [1, 1, 0]
    paths[1].write_text("2 0:1\n")
    with pytest.raises(ValueError, match="line 1"):
        sources.frappe(paths)
    with pytest.raises(ValueError, match=r"There is no .*absent"):
        sources.frappe([*paths[:2], tmp_path / "absent"])
    with pytest.raises(ValueError, match="read from"):
        sources.frappe(paths[:2])


def test_events_have_apps_beside_them_that_their_user_never_used(tmp_path):
    path, rng = tmp_path / "train.csv", np.random.default_rng(0)
    events = [(user, 10 + rng.integers(4), 30 + user % 3) for user in rng.integers(0, 3, 200)]
    path.write_text("".join(f"{u}-{c}-1-2-3-4-5-6,{item}-{90 + item % 2}\n" for u, c, item in events))
    log = sources.frappe_events([path])
    assert log.unit == "event" and log.per_unit == 3 and log.columns[8:] == ("item", "cost")
    assert sum(map(len, log.parts.values())) == 600
    for rows in log.parts.values():
        positive = rows.labels == 1
        assert positive.sum() * 3 == len(rows)
        own = rows.ids[positive][:, 0] % 3 == rows.ids[positive][:, 8]  # each user has one app of three
        others = rows.ids[~positive][:, 0] % 3 == rows.ids[~positive][:, 8]
        assert own.all() and not others.any()
        assert (rows.ids[:, 9] == rows.ids[:, 8] % 2).all()  # the cost is the app's


def test_films_beside_an_event_have_their_genre(tmp_path):
    path, rng = tmp_path / "train.csv", np.random.default_rng(0)
    events = np.stack([rng.integers(0, 40, 300), rng.integers(0, 30, 300)], axis=1)
    path.write_text("".join(f"{user}-7-8-9,{film}-{50 + film % 2}\n" for user, film in events))
    log = sources.movielens_events([path])
    assert log.columns == ("user", "gender", "age", "occupation", "item", "genre") and log.name == "MovieLens-1M"
    for rows in log.parts.values():
        assert (rows.labels == 1).sum() * 3 == len(rows) and (rows.ids[:, 5] == rows.ids[:, 4] % 2).all()
    path.write_text("".join(f"1-7-8-9,{film}-50\n" for film in range(4)))
    with pytest.raises(ValueError, match="has all 4 films"):
        sources.movielens_events([path])


def test_apps_beside_a_training_event_do_not_depend_on_the_users_other_events(tmp_path):
    """A unit's rows are its own: only an app other than the event's is drawn, whatever else the user has used."""
    path = tmp_path / "train.csv"
    path.write_text("".join(f"0-1-1-2-3-4-5-6,{k % 4}-9\n" for k in range(990)) + "".join("1-1-1-2-3-4-5-6,5-9\n" * 10))
    log = sources.frappe_events([path])
    for part, rows in log.parts.items():
        ids = rows.ids.reshape(-1, 3, 10)
        ids = ids[ids[:, 0, 0] == 0]
        own, others = ids[:, 0, 8], ids[:, 1:, 8]
        assert (others != own[:, None]).all()
        share = np.mean(others < 4)  # of apps that the user has used elsewhere: 3 of 4, or none where held back
        assert share == 0 if part != "train" else 0.7 < share < 0.8


def test_a_log_by_users_keeps_its_parts_and_loses_the_column_of_users():
    rows = rows_of(np.arange(50), columns=3)
    log = ClickLog("x", ("film", "user", "age"), (5, 6, 7), {"train": rows})
    users = log.by_user(4)
    assert users.columns == ("film", "age") and users.sizes == (5, 7) and (users.unit, users.per_unit) == ("user", 4)
    assert np.array_equal(users.parts["train"].units, rows.ids[:, 1])
    assert np.array_equal(users.parts["train"].ids, rows.ids[:, [0, 2]])
    with pytest.raises(ValueError, match='no column "user"'):
        users.by_user(4)


def test_movielens_in_both_forms(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    (one / "ml.inter").write_text("user_id:token\titem_id:token\trating:float\ttime\n1\t5\t4\t9\n2\t6\t3\t9\n")
    (one / "ml.user").write_text("user_id\tage\tgender\toccupation\tzip\n1\t24\tM\twriter\t0\n2\t53\tF\tother\t0\n")
    (one / "ml.item").write_text("item_id\ttitle\tyear\tclass\n5\tToy\t1995\tAnimation Comedy\n6\tGold\t1996\tAction\n")
    (other / "ratings.dat").write_text("1::5::4::9\n2::6::3::9\n")
    (other / "users.dat").write_text("1::M::20::7::0\n2::F::50::1::0\n")
    (other / "movies.dat").write_text("5::Toy Story (1995)::Animation|Comedy\n6::Gold (1996)::Action\n", "latin-1")
    for folder in (one, other):
        log = sources.movielens([folder])
        rows = [row for part in log.parts.values() for row in zip(part.ids.tolist(), part.labels)]
        assert len(rows) == 2 and log.sizes == (2, 2, 2, 2, 2, 1, 2, 2, 1)
        liked = {int(ids[1]): label for ids, label in rows}
        assert liked == {0: 1.0, 1: 0.0}


def test_avazu_and_private_ad(tmp_path):
    path = tmp_path / "train.csv"
    lines = [f"{10000009418151094300 + k},{k % 2},1410210{k % 10},100{k % 3},{'ab'[k % 2]}" for k in range(20)]
    path.write_text("id,click,hour,C1,site_id\n" + "\n".join(lines) + "\n")
    log = sources.avazu([path])
    assert log.columns == ("hour", "C1", "site_id") and [len(rows) for rows in log.parts.values()] == [16, 2, 2]
    train = log.parts["train"]
    assert train.ids[:, 0].tolist() == [k % 10 for k in range(16)] and len(set(train.ids[:, 2])) == 2
    assert (train.labels == np.arange(16) % 2).all()
    for day in (1, 2, 3, 4):
        (tmp_path / "ads" / f"day_int={day}").mkdir(parents=True)
        table = pa.table({
            "user_id": [f"u{day}", "v"],
            "click_delay_after_display_array": pa.array([[3.5], None], pa.list_(pa.float64())),
            "features_kv_bits_constrained_0": [1.5, None],
            "campaign_id": [7, 8],
        })
        parquet.write_table(table, tmp_path / "ads" / f"day_int={day}" / "part.parquet")
    log = sources.private_ad([tmp_path / "ads"])
    assert log.unit == "user" and [len(rows) for rows in log.parts.values()] == [4, 2, 2]
    rows = log.parts["train"]
    assert rows.labels.tolist() == [1, 0, 1, 0] and (rows.ids[1::2, 0] == 0).all() and (rows.ids[::2, 0] > 0).all()


def test_generated_ads_have_the_schema_users_of_one_day_and_clicks_that_follow_from_what_a_browser_would_not_tell():
    generator = SyntheticPrivateAds(users=3000, seed=2)
    one, two = generator.day(1), generator.day(2)
    assert generator.day(1) == one and not set(one["user_id"].to_pylist()) & set(two["user_id"].to_pylist())
    order = one["display_order"].to_numpy()
    starts = np.flatnonzero(order == 1)
    assert len(starts) == 3000 == len(set(one["user_id"].to_pylist()))
    assert (np.diff(order)[np.diff(order) != 1] <= 0).all()
    clicked = np.array([len(each) for each in one["click_delay_after_display_array"].to_pylist()])
    assert set(clicked) == {0, 1} and 0.2 < clicked.mean() < 0.4
    # The user's fit to the campaign is in what one site knows, the less the later the column.
    told = [auc(clicked, one[f"features_kv_bits_constrained_{k}"].to_numpy()) for k in (0, 4, 7)]
    assert told[0] > 0.6 > told[1] > told[2] > 0.48
    assert auc(clicked, one["features_browser_bits_constrained_0"].to_numpy()) > 0.53
    assert len(set(one["features_not_available_5"].to_pylist())) == 16
    campaigns = np.bincount(one["campaign_id"].to_numpy())
    assert campaigns.max() == campaigns[0] and abs(campaigns[0] / len(order) - 0.02) < 0.005


def test_rows_alone_are_units_of_their_own(monkeypatch, capsys):
    monkeypatch.setattr(sources, "SyntheticPrivateAds", lambda seed: SyntheticPrivateAds(users=50, seed=seed))
    log = sources.generated_ads([], days=4)
    rows = log.parts["train"]
    assert log.unit == "user" and log.per_unit == 4 and len(set(rows.units)) == 100 < len(rows)
    alone = log.by_row()
    assert alone.unit == "display" and alone.per_unit == 1 and (alone.parts["train"].ids == rows.ids).all()
    assert len(set(alone.parts["train"].units)) == len(rows)
    assert main(["generated-ads", "--per-user", "4", "--rows-alone"]) == 2
    assert "two kinds of units" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_upon_private_labels_sees_no_private_column_without_noise(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sources, "SyntheticPrivateAds", lambda seed: SyntheticPrivateAds(users=60, seed=seed))
    log = sources.generated_ads([], days=4).by_row()
    private = ~np.isin(log.columns, log.public)
    assert {name for name, one in zip(log.columns, private) if one} == {
        name for name in log.columns if name.startswith(("features_kv_bits", "features_browser", "features_not_av"))
    }
    sizes = Sizes(batch_size=20, steps=2, free_steps=(3,), hidden=(4,), width=2, delta=1e-4)
    trainings = Trainings(log, sizes, Grid(), Study(tmp_path, {}))
    seen, spent = [], []
    free, noise = Trainings.free_batches, Trainings.noise
    monkeypatch.setattr(
        Trainings, "free_batches", lambda self, *args: seen.append((args[0], free(self, *args))) or seen[-1][1]
    )
    monkeypatch.setattr(Trainings, "noise", lambda self, *args: spent.append(args[0]) or noise(self, *args))
    (contestant,) = [one for one in CONTESTANTS if one.public_first]
    found = trainings._trained(contestant, 4.0, {"share": 0.25, "length": 0.4, "clip": 1.0}, 0)
    ((of_labels, batches),) = seen
    assert of_labels == 1.0 and spent == [3.0], "both shares together are the budget"
    ids = next(iter(batches))[0]["ids"].numpy() - log.first
    assert (ids[..., private] == 0).all() and ids[..., ~private].any()
    assert 0 < found["public_auc"] < 1
    # What is trained privately is added to what the public columns tell.
    model, rows = trainings.model(True, 0), trainings.train.taken(np.arange(5)[:, None])
    alone = model(trainings.inputs(rows))
    np.testing.assert_allclose(model({**trainings.inputs(rows), "offset": np.full([5, 1], 2.0)}), alone + 2.0)
    given = ["generated-ads", "--contestants", "labels then", "--out", str(tmp_path / "out")]
    assert main(given) == 2 and "its units are not its rows" in capsys.readouterr().err


def test_the_hash_is_fixed():
    assert sources._hashed(pa.chunked_array([["a", "b", None]])).tolist() == [31944, 58449, 0]


def test_numbers_of_values():
    ids, sizes = numbered([["x", "y", "x"], [3, 3, 3]])
    assert ids.tolist() == [[0, 0], [1, 0], [0, 0]] and sizes == (2, 1)


@pytest.mark.parametrize("width, hidden", [(0, ()), (4, (3,))])
def test_both_models_are_private_and_their_loss_is_the_mean_of_a_units_rows(width, hidden):
    model = ClickModel(9, 2, 1, width, hidden, bias=-1.0)
    rng = np.random.default_rng(0)
    ids, numbers = rng.integers(0, 9, (5, 3, 2)).astype("int32"), rng.normal(size=(5, 3, 1)).astype("float32")
    inputs = {"ids": ids, "numbers": numbers}
    labels, there = rng.integers(0, 2, (5, 3)).astype("float32"), np.tile([1, 1, 0], (5, 1)).astype("float32")
    losses = model.per_example_loss((inputs, labels, there), training=True).numpy()
    z = model(inputs).numpy()
    expected = (there * (np.logaddexp(0, z) - labels * z)).sum(1) / 2
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    tfdp_rec.validate(model, (inputs, labels, there))


@pytest.mark.slow
def test_the_study_in_little(tmp_path, capsys):
    folder = tmp_path / "ml"
    folder.mkdir()
    rng = np.random.default_rng(0)
    (folder / "ml.inter").write_text(
        "h\n" + "".join(f"{u}\t{i}\t{5 if (u + i) % 3 else 1}\t0\n" for u, i in rng.integers(0, 12, (2000, 2)))
    )
    (folder / "ml.user").write_text("h\n" + "".join(f"{u}\t2{u % 9}\tM\tw\t0\n" for u in range(12)))
    (folder / "ml.item").write_text("h\n" + "".join(f"{i}\tt\t1995\tAction\n" for i in range(12)))
    args = "--epsilons 8 --seeds 2 --steps 20 --batch-size 200 --lengths 0.4 --clips 1 --free-steps 50 --delta 1e-4"
    whole = ["movielens", str(folder), "--out", str(tmp_path / "out"), *args.split()]
    assert main(whole) == 0
    page = (tmp_path / "out" / "report.md").read_text()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert "deep, LazyDPSGD" in page and (tmp_path / "out" / "auc.png").stat().st_size > 5000
    assert results["deep, no privacy"]["0"][0]["test"]["auc"] > 0.9
    assert set(results["private sums"]) == {"8"} and len(results["private sums"]["8"]) == 2
    assert main([*whole, "--contestants", "unknown"]) == 2 and "there are" in capsys.readouterr().err


def test_a_study_of_another_log_is_not_mixed_in(tmp_path):
    Study(tmp_path, {"log": "a"})
    with pytest.raises(ValueError, match="other settings"):
        Study(tmp_path, {"log": "b"})
