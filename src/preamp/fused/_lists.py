"""What the steps share on torch's own operators: the skip, the factor, float32 gradients, publishing.

On the CPU a flag is read at once, since its value is there; on an accelerator nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from ._options import Lists, Lows

_DTYPE = attrgetter("dtype")

LOW = (torch.float16, torch.bfloat16)

SLICE = 2**18
"""Elements that are cast, stepped and published together on the CPU: few enough that the float32 copies of their
gradients stay in the cache, and in memory that the allocator has at hand."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether a step may write. `flag`: 0-d float32, exactly 0 or 1, or None where it is known that it may."""

    flag: Tensor | None

    def bump(self, step: Tensor) -> None:
        """Count a step; a skipped one is taken back by `settle`."""
        step.add_(1)

    def settle(self, step: Tensor) -> None:
        """Take the count back if the step was skipped."""
        if self.flag is not None:
            step.sub_(self.flag)

    def write(self, into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Copy `values` over `into` (rounding to nearest even, if narrower) unless the step is skipped."""
        if self.flag is None:
            if into:
                torch._foreach_copy_(list(into), list(values))
            return
        skip = self.flag > 0
        for old, new in zip(into, values, strict=True):
            old.copy_(torch.where(skip, old, new.to(old.dtype)))


def gate_of(device: torch.device, found: Tensor | None) -> Gate | None:
    """The gate of a step, or None if it is known already that the step is skipped."""
    if found is None:
        return Gate(None)
    if device.type == "cpu":
        return None if found.item() > 0 else Gate(None)
    return Gate((found.to(device) > 0).to(torch.float32))


def slices(lists: Lists, lows: Lows, alike: bool) -> Iterator[tuple[Lists, Lows]]:
    """The lists in runs of about `SLICE` elements, longer tensors cut; whole, if nothing has to be cast.

    All tensors of a position must lie in memory in one order. `alike`: gradients are known to have the parameters'
    dtype.
    """
    params, grads, *_ = lists
    dtype = params[0].dtype
    if params[0].device.type != "cpu" or (not lows and (alike or set(map(_DTYPE, grads)) == {dtype})):
        yield lists, lows
        return
    begin, total = 0, 0
    for i, param in enumerate(params):
        size = param.numel()
        if total and total + size > SLICE:
            yield [tensors[begin:i] for tensors in lists], lows[begin:i] if lows else None
            begin, total = i, 0
        total += size
        if total > 2 * SLICE:  # the tensor alone
            flat = [tensors[i].as_strided((size,), (1,)).split(SLICE) if tensors else () for tensors in lists]
            low = lows[i] if lows else None
            twins = () if low is None else low.as_strided((size,), (1,)).split(SLICE)
            for j in range(len(flat[0])):
                yield [[cuts[j]] if cuts else [] for cuts in flat], [twins[j]] if twins else None
            begin, total = i + 1, 0
    if begin < len(params):
        yield [tensors[begin:] for tensors in lists], lows[begin:] if lows else None


def publish(gate: Gate, params: Sequence[Tensor], lows: Sequence[Tensor | None] | None) -> None:
    """Round float32 parameters into their low twins, where they have one."""
    if not lows:
        return
    if all(low is not None for low in lows):
        gate.write(lows, params)  # type: ignore[arg-type]
        return
    pairs = [(low, param) for low, param in zip(lows, params, strict=True) if low is not None]
    gate.write([low for low, _ in pairs], [param for _, param in pairs])


def true_gradients(
    params: Sequence[Tensor], grads: Sequence[Tensor], factor: Tensor | None, alike: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Gradients in the dtype of `params`, and what torch's fused operators still have to divide them by, or None.

    Gradients are multiplied in float32. Those that are float32 already may be multiplied in place.
    """
    dtype, device = params[0].dtype, params[0].device
    ready = list(grads) if alike else [grad if grad.dtype is dtype else grad.to(dtype) for grad in grads]
    if factor is None:
        return ready, None
    if device.type != "cpu" or dtype in LOW:
        # the operators divide in float32 and inside their one pass; a low gradient multiplied here would underflow
        return ready, factor.to(device, torch.float32).reciprocal()
    number = float(factor)
    if number == 1.0:
        return ready, None
    inverse = 1.0 / number if number else math.inf
    if math.isfinite(inverse) and abs(math.frexp(number)[0]) == 0.5 and 2.0**-126 <= inverse <= 2.0**127:
        return ready, factor.reciprocal()  # dividing by a power of two gives the same bits, and saves a pass
    torch._foreach_mul_(ready, factor)
    return ready, None
