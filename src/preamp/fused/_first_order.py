"""Gradient descent with momentum, and Adagrad."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from . import _maths, _stock
from ._choice import Way, carry_out
from ._options import AdagradOptions, Lows, SGDOptions


def sgd_(
    params: list[Tensor], grads: Sequence[Tensor], momentum_buffers: list[Tensor],
    lows: Lows, *, lr: float | Tensor, momentum: float, dampening: float,
    weight_decay: float, nesterov: bool, maximize: bool, first: bool,
    factor: Tensor | None = None, found: Tensor | None = None, contiguous: bool = False,
    alike: bool = False,
) -> None:  # fmt: skip
    """One step of stochastic gradient descent, in place; `torch.optim.SGD` defines what the numbers mean.

    `momentum_buffers`: one tensor a parameter, empty if `momentum` is 0. `first`: they hold nothing yet and become
    the gradient itself, without dampening. The rest is as in `adam_`.
    """
    if not params:
        return
    o = SGDOptions(
        lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
        maximize=maximize, first=first, factor=factor, found=found,
        contiguous=contiguous, alike=alike,
    )  # fmt: skip
    lists = [params, grads, momentum_buffers if momentum else []]
    carry_out(lists, lows, None, o, kernel=_sgd_kernel, stock=("_fused_sgd_", _stock.sgd), plain=_maths.sgd)


def adagrad_(
    params: list[Tensor], grads: Sequence[Tensor], sums: list[Tensor], lows: Lows,
    step: Tensor, *, lr: float | Tensor, lr_decay: float, weight_decay: float, eps: float, maximize: bool,
    factor: Tensor | None = None, found: Tensor | None = None, contiguous: bool = False,
    alike: bool = False,
) -> None:  # fmt: skip
    """One step of Adagrad (Duchi, Hazan and Singer 2011), in place.

    `sums`: the squares of all gradients so far. The learning rate of step t is lr / (1 + (t - 1) lr_decay). The rest
    is as in `adam_`.
    """
    if not params:
        return
    o = AdagradOptions(
        lr=lr,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
        factor=factor,
        found=found,
        contiguous=contiguous,
        alike=alike,
    )
    lists, stock = [params, grads, sums], ("_fused_adagrad_", _stock.adagrad)
    carry_out(lists, lows, step, o, kernel=_adagrad_kernel, stock=stock, plain=_maths.adagrad)


def _sgd_kernel() -> Way:
    from . import _triton

    return _triton.sgd


def _adagrad_kernel() -> Way:
    from . import _triton

    return _triton.adagrad
