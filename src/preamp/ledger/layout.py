"""The tensors of a step: private views of the memory that parameters and states have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import TensorList
from ..sharding import held_here, is_sharded
from .snapshot import Snapshot

_SHAPE = attrgetter("shape")


class Layout:
    """The memory layout of parameters that are stepped together, and of their states.

    They are stepped through private views of the same memory, whose shapes user code cannot change, so a step never
    writes beyond what was checked when these were made. `states`: for each name, one for each of `params`.
    """

    def __init__(self, params: Sequence[Parameter], states: Sequence[Sequence[Tensor]]) -> None:
        self.shapes = [param.shape for param in params]
        self._sharded = is_sharded(params[0])
        self._params = list[Tensor](params)
        # in the order of their creation, near each other in memory
        self._states = list(chain.from_iterable(zip(*states, strict=True)))
        here, kept = self._here(self._params), self._here(self._states)
        self._shown, self._kept = Snapshot(here, shown=True), Snapshot(kept)
        with torch.no_grad():
            held = [tensor.detach() for tensor in (*here, *kept)]
        self.params = TensorList(held[: len(params)])
        self.states = [TensorList(held[len(params) + number :: len(states)]) for number in range(len(states))]
        if not self._sharded:
            self.params.owners = list(params)

    def _here(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(map(held_here, tensors)) if self._sharded else tensors

    def holds(self) -> bool:
        """Whether parameters and states are where they were, in the same memory order."""
        return self._shown.holds(self._here(self._params)) and self._kept.holds(self._here(self._states))

    def takes(self, gradients: TensorList) -> bool:
        """Whether these are dense, on the device, and have the memory order or the shapes of the parameters."""
        if not gradients.together or gradients[0].device != self.params[0].device:
            return False
        if not self._sharded and self.params.contiguous and gradients.contiguous:
            return gradients.sizes == self.params.sizes
        return gradients.strided and list(map(_SHAPE, gradients)) == self.shapes


def overlapping(params: Sequence[Parameter]) -> dict[Parameter, dict[Parameter, int]]:
    """For each parameter that shares memory with others: all of these and itself, numbered in their order."""
    spans = []
    for number, param in enumerate(params):
        here = held_here(param)
        if here.numel() and here.layout is torch.strided and here.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(here.shape, here.stride(), strict=True))
            begin = here.data_ptr()
            spans.append((here.device, begin, begin + (last + 1) * here.element_size(), number))
    spans.sort(key=lambda span: (str(span[0]), *span[1:]))
    shared: dict[Parameter, dict[Parameter, int]] = {}
    group: list[int] = []
    reach: tuple[Any, int] = (None, 0)
    for device, begin, end, number in [*spans, (None, 0, 0, -1)]:
        if device == reach[0] and begin < reach[1]:
            group.append(number)
            reach = (device, max(reach[1], end))
            continue
        if len(group) > 1:
            own = {params[place]: turn for turn, place in enumerate(sorted(group))}
            shared.update(dict.fromkeys(own, own))
        group, reach = [number], (device, end)
    return shared
