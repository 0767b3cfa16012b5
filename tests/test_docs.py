"""The examples in the README and in the documentation run as they are shown.

Every block fenced as ``python`` is part of a program: the blocks of one page, one after the other,
in an interpreter and a folder of their own. What is not meant to run is fenced otherwise (in the
pages as ``{code-block} python``).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "sphinx").glob("*.md"))]


def program(page: Path) -> str:
    """The page's blocks as one program in which line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    lines: list[str] = []
    for block in BLOCK.finditer(text):
        first_line = text.count("\n", 0, block.start(1))
        lines += [""] * (first_line - len(lines)) + block[1].splitlines()
    return "\n".join(lines) + "\n" if lines else ""


PROGRAMS = {page: program(page) for page in PAGES}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name) for page, code in PROGRAMS.items() if code],
)
def test_examples_of_page_run_as_shown(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"page_{page.stem}.py"
    script.write_text(PROGRAMS[page], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr


def test_readme_shows_a_program() -> None:
    assert PROGRAMS[ROOT / "README.md"]
