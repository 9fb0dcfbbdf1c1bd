"""Tensor parallelism by itself: two ranks train, save, validate and close as one process does, at every level."""

from __future__ import annotations

from typing import Any

import pytest

import preamp

from .parted import CASES, SEQUENCE_CASES

KEYS = [(level, f"{level} {maker}") for level, maker in CASES]
KEYS += [(level, f"words {level} {maker}") for level, maker in SEQUENCE_CASES]
BOUNDS = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 3e-2, "O4": 3e-2, "O5": 3e-2}
"""How far the end may be from that of one process, over the way trained."""


@pytest.mark.parametrize(("level", "key"), KEYS)
def test_training_is_that_of_one_process(told: list[dict[str, Any]], level: str, key: str) -> None:
    first, second = (each[key] for each in told)
    assert first["norms"] == second["norms"]
    assert first["skips"] == second["skips"] == [False, True, False, False, False]  # the infinity lay in one rank
    assert first["apart"] <= BOUNDS[level]
    assert first["norms"] == pytest.approx(first["norms alone"], rel=BOUNDS[level])
    low = str(preamp.policy(level).params)
    assert low in first["dtypes"]


@pytest.mark.parametrize("what", ["resumed", "validated", "closed", "followed"])
@pytest.mark.parametrize("key", [key for _, key in KEYS])
def test_masters_of_parts_do_what_masters_do(told: list[dict[str, Any]], key: str, what: str) -> None:
    assert all(each[key][what] for each in told)


def test_whole_masters_are_not_loaded_into_parts(told: list[dict[str, Any]]) -> None:
    assert all("is whole in the state and sharded here" in each["whole"] for each in told)


def test_stages_are_not_written_over_each_other(told: list[dict[str, Any]]) -> None:
    assert all("into a file of its own" in each["stage"] for each in told)
