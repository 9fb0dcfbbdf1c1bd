"""Reading gradients by Triton kernels. Imports Triton, so import it only where `triton_runs_on`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..multi_tensor import TensorList, listed, parts_of, walkable
from . import _kernels

BLOCK = 1024
"""Elements read at a time."""
SHORT = 2 * BLOCK
"""Elements of one program."""
LONG = 16 * BLOCK
"""The same when there is work for all processors: fewer programs, fewer numbers to put together."""
MANY = 2**23
"""From so many entries on programs are long."""

KINDS = {torch.float16: (0, tl.int16, 4), torch.bfloat16: (1, tl.int16, 4), torch.float32: (2, tl.int32, 8)}
"""How a dtype is read: the kernel's name for it, the integer of its size, and warps. A thread then takes 16 bytes."""


class Numbers(NamedTuple):
    """What one reading found; all on the gradients' device."""

    found: Tensor
    """0-d float32: 1 if some entry is inf or nan, else 0."""
    norm: Tensor
    """0-d float32: L2 norm of all entries."""
    nonfinite: Tensor
    """(number of gradients,) bool: which have an entry that is inf or nan."""
    amax: Tensor
    """0-d float32: the largest magnitude; inf or nan if `found`."""
    counts: Tensor | None
    """(2,) int64: how many entries are not 0 and below `tiny`, and how many are 0; None where these were not asked."""


def readable(gradients: Sequence[Tensor]) -> bool:
    """Whether `read` takes them: strided, of float16, bfloat16 or float32, all on one device."""
    own = listed(gradients)
    return own.strided and own.together and own.dtypes.keys() <= KINDS.keys()


def read(gradients: Sequence[Tensor], tiny: float | None) -> Numbers:
    """Read every entry of `gradients` (one at least, `readable`) once.

    `tiny`: entries that are not 0 and below it in magnitude are counted as subnormal, and zeros as such; None: nothing
    is counted, which a GPU would spend a quarter of the time on. A finite float32 or bfloat16
    entry does not overflow the norm, whatever its square is. One launch for each dtype, and one to finish; views that
    do not fill their memory are copied first.
    """
    device = gradients[0].device
    dense = own = listed(gradients)
    if not own.contiguous:
        dense = TensorList(gradient if walkable(gradient) else gradient.contiguous() for gradient in own)
    chunk = LONG if sum(own.sizes) >= MANY else SHORT
    dtypes = own.dtypes
    work = []
    for dtype in dtypes:
        places = [i for i, gradient in enumerate(dense) if gradient.dtype is dtype] if len(dtypes) > 1 else None
        chosen = dense if places is None else [dense[i] for i in places]
        work += [(dtype, part) for part in parts_of([chosen], chunk, places)]
    chunks = sum(part.plan.chunks for _, part in work)
    if not chunks:
        nothing = torch.zeros((), device=device)
        none = torch.zeros(len(dense), dtype=torch.bool, device=device)
        return Numbers(nothing, nothing, none, nothing, None if tiny is None else nothing.to(torch.int64).expand(2))

    squares = torch.empty(chunks, dtype=torch.float64, device=device)
    tops = torch.empty(chunks, dtype=torch.float32, device=device)
    floats = torch.empty(3, dtype=torch.float32, device=device)
    lows = zeros = counts = None
    if tiny is not None:
        lows, zeros = torch.empty((2, chunks), dtype=torch.int32, device=device).unbind()
        counts = torch.empty(2, dtype=torch.int64, device=device)
    covered = sum(part.plan.tensors for _, part in work) == len(dense)
    flags = (torch.empty if covered else torch.zeros)(len(dense), dtype=torch.uint8, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        base = 0
        for dtype, part in work:
            plan, (kind, integer, warps) = part.plan, KINDS[dtype]
            _kernels.read[(plan.chunks,)](
                plan.tensor_of, plan.block_of, plan.sizes, part.table, plan.tensors,
                0 if tiny is None else _integer_of(tiny, dtype), base, squares, tops, lows, zeros,
                KIND=kind, INTEGER=integer, COUNTS=tiny is not None, ALIGNED=part.aligned, CHUNK=plan.chunk,
                BLOCK=BLOCK, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
            base += plan.chunks
        base = 0
        for i, (_, part) in enumerate(work):
            plan, last = part.plan, i == len(work) - 1
            _kernels.finish[(plan.tensors + last,)](
                plan.first, part.table, plan.tensors, base, chunks, squares, tops, lows, zeros, flags, floats, counts,
                COUNTS=tiny is not None, BLOCK=1024, num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            base += plan.chunks
    found, norm, amax = floats.unbind()
    return Numbers(found, norm, flags.view(torch.bool), amax, counts)


@lru_cache
def _integer_of(tiny: float, dtype: torch.dtype) -> int:
    """The integer that stands for the smallest number of `dtype` above 0 that is not below `tiny`."""
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    nearest = torch.tensor(tiny, dtype=torch.float64, device="cpu").to(dtype)
    return max(1, int(nearest.view(integer)) + (float(nearest) < tiny))
