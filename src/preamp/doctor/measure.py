"""What is asked of tensors, as cheaply as can be: are all numbers finite, how large are they, where do they lie?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..kernels import read
from ..sharding import held_here
from .exponents import Exponents

_WHOLE = 1 << 13
"""Numbers up to which all of a tensor are counted."""
_READ = frozenset({torch.float32, torch.float16, torch.bfloat16})


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all are finite: of any dtypes and layouts, on any devices; True for none. A host sync."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = values_here(gradient)
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    return not any(bool(read(group).found) for group in by_kind.values())


def values_here(tensor: Tensor) -> Tensor:
    """The part of a tensor in this process: the shard of a DTensor, the values of a sparse one.

    Values of one index are not added up: the step does that.
    """
    tensor = held_here(tensor)
    return tensor._values() if tensor.layout is torch.sparse_coo else tensor


def spread_of(tensor: Tensor) -> Exponents:
    """How the magnitudes of a tensor are spread; waits for its device.

    `tensor`: any shape, floating; read as float32, which holds every float16, bfloat16 and float8 as it is (a float64
    beyond it counts as infinite or zero). Of more than 2^13 numbers one in k is counted, k times; how many are
    infinite or NaN, and the largest, are of them all.
    """
    flat, step = tensor.detach().reshape(-1), sampling_step(tensor.shape)
    flat = flat if flat.dtype in _READ else flat.float()
    bits = flat[::step].float().cpu().numpy().view(np.uint32) & 0x7FFFFFFF  # of magnitudes: an exponent, its fraction
    biased = np.bincount(bits >> 23, minlength=256)  # of 255: not finite; of 0: zero or subnormal
    zeros = np.count_nonzero(bits == 0) if biased[0] else 0
    powers = {int(at) - 127: int(biased[at]) for at in np.flatnonzero(biased[1:255]) + 1}
    if zeros < biased[0]:
        low = bits[bits < 1 << 23]
        powers.update(Counter((np.frexp(low[low > 0].view(np.float32))[1] - 1).tolist()))
    first, last = (min(powers), max(powers)) if powers else (0, -1)
    counts = tuple(step * powers.get(power, 0) for power in range(first, last + 1))
    largest, infinite = (max(map(abs, map(float, flat.aminmax()))) if flat.numel() else 0.0), 0
    if not math.isfinite(largest):  # aminmax hands NaN on
        finite = flat[flat.isfinite()]
        largest, infinite = float(finite.abs().amax()) if finite.numel() else 0.0, flat.numel() - finite.numel()
    return Exponents(first, counts, step * zeros, infinite, largest)


def sampling_step(shape: Sequence[int]) -> int:
    """How many numbers of a tensor one that is counted stands for.

    It has no divisor in common with any dimension but the first, and so comes by every column and every channel.
    """
    step = max(1, -(-math.prod(shape) // _WHOLE))
    while any(math.gcd(step, size) > 1 for size in shape[1:]):
        step += 1
    return step


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None for sparse and other tensors that have no single one."""
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def key_of(tensor: Tensor) -> int:
    """Which storage a tensor has; its views have the same."""
    storage = storage_of(tensor)
    return -id(tensor) if storage is None else int(storage._cdata)
