"""PA202, measured: the gradients of a step against those of the same step in float32.

What is zero in float16 may have been zero before; only the step done again without casts tells. That is done for steps
that are looked at closely, where the parameters are float32 and products ran in float16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..formats import FP16
from ..report import Finding
from ._exponents import Exponents, count_exponents
from ._magnitudes import FLUSHED, SPARE_BITS
from ._patches import Patches

if TYPE_CHECKING:
    from ._watch import Watch

LOST = 0.25
"""Share of a weight's gradients that are flushed, from which it is reported."""
OFF, SOME = 0.1, 0.01
"""Relative error from which it is reported with less lost than that, and the least: rounding alone is off by 0.001."""
ALIKE = 0.5
"""Cosine below which the step done again is another step: it drew other random numbers."""
_SMALL = 16


@dataclass(frozen=True, slots=True)
class Underflow:
    """What float16 lost of one parameter's gradient."""

    module: str | None
    name: str
    """Of the parameter, with its module's path."""
    lost: float
    """Share of the values that are not zero in float32 and zero as they came, at the scale in use."""
    without_scale: float
    """Share that would be zero in float16 without a loss scale."""
    relative: float
    """||gradient - that in float32|| / ||that in float32||, L2."""
    window: tuple[int, int]
    """Exponents of the smallest and the largest scale that suit it."""
    is_vector: bool = False


def underflows(watch: Watch, loss: Tensor, scale: float, lying: float) -> list[Underflow] | None:
    """By parameter, the worst first; None where the step cannot be done again in float32.

    `scale`: on the loss in the backward pass; `lying`: on the gradients as they lie there now.
    """
    parameters = [p for p in watch.names.parameters() if p.grad is not None and p.grad.layout is torch.strided]
    if not parameters or any(p.dtype is not torch.float32 for p in parameters) or not watch.tape.knows(loss):
        return None
    exact = _in_full(watch, loss, parameters)
    if exact is None:
        return None
    found = []
    with torch.no_grad(), _disable_current_modes():
        for parameter, full in zip(parameters, exact, strict=True):
            grad = parameter.grad
            if full is None or grad is None or grad.numel() < _SMALL:
                continue
            came, full = grad.detach() / lying, full / scale  # the loss that went back was the scaled one
            norm = float(full.norm())
            if not norm or not math.isfinite(norm):
                continue
            both = float(came.norm()) * norm
            if both and float((came * full).sum()) / both < ALIKE:
                return None
            there = full != 0
            lost = float(((came == 0) & there).sum()) / max(int(there.sum()), 1)
            spread = Exponents.of(count_exponents(full).cpu())
            module, name = watch.names.parameter(parameter)
            relative = float((came - full).norm()) / norm
            found.append(Underflow(module, name, lost, spread.flushed(FP16), relative, _window(spread), grad.dim() < 2))
    return sorted(found, key=lambda one: (-one.lost, -one.relative))


def _window(spread: Exponents) -> tuple[int, int]:
    top = math.floor(math.log2(FP16.max / spread.largest)) - SPARE_BITS
    low = next((p for p in range(150) if spread.times(2.0**p).flushed(FP16) <= 10 * FLUSHED), 150)
    return min(low, top), top


def _in_full(watch: Watch, loss: Tensor, parameters: list[Any]) -> list[Tensor | None] | None:
    """Their gradients in float32, without a scale; nothing is left of the attempt."""
    patches = Patches()
    patches.wrap(torch.autocast, "__enter__", _switched_off)
    try:
        with watch.tape.done_again(watch.calls):
            again = watch.tape.replay(loss, full=True)
            return list(torch.autograd.grad(again, parameters, torch.ones_like(again), allow_unused=True))
    except Exception:  # a model that cannot be called a second time, or not in float32
        return None
    finally:
        patches.close()


def _switched_off(original: Any, region: Any) -> Any:
    """A region that the model enters by itself."""
    kept, region._enabled = region._enabled, False
    try:
        return original(region)
    finally:
        region._enabled = kept


def findings(found: list[Underflow], scale: float) -> Iterator[Finding]:
    """PA202 for each module that lost too much, by its worst parameter."""
    told: set[str | None] = set()
    # Beside a matrix a vector tells nothing: the gradient of a bias before a batch norm is zero but for rounding.
    with_matrix = {one.module for one in found if not one.is_vector}
    for one in found:
        if one.is_vector and one.module in with_matrix:
            continue
        if one.module in told or not (one.lost >= LOST or (one.relative >= OFF and one.lost >= SOME)):
            continue
        told.add(one.module)
        low, top = one.window
        good = min(max(16, low), top)
        yield Finding(
            "PA202", "warning",
            f"{one.lost:.0%} of the gradients of {one.name} that are not zero in float32 were flushed to zero by "
            f"float16 at a scale of {scale:g}; as a whole they are {min(one.relative, 1):.0%} off",
            module=one.module, direction="backward",
            evidence={"lost": round(one.lost, 3), "without a scale": round(one.without_scale, 3), "scale": scale,
                      "relative error": round(one.relative, 4), "scales that cure it": f"2**{low} to 2**{top}"},
            fix=f"scaler = torch.amp.GradScaler(init_scale=2.0**{good})",
        )  # fmt: skip
