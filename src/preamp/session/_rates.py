"""Learning rates as tensors on the device, where a graph finds them and schedulers write into them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class Rates:
    """What optimizers had as rates before they were captured, and the tensors that stand in their place."""

    def __init__(self) -> None:
        self._given: dict[tuple[Optimizer, int], float | Tensor] = {}
        self._ours: dict[tuple[Optimizer, int], Tensor] = {}

    def become_tensors(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        """Give every group a rate that is a tensor on `device`; a number set since goes into the tensor of before.

        A tensor that lies there already stays the one it is.
        """
        for optimizer in optimizers:
            for index, group in enumerate(optimizer.param_groups):
                rate = group["lr"]
                if isinstance(rate, Tensor) and rate.device == device:
                    continue
                place = (optimizer, index)
                if place not in self._given or not isinstance(rate, Tensor):  # else loaded, from the CPU
                    self._given[place] = rate
                ours = self._ours.get(place)
                if ours is None or ours.device != device:
                    ours = self._ours[place] = torch.full((), float(rate), dtype=torch.float32, device=device)
                else:
                    ours.fill_(float(rate))
                group["lr"] = ours

    def give_back(self) -> None:
        """Let rates be numbers again, or tensors of the caller's, with the values that they have come to.

        Also those that were loaded since, from a state that has tensors. Waits for the device.
        """
        for (optimizer, index), given in self._given.items():
            if index >= len(optimizer.param_groups):
                continue
            group = optimizer.param_groups[index]
            now = group["lr"]
            if not isinstance(now, Tensor):  # set after the last call
                continue
            if isinstance(given, Tensor):
                group["lr"] = given.copy_(now)
            else:
                unchanged = torch.equal(now.detach().cpu(), torch.tensor(given, dtype=now.dtype, device="cpu"))
                group["lr"] = given if unchanged else float(now)  # the tensor has fewer digits
        self._given.clear()
        self._ours.clear()
