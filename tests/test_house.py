"""`scripts/house` finds what is planted, and this tree keeps what it counts at nought."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def house():
    loader = importlib.machinery.SourceFileLoader("house", str(ROOT / "scripts" / "house"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("house", loader))
    sys.modules["house"] = module  # dataclasses and annotations look there
    loader.exec_module(module)
    yield module
    del sys.modules["house"]


@pytest.fixture
def planted(house, tmp_path):
    files = {
        "tfdp_rec/__init__.py": "",
        "tfdp_rec/noise/gaussian.py": "from tfdp_rec.training import model\n\ndef _draw():\n    pass\n",
        "tfdp_rec/training/model.py": (
            "from tfdp_rec.noise import gaussian\nKNOWN = ('dpsgd', 'EANA')\n\n"
            "def settle(table):\n    gaussian._draw()\n    return table._layers\n"
        ),
        "experiments/bench/time.py": "WAYS = {'a': DPSGD, 'b': tfdp_rec.LazyDPSGD}\nfrom keras.src import ops\n",
        "tests/test_layout.py": "FLOORS = ({'noise'}, {'training'})\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return house.Tree(tmp_path)


def test_planted_faults_are_counted(house, planted):
    figures = {name: house.shown(figure(planted)) for name, (_, figure) in house.ROWS.items() if name != "comments"}
    assert figures == {
        "mechanism": "3", "rule": "0", "data": "0", "settling": "1", "circles": "1", "files": "1", "classes": "0",
        "floors": "1", "underscores": "1",
        "unpromised": "2", "tables": "2", "product": "10", "experiments": "2",
        "largest": "6 (tfdp_rec/training/model.py)",
    }  # fmt: skip


def test_this_tree_has_one_list_of_mechanisms_no_circle_and_each_class_name_once(house):
    tree = house.Tree(ROOT)
    for name, most in (
        ("circles", 0), ("files", 0), ("classes", 0), ("floors", 0), ("tables", 1), ("mechanism", 4), ("rule", 4)
    ):
        assert len(house.ROWS[name][1](tree)) <= most, house.ROWS[name][1](tree)
