"""The notebook runs from top to bottom, and shows what it says it shows."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def shown(cell: nbformat.NotebookNode) -> str:
    """What a cell has printed, without the numbers that differ between machines."""
    text = "".join(output.get("text", str(output.get("data", ""))) for output in cell.outputs)
    return re.sub(r"source \S+|\d[\d.e+-]*", "0", text)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel's own packages
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    ran = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(ran, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for before, after in zip(kept.cells, ran.cells, strict=True):
        if after.cell_type == "code":
            assert not [output for output in after.outputs if output.output_type == "error"]
            assert shown(after) == shown(before), after.source
