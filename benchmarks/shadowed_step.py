"""What a step costs that the doctor follows with shadows: time and memory, on the four networks of the demo.

    python -m benchmarks.shadowed_step [--rounds 3] [--level O4] [--size ci] [--out FILE]

Each run is a process of its own that trains ten steps, alone or under `preamp.doctor.watch(model, every=1)`, which
follows steps 0, 1, 2, 4 and 8 operator by operator and only counts in the others. Steps 4 and 8 are set against the
steps from 4 on of the run alone; peak memory is what the process held at most beyond what it held before it trained.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import preamp
from preamp.demo._trial import make_optimizer
from preamp.machine import environment
from preamp.zoo import TASKS

STEPS = 10
FOLLOWED, COUNTED = (4, 8), (5, 6, 7, 9)
"""Steps with shadows, and steps without, under the doctor."""


def train(name: str, level: str, size: str, watched: bool) -> dict[str, Any]:
    """Ten steps of one network; seconds of each, and bytes at the most."""
    torch.set_num_threads(1)
    task = TASKS[name]
    recipe = task.recipe(size)
    model = task.build(size, seed=0)
    optimizer = make_optimizer(recipe, model)
    batches = list(task.batches(size, seed=0, steps=STEPS, batch_size=recipe.batch_size))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds: list[float] = []
    watch: Any = preamp.doctor.watch(model, every=1) if watched else nullcontext()
    with watch, preamp.prepare(model, optimizer, level=level) as session:
        for inputs, target in batches:
            started = time.perf_counter()
            with session.autocast():
                loss = task.loss(model(*inputs), target)
            session.backward(loss)
            session.step()
            session.zero_grad()
            seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "bytes": (peak - before) * 1024, "loss": float(loss.detach()).hex()}


def run(name: str, level: str, size: str, watched: bool) -> dict[str, Any]:
    """The same in a process of its own."""
    line = [sys.executable, "-m", "benchmarks.shadowed_step", "--child", name, "--level", level, "--size", size]
    ran = subprocess.run([*line, *(["--watched"] if watched else [])], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def row_of(name: str, level: str, size: str, rounds: int) -> dict[str, Any]:
    """One network: runs alone and watched in turn."""
    alone, watched = [], []
    for _ in range(rounds):
        alone.append(run(name, level, size, watched=False))
        watched.append(run(name, level, size, watched=True))

    def steps(runs: list[dict[str, Any]], which: Any) -> float:
        return float(statistics.median(one["seconds"][at] for one in runs for at in which))

    plain = steps(alone, range(4, STEPS))
    return {
        "network": name,
        "seconds": {"alone": plain, "followed": steps(watched, FOLLOWED), "counted": steps(watched, COUNTED)},
        "bytes": {who: max(one["bytes"] for one in runs) for who, runs in (("alone", alone), ("watched", watched))},
        "losses alike": len({one["loss"] for one in (*alone, *watched)}) == 1,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--level", default="O4")
    parser.add_argument("--size", default="ci")
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/shadowed_step.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--watched", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(train(given.child, given.level, given.size, given.watched)))
        return
    rows = []
    for name in TASKS:
        rows.append(row_of(name, given.level, given.size, given.rounds))
        print(json.dumps(rows[-1]), flush=True)
    result = {
        "schema": "preamp-bench/1", "suite": "shadowed_step", "environment": environment(torch.device("cpu")),
        "level": given.level, "size": given.size, "rounds": given.rounds, "rows": rows,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
