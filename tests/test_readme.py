"""The README's Python runs as it stands there."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1] / "README.md"


def run_the_page(text):
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    """With few steps."""
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    short = text.replace("data, epsilon=8.0)", "data, epsilon=8.0, batch_size=3_600, epochs=1)")
    short = short.replace("steps=400)", "steps=4)").replace("=100, epochs=4", "=2, epochs=2")
    short = short.replace('took, epsilon=8.0, unit="row")', 'took, epsilon=8.0, batch_size=2_000, epochs=1)')
    assert short.count("epochs=1)") == 2 and short.count("steps=4)") == short.count("=2, epochs=2") == 1
    names = run_the_page(short)
    assert "epsilon" in capsys.readouterr().out.lower()
    assert (tmp_path / "servable" / "saved_model.pb").is_file()
    model = names["Mine"]()
    model.compile(
        optimizer=names["tfdp_rec"].LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2)
    )
    np = names["np"]
    batch = {"user": np.array([1, 2]), "item": np.array([3, 4])}
    assert np.isfinite(model.train_on_batch(batch, return_dict=True)["loss"])
    assert np.isfinite(model.test_on_batch(batch, return_dict=True)["loss"])
    assert model.predict(batch["user"], verbose=0).shape == (2, 10)
    model.export("mine", verbose=False, input_signature=[names["keras"].InputSpec(shape=(None,), dtype="int32")])
    assert (tmp_path / "mine" / "saved_model.pb").is_file()


@pytest.mark.slow
def test_the_readmes_models_learn(tmp_path, monkeypatch):
    """The AUC that the page states, for the call and for the plan; clicks per item have .64."""
    monkeypatch.chdir(tmp_path)
    names = run_the_page(README.read_text(encoding="utf-8"))
    test, user, item, liked = (names[name] for name in ("test", "user", "item", "liked"))
    for model in (names["yours"], names["model"]):
        area = names["keras"].metrics.AUC()
        area.update_state(liked[test], model.predict((user[test], item[test]), verbose=0))
        auc = float(area.result())
        print("AUC", auc)
        assert 0.79 < auc < 0.88
