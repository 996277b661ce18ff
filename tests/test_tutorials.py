"""The notebooks run from top to bottom, each in a kernel of its own, and keep what they printed and drew."""

import copy
import dataclasses
import importlib.machinery
import importlib.util
import json
import pathlib
import re
import sys

import pytest

from tfdp_rec.job.settings import JobSettings

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "tutorials"
PATHS = sorted(FOLDER.glob("*.ipynb"))
QUICK = ("getting_started", "my_logs")
TUTORIALS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in PATHS
]
EVERY = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def loaded(name, path):
    """A script as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.modules[name] = module
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    yield loaded("tutorials_script", ROOT / "scripts" / "tutorials")
    del sys.modules["tutorials_script"]


@pytest.fixture(scope="module")
def site():
    pytest.importorskip("griffe")
    pytest.importorskip("mkdocs")
    yield loaded("site_script", ROOT / "scripts" / "site.py")
    del sys.modules["site_script"]


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS)
def test_a_tutorial_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and any(cell.outputs for cell in code)


@EVERY
def test_a_tutorial_keeps_the_outputs_of_its_code_and_nothing_of_a_machine(script, path):
    assert not script.problems(read(path)), f"run scripts/tutorials {path.stem}"
    assert path.stat().st_size <= script.MOST_NOTEBOOK


@EVERY
def test_a_tutorial_needs_the_package_alone(path):
    code = "\n".join("".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == "code")
    assert not re.search(r"sys\.path|^\s*(from|import) (experiments|tests)\b", code, re.M)


@EVERY
def test_a_tutorial_opens_with_what_one_will_have_at_the_end_and_is_listed(path):
    notebook = read(path)
    opening = "".join(notebook["cells"][0]["source"])
    assert opening.startswith("# ") and len(opening) > 200
    assert f"tutorials/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"tutorials/{path.stem}.ipynb" in (ROOT / "README.md").read_text()


def test_the_site_lists_each_option_of_a_job(site):
    asked = {field.name for field in dataclasses.fields(JobSettings)}
    rows = [line.split(" | ") for line in site.options().splitlines() if line.startswith("| `--")]
    assert {name.strip("|` -").replace("-", "_") for name, *_ in rows} == asked and all(len(row) == 3 for row in rows)


@EVERY
def test_the_site_shows_what_a_tutorial_keeps(site, script, path):
    page, notebook = site.notebook(path), read(path)
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert page.count("](data:image/png;base64,") == len(pictures)
    for words in map(script.text_of, outputs):
        assert words.rstrip() in page
    assert f"tutorials/{path.stem}.ipynb" in page


def harmed(notebook, harm):
    found = copy.deepcopy(notebook)
    harm(found)
    return found


def printed(text):
    return lambda notebook: printing(notebook)["outputs"].append(
        {"output_type": "stream", "name": "stdout", "text": text}
    )


def printing(notebook):
    return next(cell for cell in notebook["cells"] if re.search("^print", "".join(cell["source"]), re.M))


@pytest.mark.parametrize(
    "harm, says",
    [
        (lambda notebook: printing(notebook)["source"].append("\n1"), "of other code"),
        (lambda notebook: printing(notebook).update(outputs=[]), "that prints has kept nothing"),
        (lambda n: [c.update(outputs=[]) for c in n["cells"] if "".join(c["source"]).startswith("plt.")], "no plot"),
        (printed("Traceback (most recent call last)"), "a traceback"),
        (printed("/home/somebody/run"), "a path of a machine"),
        (printed("see /tmp/x1/servable"), "a path of a machine"),
        (printed("UserWarning: the data"), "a warning"),
        (printed("<Dense at 0x7f00>"), "an address in memory"),
        (printed("\x1b[31mred"), "an escape sequence"),
        (
            lambda notebook: printing(notebook)["outputs"].append(
                {"output_type": "display_data", "data": {"image/png": "A" * 90_000}, "metadata": {}}
            ),
            "a plot of 67,500 bytes",
        ),
    ],
)
def test_outputs_that_are_not_fit_are_seen(script, harm, says):
    whole = read(FOLDER / "getting_started.ipynb")
    assert not script.problems(whole)
    assert any(says in words for words in script.problems(harmed(whole, harm)))
