"""What the references share: skipping, the factor, float32 gradients, 16-bit copies.

Everything is computed in float32 (float64 for float64 parameters). On the CPU a flag is read at once, since that
costs nothing. Elsewhere learning rate and step count are 0-d tensors, and there is no host sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from .lists import flat, listed
from .storage import Options, Storage, Tensors

Number = Any  # a float, or a 0-d tensor

SLICE = 2**18
"""Elements that are cast, stepped and copied together on the CPU: few enough that the float32 copies of their gradients
stay in the cache, and in memory that the allocator reuses."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether a step may write, and the numbers that change from step to step."""

    flag: Tensor | None
    """0-d float32, exactly 0 or 1, or None if it is known that it may."""
    rate: Number = 0.0
    """The learning rate."""
    count: Number = 0
    """The number of steps, with this one."""

    def begin(self, step: Tensor | None) -> None:
        """Count a step; `settle` undoes that for a skipped one."""
        if step is not None:
            step.add_(1)

    def settle(self, step: Tensor | None) -> None:
        """Undo the count if the step was skipped."""
        if self.flag is not None and step is not None:
            step.sub_(self.flag)

    def write(self, into: Tensors, values: Tensors) -> None:
        """Copy `values` over `into` (rounded to nearest even, if narrower) unless the step is skipped."""
        if self.flag is None:
            if into:
                torch._foreach_copy_(list(into), list(values))
            return
        skip = self.flag > 0
        for old, new in zip(into, values, strict=True):
            old.copy_(torch.where(skip, old, new.to(old.dtype)))

    def draft(self, tensors: Tensors) -> list[Tensor]:
        """Tensors that a step may change in place: the tensors themselves if that is safe, else wide copies."""
        if self.flag is None and tensors and tensors[0].dtype not in LOW_DTYPES:
            return list(tensors)
        return [value.to(wide(value.dtype), copy=True) for value in tensors]

    def commit(self, *pairs: tuple[Tensors, list[Tensor]]) -> None:
        """Write drafts back, unless they are the tensors themselves."""
        for tensors, drafts in pairs:
            if tensors and tensors[0] is not drafts[0]:
                self.write(tensors, drafts)

    def publish(self, storage: Storage) -> None:
        """Round parameters into their 16-bit copies, if they have any."""
        if storage.copies:
            self.write(storage.copies, storage.params)


def gated(step: Callable[[Storage, Tensors, Any, Gate], None]) -> Callable[[Storage, Tensors, Any], None]:
    """A step that is left out if it is known to be skipped, and else counted, and rounded into the 16-bit copies."""

    @wraps(step)
    def counted(storage: Storage, gradients: Tensors, o: Options) -> None:
        device = storage.params[0].device
        gate = gate_of(device, o.found)
        if gate is None:
            return
        gate.begin(storage.step)
        count = 0 if storage.step is None else number_of(storage.step, device)
        step(storage, gradients, o, replace(gate, rate=number_of(o.lr, device), count=count))
        gate.settle(storage.step)
        gate.publish(storage)

    return counted


def gate_of(device: torch.device, found: Tensor | None) -> Gate | None:
    """The gate of a step, or None if the step is already known to be skipped."""
    if found is None:
        return Gate(None)
    if device.type == "cpu":
        return None if found.item() > 0 else Gate(None)
    return Gate((found.to(device) > 0).to(torch.float32))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float32 if dtype in LOW_DTYPES else dtype


def gradients_of(storage: Storage, gradients: Tensors, o: Options) -> list[Tensor]:
    """Wide copies of the gradients, multiplied by the factor, negated for `maximize`."""
    dtype = wide(storage.params[0].dtype)
    copies = [gradient.to(dtype, copy=True) for gradient in gradients]
    if o.factor is not None:
        torch._foreach_mul_(copies, o.factor.to(copies[0].device))
    if o.maximize:
        torch._foreach_neg_(copies)
    return copies


def number_of(value: float | Tensor, device: torch.device) -> Number:
    """A learning rate or a count: a float on the CPU, else a 0-d tensor on the device (float64 where there is one)."""
    if device.type == "cpu":
        return float(value)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return value.to(device, dtype) if isinstance(value, Tensor) else value


def root(value: Number) -> Number:
    """Square root of a number."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def single(value: Number) -> Number:
    """A number as foreach operators take it: 0-d tensors in float32."""
    return value.to(torch.float32) if isinstance(value, Tensor) else value


def descend(params: list[Tensor], updates: list[Tensor], rate: Number) -> None:
    """Subtract `rate` times the updates, whose memory is overwritten."""
    torch._foreach_mul_(updates, rate)
    torch._foreach_sub_(params, updates)


# -- for torch's fused operators, which need all tensors of a call in one dtype


def slices(storage: Storage, gradients: Tensors) -> Iterator[tuple[Storage, Tensors]]:
    """The lists in slices of about `SLICE` elements, longer tensors cut; whole, if nothing has to be cast.

    All tensors of a position must share one memory order.
    """
    params, copies = storage.params, storage.copies
    cast = copies or listed(gradients).dtypes.keys() != {params[0].dtype}
    if params[0].device.type != "cpu" or not cast:
        yield storage, gradients
        return
    begin, total = 0, 0
    for i, param in enumerate(params):
        size = param.numel()
        if total and total + size > SLICE:
            yield storage.at(slice(begin, i)), gradients[begin:i]
            begin, total = i, 0
        total += size
        if total > 2 * SLICE:  # the tensor alone
            yield from _cut(storage.at([i]), gradients[i])
            begin, total = i + 1, 0
    if begin == 0:
        yield storage, gradients
    elif begin < len(params):
        yield storage.at(slice(begin, None)), gradients[begin:]


def _cut(storage: Storage, gradient: Tensor) -> Iterator[tuple[Storage, Tensors]]:
    """The storage of one tensor in pieces, in memory order."""

    def pieces(tensors: Tensors | None) -> Tensors:
        return flat(tensors[0]).split(SLICE) if tensors else ()

    params, copies, states = pieces(storage.params), pieces(storage.copies), list(map(pieces, storage.states))
    for i, piece in enumerate(pieces([gradient])):
        own = [[state[i]] if state else [] for state in states]
        yield replace(storage, params=[params[i]], states=own, copies=[copies[i]] if copies else None), [piece]


def true_gradients(params: Tensors, gradients: Tensors, factor: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """Gradients in the dtype of `params`, and the divisor that torch's fused operators still have to apply, or None.

    Gradients are multiplied in float32. Those that are float32 already may be multiplied in place.
    """
    dtype, device = params[0].dtype, params[0].device
    ready = [gradient if gradient.dtype is dtype else gradient.to(dtype) for gradient in gradients]
    if factor is None:
        return ready, None
    if device.type != "cpu" or dtype in LOW_DTYPES:
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


def by_torch_fused(
    storage: Storage, gradients: Tensors, o: Options, operator: Any, *, lists: int, takes_step: bool = True,
    **settings: Any,
) -> None:  # fmt: skip
    """One step by torch's fused operator, which gets the flag if that is not on the host.

    `lists`: the number of lists of states that the operator takes. `takes_step`: whether it takes step counts.
    """
    gate = gate_of(storage.params[0].device, o.found)
    if gate is None:
        return
    gate.begin(storage.step)
    for part, own in slices(storage, gradients):
        ready, scale = true_gradients(part.params, own, o.factor)
        states = [*map(list, part.states), *[[]] * (lists - len(part.states))]
        counts = [[part.step] * len(ready)] if takes_step else []  # read only, so all may be one tensor
        operator(
            list(part.params), ready, *states, *counts, lr=o.lr, weight_decay=o.weight_decay,
            maximize=o.maximize, grad_scale=scale, found_inf=gate.flag, **settings,
        )  # fmt: skip
        gate.publish(part)
    gate.settle(storage.step)
