"""Split masters: bfloat16 weights and the bits they lack, or the upper 8 of these."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import Storage, Tensors, chances_like, join, split
from ..sharding import held_here
from .leaves import Kept, Leaf
from .masters import Masters
from .swap import set_data


class SplitMasters(Masters):
    """Masters of bfloat16 parameters without float32 copies: bits beside each weight, of which it is the upper part.

    With 16 bits (`kept`: int16) they are the float32 number, exactly; with 8 (int8) that number in 24 bits, rounded by
    chance (`kernels.split`). A weight written from outside keeps the bits below its precision, since its former value
    is unknown. `seed`: of the random numbers.
    """

    split = True
    compare = Masters.refresh  # values need no comparison, since a weight and its bits always agree

    def __init__(self, kept: torch.dtype = torch.int16, seed: int = 0) -> None:
        super().__init__()
        self._kept, self._seed = kept, seed
        self._audit.always = True  # `compare` before each step

    def lower(self, name: str, parameter: Parameter, dtype: torch.dtype) -> None:
        """Turn a float32 parameter into a bfloat16 one with bits beside it."""
        weight, bits = split(parameter.data, self._kept)
        set_data(parameter, weight)
        self._know(name, parameter, bits)

    def adopt(self, name: str, parameter: Parameter) -> None:
        """Keep bits for a parameter that is already bfloat16: zeros."""
        if parameter.dtype is not torch.bfloat16:
            raise OptimizerError(
                f"split masters keep the bits that bfloat16 weights lack, and a parameter is {parameter.dtype}: use "
                "master='float32'"
            )
        self._adopted.add(parameter)
        self._know(name, parameter, torch.zeros_like(parameter, dtype=self._kept))

    def _follow(self, parameter: Parameter, leaf: Leaf) -> None:
        """Record the address of a parameter that was given other data."""
        leaf.fit(parameter, parameter.data)
        self._note(parameter, leaf)

    def place(self, storage: Storage, stored: Tensors, parameters: Tensors) -> None:
        """Put the low bits beside the weights."""
        storage.bits = stored

    def _in_float32(self, parameter: Parameter, leaf: Leaf) -> Tensor:
        """Join the master, in new memory."""
        return join(parameter.data, leaf.stored)

    def _of_weight(self, wide: Tensor, low: Tensor) -> Tensor:
        return wide.detach().clone()  # joined of the weight, which it does not round to where two are as near

    def _publish(self, parameters: Sequence[Parameter], lazily: bool) -> None:
        """Split the float32 data again."""
        for parameter in parameters:
            leaf = self._leaves[parameter]
            if leaf.other is not None:
                wide, chances = leaf.other.data.float(), None
                if self._kept is torch.int8 and not lazily:  # a step has written it
                    chances = chances_like(held_here(wide), self._seed, self.step, leaf.number)
                weight, bits = split(wide, self._kept, chances)
                if not lazily or not torch.equal(held_here(leaf.low), held_here(weight)):
                    leaf.low.copy_(weight)
                leaf.stored.copy_(bits)

    def _saved(self, parameter: Parameter, leaf: Leaf) -> Kept:
        """The weight and its bits."""
        if parameter in self.inside:  # what is there now, and will be split when the weight comes back
            return split(parameter.data, self._kept)
        return leaf.low, leaf.stored

    def _take(self, parameter: Parameter, leaf: Leaf, wide: Tensor) -> None:
        """Split a master that is loaded."""
        weight, bits = split(wide, self._kept)
        parameter.data.copy_(weight)
        leaf.stored.copy_(bits)
