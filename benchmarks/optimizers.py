"""Trains networks of the zoo in float32, at O5 with masters, and in bfloat16 without masters, by many optimizers.

`python -m benchmarks.optimizers [network ...]` prints rows and writes `results/optimizers_<commit>.json`, to be
renamed. Size ci, one thread, two seeds. Learning rates are constant: that of the recipe for relatives of Adam, a tenth
of it for Lion, 0.02 for Muon, which gets the matrices of hidden layers.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adam_mini
import lion_pytorch
import optimi
import pytorch_optimizer
import schedulefree
import torch
from torch import nn

import preamp
from preamp.machine import environment
from preamp.zoo import TASKS

WAYS = {"O0": "O0", "O5": "O5", "bfloat16 without masters": "O5,masters=no"}


def hidden(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of hidden layers."""
    return [p for name, p in model.named_parameters() if p.dim() == 2 and "layers" in name]


def with_muon(kind: Any, model: nn.Module, lr: float, **options: Any) -> list[Any]:
    """Muon for hidden layers, AdamW for the others."""
    own = set(map(id, hidden(model)))
    others = [p for p in model.parameters() if id(p) not in own]
    return [kind(hidden(model), 0.02, **options), preamp.optim.AdamW(others, lr, **options)]


MAKERS: dict[str, Callable[..., Any]] = {
    "torch.optim.AdamW": lambda model, lr, way: torch.optim.AdamW(model.parameters(), lr),
    "torch.optim.Muon": lambda model, lr, way: with_muon(torch.optim.Muon, model, lr),
    "torch.optim.Adafactor": lambda model, lr, way: torch.optim.Adafactor(model.parameters(), lr),
    "preamp.optim.Muon, split": lambda model, lr, way: with_muon(
        preamp.optim.Muon, model, lr, master="split" if way == "O5" else None
    ),
    "preamp.optim.Muon, stochastic rounding": lambda model, lr, way: with_muon(
        preamp.optim.Muon, model, lr, master=None, rounding="stochastic" if way == "O5" else "nearest"
    ),
    "preamp.optim.Lion, split": lambda model, lr, way: preamp.optim.Lion(
        model.parameters(), lr / 10, master="split" if way == "O5" else None
    ),
    "preamp.optim.Lion, stochastic rounding": lambda model, lr, way: preamp.optim.Lion(
        model.parameters(), lr / 10, master=None, rounding="stochastic" if way == "O5" else "nearest"
    ),
    "lion_pytorch.Lion": lambda model, lr, way: lion_pytorch.Lion(model.parameters(), lr / 10),
    "schedulefree.AdamWScheduleFree": lambda model, lr, way: schedulefree.AdamWScheduleFree(model.parameters(), lr),
    "adam_mini.Adam_mini": lambda model, lr, way: quietly(adam_mini.Adam_mini, model.named_parameters(), lr),
    "optimi.AdamW": lambda model, lr, way: optimi.AdamW(model.parameters(), lr, triton=False),
    "pytorch_optimizer.SOAP": lambda model, lr, way: pytorch_optimizer.SOAP(model.parameters(), lr),
}


def quietly(make: Any, *arguments: Any) -> Any:
    """What a maker returns, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return make(*arguments)


def train(task: Any, name: str, way: str, seed: int) -> dict[str, float]:
    """The mean loss of the last tenth of the steps, and the metric."""
    recipe = task.recipe("ci")
    torch.manual_seed(seed)
    model = task.build("ci", seed=seed)
    made = MAKERS[name](model, recipe.max_lr, way)
    optimizers = made if isinstance(made, list) else [made]
    losses = []
    policy = "O5,masters=no" if way == "O5" and "stochastic" in name else WAYS[way]
    with preamp.prepare(model, made, policy=policy) as session:
        switch(optimizers, "train")
        batches = task.batches("ci", seed=seed, steps=recipe.steps, batch_size=recipe.batch_size)
        for inputs, target in batches:
            with session.autocast():
                loss = task.loss(model(*inputs), target)
            session.backward(loss)
            session.clip_grad_norm_(recipe.clip)
            session.step()
            session.zero_grad()
            losses.append(loss.item())
        if way != "bfloat16 without masters":  # schedulefree cannot: its averages are float32
            switch(optimizers, "eval")
    model.eval()
    last = losses[-recipe.steps // 10 :]
    return {"loss": sum(last) / len(last), "metric": task.evaluate(model, "ci", device=torch.device("cpu"))}


def switch(optimizers: list[Any], to: str) -> None:
    """Exchange the weights of training and evaluation, where an optimizer has both."""
    for optimizer in optimizers:
        getattr(optimizer, to, lambda: None)()


def main(names: list[str]) -> None:
    """Run, print, write."""
    rows = []
    for network in names:
        for name in MAKERS:
            for way in WAYS:
                for seed in range(2):
                    row = {"network": network, "optimizer": name, "way": way, "seed": seed}
                    row |= train(TASKS[network], name, way, seed)
                    rows.append(row)
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    found = environment(torch.device("cpu"))
    path = Path(__file__).parent / "results" / f"optimizers_{found['commit']}.json".replace("+", "")
    path.write_text(json.dumps({"schema": "preamp-bench/1", "environment": found, "rows": rows}, indent=1) + "\n")
    print(path.name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:] or ["flights"])
