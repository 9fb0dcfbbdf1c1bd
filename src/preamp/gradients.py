"""Reading gradients: are they finite, how large are they, and what are they without the loss scale.

Everything returned stays on the gradients' device. Gradients may be dense or sparse, of several dtypes, on several
devices; the flags and norms of several devices are gathered on that of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .formats import LOW_DTYPES


def check_and_unscale_(gradients: Iterable[Tensor], inverse: Tensor | None) -> Tensor:
    """Multiply gradients by `inverse` in place, and say whether all of them were finite.

    `inverse`: 0-d float32, or None to only check. Returns 0-d float32: 1 when some entry was inf or nan, else 0. The
    check is made on the values before the multiplication. float16 gradients are multiplied in float16.
    """
    values = [_parts(dense_values(gradient)) for gradient in gradients]
    if not values:
        return torch.zeros((), dtype=torch.float32)
    home = values[0].device
    flags = []
    for (device, _), group in _grouped(values).items():
        found = torch.zeros((), dtype=torch.float32, device=device)
        factor = torch.ones_like(found) if inverse is None else inverse.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, factor)
        flags.append(found.to(home))
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()


def global_norm(gradients: Iterable[Tensor], order: float = 2.0) -> Tensor:
    """The norm of all gradients taken as one vector: 0-d float32, computed in float32 whatever their dtype.

    `order`: any positive number, or inf. No gradients: 0.
    """
    values = [dense_values(gradient) for gradient in gradients]
    filled = [value for value in values if value.numel()]  # the largest of no numbers is an error in torch
    if not filled:
        return torch.zeros((), dtype=torch.float32, device=values[0].device if values else None)
    home = values[0].device
    norms: list[Tensor] = []
    for group in _grouped(filled).values():
        found = torch._foreach_norm([_floats(value) for value in group], order)
        norms += [norm.to(home, torch.float32) for norm in found]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return total


def multiply_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-d float32 tensor."""
    for (device, _), group in _grouped([dense_values(gradient) for gradient in gradients]).items():
        torch._foreach_mul_(group, factor.to(device))


def clip_values_(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamp every entry of the gradients to [-limit, limit] in place; of complex ones, both parts."""
    for group in _grouped([_parts(dense_values(gradient)) for gradient in gradients]).values():
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)


def dense_values(gradient: Tensor) -> Tensor:
    """The numbers of a gradient: itself, or the values of a coalesced sparse one (sharing its memory)."""
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo:
        if not gradient.is_coalesced():
            raise ValueError("a sparse gradient must be coalesced first: equal indices may add up to an overflow")
        return gradient._values()
    return gradient.values()


def _floats(value: Tensor) -> Tensor:
    return value.float() if value.dtype in LOW_DTYPES else value


def _parts(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


def _grouped(values: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for value in values:
        groups[(value.device, value.dtype)].append(value)
    return groups
