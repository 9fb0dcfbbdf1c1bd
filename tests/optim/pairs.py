"""The optimizers of preamp.optim beside those of torch that they have to equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from preamp import optim

Make = Callable[[Iterable[Any]], Optimizer]

CASES = (
    ("Adam", {"lr": 1e-2}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 1e-2, "amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-4}),
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    ("SGD", {"lr": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-2}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adagrad", {"lr": 1e-2}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
)

PAIRS: dict[str, tuple[Make, Make]] = {
    f"{name} {', '.join(f'{key}={value}' for key, value in arguments.items())}": (
        partial(getattr(optim, name), **arguments),
        partial(getattr(torch.optim, name), fused=True, **arguments),
    )
    for name, arguments in CASES
}
