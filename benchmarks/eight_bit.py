"""Trains networks of the zoo with AdamW's states in float32 and in 8 bits, and measures how far the steps differ.

`python -m benchmarks.eight_bit [network ...]` prints rows and writes `results/eight_bit_<commit>.json`, to be renamed.
Float32 weights, size ci, three seeds. "update error" is the L2 distance of the update from the one that float32
moments of the same gradients would make, relative to that, the mean over steps; parameters with states in 8 bits only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from preamp.kernels import dequantize
from preamp.machine import environment
from preamp.optim import AdamW
from preamp.zoo import TASKS

BETAS, EPS = (0.9, 0.999), 1e-8


def train(task: Any, states: str, seed: int) -> dict[str, float]:
    """The mean loss of the last tenth of the steps, the metric, and the update error."""
    recipe = task.recipe("ci")
    model = task.build("ci", seed=seed)
    params = list(model.parameters())
    optimizer = AdamW(params, recipe.max_lr, BETAS, EPS, recipe.weight_decay, states=states, seed=seed)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.max_lr, total_steps=recipe.steps + 1, cycle_momentum=False
    )
    exact = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in params}
    losses, errors = [], []
    batches = task.batches("ci", seed=seed, steps=recipe.steps, batch_size=recipe.batch_size)
    for step, (inputs, target) in enumerate(batches, 1):
        loss = task.loss(model(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, recipe.clip)
        gap = total = 0.0
        with torch.no_grad():
            for p in params:
                coded = update(moved(*read(optimizer.state[p]), p.grad), step) if states == "8bit" else None
                exact[p] = moved(*exact[p], p.grad)
                if coded is not None and "exp_avg_scale" in optimizer.state[p]:
                    wanted = update(exact[p], step)
                    gap, total = gap + float((coded - wanted).square().sum()), total + float(wanted.square().sum())
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if total:
            errors.append((gap / total) ** 0.5)
    model.eval()
    last = losses[-recipe.steps // 10 :]
    return {
        "loss": sum(last) / len(last),
        "metric": task.evaluate(model, "ci", device=torch.device("cpu")),
        "update error": sum(errors) / len(errors) if errors else 0.0,
    }


def read(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both moments in float32; 0 before the first step."""
    if "exp_avg_scale" not in state:
        return state.get("exp_avg", torch.zeros(())), state.get("exp_avg_sq", torch.zeros(()))
    return (
        dequantize(state["exp_avg"], state["exp_avg_scale"]),
        dequantize(state["exp_avg_sq"], state["exp_avg_sq_scale"]),
    )


def moved(first: Tensor, second: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments with one more gradient."""
    return BETAS[0] * first + (1 - BETAS[0]) * grad, BETAS[1] * second + (1 - BETAS[1]) * grad.square()


def update(moments: tuple[Tensor, Tensor], step: int) -> Tensor:
    """Adam's step for a learning rate of 1."""
    first, second = moments
    return first / (1 - BETAS[0] ** step) / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS)


def main(names: list[str]) -> None:
    """Run, print, write."""
    tasks = {task.name: task for task in (TASKS.values() if isinstance(TASKS, dict) else TASKS)}
    rows = []
    for name in names:
        for states in ("float32", "8bit"):
            for seed in range(3):
                row = {"network": name, "states": states, "seed": seed, **train(tasks[name], states, seed)}
                rows.append(row)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    found = environment(torch.device("cpu"))
    path = Path(__file__).parent / "results" / f"eight_bit_{found['commit']}.json".replace("+", "")
    path.write_text(json.dumps({"schema": "preamp-bench/1", "environment": found, "rows": rows}, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:] or ["flights", "bert"])
