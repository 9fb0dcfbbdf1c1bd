"""Split masters: bfloat16 weights and the bits they lack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import Storage, Tensors, join, split
from ..sharding import held_here, placed_like
from .leaves import Leaf, Leaves
from .masters import Masters
from .swap import set_data


class SplitMasters(Masters):
    """Masters of bfloat16 parameters without float32 copies: 16 bits beside each weight, of which it is the upper part.

    Together they are the float32 number, exactly (`kernels.split`). A weight written from outside keeps the bits below
    its precision, since its former value is unknown.
    """

    split = True

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Turn a float32 parameter into a bfloat16 one with bits beside it."""
        weight, bits = _split(parameter.data)
        set_data(parameter, weight)
        self._know(name, parameter, bits)

    def adopt(self, name: str, parameter: Parameter, master: Tensor | None = None) -> None:
        """Keep bits for a parameter that is already bfloat16: zeros, or those that were saved for it (int16)."""
        if parameter.dtype is not torch.bfloat16:
            raise OptimizerError(
                f"master='split' keeps the lower half of float32 beside bfloat16 weights, and a parameter is "
                f"{parameter.dtype}: use master='float32'"
            )
        self._adopted.add(parameter)
        self._know(name, parameter, torch.zeros_like(parameter, dtype=torch.int16) if master is None else master)

    def _follow(self, parameter: Parameter, leaf: Leaf) -> None:
        """Record the address of a parameter that was given other data."""
        self._note(parameter, leaf)

    def refresh_before_step(self, leaves: Leaves, *, again: bool = False) -> None:
        """`refresh`; the values need no comparison, since a weight and its bits always agree."""
        self.refresh(leaves)

    def compare(self, leaves: Leaves | None = None) -> None:
        """`refresh`, for the same reason."""
        self.refresh(leaves)

    def place(self, storage: Storage, stored: Tensors, parameters: Tensors) -> None:
        """Put the low bits beside the weights."""
        storage.bits = stored

    def _in_float32(self, parameter: Parameter, leaf: Leaf) -> Tensor:
        """Join the master, in new memory."""
        return _join(parameter.data, leaf.stored)

    def _publish(self, parameters: Sequence[Parameter], lazily: bool) -> None:
        """Split the float32 data again."""
        for parameter in parameters:
            leaf = self._leaves[parameter]
            if leaf.other is not None:
                weight, bits = _split(leaf.other.data)
                if not lazily or not torch.equal(held_here(leaf.low), held_here(weight)):
                    leaf.low.copy_(weight)
                leaf.stored.copy_(bits)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, master) pairs in float32, in new memory."""
        self.refresh()
        for leaf in self._leaves.values():
            yield leaf.name, _join(leaf.low, leaf.stored)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take float32 masters by name. `StateError`, changing nothing, if one does not fit."""
        self._loaded, self.rounded = False, None
        self.full()
        try:
            super()._check_fit(state)
            for parameter, leaf in self._leaves.items():
                parameter.data.copy_(state[leaf.name])
        finally:
            self.low()


def _split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.split`, of DTensors too."""
    weight, bits = split(held_here(wide))
    shape = tuple(wide.shape)
    return placed_like(wide, weight, shape), placed_like(wide, bits, shape)


def _join(weight: Tensor, bits: Tensor) -> Tensor:
    """`kernels.join`, of DTensors too."""
    return placed_like(weight, join(held_here(weight), held_here(bits)), tuple(weight.shape))
