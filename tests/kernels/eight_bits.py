"""Runs of Adam in 8 bits that tests of every kind of device share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import calls as fused
from .steps import ADAM

OPTIONS: dict[str, Any] = {name: value for name, value in ADAM.items() if name != "amsgrad"}
SETTINGS: list[dict[str, Any]] = [
    OPTIONS,
    {**OPTIONS, "weight_decay": 0.1, "maximize": True},
    {**OPTIONS, "weight_decay": 0.1, "decoupled": True, "beta1": 0.0},
]
KINDS = ("float32", "published", "split", "split24", "stochastic", "nearest")


@dataclass
class Run:
    """Parameters of one kind with moments in 8 bits, stepped by `fused.adam_8bit_`."""

    kind: str
    options: dict[str, Any]
    params: list[Tensor]
    low: torch.dtype = torch.bfloat16
    seed: int = 11
    lows: list[Tensor] | None = None
    bits: list[Tensor] | None = None
    moments: list[list[Tensor]] = field(init=False)
    step: Tensor = field(init=False)

    def __post_init__(self) -> None:
        wide = self.params
        self.step = torch.zeros((), device=wide[0].device)
        if self.kind == "published":
            self.lows = [p.to(self.low) for p in wide]
        elif self.kind in ("split", "split24"):
            halves = [fused.split(p, torch.int16 if self.kind == "split" else torch.int8) for p in wide]
            self.params, self.bits = [w for w, _ in halves], [b for _, b in halves]
        elif self.kind != "float32":
            self.params = [p.to(self.low) for p in wide]
        scales = [torch.zeros(fused.blocks_of(p.numel()), device=p.device) for p in wide]
        self.moments = [
            [torch.zeros_like(p, dtype=torch.int8) for p in wide], scales,
            [torch.zeros_like(p, dtype=torch.uint8) for p in wide], [s.clone() for s in scales],
        ]  # fmt: skip

    def take(self, grads: Sequence[Tensor], factor: Tensor | None = None, found: Tensor | None = None) -> None:
        fused.adam_8bit_(
            self.params, grads, *self.moments, self.lows, self.step, seed=self.seed, bits=self.bits,
            stochastic=self.kind == "stochastic", factor=factor, found=found, **self.options,
        )  # fmt: skip

    def masters(self) -> list[Tensor]:
        """What the parameters stand for, float32."""
        if self.bits is None:
            return [p.float() for p in self.params]
        return [fused.join(p, b) for p, b in zip(self.params, self.bits, strict=True)]

    def everything(self) -> list[Tensor]:
        """All that a step may write."""
        moments = [t for each in self.moments for t in each]
        return [*self.params, *(self.lows or []), *(self.bits or []), *moments, self.step]

    def twin(self) -> Run:
        """An independent copy of a run that has not begun, strides kept."""
        wide = [p.clone() for p in self.masters()]
        return Run(self.kind, self.options, wide, self.low, self.seed)
