"""Gradient descent with momentum, and Adagrad."""

from __future__ import annotations

import torch

from .dispatch import Backend, Backends, dispatch
from .foreach import by_torch_fused, descend, gate_of, gradients_of, number_of, single
from .rounding import Kinds
from .storage import AdagradOptions, SGDOptions, Storage, Tensors


def sgd(storage: Storage, gradients: Tensors, o: SGDOptions) -> None:
    """One step of stochastic gradient descent, in place. States: momentum buffers, empty if `momentum` is 0.

    Parameters, states and gradients are as in `adam.adam`. `step` is needed for random numbers, and else may be None.
    """
    if storage.params:
        _SGD.dispatch(storage, gradients, o)


def adagrad(storage: Storage, gradients: Tensors, o: AdagradOptions) -> None:
    """One step of Adagrad, in place. States: the sums of the squares of all gradients so far.

    Parameters, states and gradients are as in `adam.adam`.
    """
    if storage.params:
        dispatch(storage, gradients, o, _ADAGRAD)


def _sgd(storage: Storage, gradients: Tensors, o: SGDOptions) -> None:
    params = storage.params
    gate = gate_of(params[0].device, o.found)
    if gate is None:
        return
    p, d = gate.draft(params), gradients_of(storage, gradients, o)
    if o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    if o.momentum:
        b = gate.draft(storage.states[0])
        if o.first:
            torch._foreach_copy_(b, d)
        else:
            torch._foreach_mul_(b, o.momentum)
            torch._foreach_add_(b, d, alpha=1 - o.dampening)
        if o.nesterov:
            torch._foreach_add_(d, b, alpha=o.momentum)
        else:
            torch._foreach_copy_(d, b)
        gate.commit((storage.states[0], b))
    descend(p, d, single(number_of(o.lr, params[0].device)))
    gate.commit((params, p))
    gate.count(storage.step)
    gate.settle(storage.step)
    gate.publish(storage)


def _adagrad(storage: Storage, gradients: Tensors, o: AdagradOptions) -> None:
    params, (sums,), step = storage.params, storage.states, storage.step
    device = params[0].device
    gate = gate_of(device, o.found)
    if gate is None:
        return
    assert step is not None
    p, s, d = gate.draft(params), gate.draft(sums), gradients_of(storage, gradients, o)
    rate = number_of(o.lr, device) / (1 + number_of(step, device) * o.lr_decay)
    gate.count(step)
    if o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_addcmul_(s, d, d)
    below = torch._foreach_sqrt(s)
    torch._foreach_add_(below, o.eps)
    torch._foreach_div_(d, below)
    descend(p, d, single(rate))
    gate.commit((params, p), (sums, s))
    gate.settle(step)
    gate.publish(storage)


def _sgd_torch_fused(storage: Storage, gradients: Tensors, o: SGDOptions) -> None:
    by_torch_fused(
        storage, gradients, o, torch._fused_sgd_, lists=1, takes_step=False, momentum=o.momentum,
        dampening=o.dampening, nesterov=o.nesterov, is_first_step=o.first and bool(o.momentum),
    )  # fmt: skip


def _adagrad_torch_fused(storage: Storage, gradients: Tensors, o: AdagradOptions) -> None:
    by_torch_fused(storage, gradients, o, torch._fused_adagrad_, lists=1, lr_decay=o.lr_decay, eps=o.eps)


def _sgd_kernel() -> Backend:
    from .triton import elementwise

    return elementwise.sgd


def _adagrad_kernel() -> Backend:
    from .triton import elementwise

    return elementwise.adagrad


_SGD = Kinds(Backends(_sgd, _sgd_kernel, ("_fused_sgd_", _sgd_torch_fused)))
_ADAGRAD = Backends(_adagrad, _adagrad_kernel, ("_fused_adagrad_", _adagrad_torch_fused))
