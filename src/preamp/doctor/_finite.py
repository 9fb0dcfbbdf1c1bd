"""Whether all gradients are finite: asked after every backward pass, so as cheaply as it can be known."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..gradients import read


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Of any dtypes and layouts, on any devices; True for none. Waits for the devices."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # The values of a sparse one as they lie there: entries of one index are added up when the step comes.
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    return all(_surely(group) or not bool(read(group).found) for group in by_kind.values())


def _surely(gradients: list[Tensor]) -> bool:
    """By one call: a finite norm proves it. An infinite one may be that of large numbers, and is to be looked at."""
    if gradients[0].device.type != "cpu" or any(gradient.layout is not torch.strided for gradient in gradients):
        return False
    return bool(torch.stack(torch._foreach_norm(gradients)).sum().isfinite())
