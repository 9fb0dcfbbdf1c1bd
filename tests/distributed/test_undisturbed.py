"""On several ranks, too, what happens beside a training run changes no bit of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from .together import told_by
from .undisturbed import KINDS


def told(ranks: int, first: int, of_each_kind: int, folder: Path) -> dict[str, list[str]]:
    """What the ranks found changed, by run."""
    number = of_each_kind * len(KINDS[ranks])
    every = told_by("undisturbed", ranks, folder, str(first), str(first + number))
    assert all(len(each) == number for each in every)
    return {run: changed for each in every for run, changed in each.items() if changed}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "first", "of_each_kind"), [(2, 0, 6), (2, 100, 40), (4, 100, 15)])
def test_neutral_events(ranks: int, first: int, of_each_kind: int, tmp_path: Path) -> None:
    assert told(ranks, first, of_each_kind, tmp_path) == {}
