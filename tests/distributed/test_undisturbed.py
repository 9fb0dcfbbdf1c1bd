"""On several ranks, too, what happens beside a training run changes no bit of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .together import told_by
from .undisturbed import KINDS


def told(first: int, last: int, folder: Path) -> dict[str, list[str]]:
    """What two ranks found changed, by run."""
    ranks = told_by("undisturbed", 2, folder, str(first), str(last))
    assert all(len(each) == last - first for each in ranks)
    return {run: changed for each in ranks for run, changed in each.items() if changed}


def test_neutral_events(tmp_path: Path) -> None:
    assert told(0, 6 * len(KINDS), tmp_path) == {}


@pytest.mark.slow
def test_many_neutral_events(tmp_path: Path) -> None:
    assert told(100, 100 + 40 * len(KINDS), tmp_path) == {}
