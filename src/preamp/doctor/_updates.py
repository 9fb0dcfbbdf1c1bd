"""PA202 and PA204 from the gradients and weights of one step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..formats import FP16, LOW_DTYPES, name_of
from ..report import Finding
from ._finite import values_here
from ._moments import Moments

if TYPE_CHECKING:
    from ._watch import Watch

LOST = 0.5
"""Share of the weights that a step leaves as they were, from which it is reported."""


class Updates:
    """Weights before and after a step, for those stepped in 16 bits."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._moments = Moments(watch)

    def before(self, optimizer: Optimizer, close: bool) -> None:
        """Keep the 16-bit weights that are about to be stepped, and which of them have a gradient, if `close`."""
        self._moments.before(optimizer, close)
        if not close:
            return
        self._before = [
            (p, values_here(p.detach()).clone(), values_here(p.grad) != 0)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.dtype in LOW_DTYPES and p.grad is not None and p.grad.layout is torch.strided
        ]

    def after(self, optimizer: Optimizer) -> Iterator[Finding]:
        """PA204, of the module with the largest share lost."""
        self._moments.after(optimizer)
        kept, self._before = self._before, []
        worst: tuple[float, Tensor] | None = None
        unmoved: list[Tensor] = []
        lost = total = 0
        for parameter, old, meant in kept:
            count = int(meant.sum())
            if not count or parameter.dtype not in LOW_DTYPES:
                continue
            same = int(((values_here(parameter.detach()) == old) & meant).sum())
            lost, total = lost + same, total + count
            if worst is None or same / count > worst[0]:
                worst = same / count, parameter
            if same / count >= LOST:
                unmoved.append(parameter)
        if worst is None or lost / total < LOST:
            return
        name = self._watch.names.parameter(worst[1])[1]
        file, line = self._watch.places.get(id(optimizer), (None, None))
        dtype = name_of(worst[1].dtype)
        yield Finding(
            "PA204", "warning",
            f"{lost / total:.0%} of the {total} weights with a gradient are after the step what they were before: "
            f"the update is less than half of what {dtype} can tell apart there",
            module=self._watch.names.common(unmoved), op=type(optimizer).__name__, file=file, line=line,
            evidence={"weights unchanged": round(lost / total, 3), "worst": name, "dtype": dtype,
                      "unchanged there": round(worst[0], 3)},
            fix="session = preamp.prepare(model.float(), optimizer, level='O5')  # float32 masters\n"
            "# or preamp.optim with stochastic rounding",
        )  # fmt: skip


def flushed(watch: Watch, scale: float) -> Iterator[Finding]:
    """PA202: gradients that passed through float16 and mostly fell below what it holds.

    What is zero in float16 may have been zero before. So a layer counts when many of its other gradients are
    subnormal in float16, under the scale that was on them: then as many again are below.
    """
    sick: dict[str | None, tuple[float, Tensor, float]] = {}
    empty: list[Tensor] = []
    lift = watch.scaling.scale_of_backward() / scale  # as they were when float16 held them, unscaled since or not
    scale = watch.scaling.scale_of_backward()
    parameters = watch.names.parameters()
    halves = [p for p in parameters if p.dtype is torch.float16]  # norms kept in float32 have float32 gradients
    with_matrix = {watch.names.owners.get(id(p)) for p in parameters if p.grad is not None and p.dim() > 1}
    for parameter in halves or parameters:
        grad = parameter.grad
        if grad is None or grad.layout is not torch.strided or grad.numel() < 16:
            continue
        if parameter.dim() < 2 and watch.names.owners.get(id(parameter)) in with_matrix:
            continue  # the gradient of a bias before a batch norm is zero but for rounding
        size = values_here(grad.detach()).float().abs() * lift
        some = size > 0
        count = int(some.sum())
        if count < 8:
            empty += [parameter] if not count and parameter.dim() > 1 else []
            continue
        low = int((some & (size < FP16.smallest_normal)).sum())
        share = low / count
        zeros = 1 - count / size.numel()
        if share > LOST and (zeros > 0.02 or share > 0.9):
            owner = watch.names.owners.get(id(parameter))
            if owner not in sick or share > sick[owner][0]:
                sick[owner] = share, parameter, float(size.max())
    for share, weight, top in sick.values():
        yield _flushed_in(watch, weight, share, top, scale)
    for weight in empty if sick else ():
        module, name = watch.names.parameter(weight)
        yield Finding(
            "PA202", "warning",
            f"the gradient of {name} is zero throughout at a scale of {scale:g}, and those of other layers are barely "
            "above what float16 holds",
            module=module, direction="backward", evidence={"zero": 1.0, "scale": scale},
            fix="scaler = torch.amp.GradScaler()  # begins at 2**16 and finds the largest scale that fits",
        )  # fmt: skip


def _flushed_in(watch: Watch, parameter: Tensor, share: float, top: float, scale: float) -> Finding:
    module, name = watch.names.parameter(parameter)
    room = FP16.max / top / 4
    power = math.floor(math.log2(room))
    lowest = math.ceil(math.log2(FP16.smallest_normal / top * 2**6))
    return Finding(
        "PA202", "warning",
        f"{share:.0%} of the gradients of {name} that are not zero are subnormal in float16 at a scale of {scale:g}; "
        "smaller ones are flushed to zero",
        module=module, direction="backward",
        evidence={"subnormal": round(share, 3), "largest magnitude": top, "scale": scale,
                  "scales that cure it": f"2**{max(lowest, 0) + _log2(scale)} to 2**{power + _log2(scale)}"},
        fix=f"scaler = torch.amp.GradScaler(init_scale=2.0**{_usual(lowest + _log2(scale), power + _log2(scale))})",
    )  # fmt: skip


def _log2(scale: float) -> int:
    return round(math.log2(scale))


def _usual(low: int, high: int) -> int:
    """The exponent nearest to 16, where torch's scaler begins, of those that cure it."""
    return min(max(16, low), high)
