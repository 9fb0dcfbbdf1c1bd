"""Gradient descent with momentum, and Adagrad."""

from __future__ import annotations

import torch

from .dispatch import Algorithm, dispatch
from .foreach import Gate, by_torch_fused, descend, gated, gradients_of, single
from .storage import AdagradOptions, SGDOptions, Storage, Tensors


def sgd(storage: Storage, gradients: Tensors, o: SGDOptions) -> None:
    """One step of stochastic gradient descent, in place. States: momentum buffers, empty if `momentum` is 0.

    Parameters, states and gradients are as in `adam.adam`. `step` is needed for random numbers, and else may be None.
    """
    dispatch(_SGD, storage, gradients, o)


def adagrad(storage: Storage, gradients: Tensors, o: AdagradOptions) -> None:
    """One step of Adagrad, in place. States: the sums of the squares of all gradients so far.

    Parameters, states and gradients are as in `adam.adam`.
    """
    dispatch(_ADAGRAD, storage, gradients, o)


@gated
def _sgd(storage: Storage, gradients: Tensors, o: SGDOptions, gate: Gate) -> None:
    p, d = gate.draft(storage.params), gradients_of(storage, gradients, o)
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
    descend(p, d, single(gate.rate))
    gate.commit((storage.params, p))


@gated
def _adagrad(storage: Storage, gradients: Tensors, o: AdagradOptions, gate: Gate) -> None:
    params, (sums,) = storage.params, storage.states
    p, s, d = gate.draft(params), gate.draft(sums), gradients_of(storage, gradients, o)
    if o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_addcmul_(s, d, d)
    below = torch._foreach_sqrt(s)
    torch._foreach_add_(below, o.eps)
    torch._foreach_div_(d, below)
    descend(p, d, single(gate.rate / (1 + (gate.count - 1) * o.lr_decay)))
    gate.commit((params, p), (sums, s))


def _sgd_torch_fused(storage: Storage, gradients: Tensors, o: SGDOptions) -> None:
    by_torch_fused(
        storage, gradients, o, torch._fused_sgd_, lists=1, takes_step=False, momentum=o.momentum,
        dampening=o.dampening, nesterov=o.nesterov, is_first_step=o.first and bool(o.momentum),
    )  # fmt: skip


def _adagrad_torch_fused(storage: Storage, gradients: Tensors, o: AdagradOptions) -> None:
    by_torch_fused(storage, gradients, o, torch._fused_adagrad_, lists=1, lr_decay=o.lr_decay, eps=o.eps)


_SGD = Algorithm(_sgd, "elementwise.sgd", ("_fused_sgd_", _sgd_torch_fused))
_ADAGRAD = Algorithm(_adagrad, "elementwise.adagrad", ("_fused_adagrad_", _adagrad_torch_fused))
