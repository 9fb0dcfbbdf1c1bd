"""torch's pipeline schedules: stages without a loss step, skip and scale as the one that has it, and as one process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from .piped import LEVELS, SCHEDULES, SICK, STEPS

SCRIPT = Path(__file__).with_name("piped.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each stage saw."""
    out = tmp_path_factory.mktemp("piped") / "told.json"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    ran = subprocess.run([*line, str(out)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr[-3000:]
    both: list[dict[str, Any]] = json.loads(out.read_text())
    return both


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
