"""The ablations of trained two-towers: examples, their price, one step two ways, and a run from file to report."""

import dataclasses

import numpy as np
import pytest

from experiments.spectral import ablations, data, quick, towers
from experiments.spectral.__main__ import main
from experiments.spectral.baskets import Baskets, Budget, Head, Recipe
from tfdp_rec.spectral import Histories

ITEMS = 30
PLAIN = Recipe(width=4)
WHOLE = Recipe(head=12, labels=3, history=4, clip=0.1, width=4, item_power=0.5, context_power=-0.5, temperature=3.0,
               unit=True, momentum=0.5, decay=True)  # fmt: skip
DRAWN = Recipe(head=20, candidates=7, by_count=True, temperature=0.5, width=3)


@pytest.fixture
def histories():
    """Forty users of none to eight items."""
    rng = np.random.default_rng(0)
    items = [rng.choice(ITEMS, rng.integers(0, 9), replace=False) + 1 for _ in range(40)]
    return Histories(np.concatenate(items), np.concatenate([[0], np.cumsum([len(each) for each in items])]))


def head_of(recipe):
    rng = np.random.default_rng(1)
    return Head(np.sort(rng.choice(ITEMS, recipe.head or ITEMS, replace=False)), rng.random(ITEMS) + 0.1)


def test_an_example_wants_at_most_half_and_tells_the_rest(histories):
    recipe = dataclasses.replace(PLAIN, labels=3, history=4)
    baskets = Baskets(histories, head_of(recipe), recipe)
    examples = baskets.fetch(np.arange(40))
    for items, context, wanted in zip(baskets.users, examples["context"], examples["wanted"]):
        told, asked = set(context[context > 0]), set(np.flatnonzero(wanted))
        assert told | asked <= set(items) and not told & asked
        assert len(asked) == min(3, max(len(items) // 2, 1), len(items))
        assert len(told) == min(4, len(items) - len(asked))
        assert wanted.sum() == pytest.approx(float(len(items) > 0))


def test_who_has_nothing_in_the_head_is_a_unit_without_a_gradient(histories):
    recipe = dataclasses.replace(WHOLE, head=2)
    head = head_of(recipe)
    baskets, rng = Baskets(histories, head, recipe), np.random.default_rng(2)
    nothing = np.array([user for user in range(40) if not len(baskets.users[user])])
    tables = [rng.normal(size=[2, 4]), rng.normal(size=[2, 4])]
    assert len(baskets.users) == 40 and len(nothing) > 3
    for found in quick.clipped_sums(recipe, head, tables, baskets.fetch(nothing), baskets.shared()):
        assert not found.any()


def test_one_user_moves_the_sums_by_no_more_than_the_clip(histories):
    recipe = dataclasses.replace(WHOLE, clip=0.01)
    head, rng = head_of(recipe), np.random.default_rng(3)
    baskets = Baskets(histories, head, recipe)
    tables = [rng.normal(size=[12, 4]), rng.normal(size=[12, 4])]
    for user in range(40):
        found = quick.clipped_sums(recipe, head, tables, baskets.fetch(np.array([user])), baskets.shared())
        assert np.sqrt(sum(np.square(each).sum() for each in found)) <= 0.01


@pytest.mark.parametrize("recipe", [PLAIN, WHOLE, DRAWN], ids=["plain", "whole", "drawn"])
def test_a_step_on_arrays_is_that_of_the_package(histories, recipe):
    head = head_of(recipe)
    baskets = Baskets(histories, head, recipe)
    batch, shared = baskets.fetch(np.arange(40)), baskets.shared()
    model = towers.new_model(recipe, head, seed=0)
    model.compile(
        towers.optimizer(recipe, l2_norm_clip=recipe.clip, noise_multiplier=0.0, expected_batch_size=10),
        run_eagerly=True,
    )
    items = np.random.default_rng(4).normal(size=[baskets.size + 1, recipe.width])
    model.scores.embeddings.assign(items)
    tables = [each.copy() for each in towers.tables_of(model)]
    stepped = quick.Stepped(recipe, tables)
    for step in range(2):
        model.train_on_batch({**batch, **shared})
        stepped.by([found / 10 for found in quick.clipped_sums(recipe, head, tables, batch, shared)], step)
        for ours, packaged in zip(tables, towers.tables_of(model)):
            np.testing.assert_allclose(ours, packaged, atol=2e-5)


def test_counts_and_steps_cost_the_budget_and_no_more():
    budget = Budget.of(Recipe(sampled=1.0, steps=3), users=200, epsilon=4.0, delta=1e-6)
    assert 3.9 < budget.epsilon <= 4.0
    less = dataclasses.replace(budget, noise=0.9 * budget.noise)
    assert less.epsilon > 4.0


def test_an_average_of_released_weights_is_of_the_last_ones():
    assert Recipe(steps=10, averaged=0.5).first_averaged == 5
    assert Recipe(steps=10).first_averaged == Recipe(steps=10, averaged=0.01).first_averaged == 9


def test_who_is_held_back_is_not_counted(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{user} {user + 1} {user + 2} {user + 3}\n" for user in range(1, 51)))
    split = data.users_apart(str(path), users=40)
    again = data.held_back(split)
    assert len(split.counted) + len(split.given) == 40
    assert len(again.counted) + len(again.given) == len(split.counted)
    counted = {tuple(sorted(items)) for items in again.counted}
    assert not counted & {tuple(sorted([*given, *wanted])) for given, wanted in zip(again.given, again.relevant)}


def test_every_change_is_tried_alone_and_together():
    names = [row.name for row in ablations.rows()]
    assert len(names) == len(set(names))
    for change in ablations.TOGETHER:
        assert f"plain + {change}" in names and f"together − {change}" in names
    assert all(row.beside in [*names, *ablations.METHODS] for row in ablations.rows())


def test_a_run_writes_its_tables(tmp_path, capsys):
    rng = np.random.default_rng(0)
    path, out = tmp_path / "lines.txt", tmp_path / "run"
    users = [rng.choice(12, 6, replace=False) + 12 * (user % 2) + 1 for user in range(80)]
    path.write_text("".join(f"{user} {' '.join(map(str, items))}\n" for user, items in enumerate(users)))
    few = ["--epsilon", "8", "--seeds", "1", "--paths", "60", "--choices", "1"]
    assert main(["ablations", "--data", str(path), "--out", str(out), *few, "--only", "together, by"]) == 0
    page = (out / "report.md").read_text()
    named = [line.split(" | ")[0].strip("| ") for line in page.splitlines() if line.startswith("| ")]
    assert named.count("together, by DPSGD") == named.count("together") == named.count("spectral") == 2
    assert (out / "lines.json").exists()
    capsys.readouterr()
