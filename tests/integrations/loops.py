"""What the tests of frameworks train: a small network on fixed batches, one of which overflows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import preamp

MAKERS: dict[str, Any] = {
    "preamp": lambda params: preamp.optim.AdamW(params, 1e-2, eps=1e-4),
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-4, fused=True),
    "foreach": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
}
CASES = [*((level, "preamp") for level in ("O0", "O1", "O2", "O3", "O4", "O5")), ("O2", "fused"), ("O5", "foreach")]

STEPS, MICRO, CLIP = 50, 2, 0.05
BAD = 7
"""The step whose first micro-batch overflows."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


@cache
def data() -> list[tuple[Tensor, Tensor]]:
    """Batches of four, `MICRO` for each step."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(STEPS * MICRO)
    ]
    rows[BAD * MICRO] = (rows[BAD * MICRO][0] * float("inf"), rows[BAD * MICRO][1])
    return rows


def schedule_of(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that falls at each step that is not skipped."""
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
