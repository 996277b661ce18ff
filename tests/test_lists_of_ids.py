"""Files that hold ids, titles or settings are read as they are; what is none of these is refused in a sentence."""

import json
import zipfile

import keras
import numpy as np
import pytest

from tfdp_rec.cli import main
from tfdp_rec.data import Interactions, Items
from tfdp_rec.datasets.logs import sources
from tfdp_rec.datasets.movielens import files
from tfdp_rec.federated import client


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_is_an_id_as_it_stands(tmp_path, end):
    ids = ["A", "A ", " A", "B\u2028C", "D\x85", "E\x0cF", "G\rH", "\tI"]
    (tmp_path / "items.txt").write_bytes(f"\ufeff{end.join(['', *ids, ''])}".encode())
    assert Items.read(tmp_path / "items.txt").ids.to_pylist() == ids


def test_a_line_of_movielens_is_a_movie(tmp_path):
    (tmp_path / "movies.dat").write_bytes("1::One\x85 more (1999)::Drama\n2::Two (2000)::Drama\n".encode("latin-1"))
    (tmp_path / "ratings.dat").write_text("1::1::5::978300760\n1::2::3::978300761\n")
    assert files.read(tmp_path).titles == ["One\x85 more (1999)", "Two (2000)"]


@pytest.mark.parametrize("kind", ["user", "item"])
def test_minus_2_to_the_63_is_no_id(kind):
    rows = {"user": np.array([1, 2]), "item": np.array([3, 4])}
    rows[kind] = np.array(["NaT", 1], "datetime64[s]").astype(np.int64)
    with pytest.raises(ValueError, match="row 1: .*NaT"):
        Interactions.read(rows, user="user", item="item")
    with pytest.raises(ValueError, match="NaT"):
        Items([5, -(2**63)])


@pytest.mark.parametrize("said", ["null", "5", "[1]", "{"])
def test_settings_that_are_none_are_refused_in_a_sentence(tmp_path, said):
    (tmp_path / "titles.json").write_text(said)
    with pytest.raises(ValueError, match="row 1: not one JSON object"):
        sources.column_names(tmp_path / "titles.json")
    Interactions.read({"u": [1], "i": [2]}, user="u", item="i", folder=tmp_path / "log")
    (tmp_path / "log" / "about.json").write_text(said)
    with pytest.raises(ValueError, match="holds something else"):
        Interactions.read({"u": [1], "i": [2]}, user="u", item="i", folder=tmp_path / "log")
    (tmp_path / "bundle.json").write_text(said)
    with pytest.raises(ValueError, match="bundle|JSON|Expecting"):
        client._read_about(tmp_path)


@pytest.mark.parametrize("config", [{"class_name": "Nobody", "module": "nowhere", "config": {}}, None, [], 5])
def test_a_keras_file_of_an_unknown_class_is_refused_in_a_line(tmp_path, capsys, config):
    keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]).save(tmp_path / "whole.keras")
    with zipfile.ZipFile(tmp_path / "whole.keras") as whole, zipfile.ZipFile(tmp_path / "m.keras", "w") as other:
        for name in whole.namelist():
            other.writestr(name, json.dumps(config) if name == "config.json" else whole.read(name))
    assert main(["export", str(tmp_path / "m.keras"), str(tmp_path / "servable")]) == 2
    said = capsys.readouterr().err
    assert "m.keras holds no model" in said and said.count("\n") == 1
