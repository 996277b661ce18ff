"""The examples of tutorials/examples: each runs whole, its clipping is checked, and its head counts what was changed.

A line under `# was: …` stands for that line of the public original, one that ends in `# new` for none, and none for
`# gone: …`, so that the unchanged program can be read back, run on the same data and compared: `pytest
tests/test_examples.py -m slow -s`.
"""

import ast
import os
import pathlib
import re

import keras
import numpy as np
import pytest
import seeding
import tensorflow as tf
from alone import assert_clipped_alone

import tfdp_rec

FOLDER = pathlib.Path(__file__).parents[1] / "tutorials" / "examples"
EXAMPLES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
QUICK = ("basic_ranking", "tfrs_basic_ranking")
PROJECTS = r"keras-rs|keras\.io|TensorFlow Recommenders|RecLearn|recommenders-team|KerasGRU4Rec"
WAS = re.compile(r"( *)# (?:was|(gone)): (.*)")


def unchanged(source):
    """The program as it was, and how many lines were taken out and put in."""
    kept, out, put, waiting = [], 0, 0, False
    for line in source.splitlines():
        if found := WAS.fullmatch(line):
            kept.append(found[1] + found[3])
            out, waiting = out + 1, not found[2]
        elif waiting or line.endswith("# new"):
            put, waiting = put + 1, False
        else:
            kept.append(line)
    return "\n".join(kept), out, put


def without_libraries_that_are_not_here(source):
    if "import keras_rs" in source:
        pytest.importorskip("keras_rs")


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_head_says_what_it_is_and_counts_what_was_changed(name):
    source = EXAMPLES[name]
    before, out, put = unchanged(source)
    head = ast.get_docstring(ast.parse(source))
    ast.parse(before)
    assert "tfdp_rec" not in before.split('"""', 2)[2]
    assert re.search(rf"^Public original: ({PROJECTS})", head, re.M)
    said = re.search(r"^Lines changed besides the data: -(\d+) \+(\d+)([.:])(.*)", head, re.M)
    assert said and (int(said[1]), int(said[2])) == (out, put)
    assert put <= 3 or said[4], "more than three lines, and no reason"


def run(source, private, folder, monkeypatch, epochs=None, seed=1):
    """A program's names after it ran."""
    monkeypatch.chdir(folder)
    made = []

    def quick(*args, **kwargs):
        fit = real(*args, **{**kwargs, "accountant": "rdp"})
        made.append((fit, args[1]))
        monkeypatch.setattr(type(fit), "fit", quiet, raising=True)
        return fit

    real, fitted = tfdp_rec.make_private, tfdp_rec.training.private_fit.PrivateFit.fit

    def quiet(self, **options):
        return fitted(self, **{"verbose": 0, **({"epochs": epochs} if epochs else {}), **options})

    if private:
        monkeypatch.setattr(tfdp_rec, "make_private", quick)
    names = {"__name__": "__main__"}
    seeding.seed(seed)
    exec(compile(source, "example.py", "exec"), names)
    monkeypatch.undo()
    return names, made[-1] if made else None  # of two in one program, the last has the budget of both


def rows(data, number):
    return tf.nest.map_structure(lambda column: tf.constant(column[:number]), data)


@pytest.fixture
def quiet():
    keras.config.disable_interactive_logging()
    yield
    keras.config.enable_interactive_logging()


def checked(names, made, folder):
    """What every example ends with: a budget kept, sound clipping, and a model that is saved, loaded and served."""
    (fit, data), model = made, names["model"]
    assert 7.5 < fit.plan.accountant.epsilon() <= 8.0
    tfdp_rec.clipping.check(fit.model, rows(data, 5), examples=2)
    report = tfdp_rec.validate(fit.model, rows(data, 5))
    assert report.ok and ("were compared" in report.compared or "draws random" in report.compared)
    assert_clipped_alone(fit.model, rows(data, 5), rtol=1e-4)
    assert all(np.isfinite(value) for value in tf.nest.flatten(names["scores"]))
    assert all(len(each) for each in tf.nest.flatten(names["predictions"]))
    if "loaded" in names:
        for one, other in zip(model.get_weights(), names["loaded"].get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
    assert tf.saved_model.load(str(folder / "servable")).signatures["serve"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs(name, tmp_path, monkeypatch, quiet):
    without_libraries_that_are_not_here(EXAMPLES[name])
    checked(*run(EXAMPLES[name], True, tmp_path, monkeypatch), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_beside_what_it_was(name, tmp_path, monkeypatch, quiet):
    """On the same data; that the private one learned at all, its first loss tells."""
    without_libraries_that_are_not_here(EXAMPLES[name])
    names, made = run(EXAMPLES[name], True, tmp_path, monkeypatch)
    checked(names, made, tmp_path)
    found = [names["scores"]]
    for seed in range(2, 1 + int(os.environ.get("TRAININGS", 1))):
        found.append(run(EXAMPLES[name], True, tmp_path, monkeypatch, seed=seed)[0]["scores"])
    before, out, put = unchanged(EXAMPLES[name])
    others, _ = run(before, False, tmp_path, monkeypatch)
    ours = {key: [scores[key] for scores in found] for key in names["scores"]}
    shown = " | ".join(
        f"{key} {np.mean(each):.3f} ± {np.std(each):.3f} / {others['scores'][key]:.3f}" for key, each in ours.items()
    )
    print(f"\n| {name} | -{out} +{put} | {shown} |")
