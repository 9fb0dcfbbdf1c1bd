"""AdamW's ways of keeping numbers, bfloat16 weights: time of a step alone, and what training comes to at O5.

    python -m benchmarks.options [--rounds 9] [--out FILE]

Times: `scaler.step(optimizer); scaler.update()` over 150 tensors of 100,000 elements, contenders interleaved. Losses:
networks of the zoo, size ci, three seeds, beside float32 weights at O4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import preamp
from preamp.machine import environment
from preamp.optim import AdamW
from preamp.zoo import TASKS

from .harness import Setting
from .lists import LISTS, leaves, scaled, with_masters
from .race import Entry, Step, keep_heap, race

OPTIONS: dict[str, dict[str, Any]] = {
    "master float32": {},
    "master split": {"master": "split"},
    "master split24": {"master": "split24"},
    "no master, stochastic rounding": {"master": None, "rounding": "stochastic"},
    "master float32, 8-bit states": {"states": "8bit"},
    "master split, 8-bit states": {"master": "split", "states": "8bit"},
    "master split24, 8-bit states": {"master": "split24", "states": "8bit"},
    "no master, stochastic rounding, 8-bit states": {"master": None, "rounding": "stochastic", "states": "8bit"},
}
FEW = {"unet": ("master float32", "master split24, 8-bit states", "float32 weights")}
"""What a network is trained with whose training takes minutes; the others with everything."""


def times(rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step, by contender and round."""
    cpu, (shapes, _) = torch.device("cpu"), LISTS["150 x 100k"]
    works: dict[str, Step] = {
        "torch, masters by hand": with_masters("AdamW", {"lr": 1e-9}, shapes, cpu)["masters by hand"]
    }
    for name, options in OPTIONS.items():
        optimizer = AdamW(leaves(shapes, cpu, torch.bfloat16), 1e-9, **options)
        works[name] = scaled(preamp.GradScaler, optimizer, cpu)
    entries = [Entry(name, lambda _, work=work: work) for name, work in works.items()]  # type: ignore[misc]
    race(entries, Setting(device=cpu, rounds=rounds))
    return [{"name": entry.name, "seconds": entry.seconds} for entry in entries]


def train(network: str, policy: str, seed: int, make: Callable[..., Any] = AdamW, **options: Any) -> float:
    """The mean loss of the last tenth of the steps. `options` are of `prepare`.

    Gradients that are released are clipped one by one, which cannot be done by their common norm.
    """
    task = TASKS[network]
    recipe = task.recipe("ci")
    model = task.build("ci", seed=seed)
    optimizer = make(model.parameters(), lr=recipe.max_lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.max_lr, total_steps=recipe.steps + 1)
    for parameter in model.parameters() if options else ():
        parameter.register_hook(lambda g: g * (recipe.clip / (g.float().norm() + 1e-6)).clamp(max=1.0).to(g.dtype))
    losses = []
    with preamp.prepare(model, optimizer, policy=policy, **options) as session:
        for inputs, target in task.batches("ci", seed=seed, steps=recipe.steps, batch_size=recipe.batch_size):
            with session.autocast():
                loss = task.loss(model(*inputs), target)
            session.backward(loss)
            if not options:
                session.clip_grad_norm_(recipe.clip)
            session.step()
            session.zero_grad()
            schedule.step()
            losses.append(float(loss.detach()))
    return statistics.fmean(losses[-len(losses) // 10 :])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/options.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_heap()
    timed = times(arguments.rounds)
    for row in timed:
        print(f"{row['name']:36} {1e3 * statistics.median(row['seconds']):8.1f} ms", flush=True)
    trained: list[dict[str, Any]] = []
    variants = [*(("O5", name, options) for name, options in OPTIONS.items()), ("O4", "float32 weights", {})]
    for network in TASKS:
        for level, name, options in variants:
            if name not in FEW.get(network, (name,)):
                continue
            policy = f"{level},masters=no" if options.get("master", "") is None else level
            losses = [train(network, policy, seed, partial(AdamW, **options)) for seed in range(3)]
            trained.append({"network": network, "level": level, "name": name, "losses": losses})
            print(f"{network:8} {level} {name:36} {', '.join(f'{loss:.4f}' for loss in losses)}", flush=True)
    about = environment(torch.device("cpu"))
    result = {"schema": "preamp-bench/1", "suite": "options", "environment": about, "steps": timed, "rows": trained}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
