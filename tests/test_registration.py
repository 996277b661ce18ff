"""Files name the package's classes, and Keras finds them once the package was imported, and nothing was asked of it."""

import subprocess
import sys
import types

import keras
import pytest

import tfdp_rec
from tfdp_rec import models
from tfdp_rec.core.ground import registration


@pytest.mark.slow
def test_a_saved_model_loads_in_a_process_that_imported_the_package_first(tmp_path):
    inputs = keras.Input([3])
    model = tfdp_rec.PrivateModel(inputs, keras.layers.Dense(1)(inputs))
    model.compile(tfdp_rec.AdaFEST.with_total_noise(
        0.1, noise_multiplier=1.0, threshold=9.0, l2_norm_clip=1.0, contribution_clip=1.0, expected_batch_size=4
    ), loss="mse")  # fmt: skip
    model.save(tmp_path / "model.keras")
    code = f"""if True:
        import sys, tfdp_rec
        assert "keras" not in sys.modules
        import keras
        assert "tfdp_rec.training" not in sys.modules
        model = keras.models.load_model({str(tmp_path / "model.keras")!r})
        from tfdp_rec.core.ground.registration import StandIn
        print(type(model).__name__, type(model.optimizer).__name__, type(model) is not StandIn)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["PrivateModel", "AdaFEST", "True"], run.stderr[-2000:]


@pytest.mark.parametrize("name, home", [("PrivateModel", tfdp_rec), ("TwoTower", models), ("DPSGD", tfdp_rec)])
def test_the_class_takes_its_stand_ins_place(name, home):
    assert getattr(home, name) is keras.saving.get_registered_object(f"tfdp_rec>{name}")


def test_what_keras_knows_already_stays(monkeypatch):
    registry = keras.saving.get_custom_objects()
    monkeypatch.setitem(registry, "shop>Known", dict)
    registration.register("shop", lambda: [("collections", "Known"), ("collections", "OrderedDict")])
    assert registry["shop>Known"] is dict
    assert registry.pop("shop>OrderedDict").fromkeys("ab") == {"a": None, "b": None}


def test_a_module_is_waited_for_and_then_left_alone(tmp_path, monkeypatch):
    (tmp_path / "late_one.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    waiting = registration._WhenImported("late_one", lambda: seen.append(sys.modules["late_one"].value))
    monkeypatch.setattr(sys, "meta_path", [waiting, *sys.meta_path])
    import late_one

    assert isinstance(late_one, types.ModuleType) and seen == [1] and waiting not in sys.meta_path
