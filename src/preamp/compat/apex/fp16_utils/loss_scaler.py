"""The loss scalers of manual mixed precision, which look at parameters and move when they are told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....kernels import check_and_unscale_
from .._notice import deprecated_warning
from .fp16util import to_python_float

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class _Scaler:
    """What both scalers have: a scale, the backward pass with it."""

    cur_scale: float

    @property
    def loss_scale(self) -> float:
        """The scale as it stands."""
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        """A backward hook of a module: its input's gradients times the scale."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """The backward pass of `loss` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class LossScaler(_Scaler):
    """A scale that never changes, and does not look for overflows."""

    def __init__(self, scale: float = 1) -> None:
        deprecated_warning(
            "fp16_utils.LossScaler is deprecated in Apex: with preamp.prepare, the loss scale is part of the session"
        )
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """False, whatever the gradients are."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Nothing changes."""


class DynamicLossScaler(_Scaler):
    """A scale that falls at an overflow and rises after a while without.

    `init_scale`: where it starts. An overflow divides it by `scale_factor`, not below 1; every `scale_window` updates
    after the last overflow multiply it by that.
    """

    def __init__(self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether some parameter's gradient has an entry that is inf or nan. Waits for the device."""
        return _any_bad([param.grad.detach() for param in params if param.grad is not None])

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return _any_bad([x])

    def update_scale(self, overflow: bool) -> None:
        """Move the scale by whether the gradients overflowed."""
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def _any_bad(grads: list[Tensor]) -> bool:
    # equal indices of sparse ones may add up to an overflow
    summed = [gradient if gradient.layout is torch.strided else gradient.coalesce() for gradient in grads]
    return bool(check_and_unscale_(summed, None).item())
