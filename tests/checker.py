"""The checkers that docs/ledger.md and docs/card.md print, run as a stranger would: without this package."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def checked(path, delta, tmp_path):
    """What it says of a ledger."""
    return float(_said(written("ledger", "checker", 36, tmp_path), path, str(delta)))


def card_checked(folder, tmp_path):
    """The epsilon that the checker of cards finds."""
    written("ledger", "checker", 36, tmp_path)
    return float(_said(written("card", "card_checker", 60, tmp_path), folder))


def written(page, name, lines, tmp_path):
    """The text of a page's checker, as a file."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)[-1]
    assert code.startswith(f'"""python {name}.py') and code.count("\n") <= lines and "tfdp_rec" not in code
    (tmp_path / f"{name}.py").write_text(code)
    return tmp_path / f"{name}.py"


def _said(checker, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, checker, *arguments], capture_output=True, text=True, env=environment, cwd=checker.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
