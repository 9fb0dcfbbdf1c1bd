"""Three networks of the zoo trained by a script for Apex at O0 to O3: losses after 200 steps against float32 seeds.

    python -m benchmarks.apex_levels [--steps 200] [--out FILE]

SGD with momentum, since O3 has no masters and Adam's squares are nothing in float16. A level passes if the mean over
its seeds of the final loss (of the last 20 steps) is not above the worst of the float32 seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import warnings
from pathlib import Path

import torch

from preamp.compat.apex import amp
from preamp.machine import environment
from preamp.zoo import TASKS

RATES = {"flights": 0.05, "unet": 0.05, "seresnext": 0.02}
BATCH = {"flights": 256, "unet": 4, "seresnext": 16}


def train(name: str, level: str, seed: int, steps: int) -> list[float]:
    """Losses of one run."""
    task = TASKS[name]
    model = task.build("ci", seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), RATES[name], momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = []
    for inputs, target in task.batches("ci", seed=seed, steps=steps, batch_size=BATCH[name]):
        loss = task.loss(model(*inputs), target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(v.dtype in (torch.float32, torch.int64) for v in model.state_dict().values())
    amp.close()
    return losses


def main() -> None:
    """Train, print, write after every run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/apex_levels.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for name in RATES:
        finals: dict[str, list[float]] = {}
        for level, seed in itertools.product(("O0", "O1", "O2", "O3"), range(arguments.seeds)):
            losses = train(name, level, seed, arguments.steps)
            finals.setdefault(level, []).append(statistics.fmean(losses[-20:]))
            rows.append({"network": name, "level": level, "seed": seed, "losses": losses})
            about = environment(torch.device("cpu"))
            result = {"schema": "preamp-bench/1", "suite": "apex_levels", "environment": about, "rows": rows}
            arguments.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
        worst = max(finals["O0"])
        for level, values in finals.items():
            mean = statistics.fmean(values)
            told = "in the band" if mean <= worst else f"ABOVE by {mean - worst:.4f}"
            print(f"{name} {level}: {mean:.4f} ({', '.join(f'{v:.4f}' for v in values)}) {told}", flush=True)


if __name__ == "__main__":
    main()
