"""Each tutorial holds as it stands: its files are written, its changes applied, its commands run, its outputs seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"

PAGES = sorted(
    page.name
    for page in TUTORIALS.glob("*.md")
    if "```bash\n" in page.read_text(encoding="utf-8") and page.name != "README.md"
)

_BLOCK = re.compile(r'^```(python|diff|bash|text)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def changed(text: str, diff: str) -> str:
    """A text with one hunk applied; the hunk has no line numbers and fits in one place."""
    lines = diff.splitlines(keepends=True)
    lines = [" " + line if line == "\n" else line for line in lines]  # an empty line, less the space that editors drop
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    assert text.count(before) == 1, f"fits in {text.count(before)} places:\n{before}"
    return text.replace(before, after)


def is_in(wanted: str, shown: str) -> bool:
    """Whether an output has this part; `...` stands for anything, and lines may be broken elsewhere."""
    pattern = ".*?".join(re.escape(" ".join(part.split())) for part in wanted.split("..."))
    return re.search(pattern, " ".join(shown.split()), re.DOTALL) is not None


QUICK = ("from-apex.md", "from-torch-amp.md")
"""The two that most readers begin with."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PAGES])
def test_a_tutorial_holds(page: str, tmp_path: Path) -> None:
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "120",
        "PYTHONWARNINGS": "default",
    }  # fmt: skip
    shown = None
    for kind, title, body in _BLOCK.findall((TUTORIALS / page).read_text(encoding="utf-8")):
        if kind == "bash":
            lines = "".join(line for line in body.splitlines(keepends=True) if not line.startswith("pip install"))
            done = subprocess.run(
                ["bash", "-e", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
            shown = done.stdout + done.stderr
        elif kind == "text":
            assert shown is not None, "an output without a command"
            assert is_in(body, shown), f"wanted:\n{body}\nseen:\n{shown}"
        elif title and kind == "diff":
            path = tmp_path / title
            path.write_text(changed(path.read_text(encoding="utf-8"), body), encoding="utf-8")
        elif title:
            (tmp_path / title).write_text(body, encoding="utf-8")
