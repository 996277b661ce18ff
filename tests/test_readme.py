"""The README's Python runs as it stands there."""

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    names: dict = {}
    first, *rest = [block for block in blocks if not block.startswith("model.compile")]
    for block in (first, *rest):
        exec(compile(block, "README.md", "exec"), names)
    assert "epsilon" in capsys.readouterr().out.lower()
    assert (tmp_path / "servable" / "saved_model.pb").is_file()
    model = names["Mine"]()
    model.compile(
        optimizer=names["tfdp_rec"].LazyDPSGD(0.5, l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=2)
    )
    np = names["np"]
    batch = {"user": np.array([1, 2]), "item": np.array([3, 4]), "negatives": np.array([5, 6])}
    assert np.isfinite(model.train_on_batch(batch, return_dict=True)["loss"])
    assert np.isfinite(model.test_on_batch(batch, return_dict=True)["loss"])
    assert model.predict(batch["user"], verbose=0).shape == (2, 10)
    model.export("mine", verbose=False, input_signature=[names["keras"].InputSpec(shape=(None,), dtype="int32")])
    assert (tmp_path / "mine" / "saved_model.pb").is_file()
