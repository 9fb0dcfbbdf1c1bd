"""Whole training steps of the zoo's four networks on a CPU: float32, torch.amp and preamp's levels, interleaved.

    python -m benchmarks.cpu_levels [--rounds 15] [--model NAME] [--out FILE]

Each network trains on its real data with its own recipe (size "ci", fused AdamW). A turn is one step off the clock and
two on it, clipping included. Contenders take turns in balanced orders in one process, and the kernels of preamp are out
of the dispatcher while torch's contenders run, off the clock. Ratios are a round's time of float32 over the
contender's: above 1 is faster. `kept`: bytes of storages that autograd keeps for backward, but for parameters and
buffers; `kept by torch's kernels`: the same with products in 16 bits by torch's own kernels, whatever they take.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import warnings
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

import preamp
from preamp.autocast import PRODUCTS
from preamp.demo._trial import make_optimizer, saved_bytes
from preamp.formats import cpu_multiplies
from preamp.machine import environment
from preamp.zoo import TASKS, Task

from .harness import Setting
from .race import Entry, Step, keep_heap, race, without_rules

LEVELS = ("O1", "O2", "O4", "O5")
TORCH = {"torch.amp bf16": torch.bfloat16, "torch.amp fp16": torch.float16}
CONTENDERS = ("float32", *TORCH, *LEVELS)
STEPS = 2
"""A turn's timed steps."""


class Trainer:
    """A network in training. `step()` takes the next batch; `forward()` is its first half."""

    def __init__(self, task: Task, name: str, batches: int = 64) -> None:
        self.task, self.name = task, name
        recipe = task.recipe("ci")
        self.clip = recipe.clip
        self.model = task.build("ci", seed=0)
        self.optimizer = make_optimizer(recipe, self.model)
        made = list(task.batches("ci", seed=0, steps=batches, batch_size=recipe.batch_size))
        self.batches = cycle(made)
        self.session = preamp.prepare(self.model, self.optimizer, level=name) if name in LEVELS else None
        self.scaler = torch.amp.GradScaler("cpu", enabled=name == "torch.amp fp16")

    def forward(self) -> torch.Tensor:
        """The loss of the next batch."""
        inputs, target = next(self.batches)
        if self.session is not None:
            region: Any = self.session.autocast()
        else:
            low = TORCH.get(self.name)
            region = contextlib.nullcontext() if low is None else torch.autocast("cpu", low)
        with region:
            return self.task.loss(self.model(*inputs), target)

    def step(self) -> None:
        """A whole training step."""
        loss = self.forward()
        if self.session is not None:
            self.session.backward(loss)
            self.session.clip_grad_norm_(self.clip)
            self.session.step()
            self.session.zero_grad()
            return
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Give torch back."""
        if self.session is not None:
            self.session.close()


def kept(task: Task, name: str, multiplies: str | None) -> int:
    """Bytes that a forward pass keeps, on this CPU or (`multiplies`) one that is said to have 16-bit arithmetic."""
    before = os.environ.pop("PREAMP_CPU_MULTIPLIES", None)
    if multiplies is not None:
        os.environ["PREAMP_CPU_MULTIPLIES"] = multiplies
    cpu_multiplies.cache_clear()
    try:
        trainer = Trainer(task, name, batches=1)
        with saved_bytes(trainer.model) as found:
            loss = trainer.forward()
        assert loss.requires_grad
        trainer.close()
        return sum(found.values())
    finally:
        os.environ.pop("PREAMP_CPU_MULTIPLIES", None)
        if before is not None:
            os.environ["PREAMP_CPU_MULTIPLIES"] = before
        cpu_multiplies.cache_clear()


def row_of(task: Task, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Times, ratios and bytes of one network."""
    bytes_kept = {name: kept(task, name, None) for name in CONTENDERS}
    by_torch = {name: kept(task, name, "bf16,fp16") for name in LEVELS}

    def entry(name: str) -> Entry:
        def make(stack: contextlib.ExitStack) -> Step:
            return stack.enter_context(contextlib.closing(Trainer(task, name))).step

        return Entry(name, make, contextlib.nullcontext if name in LEVELS else without_rules, before=1, number=STEPS)

    found = race([entry(name) for name in CONTENDERS], Setting(device=torch.device("cpu"), rounds=rounds))
    assert not PRODUCTS._libraries
    rows = []
    for each in found:
        name, seconds = each["name"], each["seconds"]
        rows.append({
            "name": name, "seconds": seconds, "median ms": statistics.median(seconds) * 1e3, "ratio": each["ratio"],
            "kept": bytes_kept[name], "kept by torch's kernels": by_torch.get(name),
        })  # fmt: skip
        say(
            f"  {name:15} {statistics.median(seconds) * 1e3:8.1f} ms  {each['ratio']['median']:6.3f}x of float32  "
            f"keeps {bytes_kept[name] / 2**20:6.1f} MiB"
        )
    recipe = task.recipe("ci")
    return {"name": task.name, "what": f"{task.title}, batch {recipe.batch_size}", "contenders": rows}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=list(TASKS), action="append")
    parser.add_argument("--out", type=Path, default=Path("preamp-bench/cpu_levels.json"))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_heap()
    rows = []
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.model or TASKS:
        print(name, flush=True)
        rows.append(row_of(TASKS[name], arguments.rounds, lambda text: print(text, flush=True)))
        about = environment(torch.device("cpu"))
        result = {"schema": "preamp-bench/1", "suite": "cpu_levels", "environment": about, "heap kept": True}
        arguments.out.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
