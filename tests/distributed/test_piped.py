"""torch's pipeline schedules: stages without a loss step, skip and scale as the one that has it, and as one process."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest

from .piped import LEVELS, SCHEDULES, SICK, STEPS

pytestmark = pytest.mark.slow  # processes of their own; `test_parted` and `test_sharded` are always run


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("level", LEVELS)
def test_stages_train_as_one_process(told: list[dict[str, Any]], level: str, schedule: str) -> None:
    first, second = (each[f"{level} {schedule}"] for each in told)
    alone = told[0][f"{level} alone"]
    assert first["skips"] == second["skips"] == alone["skips"] == [step == SICK for step in range(STEPS)]
    assert first["norms"] == second["norms"]
    assert not math.isfinite(first["norms"][SICK])
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    assert (first["scale"], first["steps"]) == (second["scale"], second["steps"]) == (alone["scale"], STEPS)
    mine = [*chain(*first["weights"], *second["weights"])]
    assert mine == pytest.approx([*chain(*alone["weights"])], abs=1e-7, rel=0)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_no_stage_scaled_is_told_before_the_first_step(told: list[dict[str, Any]], level: str) -> None:
    scales = level in ("O1", "O2")
    for each in told:
        seen = each[f"{level} unscaled"]
        assert ("session.scale(loss)" in seen["said"]) is scales
        assert seen["steps"] == (2 if scales else 3)
