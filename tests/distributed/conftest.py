"""What several ranks told that ran a test file as a script."""

from __future__ import annotations

from typing import Any

import pytest

from .together import told_once


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw; of ranks there are two, or as many as RANKS of the test's module says."""
    name = request.module.__name__.rpartition(".")[2]
    return told_once(name, getattr(request.module, "RANKS", 2), tmp_path_factory.mktemp(name))
