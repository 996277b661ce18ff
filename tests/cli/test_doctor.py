"""`tfdp-rec doctor` prints what is refused of a model, and says by its exit code whether anything is."""

import pytest

from tfdp_rec import cli

MODELS = """
import keras, numpy as np, tfdp_rec
from keras import layers

def made(*several):
    inputs = keras.Input([3])
    outputs = inputs
    for layer in several:
        outputs = layer(outputs)
    model = tfdp_rec.PrivateModel(inputs, outputs, name="small")
    model.compile(loss="mse")
    return model, (np.ones([2, 3]), np.ones([2, 1]))

def good():
    return made(layers.Dense(1, name="out"))

def bad():
    return made(layers.BatchNormalization(name="norm"), layers.Dense(1, name="out"))

def half():
    return good()[0]

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "models_to_look_at.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "models_to_look_at"


@pytest.mark.parametrize("name, code, says", [("good", 0, "can be trained privately."), ("bad", 1, "1. Layer 'norm'")])
def test_it_prints_the_report(here, name, code, says, capsys):
    assert cli.main(["doctor", f"{here}:{name}"]) == code
    out = capsys.readouterr().out
    assert says in out and "out (Dense): closed form, 4 weights" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    "given, says",
    [
        ("nothing", "must be MODULE:FUNCTION"),
        ("no_such_module_here:f", "there is no module no_such_module_here"),
        ("models_to_look_at:number", "has no function number"),
        ("models_to_look_at:half", "must return (model, batch)"),
    ],
)
def test_what_it_cannot_look_at_gets_one_line(here, given, says, capsys):
    assert cli.main(["doctor", given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1
