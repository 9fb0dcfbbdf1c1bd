"""What is known of one parameter and its master."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(slots=True)
class Entry:
    name: str
    master: Tensor
    """float32, of the parameter's shape; what the parameter is while swapped in."""
    low: Tensor
    """The 16-bit data that the model computes with."""
    number: int
    """By which `Agreed` knows it."""
    other: Parameter | None = None
    """What the parameter is else, with its 16-bit gradient and its hooks, while the master is in its place."""
    shown: Tensor | None = None
    """The float32 gradient that stands for the 16-bit one meanwhile; None where that is only put aside."""
    shown_version: int = 0

    def take_back(self, parameter: Parameter, scale: Tensor | None, changed: bool) -> None:
        """Let the 16-bit gradient be what became of the float32 one, times `scale`: of one that is gone nothing."""
        assert self.other is not None
        shown, now, low = self.shown, parameter.grad, self.other.grad
        if shown is None or (now is shown and now._version == self.shown_version and not changed):
            return
        if now is None:
            self.other.grad = None
            return
        wide = now if scale is None else now * scale.to(now.device)
        if low is None or low.layout is not torch.strided:
            self.other.grad = wide.to(self.low.dtype)
        else:
            low.copy_(wide)  # in place: a communication bucket may hold it
