"""One step over a list of parameters of any mixture: sorted by device and dtype, then handed to `preamp.kernels`.

Every step is in place and computed in float32 (float64 for float64 parameters), whatever the parameters are stored in.
16-bit parameters with a master step the master and get it rounded; those without are widened for the length of the
call, stepped, and rounded back once. `found` is a 0-d float32 flag on the device: above 0 nothing is written. `factor`
multiplies the gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from ...formats import LOW_DTYPES
from ...kernels import Options, Storage

Lists = Sequence[Sequence[Tensor]]
Masters = Sequence[Tensor | None] | None

WIDENED = 2**26
"""Elements of 16-bit parameters that are held in float32 at a time: the copies take 256 MiB at most, if no single
parameter is larger."""
WIDENED_ON_CPU = 2**18
"""The same on a CPU, where the copies should stay in the cache."""

LATE = 2**31
"""A step at which Adam's bias corrections are 1 to the last bit: what `bias_correction=False` means."""


def storages(
    params: Sequence[Tensor], states: Lists, step: int | Tensor | None = None, masters: Masters = None
) -> Iterator[tuple[list[int], Storage]]:
    """(positions, storage) of parameters that one call of a kernel can step.

    `states`: an empty list is a state that the kernel does without. `step`: the number of this step, from 1; a tensor
    is read on the device.
    """
    masters = [None] * len(params) if masters is None else masters
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, (param, master) in enumerate(zip(params, masters, strict=True)):
        kept = tuple(state[i].dtype for state in states if state)
        alike[param.device, param.dtype, master is not None, kept].append(i)
    for (device, dtype, mastered, _), places in alike.items():
        widened = dtype in LOW_DTYPES and not mastered
        for part in _parts(params, places) if widened else [places]:
            own = [params[i] for i in part]
            targets = [param.detach().float() for param in own] if widened else own
            if mastered:
                targets = [master for i in part if (master := masters[i]) is not None]
            lists = [[state[i] for i in part] if state else [] for state in states]
            taken = None if step is None else _taken(step, device)
            yield part, Storage(targets, lists, taken, own if widened or mastered else None)


def _parts(params: Sequence[Tensor], places: list[int]) -> Iterator[list[int]]:
    """Parameters to widen at a time."""
    limit = WIDENED_ON_CPU if params[places[0]].device.type == "cpu" else WIDENED
    begin, total = 0, 0
    for end, place in enumerate(places):
        size = params[place].numel()
        if total and total + size > limit:
            yield places[begin:end]
            begin, total = end, 0
        total += size
    yield places[begin:]


def _taken(step: int | Tensor, device: torch.device) -> Tensor:
    """How many steps were taken before this one, 0-d float32 on the device."""
    if isinstance(step, Tensor):
        return step.reshape(()).to(device, torch.float32) - 1
    return torch.full((), step - 1, dtype=torch.float32, device=device)


@torch.no_grad()
def take(
    kernel: Callable[[Storage, Any, Any], None], options: Options, params: Sequence[Tensor], grads: Sequence[Tensor],
    states: Lists, *, step: int | Tensor | None = None, masters: Masters = None, shrinks: bool = False,
) -> None:  # fmt: skip
    """One step by one of the kernels. `shrinks`: weight decay is taken off the parameters before, by no gradient."""
    shrink = options.weight_decay if shrinks else 0.0
    options = replace(options, weight_decay=0.0) if shrinks else options
    for places, storage in storages(params, states, step, masters):
        if shrink:
            _shrink(list(storage.params), options.lr, shrink, options.found)
        kernel(storage, [grads[i] for i in places], options)


def _shrink(params: list[Tensor], lr: float | Tensor, weight_decay: float, found: Tensor | None) -> None:
    """Multiply parameters by 1 - lr * weight_decay, unless `found`."""
    device = params[0].device
    keep = 1 - (lr.to(device) if isinstance(lr, Tensor) else lr) * weight_decay
    if found is not None:
        keep = torch.where(found.to(device) > 0, 1.0, torch.as_tensor(keep, dtype=torch.float32, device=device))
    torch._foreach_mul_(params, keep)


def novograd(storage: Storage, gradients: Sequence[Tensor], options: Any) -> None:
    """`kernels.novograd` by running norms that lie in one tensor each, 0-d float32."""
    exp_avgs, shown = storage.states
    norms = torch.stack(list(shown))
    kernels.novograd(replace(storage, states=(exp_avgs, [norms])), gradients, options)
    torch._foreach_copy_(list(shown), norms.unbind())
