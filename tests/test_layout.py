"""Imports point one way, and the folders at the top are links into the package."""

import importlib.machinery
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tfdp_rec"

LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]


WRONG = {
    "core/claim/events": "tfdp_rec.sums.counts",
    "core/ground/files": "tfdp_rec.core.claim.events",
    "models/dlrm": "tfdp_rec.data",
    "cellar/hole": "tfdp_rec.metrics",  # a room without a floor
    "sums/counts": "dp_accounting",
    "core/mechanism/base": "dp_accounting.rdp",
}


@pytest.mark.parametrize("module, imported", WRONG.items())
def test_what_points_another_way_is_found(tmp_path, module, imported):
    """That the package itself points one way, `lint-imports` says in .ci/run."""
    shutil.copytree(PACKAGE, tmp_path / "tfdp_rec", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    path = tmp_path / "tfdp_rec" / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    with path.open("a") as file:
        file.write(f"import {imported}\n")
    found = subprocess.run(LINT, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode and "0 kept" not in found.stdout.split("Contracts")[0], found.stdout


def test_the_page_of_the_design_has_the_rooms_sizes():
    loader = importlib.machinery.SourceFileLoader("sizes", str(ROOT / "scripts" / "sizes"))
    sizes = importlib.util.module_from_spec(importlib.util.spec_from_loader("sizes", loader))
    loader.exec_module(sizes)
    assert sizes.page_with(sizes.table()) == sizes.PAGE.read_text(), "scripts/sizes --write, and say what grew and why"
    four = '"""Doc.\n\nMore.\n"""\n\n# why\nx = 1\n\n\ndef f():\n    "Doc."\n    return (1,\n            2)\n'
    assert sizes.code_lines(four) == 4


def test_the_product_knows_nothing_of_the_experiments():
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not [str(path) for path, text in texts.items() if re.search(r"^ *(from|import) experiments", text, re.M)]


@pytest.mark.slow
def test_the_wheel_holds_the_product_alone(tmp_path):
    pytest.importorskip("setuptools")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tfdp_rec", "experiments", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; build_meta.build_wheel('out')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    kinds = (".py", ".typed", ".md")
    assert held == {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.suffix in kinds}


@pytest.mark.parametrize("name", ["models", "callbacks"])
def test_the_folders_at_the_top_are_links_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink() and link.readlink() == Path("tfdp_rec") / name
    assert link.is_dir()
