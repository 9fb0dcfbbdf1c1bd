"""Lists of tensors that a step works on together: each property is read once, and kernels walk them in memory order.

An elementwise kernel need not know shapes if element k in memory of the parameter, the gradient and every state is
the same element. That holds for contiguous tensors, and for dense ones of equal strides (channels_last weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

Walks = tuple[tuple[int, ...] | None, ...]
"""How each of some tensors lies in memory (`walk_of`)."""

_DTYPE, _LAYOUT = attrgetter("dtype"), attrgetter("layout")

GRAIN = 32768
"""From this many entries on, torch with several threads no longer concatenates in one loop, but by a copying operator
for each tensor, which it sets up again where sizes differ."""


class TensorList(list[Tensor]):
    """Tensors that do not change during a step, with cached properties.

    Reading the addresses of a thousand tensors takes as long as launching the kernel that steps them, and a step uses
    them several times.
    """

    owners: Sequence[Tensor] | None = None
    """The tensors whose versions count writes to these, if not these themselves."""

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The address of each tensor's first entry; torch raises `RuntimeError` for sparse ones."""
        return tuple(map(Tensor.data_ptr, self))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of entries of each tensor."""
        return tuple(map(Tensor.numel, self))

    @cached_property
    def dtypes(self) -> dict[torch.dtype, None]:
        """The dtypes that occur, in order of first occurrence."""
        return dict.fromkeys(map(_DTYPE, self))

    @cached_property
    def strided(self) -> bool:
        """Whether all are dense."""
        return self.contiguous or set(map(_LAYOUT, self)) <= {torch.strided}

    @cached_property
    def together(self) -> bool:
        """Whether all are on one device."""
        return len(set(map(Tensor.get_device, self))) <= 1

    @cached_property
    def contiguous(self) -> bool:
        """Whether all are contiguous, and none is sparse."""
        try:
            return all(map(Tensor.is_contiguous, self))
        except RuntimeError:  # raised by sparse ones in rows
            return False

    @cached_property
    def walks(self) -> Walks:
        """How each tensor lies in memory (`walk_of`)."""
        return ((),) * len(self) if self.contiguous else tuple(map(walk_of, self))


def listed(tensors: Sequence[Tensor]) -> TensorList:
    """The same object if it is a `TensorList`, else a new one."""
    return tensors if isinstance(tensors, TensorList) else TensorList(tensors)


def chained(lists: Sequence[Sequence[Tensor]]) -> TensorList:
    """All tensors of some lists in one list, with their cached properties; of a single list, the list itself."""
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


def walk_of(tensor: Tensor) -> tuple[int, ...] | None:
    """How a strided tensor lies in memory; tensors of one shape that lie alike can be walked together.

    () if it is contiguous, else the strides of its sizes other than 1; None if it does not fill one range of memory,
    each position once.
    """
    return () if tensor.is_contiguous() else _walk(tensor.shape, tensor.stride())


def flat(tensor: Tensor) -> Tensor:
    """A walkable tensor in memory order, (n,), sharing its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def unflattened(values: Tensor, like: Tensor) -> Tensor:
    """Values in memory order as a tensor with the shape and memory order of another, which is walkable."""
    made = torch.empty_like(like, dtype=values.dtype)
    flat(made).copy_(values)
    return made


@lru_cache(maxsize=1024)
def _walk(sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    own = [(stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1]
    expected = 1
    for stride, size in sorted(own):
        if stride != expected:
            return None
        expected *= size
    return tuple(stride for stride, _ in own)


def split_by_walk(walks: Iterable[Walks]) -> tuple[list[int], list[int]]:
    """Positions whose tensors can be walked together, and the others, from the `walks` of each list."""
    fit = [own[0] is not None and len(set(own)) == 1 for own in zip(*walks, strict=True)]
    return [i for i, good in enumerate(fit) if good], [i for i, good in enumerate(fit) if not good]


def laid_out_like(models: Sequence[Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` in the memory order of their walkable models: unchanged, or copied if they have another order."""
    wanted, found = listed(models).walks, listed(tensors).walks
    if wanted == found:
        return tensors
    return [
        tensor if walk == own else torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)
        for model, tensor, walk, own in zip(models, tensors, wanted, found, strict=True)
    ]


def batches(sizes: Sequence[int]) -> Iterator[slice]:
    """How many tensors torch should concatenate in one call: fewer than `GRAIN` entries, or one tensor.

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
    """Count a write to every tensor, as an in-place operator would, after a write that autograd did not see.

    A backward pass that still needs the old values then raises instead of using the new ones, and a changed `_version`
    shows the write.
    """
    if isinstance(tensors, TensorList) and tensors.owners is not None:
        tensors = tensors.owners
    try:
        torch.autograd.graph.increment_version(tensors)
    except TypeError:  # older releases take one tensor
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)
