"""The losses of the four networks with the doctor on, against those without: the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import dataclasses, sys
import torch
from preamp.demo import run_trial
from preamp.demo._plan import make_plan

name, level = sys.argv[1:]
task = make_plan([name], level, "ci", True, 1, "cpu").tasks[0]
recipe = dataclasses.replace(task.recipe("ci", quick=True), steps=5)
trial = run_trial(task, level, size="ci", seed=0, device=torch.device("cpu"), recipe=recipe)
print([loss.hex() for loss in trial.losses])
"""
FAST = {("flights", "O4")}
NETWORKS = ("flights", "unet", "bert", "seresnext")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=[] if (name, level) in FAST else [pytest.mark.slow])
        for name in NETWORKS
        for level in ("O0", "O4", "O5", *(("O1", "O2") if name == "flights" else ()))
    ],
)
def test_losses_keep_their_bits(name: str, level: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    end = [str(script), name, level]
    alone = subprocess.run([sys.executable, *end], capture_output=True, text=True, check=True)
    doctor = [sys.executable, "-m", "preamp", "doctor", "--out", str(tmp_path / "out"), *end]
    watched = subprocess.run(doctor, capture_output=True, text=True)
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == alone.stdout
    assert "error PA" not in watched.stderr
