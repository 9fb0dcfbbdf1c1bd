"""A list of tensors that is asked each thing once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")


class TensorList(list[Tensor]):
    """Tensors that nobody touches for the length of a step, and what was found of them.

    To ask a thousand tensors for their addresses takes as long as to launch the kernel that steps them, and a step has
    several uses for them.
    """

    owners: Sequence[Tensor] | None = None
    """In whose name writes to these are counted, where that is not themselves."""

    def become(self, tensors: Iterable[Tensor], owners: Sequence[Tensor] | None = None) -> None:
        """Hold others, of which nothing is known yet."""
        self[:] = tensors
        self.ask_anew(owners)

    def ask_anew(self, owners: Sequence[Tensor] | None = None) -> None:
        """Forget what was found: another step begins."""
        vars(self).clear()
        self.owners = owners

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the first entry of each lies; `RuntimeError` of torch's for sparse ones."""
        return tuple(map(Tensor.data_ptr, self))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many entries each has."""
        return tuple(map(Tensor.numel, self))

    @cached_property
    def dtypes(self) -> dict[torch.dtype, None]:
        """Those that there are, in the order in which they come first."""
        return dict.fromkeys(map(_DTYPE, self))

    @cached_property
    def strided(self) -> bool:
        """Whether all are dense."""
        return self.contiguous or set(map(_LAYOUT, self)) <= {torch.strided}

    @cached_property
    def together(self) -> bool:
        """Whether all lie on one device."""
        return len(set(map(Tensor.get_device, self))) <= 1

    @cached_property
    def contiguous(self) -> bool:
        """Whether all are, and none is sparse."""
        try:
            return all(map(Tensor.is_contiguous, self))
        except RuntimeError:  # what sparse ones in rows say
            return False


def listed(tensors: Sequence[Tensor]) -> TensorList:
    """The same list if it is one of these, else a new one."""
    return tensors if isinstance(tensors, TensorList) else TensorList(tensors)


def chained(lists: Sequence[Sequence[Tensor]]) -> TensorList:
    """All tensors of some lists, one behind the other, asked with these; of a single one the list itself."""
    own = list(map(listed, lists))
    if len(own) == 1:
        return own[0]
    made = TensorList(chain.from_iterable(own))
    made.strided = all(each.strided for each in own)
    if made.strided:
        made.addresses = tuple(chain.from_iterable(each.addresses for each in own))
        made.sizes = tuple(chain.from_iterable(each.sizes for each in own))
        made.dtypes = dict.fromkeys(chain.from_iterable(each.dtypes for each in own))
        made.contiguous = all(each.contiguous for each in own)
    return made
