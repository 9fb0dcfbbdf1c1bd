"""What `preamp doctor` costs: BERT of size ci trained on the CPU, alone and watched.

    python -m benchmarks.doctor_overhead [--rounds 5] [--level O4] [--out FILE]

Each run is a process of its own, as a user's is: the script below, started by Python or by `preamp doctor`. It times
its own training loop, so imports and the making of the report do not count. Contenders are interleaved; the ratio of a
round is the time alone over the time watched. The losses of all runs are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from preamp.machine import environment

SCRIPT = """
import json, sys, time
import torch
from benchmarks.race import keep_heap
from preamp.demo import run_trial
from preamp.zoo import TASKS

keep_heap()
task = TASKS["bert"]
recipe = task.recipe("ci")
next(iter(task.batches("ci", seed=0, steps=1, batch_size=recipe.batch_size)))  # prepares the data
started = time.perf_counter()
trial = run_trial(task, sys.argv[1], size="ci", seed=0, device=torch.device("cpu"), recipe=recipe)
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "losses": [loss.hex() for loss in trial.losses]}))
"""
CONTENDERS = {"alone": None, "--every 50": 50, "--every 10": 10, "--every 1": 1}


def run(script: Path, level: str, every: int | None) -> tuple[float, list[str], float]:
    """Seconds of the training loop, its losses, and the seconds that the doctor says it took itself."""
    line = [sys.executable]
    if every is not None:
        line += ["-m", "preamp", "doctor", "--every", str(every), "--out", str(script.parent / "out")]
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run([*line, str(script), level], capture_output=True, text=True, env=env)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    result = json.loads(ran.stdout)
    own = 0.0
    if every is not None:
        report = json.loads((script.parent / "out" / "report.json").read_text(encoding="utf-8"))
        own = report["environment"]["doctor's own seconds"]
    return result["seconds"], result["losses"], own


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--level", default="O4")
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/doctor_overhead.json"))
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    own_seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        for number in range(arguments.rounds):
            for name, every in CONTENDERS.items():
                took, each, own = run(script, arguments.level, every)
                seconds[name].append(took)
                own_seconds[name].append(own)
                losses.append(each)
            print(number, {name: round(many[-1], 2) for name, many in seconds.items()}, flush=True)
    rows = []
    for name in list(CONTENDERS)[1:]:
        ratios = [alone / watched for alone, watched in zip(seconds["alone"], seconds[name], strict=True)]
        spent = {"alone": seconds["alone"], "watched": seconds[name], "own": own_seconds[name]}
        rows.append({"name": name, "seconds": spent, "ratios": ratios})
        share = statistics.median(own_seconds[name]) / statistics.median(seconds["alone"])
        print(f"{name}: {statistics.median(ratios):.3f} of the speed alone; the doctor's own time is {share:.1%} of it")
    result = {
        "schema": "preamp-bench/1", "suite": "doctor_overhead", "environment": environment(torch.device("cpu")),
        "level": arguments.level, "steps": len(losses[0]), "losses alike": len({tuple(one) for one in losses}) == 1,
        "rows": rows,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
