"""Changes gradients in place: unscales and clips them. Also computes norms of any order.

Everything returned stays on the gradients' device. Gradients may be dense or sparse, of several dtypes, on several
devices; the flags and norms of several devices are gathered on that of the first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from operator import attrgetter, is_not

import torch
from torch import Tensor
from torch.nn import Parameter

from ..formats import LOW_DTYPES
from ..sharding import agreed_flag, any_sharded, held_here
from .lists import listed
from .norms import l2_norms


def check_and_unscale_(gradients: Iterable[Tensor], inverse: Tensor | None) -> Tensor:
    """Multiply gradients by `inverse` in place, and say whether all of them were finite.

    `inverse`: 0-d float32, or None to only check. Returns 0-d float32: 1 if some entry was inf or nan, else 0. It
    reads the values before the multiplication. float16 gradients are multiplied in float16. With DTensors each process
    reads its shard, and all processes get the same flag.
    """
    gradients = list(gradients)
    groups = grouped(gradients)
    if not groups:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    home = groups[0][0].device
    flags = []
    for group in groups:
        found = torch.zeros((), dtype=torch.float32, device=group[0].device)
        factor = torch.ones_like(found) if inverse is None else inverse.to(found.device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, factor)
        flags.append(found.to(home))
    return agreed_flag(flags[0] if len(flags) == 1 else torch.stack(flags).amax(), gradients)


def global_norm(gradients: Iterable[Tensor], order: float = 2.0, *, device: torch.device | None = None) -> Tensor:
    """The norm of all gradients taken as one vector: 0-d float32, computed in float32 whatever their dtype.

    `order`: any positive number, or inf. `device`: of the result, by default that of the first gradient, or the CPU
    without gradients. The norm of no gradients is 0.
    """
    gradients = list(gradients)
    norms: list[Tensor] = []
    for group in grouped(gradients, complex_as_real=False):
        filled = [value for value in group if value.numel()]  # torch raises for the largest of no numbers
        if filled:
            values = [in_float32(value) for value in filled]
            norms += l2_norms(values) if order == 2 else torch._foreach_norm(values, order)
    if not norms:
        return torch.zeros((), dtype=torch.float32, device=device or (gradients[0].device if gradients else "cpu"))
    home = device or norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(home, torch.float32) for norm in norms]), order)
    return total


_GRAD, _IS_THERE = attrgetter("grad"), partial(is_not, None)


def present_in(params: list[Parameter]) -> tuple[list[Parameter], list[Tensor]]:
    """The parameters that have gradients, and these; usually all have one, which is faster to check than to collect."""
    gradients = list(map(_GRAD, params))
    if all(map(_IS_THERE, gradients)):
        return params, gradients
    return [p for p, g in zip(params, gradients, strict=True) if g is not None], list(filter(_IS_THERE, gradients))


def reciprocal(scale: Tensor) -> Tensor:
    """1/scale, 0-d float32, by which gradients are unscaled: the same number as in torch's scaler, by one operator.

    torch divides in float64 and rounds twice. The result is that of a float32 division (Figueroa 1995: with twice the
    digits and two more, the first rounding does no harm).
    """
    return scale.reciprocal().float()


def multiply_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by a 0-d float32 tensor."""
    for group in grouped(list(gradients), complex_as_real=False, linear=True):
        torch._foreach_mul_(group, factor.to(group[0].device))


def clip_values_(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamp every entry of the gradients to [-limit, limit] in place; of complex ones, both parts."""
    for group in grouped(list(gradients)):
        torch._foreach_clamp_min_(group, -limit)
        torch._foreach_clamp_max_(group, limit)


def grouped(gradients: list[Tensor], *, complex_as_real: bool = True, linear: bool = False) -> list[list[Tensor]]:
    """The gradients' values, in lists of one device and one dtype each, for which torch's foreach operators are fast.

    Usually all are alike. Checking that for a thousand tensors must take less time than stepping them. `linear`: what
    is to be done to values may be done before equal indices of a sparse gradient are added up.
    """
    own = listed(gradients)
    alike = not any_sharded(own) and own.strided and own.together and len(own.dtypes) == 1
    if alike and not own[0].is_complex():
        return [own]
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        value = gradient._values() if linear and gradient.layout is torch.sparse_coo else dense_values(gradient)
        value = as_real(value) if complex_as_real else value
        groups[(value.device, value.dtype)].append(value)
    return list(groups.values())


def dense_values(gradient: Tensor) -> Tensor:
    """A gradient's values, sharing its memory: itself, the values of a sparse one, or the shard of a DTensor."""
    gradient = held_here(gradient)
    if gradient.layout is torch.strided:
        return gradient
    if gradient.layout is torch.sparse_coo:
        if not gradient.is_coalesced():
            raise ValueError("a sparse gradient must be coalesced first: equal indices may add up to an overflow")
        return gradient._values()
    return gradient.values()


def in_float32(value: Tensor) -> Tensor:
    """A 16-bit gradient as float32; any other as it is."""
    return value.float() if value.dtype in LOW_DTYPES else value


def as_real(value: Tensor) -> Tensor:
    """A view of complex numbers as pairs of real ones; real numbers as they are."""
    return torch.view_as_real(value) if value.is_complex() else value
