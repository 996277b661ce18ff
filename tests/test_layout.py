"""Imports point one way, and the folders at the top are links into the package."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tfdp_rec"

# The floors, from the ground up: a part imports from lower floors alone, and from its own where it is named.
FLOORS = (
    {
        "demands", "files", "keras_internals", "lazily", "mechanisms", "metrics", "negative_shares",
        "quiet", "interruption", "refused", "registration", "settings", "shared_graphs",
    },
    {"noise", "withheld_rows"},
    {"independence"},
    {"clipping", "audit", "datasets"},
    {"pricing"},
    {"sampling", "sums"},
    {"spending"},
    {"optimizers"},
    {"serving", "training"},
    {"data", "models", "callbacks", "spectral"},
    {"federated", "distribute", "private_plan"},
    {"job", "private_fit", "privacy"},
    {"cli"},
)
LEVEL = {part: level for level, parts in enumerate(FLOORS) for part in parts}


def part_of(module):
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "tfdp_rec" and len(pieces) > 1 else None


def imports(path):
    """(line, part) of every part of the package that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "tfdp_rec" else [module]
            assert not node.level, f"{path}:{node.lineno}: a relative import"
        else:
            continue
        yield from ((node.lineno, part_of(name)) for name in names if part_of(name))


def allowed(importer, imported):
    return importer == imported or LEVEL[imported] < LEVEL[importer]


def test_imports_point_one_way():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if importer == "__init__":
            continue
        assert importer in LEVEL, f"{path}: which floor is {importer} on?"
        for line, imported in imports(path):
            if imported in LEVEL and not allowed(importer, imported):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "importer, imported",
    [("pricing", "data"), ("noise", "optimizers"), ("optimizers", "training"), ("federated", "cli")],
)
def test_the_rule_forbids_what_it_should(importer, imported):
    assert not allowed(importer, imported)


def test_the_product_knows_nothing_of_the_experiments():
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not [str(path) for path, text in texts.items() if re.search(r"^ *(from|import) experiments", text, re.M)]


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
    assert held == {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed")}


@pytest.mark.parametrize("name", ["models", "callbacks"])
def test_the_folders_at_the_top_are_links_into_the_package(name):
    link = ROOT / name
    assert link.is_symlink() and link.readlink() == Path("tfdp_rec") / name
    assert link.is_dir()
