"""Whether somebody else has cleared or written the model's 16-bit gradients, which the optimizer's masters do not see.

Loops of others clear those to give a step up, or write new ones by a backward pass without `scale_loss`. So amp notes
which versions of them it has left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter

import torch
from torch.nn import Parameter

_GRAD, _VERSION = attrgetter("grad"), attrgetter("_version")
_SEEN, _ZEROED = "_amp_seen_version", "_amp_zeroed_version"
"""Marks on a gradient, by amp and by a model's `zero_grad`: a reference would keep memory that a script has freed."""


class GradientVersions:
    """The gradients of a list of parameters as amp left them."""

    def __init__(self) -> None:
        self._had = set[int]()  # ids of parameters

    def record(self, parameters: Sequence[Parameter]) -> None:
        """Note the gradients as they are now."""
        self._had = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for gradient in map(_GRAD, parameters):
            if gradient is not None:
                gradient._amp_seen_version = gradient._version

    def update_masters(self, parameters: Sequence[Parameter], masters: Sequence[Parameter], stepping: bool) -> bool:
        """Clear the masters' gradients whose parameters' were cleared: made None, or zeroed by the model's `zero_grad`.

        Returns whether others were changed since amp left them, of which no master learns: other zeros may come from
        clipping, and nothing tells them from those of a loop that clears by hand.

        `stepping`: the step comes next. Where all are None before it, somebody saves memory, and the masters' stay;
        otherwise the pass is given up. Zeros clear nothing then. RuntimeError for gradients that came from a backward
        pass elsewhere.
        """
        gradients = list(map(_GRAD, parameters))
        with suppress(AttributeError):  # of one that is not there, or was never seen
            if list(map(attrgetter(_SEEN), gradients)) == list(map(_VERSION, gradients)):
                return False
        had = [id(parameter) in self._had for parameter in parameters]
        zeroed = [not stepping and g is not None and getattr(g, _ZEROED, None) == g._version for g in gradients]
        cleared = [h and (g is None or zero) for h, g, zero in zip(had, gradients, zeroed, strict=True)]
        whole = any(cleared) and cleared == had
        for master, gone in zip(masters, cleared, strict=True) if not (stepping and whole) else ():
            if gone or whole:
                master.grad = None
        changed = [
            (g, master)
            for g, zero, master in zip(gradients, zeroed, masters, strict=True)
            if g is not None and not zero and getattr(g, _SEEN, None) != g._version and g.numel()
        ]
        for gradient, master in changed:
            known = hasattr(gradient, _SEEN) and master.grad is not None
            if not known and (gradient.layout is not torch.strided or bool(gradient.any())):
                raise RuntimeError(
                    f"a gradient of a 16-bit parameter of shape {tuple(gradient.shape)} was written outside of "
                    "amp.scale_loss for this optimizer, which steps float32 masters that do not have it: it would be "
                    "lost. Write `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()` for every "
                    "backward pass, with all optimizers that are to step for it; change gradients through "
                    "amp.master_params(optimizer); and clear what another loss left with optimizer.zero_grad()"
                )
        return any(master.grad is not None for _, master in changed)
