"""`python -m experiments.bench noise` measures every sampler, writes what it prints, and names a wrong argument."""

import json

import pytest

from experiments.bench import timing
from experiments.bench.__main__ import main


@pytest.mark.slow
def test_small_run(tmp_path, capsys):
    file = tmp_path / "noise.json"
    arguments = ["--rows", "40", "--width", "4", "--tables", "3", "--repeats", "2", "--json", str(file)]
    assert main(["noise", *arguments]) == 0
    figures = json.loads(file.read_text())["milliseconds"]
    assert {"EntropyNoise", "EntropyNoise, 3 calls", "SecureNoise", "tf.random.Generator.normal"} <= set(figures)
    printed = capsys.readouterr().out
    for name, found in figures.items():
        assert name in printed
        assert 0 < found["lowest"] <= found["median"] <= found["highest"]


@pytest.mark.parametrize("name", ["rows", "width", "tables", "repeats"])
def test_a_wrong_argument_is_named(name, capsys):
    assert main(["noise", f"--{name}", "0"]) == 2
    assert f"--{name} must be at least 1" in capsys.readouterr().err


def test_contestants_alternate():
    order = []
    timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2, warm_up=1)
    assert order == ["a", "b"] * 3
    with pytest.raises(ValueError, match="repeats"):
        timing.alternate({}, repeats=0)
