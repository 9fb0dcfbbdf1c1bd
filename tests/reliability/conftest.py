"""Runs that a test left open, or that it failed with, are closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .runs import Run


@pytest.fixture(autouse=True)
def runs_are_closed() -> Iterator[None]:
    yield
    Run.close_all()
