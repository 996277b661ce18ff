"""An approximate index beside a SavedModel: the same answers as every item scored, where it searches all lists."""

import json
import re
import shutil
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdp_rec.cli import main
from tfdp_rec.core.ground.files import digest
from tfdp_rec.data import Items
from tfdp_rec.models import TwoTower
from tfdp_rec.serving import Served, export
from tfdp_rec.serving.item_index import FOLDER, open_signatures, write_index

MANY, WIDTH, K = 50_000, 6, 4


def two_tower(seed, items=MANY, clusters=50):
    """Its items lie in clusters, and the popularity of each is another."""
    rng = np.random.default_rng(seed)
    model = TwoTower(np.arange(1, items + 1), WIDTH, 0, prior=rng.uniform(1, 9, items), history_length=3)
    if clusters:
        vectors = rng.normal(size=(clusters, WIDTH))[rng.integers(clusters, size=items + 1)]
        vectors = vectors + 0.2 * rng.normal(size=(items + 1, WIDTH))
    else:
        vectors = rng.normal(size=(items + 1, WIDTH))
    model.scores.embeddings.assign(vectors)
    model.context_table.embeddings.assign(vectors)
    return model


def name(number):
    return f"item {number}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A SavedModel without an index."""
    folder = tmp_path_factory.mktemp("plain") / "servable"
    export(folder, two_tower(0), Items(list(map(name, range(1, MANY + 1)))), {name(7): "Seven"}, k=K)
    return folder


@pytest.fixture(scope="module")
def indexed(plain, tmp_path_factory):
    pytest.importorskip("faiss")
    folder = tmp_path_factory.mktemp("run") / "servable"
    shutil.copytree(plain, folder)
    return folder, write_index(folder)


@pytest.fixture(scope="module")
def exact(plain):
    return tf.saved_model.load(str(plain)).signatures


def rewrite(folder, probes):
    """The index again, that many lists searched."""
    import faiss

    index = faiss.read_index(str(folder / FOLDER / "items.faiss"))
    index.nprobe = probes or index.nlist
    faiss.write_index(index, str(folder / FOLDER / "items.faiss"))
    about = json.loads((folder / FOLDER / "index.json").read_text())
    about["vectors"] = digest(folder / FOLDER / "items.faiss")
    (folder / FOLDER / "index.json").write_text(json.dumps(about))


@pytest.fixture
def copy(indexed, tmp_path):
    shutil.copytree(indexed[0], tmp_path / "servable")
    return tmp_path / "servable"


def opened(folder):
    return open_signatures(tf.saved_model.load(str(folder)), folder)


def index_alone(folder):
    """The same, of a model whose `top_k` cannot be asked."""
    loaded = tf.saved_model.load(str(folder))
    parts = {key: getattr(loaded, key) for key in ("answers", "ids", "encode", "to_outputs")} | {"whole": loaded}
    signatures = dict(loaded.signatures) | {"top_k": types.SimpleNamespace(structured_input_signature=None)}
    return open_signatures(types.SimpleNamespace(signatures=signatures, **parts), folder)


def histories(rows, seed=1):
    rng = np.random.default_rng(seed)
    return tf.constant([[name(n) for n in rng.integers(1, MANY + 1, 5)] for _ in range(rows)])


def assert_equal_answers(one, other):
    assert one.keys() == other.keys()
    for key in one:
        if key == "scores":
            np.testing.assert_allclose(one[key], other[key], rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(one[key].numpy(), other[key].numpy())


def test_an_index_of_all_lists_answers_as_every_item_scored(copy, exact):
    """Ids, titles, scores and the number of known items, of histories with unknown and no items among others."""
    rewrite(copy, probes=0)
    found = opened(copy)
    asked = histories(6).numpy().astype(str)
    asked[1, 2:], asked[2] = "", "nowhere"  # a short history; nothing that is known: the most popular items
    asked[3] = name(7)
    asked = tf.constant(asked)
    assert_equal_answers(found["serving_default"](history=asked), exact["serving_default"](history=asked))
    for k in (1, 60):
        given = {"history": asked, "k": tf.constant(k)}
        assert_equal_answers(found["top_k"](**given), exact["top_k"](**given))
    flat = {"items": tf.reshape(asked, [-1])[:12], "lengths": tf.constant([5, 0, 7]), "k": tf.constant(9)}
    assert_equal_answers(found["ragged"](**flat), exact["ragged"](**flat))
    none = {"history": tf.zeros([0, 0], tf.string), "k": tf.constant(3)}
    assert_equal_answers(found["top_k"](**none), exact["top_k"](**none))


def test_what_the_history_holds_is_left_out_and_replaced(copy, exact):
    rewrite(copy, probes=0)
    seen = exact["top_k"](history=tf.constant([[name(3)]]), k=tf.constant(40))["ids"]
    asked = tf.concat([seen, [[name(3)]]], axis=1)  # the last three, which make the query, stay what they are
    given = {"history": asked, "k": tf.constant(10)}
    answer = index_alone(copy)["top_k"](**given)
    assert_equal_answers(answer, exact["top_k"](**given))
    assert not np.isin(answer["ids"].numpy(), asked.numpy()).any()


def test_where_the_index_finds_too_few_the_model_answers_that_history(copy, exact):
    rewrite(copy, probes=1)  # a list has some fifty items
    given = {"history": histories(3), "k": tf.constant(900)}
    assert_equal_answers(opened(copy)["top_k"](**given), exact["top_k"](**given))
    nothing = {"history": tf.constant([["", "nowhere"]]), "k": tf.constant(10)}  # its direction is no history's
    assert_equal_answers(opened(copy)["top_k"](**nothing), exact["top_k"](**nothing))


def test_its_recall_is_measured_and_told(indexed, exact):
    folder, told = indexed
    about = json.loads((folder / FOLDER / "index.json").read_text())
    assert about == {key: value for key, value in told.items() if key != "folder"}
    assert about["items"] == MANY and about["lists"] == 1024 and 0.95 <= about["recall"] <= 1
    asked = histories(200)
    given = {"history": asked, "k": tf.constant(100)}
    ours, wanted = (question["top_k"](**given)["ids"].numpy() for question in (opened(folder), exact))
    assert np.mean([np.isin(*rows).mean() for rows in zip(wanted, ours)]) >= about["recall"] - 0.03
    assert (ours != wanted).any()  # it is the index that answered


def test_a_server_and_the_command_answer_by_it(copy, capsys, exact):
    rewrite(copy, probes=1)  # so that it answers otherwise than the model
    asked = histories(50)
    ours, wanted = (each["serving_default"](history=asked)["ids"].numpy() for each in (opened(copy), exact))
    differs = int(np.flatnonzero((ours != wanted).any(axis=1))[0])
    row, answer = ([each.decode() for each in ids[differs]] for ids in (asked.numpy(), ours))
    (said,) = Served(copy).predict({"instances": [{"history": row}]})["predictions"]
    assert said["ids"] == answer and said["known"] == 5
    assert main(["recommend", str(copy), "--history", *row, "--json"]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)["recommendations"]] == answer


def test_an_index_is_of_the_variables_too(copy):
    loaded = tf.saved_model.load(str(copy))
    assert open_signatures(loaded, copy).keys() == loaded.signatures.keys()
    with open(copy / "variables" / "variables.data-00000-of-00001", "ab") as file:
        file.write(b"1")
    with pytest.raises(ValueError, match="another model's index"):
        open_signatures(loaded, copy)


def test_another_models_index_and_a_broken_one_are_refused(copy, tmp_path, capsys):
    export(tmp_path / "other", two_tower(5), Items(list(map(name, range(1, MANY + 1)))), k=K)
    shutil.copytree(copy / FOLDER, tmp_path / "other" / FOLDER)
    with pytest.raises(ValueError, match="another model's index: remove it, and make it anew"):
        Served(tmp_path / "other")
    assert main(["recommend", str(tmp_path / "other")]) == 2 and "another model's index" in capsys.readouterr().err
    whole = (copy / FOLDER / "items.faiss").read_bytes()
    for broken in (whole[:-1], b"", bytes([*whole[:5000], whole[5000] ^ 1, *whole[5001:]])):
        (copy / FOLDER / "items.faiss").write_bytes(broken)
        with pytest.raises(ValueError, match="is broken"):
            Served(copy)
    (copy / FOLDER / "items.faiss").write_bytes(whole)
    Served(copy)
    for text in ("", "[]", "{}"):
        (copy / FOLDER / "index.json").write_text(text)
        with pytest.raises(ValueError, match="is broken"):
            Served(copy)


def test_a_model_that_replaces_the_folder_has_no_index(copy):
    export(copy, two_tower(5, items=9), Items(list(map(name, range(1, 10)))), k=2)
    assert not (copy / FOLDER).exists()


def test_an_index_that_finds_too_little_is_not_written(plain, tmp_path, monkeypatch):
    faiss = pytest.importorskip("faiss")
    shutil.copytree(plain, tmp_path / "servable")
    right = faiss.index_factory

    def wrong(width, words, metric):
        """It finds the nearest vectors in place of those of the largest product."""
        return right(width, words, faiss.METRIC_L2)

    monkeypatch.setattr(faiss, "index_factory", wrong)
    with pytest.raises(ValueError, match=r"would find 0\.\d+ of the best 100 items, less than 0.95: none is written"):
        write_index(tmp_path / "servable")
    assert not (tmp_path / "servable" / FOLDER).exists()


def test_few_items_and_other_recommenders_need_none(exported, tmp_path, capsys):
    pytest.importorskip("faiss")
    export(tmp_path / "few", two_tower(5, items=9), Items(list(map(name, range(1, 10)))), k=2)
    assert main(["index", str(tmp_path / "few")]) == 2
    assert "9 items; below 50000 every item is scored as quickly" in capsys.readouterr().err
    with pytest.raises(ValueError, match="only a TwoTower does"):
        write_index(exported / "servable")
    with pytest.raises(FileNotFoundError, match="holds no exported model"):
        write_index(tmp_path / "nothing")


def test_the_command_prints_the_recall_and_whole_numbers_are_answered(tmp_path, capsys):
    pytest.importorskip("faiss")
    folder = tmp_path / "servable"
    export(folder, two_tower(3), Items(range(MANY)), k=K)  # 0 is an item, and no padding
    assert main(["index", str(tmp_path)]) == 0
    assert re.search(r"50000 items, \d+ of 1024 lists searched: recall@100 (0\.9|1\.0)", capsys.readouterr().out)
    rewrite(folder, probes=0)
    flat = {"items": tf.constant([3, 0, 5, 49_999], tf.int64), "lengths": tf.constant([1, 3]), "k": tf.constant(30)}
    exact = tf.saved_model.load(str(folder)).signatures
    assert_equal_answers(index_alone(folder)["ragged"](**flat), exact["ragged"](**flat))


def test_without_faiss_the_extra_is_named_and_a_model_without_an_index_is_served(plain, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert main(["index", str(plain)]) == 2 and "tfdp-rec[ann]" in capsys.readouterr().err
    (answer,) = Served(plain).predict({"instances": [{"history": [name(1)]}]})["predictions"]
    assert len(answer["ids"]) == K
    shutil.copytree(plain, tmp_path / "servable")
    (tmp_path / "servable" / FOLDER).mkdir(parents=True)
    with pytest.raises(ImportError, match=r"tfdp-rec\[ann\]"):
        Served(tmp_path / "servable")
