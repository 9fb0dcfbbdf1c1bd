"""Whether all gradients are finite: asked after every backward pass, so as cheaply as it can be known."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..kernels import read
from ..sharding import held_here


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Of any dtypes and layouts, on any devices; True for none. Waits for the devices."""
    gradients = list(gradients)
    if _surely(gradients):
        return True
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = values_here(gradient)
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    return not any(bool(read(group).found) for group in by_kind.values())


def values_here(tensor: Tensor) -> Tensor:
    """What of a tensor lies in this process: the shard of a DTensor, the values of a sparse one.

    Those of one index are not added up: that is done when the step comes.
    """
    tensor = held_here(tensor)
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def _surely(gradients: list[Tensor]) -> bool:
    """By one call: a finite norm proves it. An infinite one may be that of large numbers, and is to be looked at."""
    for gradient in gradients:
        if gradient.__class__ is not Tensor or gradient.layout is not torch.strided or not gradient.is_cpu:
            return False
    if len({gradient.dtype for gradient in gradients}) != 1:
        return not gradients
    return math.isfinite(torch.stack(torch._foreach_norm(gradients)).sum().item())
