"""Split masters: bfloat16 weights and the bits they lack, or the upper 8 of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import Storage, Tensors, chances_like, join, split
from ..sharding import held_here, placed_like
from .leaves import Leaf, Leaves
from .masters import Masters
from .swap import set_data

KEPT = {"split": torch.int16, "split24": torch.int8}
"""The dtype of the bits, for each `master=` of an optimizer with split masters."""


class SplitMasters(Masters):
    """Masters of bfloat16 parameters without float32 copies: bits beside each weight, of which it is the upper part.

    With 16 bits (`kept`: int16) they are the float32 number, exactly; with 8 (int8) that number in 24 bits, rounded by
    chance (`kernels.split`). A weight written from outside keeps the bits below its precision, since its former value
    is unknown. `seed`: of the random numbers.
    """

    split = True

    def __init__(self, kept: torch.dtype = torch.int16, seed: int = 0) -> None:
        super().__init__()
        self._kept, self._seed = kept, seed

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Turn a float32 parameter into a bfloat16 one with bits beside it."""
        weight, bits = split_like(parameter.data, self._kept)
        set_data(parameter, weight)
        self._know(name, parameter, bits)

    def adopt(self, name: str, parameter: Parameter, master: Tensor | None = None) -> None:
        """Keep bits for a parameter that is already bfloat16: zeros, or those that were saved for it."""
        if parameter.dtype is not torch.bfloat16:
            raise OptimizerError(
                f"split masters keep the bits that bfloat16 weights lack, and a parameter is {parameter.dtype}: use "
                "master='float32'"
            )
        self._adopted.add(parameter)
        self._know(name, parameter, torch.zeros_like(parameter, dtype=self._kept) if master is None else master)

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
        return joined(parameter.data, leaf.stored)

    def _publish(self, parameters: Sequence[Parameter], lazily: bool) -> None:
        """Split the float32 data again."""
        for parameter in parameters:
            leaf = self._leaves[parameter]
            if leaf.other is not None:
                wide, chances = leaf.other.data, None
                if self._kept is torch.int8 and not lazily:  # a step has written it
                    chances = chances_like(held_here(wide), self._seed, self.step, leaf.number)
                weight, bits = split_like(wide, self._kept, chances)
                if not lazily or not torch.equal(held_here(leaf.low), held_here(weight)):
                    leaf.low.copy_(weight)
                leaf.stored.copy_(bits)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name, master) pairs in float32, in new memory."""
        self.refresh()
        for leaf in self._leaves.values():
            yield leaf.name, joined(leaf.low, leaf.stored)

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


def split_like(wide: Tensor, kept: torch.dtype, chances: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`kernels.split`, of DTensors too. `chances`: for this process's part."""
    weight, bits = split(held_here(wide), kept, chances)
    shape = tuple(wide.shape)
    return placed_like(wide, weight, shape), placed_like(wide, bits, shape)


def joined(weight: Tensor, bits: Tensor) -> Tensor:
    """`kernels.join`, of DTensors too."""
    return placed_like(weight, join(held_here(weight), held_here(bits)), tuple(weight.shape))
