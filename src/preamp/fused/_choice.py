"""Where a step runs: Triton's kernel, torch's fused operator or plain operations, tensor by tensor if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import OptimizerError
from ..multi_tensor import count_writes, laid_out_like, listed, split_by_walk, triton_runs_on
from ._options import Lists, Lows
from ._stock import has_stock

_GRADS = {torch.float16, torch.bfloat16, torch.float32}

Way = Callable[[Lists, Lows, Any, Any], None]
"""Takes the lists, twins, the step tensor (None for an optimizer that counts nothing) and the options."""


def kernels_take(lists: Lists, *, low: bool = False) -> bool:
    """Whether Triton runs on the device, states are float32 (and parameters, unless `low`), gradients readable."""
    params, grads, *states = lists
    if not triton_runs_on(params[0].device):
        return False
    wide = states if low else [params, *states]
    return all(not tensors or tensors[0].dtype is torch.float32 for tensors in wide) and grads[0].dtype in _GRADS


def walks(lists: Lists, lows: Lows) -> tuple[list[int], list[int]] | None:
    """Positions whose parameter, states and twin lie in one order of memory, and the others; None if there are none.

    Gradients need not fit, they can be copied. `OptimizerError` where sizes differ: what walks memory asks nobody.
    """
    params, grads, *states = lists
    twins = [param if low is None else low for param, low in zip(params, lows, strict=True)] if lows else []
    sizes = list(map(Tensor.numel, params))
    if any(tensors and list(map(Tensor.numel, tensors)) != sizes for tensors in (grads, *states, twins)):
        raise OptimizerError(
            "gradients, states or twins have other numbers of elements than their parameters: each list holds one "
            "tensor for each parameter, of its shape"
        )
    return split_by_walk([tensors for tensors in (params, *states, twins) if tensors])


def carry_out(
    lists: Lists, lows: Lows, step: Tensor | None, o: Any, *, kernel: Callable[[], Way], stock: tuple[str, Way],
    plain: Way,
) -> None:  # fmt: skip
    """Step by the fastest way that these tensors allow.

    `kernel`: gives the way by Triton, which must not be imported before it is known to run. `stock`: the name of
    torch's operator, and the way by it. Tensors that those cannot walk go the `plain` way.
    """
    if kernels_take(lists):
        way = kernel()
    elif has_stock(stock[0], lists):
        way = stock[1]
    else:
        plain(lists, lows, step, o)
        return
    parted = None if o.contiguous else walks(lists, lows)
    if parted is not None:
        fit, rest = parted
        count = step.clone() if fit and step is not None else step  # each of the two ways counts the step
        plain(pick(lists, rest), pick_lows(lows, rest), count, o)
        if not fit:
            return
        lists, lows = pick(lists, fit), pick_lows(lows, fit)
    params, grads, *states = lists
    if not (o.contiguous and listed(grads).contiguous):
        grads = laid_out_like(params, grads)
    way([params, grads, *states], lows, step, o)
    if way is stock[1]:  # torch's fused operators count no write
        count_writes(params)


def pick(lists: Lists, places: Sequence[int]) -> Lists:
    """The tensors at `places` of each list; of an empty list none."""
    return [[tensors[i] for i in places] if tensors else [] for tensors in lists]


def pick_lows(lows: Lows, places: Sequence[int]) -> Lows:
    """The twins at `places`, if there are any."""
    return [lows[i] for i in places] if lows else None
