"""Lists of tensors that are worked on together: asked each thing once, and walked as they lie in memory.

An elementwise kernel need not know shapes if element k in memory of the parameter, the gradient and every state is
the same element. That holds for contiguous tensors, and for dense ones of equal strides (channels_last weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")

GRAIN = 32768
"""Entries from which on torch, if it has several threads, no longer concatenates in one loop, but by a copying operator
for each tensor, made anew where sizes differ."""


class TensorList(list[Tensor]):
    """Tensors that nobody touches for the length of a step, and what was found of them.

    To ask a thousand tensors for their addresses takes as long as to launch the kernel that steps them, and a step has
    several uses for them.
    """

    owners: Sequence[Tensor] | None = None
    """In whose name writes to these are counted, where that is not themselves."""

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


def walkable(tensor: Tensor) -> bool:
    """Whether the elements of a strided tensor fill one stretch of memory, each place once."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def same_walk(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are walkable and lie in memory in the same order."""
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    return walkable(tensor) and _strides(tensor) == _strides(other)


def _strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def split_by_walk(lists: Sequence[Sequence[Tensor]]) -> tuple[list[int], list[int]] | None:
    """Positions whose tensors can be walked together, and the others; None if all of them can."""
    if all(all(map(Tensor.is_contiguous, tensors)) for tensors in lists):
        return None
    first, others = lists[0], lists[1:]
    fit = [walkable(one) and all(same_walk(one, tensors[i]) for tensors in others) for i, one in enumerate(first)]
    if all(fit):
        return None
    return [i for i, good in enumerate(fit) if good], [i for i, good in enumerate(fit) if not good]


def laid_out_like(models: Sequence[Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` in the memory order of their walkable models: themselves, or copies of the few that lie otherwise."""
    if split_by_walk([models, tensors]) is None:
        return tensors
    return [
        tensor if same_walk(model, tensor) else torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)
        for model, tensor in zip(models, tensors, strict=True)
    ]


def batches(sizes: Sequence[int]) -> Iterator[slice]:
    """How many tensors to give torch at once to lay one behind the other: fewer than `GRAIN` entries, or one tensor.

    All at once if they are of one size (in entries).
    """
    if sizes and min(sizes) == max(sizes):
        yield slice(0, len(sizes))
        return
    begin = taken = 0
    for end, size in enumerate(sizes):
        taken += size
        if taken >= GRAIN and end > begin:
            yield slice(begin, end)
            begin, taken = end, size
    if sizes:
        yield slice(begin, len(sizes))


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Count a write to every tensor, as an operator in place would, where autograd was not told of it.

    A backward pass that still needs the old values then says so instead of using the new ones, and whoever watches
    `_version` sees that something has changed.
    """
    if isinstance(tensors, TensorList) and tensors.owners is not None:
        tensors = tensors.owners
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # older releases take one tensor
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
