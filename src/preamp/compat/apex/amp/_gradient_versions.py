"""Which versions of the model's 16-bit gradients amp knows: what was done to them since they were unscaled or cleared.

The optimizer steps masters, which have gradients of their own. Loops of others know the model's: they clear those to
give a step up, or write new ones by a backward pass without `scale_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")
_SEEN = "_amp_seen_version"
"""A mark on a gradient: a reference would keep its memory where a script has set it to None."""


class GradientVersions:
    """The gradients of a list of parameters as amp left them."""

    def __init__(self) -> None:
        self._had: list[bool] = []

    def record(self, parameters: Sequence[Parameter]) -> None:
        """Note the gradients as they are now."""
        gradients = list(map(_GRAD, parameters))
        self._had = [gradient is not None for gradient in gradients]
        for gradient in gradients:
            if gradient is not None:
                gradient._amp_seen_version = gradient._version

    def forget(self) -> None:
        """No gradient is there that could be cleared."""
        self._had = []

    def update_masters(self, parameters: Sequence[Parameter], masters: Sequence[Parameter], stepping: bool) -> None:
        """Clear the masters' gradients whose parameters' were cleared, by whichever call.

        `stepping`: the step comes next. Where all are None before it, somebody saves memory, and the masters' stay;
        otherwise the pass is given up. RuntimeError for gradients that came from a backward pass elsewhere.
        """
        gradients = list(map(_GRAD, parameters))
        with suppress(AttributeError):  # of one that is not there, or was never seen
            if list(map(attrgetter(_SEEN), gradients)) == list(map(_VERSION, gradients)):
                return
        had = [*self._had, *[False] * (len(parameters) - len(self._had))]
        odd = [g for g in gradients if g is not None and getattr(g, _SEEN, None) != g._version]
        zeros = {id(gradient) for gradient in odd if not gradient.numel()} | _zeros(odd)
        cleared = [(p, m) for p, m, h in zip(parameters, masters, had, strict=True) if h and _is_cleared(p, zeros)]
        whole = bool(cleared) and len(cleared) == sum(had)
        if not (stepping and whole and all(parameter.grad is None for parameter, _ in cleared)):
            for parameter, master in cleared:
                if parameter.grad is None or master.grad is None:
                    master.grad = None
                else:
                    master.grad.zero_()
            if whole:
                for master in masters:
                    master.grad = None
        for parameter, gradient, master in zip(parameters, gradients, masters, strict=True):
            if gradient is None or id(gradient) in zeros or getattr(gradient, _SEEN, None) == gradient._version:
                continue
            if not hasattr(gradient, _SEEN) or master.grad is None:
                raise RuntimeError(
                    f"a gradient of a 16-bit parameter of shape {tuple(parameter.shape)} was written outside of "
                    "amp.scale_loss for this optimizer, which steps float32 masters that do not have it: it would be "
                    "lost. Write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()` for every "
                    "backward pass, with all optimizers that are to step for it; change gradients through "
                    "amp.master_params(optimizer); and clear what another loss left with optimizer.zero_grad()"
                )


def _is_cleared(parameter: Parameter, zeros: set[int]) -> bool:
    return parameter.grad is None or id(parameter.grad) in zeros


def _zeros(gradients: Sequence[Tensor]) -> set[int]:
    """Which gradients hold nothing but zeros. Waits for the device, if there are any to look at."""
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided and gradient.numel()]
    if not dense:
        return set()
    largest = torch.stack([norm.to(dense[0].device) for norm in torch._foreach_norm(dense, float("inf"))])
    return {id(gradient) for gradient, size in zip(dense, largest.tolist(), strict=True) if size == 0}
