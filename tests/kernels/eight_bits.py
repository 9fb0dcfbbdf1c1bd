"""Runs of Adam in 8 bits that tests of every kind of device share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import calls as fused
from .steps import ADAM, by_operators, far, gradients

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


def check_kernels(
    kind: str, options: dict[str, Any], dtype: torch.dtype, params: list[Tensor], *, but: float = 0.0
) -> None:
    """Each step by kernels is that by operators from equal states: codes differ by one, once in thousands.

    `but`: a share of the entries in which a last bit of float32 decides for more.
    """
    run = Run(kind, options, params)
    twin = run.twin()
    none = torch.zeros((), device=params[0].device)
    for i, factor in enumerate([None, 0.25, 0.3, 0.3]):
        grads = gradients(run.params, dtype, i, same_layout=i != 1)
        times = None if factor is None else none + factor
        with by_operators():
            twin.take([g.clone() for g in grads], times, none)
        run.take(grads, times, none if i else None)
        if kind in ("float32", "published", "split"):
            assert far(run.masters(), twin.masters(), but=but) <= 8
        for mine, theirs in zip(run.moments, twin.moments, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                if a.dtype is torch.float32:
                    assert torch.allclose(a, b, rtol=1e-5, atol=0)
                elif a.numel():
                    apart = (a.int() - b.int()).abs()
                    assert int((apart > 1).sum()) <= but * a.numel()
                    assert int((apart > 0).sum()) <= 1 + 1e-3 * a.numel()
        for p, low in zip(run.params, run.lows or [], strict=kind == "published"):
            assert torch.equal(low, p.to(low.dtype))
        for a, b in zip(twin.everything(), run.everything(), strict=True):
            a.copy_(b)
    assert float(run.step) == 4
