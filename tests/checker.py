"""The checker that docs/ledger.md prints, run as a stranger would: by itself, without this package."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "ledger.md"


def checked(path, delta, tmp_path):
    """What it says of a ledger."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)[-1]
    assert code.startswith('"""python checker.py') and code.count("\n") <= 36 and "tfdp_rec" not in code
    checker = tmp_path / "checker.py"
    checker.write_text(code)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, checker, path, str(delta)], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)
