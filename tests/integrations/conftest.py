"""Accelerate keeps one state for the process, which no test may leave to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def forget_accelerate() -> None:
    """Reset what Accelerate keeps, if it was imported."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        for kept in (state.AcceleratorState, state.GradientState, state.PartialState):
            kept._reset_state()


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    forget_accelerate()
    yield
    forget_accelerate()
