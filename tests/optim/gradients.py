"""Gradients by chance, the same in each run, and steps with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


def give(params: Sequence[Parameter], step: int, missing: Callable[[int], bool] = lambda i: False) -> list[Tensor]:
    """Gradients in the order of memory of a new tensor, whatever that of the parameter; none for those `missing`."""
    torch.manual_seed(1000 + step)
    for i, p in enumerate(params):
        gradient = torch.randn(p.shape).to(p.dtype)
        p.grad = None if missing(i) else gradient
    return [p.grad for p in params if p.grad is not None]


def run(optimizer: Any, params: Sequence[Parameter], steps: Iterable[int]) -> None:
    for step in steps:
        give(params, step)
        optimizer.step()


def everything(params: Sequence[Parameter], optimizer: Any) -> list[Tensor]:
    """Parameters and states."""
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    return [*(p.detach() for p in params), *states]
