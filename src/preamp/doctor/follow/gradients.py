"""What float16 lost of a step's gradients: seen beside their shadows, or told from what is left of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..findings.events import GradientSpread
from ..measure import spread_of, values_here
from ..names import Names
from ..shadow.values import Shadows, relative_error, share_lost

_SMALL = 16
"""Gradients of fewer values are not judged."""


def beside_shadows(
    given: Iterable[tuple[Tensor, Tensor | None]], shadows: Shadows, names: Names, scale: float
) -> dict[int, GradientSpread]:
    """Each parameter's gradient against what exact arithmetic gives, by the parameter's id; `scale`: on all of them.

    What is zero in float16 may have been zero before; only its shadow shows that. One that was computed while nothing
    was followed has none, and is left out.
    """
    found = {}
    for parameter, grad in given:
        if grad is None or grad.layout is not torch.strided or grad.numel() < _SMALL:
            continue
        came = values_here(grad.detach())
        exact = shadows.find(came)
        if exact is None or not bool(exact.isfinite().all()) or not bool(exact.any()):
            continue
        spread, vector = spread_of(exact / scale), grad.dim() < 2
        lost, off = share_lost(came, exact), relative_error(came, exact)
        found[id(parameter)] = GradientSpread(*names.parameter(parameter), spread, vector, lost, off)
    return found


def as_stored(names: Names, scale: float) -> list[GradientSpread]:
    """Gradients that are float16 or, where none is, all: they passed through it. `scale`: on them as they are now."""
    parameters = names.parameters()
    halves = [p for p in parameters if p.dtype is torch.float16]  # norms kept in float32 have float32 gradients
    found = []
    for parameter in halves or parameters:
        grad = parameter.grad
        if grad is not None and grad.layout is torch.strided and grad.numel() >= _SMALL:
            spread = spread_of(values_here(grad)).times(1 / scale)
            found.append(GradientSpread(*names.parameter(parameter), spread, parameter.dim() < 2))
    return found
