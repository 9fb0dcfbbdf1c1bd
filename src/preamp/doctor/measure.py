"""What is asked of tensors, as cheaply as can be: are all numbers finite, how large are they, where do they lie?"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kernels import read
from ..sharding import held_here
from .exponents import BINS, WIDTH, Exponents

_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_WHOLE = 1 << 16
"""Numbers up to which all of a tensor are counted."""
_TOGETHER = 32
"""Tensors that are counted together: their samples take 8 MB at most."""
_STEPS = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 61, 127, 251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521)
"""Primes: a step that divides no dimension but the first comes by every column and every channel."""
_READ = frozenset({torch.float32, torch.float16, torch.bfloat16})


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all are finite: of any dtypes and layouts, on any devices; True for none. A host sync."""
    gradients = list(gradients)
    if _surely(gradients):
        return True
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


def _surely(gradients: list[Tensor]) -> bool:
    """Whether one norm proves it: a finite one does, an infinite one may be that of large finite numbers."""
    for gradient in gradients:
        if gradient.__class__ is not Tensor or gradient.layout is not torch.strided or not gradient.is_cpu:
            return False
    if len({gradient.dtype for gradient in gradients}) != 1:
        return not gradients
    return math.isfinite(torch.stack(torch._foreach_norm(gradients)).sum().item())


def spread_of(tensor: Tensor) -> Exponents:
    """How the magnitudes of a tensor are spread; waits for its device."""
    return Exponents.of(count_exponents(tensor).cpu())


def count_exponents(tensor: Tensor) -> Tensor:
    """int64 of `WIDTH` on the CPU: counts by exponent field, the zeros, and the bits of the largest.

    `tensor`: any shape, floating; read as float32, which holds every float16, bfloat16 and float8 as it is (a float64
    beyond it counts as infinite or zero). Of more than 2^16 numbers one in k is counted, k times; how many are
    infinite or NaN, and the largest, are of them all. It waits for the tensor's device.
    """
    return count_each([tensor])[0]


def count_each(many: Sequence[Tensor]) -> list[Tensor]:
    """`count_exponents` of each, with a few operators for many of them."""
    found = [torch.zeros(WIDTH, dtype=torch.int64, device="cpu")] * len(many)
    filled = [index for index, tensor in enumerate(many) if tensor.numel()]
    for start in range(0, len(filled), _TOGETHER):
        part = filled[start : start + _TOGETHER]
        for index, counts in zip(part, _count([many[index] for index in part]), strict=True):
            found[index] = counts
    return found


def _count(many: Sequence[Tensor]) -> Sequence[Tensor]:
    """One histogram with bins of their own for each; slow passes are for those that need them."""
    flats = [_flat(tensor) for tensor in many]
    steps = [sampling_step(tensor.shape) for tensor in many]
    sampled = [flat[::step].float().cpu() for flat, step in zip(flats, steps, strict=True)]
    sizes = [one.numel() for one in sampled]
    joined = torch.cat(sampled) if len(many) > 1 else sampled[0].contiguous()
    bits = joined.view(torch.int32).bitwise_and(_MAGNITUDE)
    fields = bits >> 23
    if len(many) > 1:
        first = bits.new_tensor(range(0, BINS * len(many), BINS))
        fields += first.repeat_interleave(torch.tensor(sizes, device="cpu"), output_size=bits.numel())
    out = torch.empty(len(many), WIDTH, dtype=torch.int64, device="cpu")
    out[:, :BINS] = torch.bincount(fields, minlength=BINS * len(many)).view(-1, BINS)
    if max(steps) > 1:
        out[:, :BINS] *= torch.tensor(steps, device="cpu").unsqueeze(1)
    tails = []
    for flat, part, step, small in zip(flats, bits.split(sizes), steps, out[:, 0].tolist(), strict=True):
        largest, infinite = _extremes(flat)
        tails.append([infinite, step * (part.numel() - int(part.count_nonzero())) if small else 0, _bits_of(largest)])
    out[:, BINS - 1 :] = torch.tensor(tails, device="cpu")
    return out.unbind()


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype in _READ else flat.float()


def sampling_step(shape: Sequence[int]) -> int:
    """How many numbers of a tensor one that is counted stands for."""
    count = math.prod(shape)
    if count <= _WHOLE:
        return 1
    fit = [step for step in _STEPS if all(size % step for size in shape[1:])]
    return next((step for step in fit if count <= step * _WHOLE), fit[-1] if fit else 1)


def _extremes(flat: Tensor) -> tuple[float, int]:
    """The largest finite magnitude, and how many numbers are infinite or NaN."""
    low, high = flat.aminmax()
    largest = max(abs(float(low)), abs(float(high)))
    if math.isfinite(largest):  # aminmax hands NaN on
        return largest, 0
    finite = flat[flat.isfinite()]
    return (float(finite.abs().amax()) if finite.numel() else 0.0), flat.numel() - finite.numel()


def _bits_of(number: float) -> int:
    """The bits of a float32."""
    return int.from_bytes(struct.pack("<f", number), "little")


def key_of(tensor: Tensor) -> int:
    """Which storage a tensor has; its views have the same."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)  # sparse and other tensors without one storage


def storage_bytes(tensor: Tensor) -> int:
    """How large it is; 0 for a tensor without one."""
    try:
        return tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return 0
