"""Which tensors may be walked side by side in the order in which they lie in memory.

An elementwise kernel need not know shapes if element k in memory of the parameter, the gradient and every state is
the same element. That holds for contiguous tensors, and for dense ones of equal strides (channels_last weights).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def turnable(tensor: Tensor) -> bool:
    """Whether a tensor can be transposed in place without a change of shape."""
    sizes = [size for size in tensor.shape if size > 1]
    return len(set(sizes)) < len(sizes)


def laid_out_like(models: Sequence[Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """`tensors` in the memory order of their walkable models: themselves, or copies of the few that lie otherwise."""
    if split_by_walk([models, tensors]) is None:
        return tensors
    return [
        tensor if same_walk(model, tensor) else torch.empty_like(model, dtype=tensor.dtype).copy_(tensor)
        for model, tensor in zip(models, tensors, strict=True)
    ]
