"""Whether somebody else has cleared or written the model's 16-bit gradients, which the optimizer's masters do not see.

Loops of others clear those to give a step up, or write new ones by a backward pass without `scale_loss`. So amp notes
which versions of them it has left there.
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

    def accept(self, parameters: Sequence[Parameter]) -> None:
        """Take the gradients that amp has left for what they are now."""
        for gradient in map(_GRAD, parameters):
            if hasattr(gradient, _SEEN):
                gradient._amp_seen_version = gradient._version

    def update_masters(self, parameters: Sequence[Parameter], masters: Sequence[Parameter], stepping: bool) -> bool:
        """Clear the masters' gradients whose parameters' were cleared, by whichever call.

        Returns whether others were changed since amp left them, of which no master learns.

        `stepping`: the step comes next. Where all are None before it, somebody saves memory, and the masters' stay;
        otherwise the pass is given up. Zeros clear nothing then: clipping makes them of gradients whose norm is beyond
        float16. RuntimeError for gradients that came from a backward pass elsewhere.
        """
        gradients = list(map(_GRAD, parameters))
        with suppress(AttributeError):  # of one that is not there, or was never seen
            if list(map(attrgetter(_SEEN), gradients)) == list(map(_VERSION, gradients)):
                return False
        had = [*self._had, *[False] * (len(parameters) - len(self._had))]
        odd = [g for g in gradients if g is not None and getattr(g, _SEEN, None) != g._version]
        zeros = {id(gradient) for gradient in odd if not gradient.numel()} | _zeros(odd)
        gone = set() if stepping else zeros
        cleared = [(p, m) for p, m, h in zip(parameters, masters, had, strict=True) if h and _is_cleared(p, gone)]
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
        return any(
            h and g is not None and getattr(g, _SEEN, None) != g._version for g, h in zip(gradients, had, strict=True)
        )


def _is_cleared(parameter: Parameter, zeros: set[int]) -> bool:
    return parameter.grad is None or id(parameter.grad) in zeros


def _zeros(gradients: Sequence[Tensor]) -> set[int]:
    """Which gradients were zeroed. Waits for the device, if there are any to look at.

    None, if they are products with zero, which keep signs: clipping leaves them, and gives nothing up.
    """
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided and gradient.numel()]
    if not dense:
        return set()
    largest = torch.stack([norm.to(dense[0].device) for norm in torch._foreach_norm(dense, float("inf"))])
    zeros = [gradient for gradient, size in zip(dense, largest.tolist(), strict=True) if size == 0]
    return set() if any(bool(torch.signbit(each).any()) for each in zeros) else set(map(id, zeros))
