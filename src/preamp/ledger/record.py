"""What is known of an optimizer's gradients between backward and step, and sums of them in float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from ..kernels import Reading, present_in
from ..parallel import Agreement
from .buckets import Collected
from .leaves import Leaves, dtype_of_gradient


@dataclass(slots=True)
class Record:
    """The result of reading an optimizer's gradients before its step, and the factor still to apply."""

    reading: Reading
    parameters: list[Parameter]  # of those gradients
    leaves: Leaves  # of all parameters of the optimizer
    inverse: Tensor | None = None  # 0-d float32 that unscales them; None: they are unscaled
    clip: Tensor | None = None  # 0-d float32, the clipping factor, applied in addition
    clipped: dict[int, int] = field(default_factory=dict)  # versions of the gradients that `clip` is for, by identity
    true: bool = False
    """Whether `inverse` and `clip` have been applied, so that user code may read and change them."""
    kept: list[Parameter] = field(default_factory=list)  # low ones in whose float32 gradients several losses add up
    norm: Tensor | None = None  # L2 norm of the true gradients before clipping, once requested
    collected: Collected | None = None
    """The lists that an optimizer of `preamp.optim` will step, if these were read instead of the gradients."""

    @property
    def present(self) -> list[Parameter]:
        """The parameters of the reading: of true gradients some may have been cleared before it."""
        return present_in(self.parameters)[0] if self.true else self.parameters

    @property
    def factor(self) -> Tensor | None:
        """The factor still to be applied to the gradients."""
        if self.true or self.inverse is None or self.clip is None:
            return None if self.true else (self.clip if self.inverse is None else self.inverse)
        return self.inverse * self.clip


@dataclass(slots=True)
class Owned:
    """What is known of an optimizer's parameters, as long as they are these."""

    parameters: list[Parameter]
    leaves: Leaves
    agreement: Agreement | None  # among ranks, that readings of their gradients need


@dataclass(slots=True)
class _Sum:
    value: Tensor
    shown: Tensor  # the 16-bit gradient shown for it: the same, rounded
    version: int


class WideSums(dict[Parameter, _Sum]):
    """The sums, by parameter. One holds as long as the parameter's gradient is what was shown for it."""

    def of(self, parameter: Parameter) -> Tensor:
        """A parameter's gradient in float32, to be written; it must have one."""
        grad = parameter.grad
        assert grad is not None
        known = self.get(parameter)
        if known is None:
            return grad.to(torch.float32, copy=True)  # of a parameter that was cast since, it may be float32
        if known.shown is grad and known.version == grad._version:
            return known.value
        low = known.value.to(grad.dtype)  # user code wrote into it: entries that still show the sum keep the sum
        return torch.where((grad == low) & (low != 0), known.value, grad.float())

    def show(self, parameter: Parameter, total: Tensor) -> None:
        """Set a parameter's gradient to this float32 one, rounded, and keep the sum."""
        parameter.grad = shown = total.to(dtype_of_gradient(parameter), copy=True)
        self[parameter] = _Sum(total, shown, shown._version)

    def forget(self, parameter: Parameter) -> bool:
        """Drop a parameter's sum; returns whether there was one."""
        return self.pop(parameter, None) is not None


def mark(gradients: Iterable[Tensor | None], name: str) -> None:
    """Give gradients a mark, which they lose by any change."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, name, gradient._version)


def is_marked(gradient: Tensor | None, name: str) -> bool:
    """Whether a gradient has a mark, and has not been changed since it got it."""
    return gradient is not None and bool(getattr(gradient, name, None) == gradient._version)
