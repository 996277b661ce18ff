"""The notebooks run from top to bottom, each in a kernel of its own."""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "tutorials"
TUTORIALS = [
    pytest.param(path, id=path.stem, marks=() if path.stem == "getting_started" else pytest.mark.slow)
    for path in sorted(FOLDER.glob("*.ipynb"))
]


@pytest.mark.parametrize("path", TUTORIALS)
def test_a_tutorial_runs(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and any(cell.outputs for cell in code)
