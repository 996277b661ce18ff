"""Pages of the site that nobody writes: the README as its front, the notebooks, and the reference of each room.

MkDocs calls `on_files` and `on_page_markdown`, and mkdocstrings' reader of the source calls `Dialect` (see mkdocs.yml).
Nothing is imported but the settings of `tfdp-rec train`: names are read from the source. Notebooks are shown as they
stand in git, with the outputs that `scripts/tutorials` kept in them.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tfdp_rec"
ROOMS = (
    "optimizers", "training", "clipping", "independence", "privacy", "noise", "callbacks", "audit", "models",
    "datasets", "distribute", "federated", "spectral", "serving",
)  # fmt: skip
NAMES = ("optimizers", "clipping", "privacy", "noise", "callbacks")  # names alone: what they name is in other rooms


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    pages = {"index.md": front("README.md"), "contributing.md": front("CONTRIBUTING.md")}
    pages |= {"changelog.md": front("CHANGELOG.md"), "security.md": front("SECURITY.md")}
    pages |= {f"tutorials/{path.stem}.md": notebook(path) for path in sorted((ROOT / "tutorials").glob("*.ipynb"))}
    pages["reference/tfdp_rec.md"] = "# tfdp_rec\n\n::: tfdp_rec.mechanisms\n\n::: tfdp_rec.metrics\n"
    pages |= {f"reference/{room}.md": reference(room) for room in ROOMS}
    pages["reference/options.md"] = options()
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page of docs/ with links to the repository's root, which are right where code is read, as links of the site."""
    markdown = re.sub(r"\]\(\.\./README\.md", "](index.md", markdown)
    return re.sub(r"\]\(\.\./tutorials/(\w+)\.ipynb\)", r"](tutorials/\1.md)", markdown)


def front(name: str) -> str:
    """A page of the repository's root, with its links as they are from docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(tutorials/(\w+)\.ipynb\)", r"](tutorials/\1.md)", text)
    return re.sub(r"\]\((CONTRIBUTING|CHANGELOG|SECURITY)\.md\)", lambda found: f"]({found[1].lower()}.md)", text)


def options() -> str:
    """The options of `tfdp-rec train`, from the fields that declare them."""
    from tfdp_rec.job.settings import JobSettings
    from tfdp_rec.settings import flag

    lines = ["# Options of tfdp-rec train", "", "| option | default | |", "| --- | --- | --- |"]
    for field in dataclasses.fields(JobSettings):
        default = "" if field.default in (None, "", ()) else f"`{field.default}`"
        lines.append(f"| `{flag(field.name)}` | {default} | {field.metadata['option'].words} |")
    return "\n".join(lines) + "\n"


def notebook(path: Path) -> str:
    """A notebook as Markdown: prose, code, and the outputs it was saved with."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += filter(None, map(output, cell.get("outputs", [])))
    parts.append(
        f"*This page is the notebook `tutorials/{path.name}`, with what one run of it printed and drew. Noise is drawn "
        "anew in every run: your figures will differ.*"
    )
    return "\n\n".join(parts) + "\n"


def output(found: dict[str, Any]) -> str:
    """One output of a cell."""
    data = found.get("data", {})
    if "image/png" in data:
        return f"![plot](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(found.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```" if text else ""


def reference(room: str) -> str:
    """The reference of a package: what it is for, and each public name where it is defined."""
    folder = PACKAGE / ("core/sensitivity/independence" if room == "independence" else room)
    source = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    own = [pair for pair in public(source, f"tfdp_rec.{room}") if room in NAMES or f".{room}" in pair[1]]
    names = [f"::: {module}.{name}" for name, module in own if defined(module, name)]
    if not names:  # a room of rooms
        files = sorted(path for path in folder.rglob("[a-z]*.py"))
        names = [f"::: {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" for path in files]
    return "\n\n".join([f"# {room}", (ast.get_docstring(source) or "").replace("docs/", ""), *names]) + "\n"


def public(source: ast.Module, package: str) -> list[tuple[str, str]]:
    """(name, module) of what a package hands out: what it defines, imports, or loads when asked."""
    homes: dict[str, str] = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfdp_rec."):
            homes |= {alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Dict) and node.keys:
            pairs = [(k, v) for k, v in zip(node.keys, node.values) if isinstance(k, ast.Constant)]
            homes |= {str(k.value): f"{package}.{v.value}" for k, v in pairs if isinstance(v, ast.Constant)}
    homes |= {node.name: package for node in source.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return [(name, module) for name, module in sorted(homes.items()) if not name.startswith("_")]


def defined(module: str, name: str) -> bool:
    """Whether a module defines a class or a function of that name."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not path.is_file():
        return False
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name for node in body)


class Dialect(griffe.Extension):
    """What our docstrings mean to Markdown: an example is code, and a list needs no empty line before it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each thing that has been read."""
        if obj.docstring is not None:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = re.sub(r"^(?![-*] |  )(.+)\n(?=[-*] )", r"\1\n\n", text, flags=re.M)
