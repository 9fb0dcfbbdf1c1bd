"""Tensors that others may have in their hands."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount
from typing import Any
from weakref import getweakrefcount

from torch import Tensor

from ._layout import turnable

_IN_A_LIST = next(map(getrefcount, [object()]))
"""References to what nothing holds but the list that is looked through."""


class Shown:
    """Tensors that somebody shows to everybody, and where they lie.

    Who has one of them can give it other memory, which leaves no trace. So their addresses are compared before a step,
    unless nobody can have one: their owner was not asked for any since they were last found in nobody else's hands.
    `owner`: counts in `asked` how often that was; None if nobody counts. `others`: references to each that its owner
    and the caller have, besides that of the list in which they are given.
    """

    def __init__(self, tensors: Sequence[Tensor], owner: Any, others: int) -> None:
        self._addresses = list(map(Tensor.data_ptr, tensors))
        self._alone = {_IN_A_LIST + others}
        self._turnable = [i for i, tensor in enumerate(tensors) if turnable(tensor)]
        self._as_they_lay = [tensors[i].is_contiguous() for i in self._turnable]
        self._owner = owner
        self._asked = -1

    def are_where_they_were(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the same tensors lie as they did."""
        if self._owner is not None and self._owner.asked == self._asked:
            return True
        if list(map(Tensor.data_ptr, tensors)) != self._addresses:
            return False
        if [tensors[i].is_contiguous() for i in self._turnable] != self._as_they_lay:
            return False
        alone = self._owner is not None and set(map(getrefcount, tensors)) == self._alone
        if alone and not any(map(getweakrefcount, tensors)):
            self._asked = self._owner.asked
        return True
