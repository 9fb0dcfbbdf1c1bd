"""Adam, SGD and Adagrad by torch's own fused operators, which want every tensor of a call in one dtype."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ._lists import LOW, gate_of, publish, slices, true_gradients
from ._options import AdagradOptions, AdamOptions, Lists, Lows, SGDOptions

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@cache
def _has_kernel(name: str, device_type: str) -> bool:
    if device_type not in ("cpu", "cuda"):  # elsewhere the meaning of a skipped step has not been checked
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", device_type.upper()))


def has_stock(name: str, lists: Lists) -> bool:
    """Whether torch's fused operator `name` takes these; the first tensor of each list speaks for the list.

    All are to have one dtype, save for gradients, which can be cast. The operators walk tensors in memory order
    whatever their strides, so that the caller has to see to it that it is the same (`multi_tensor.same_walk`).
    """
    params, _, *states = lists
    dtype = params[0].dtype
    same = all(not state or state[0].dtype is dtype for state in states)
    if name == "_fused_sgd_" and dtype in LOW and params[0].device.type == "cpu":
        return False  # torch 2.13 there leaves all but the last few elements of a 16-bit tensor as they are
    return same and dtype in _DTYPES and _has_kernel(name, params[0].device.type)


def adam(lists: Lists, lows: Lows, step: Tensor, o: AdamOptions) -> None:
    """One step of Adam or AdamW."""
    gate = gate_of(lists[0][0].device, o.found)
    if gate is None:
        return
    gate.bump(step)
    operator = torch._fused_adamw_ if o.decoupled else torch._fused_adam_
    for part, twins in slices(lists, lows, o.alike):
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = map(list, part)
        ready, scale = true_gradients(params, grads, o.factor, o.alike)
        operator(
            params, ready, exp_avgs, exp_avg_sqs, max_exp_avg_sqs,
            [step] * len(params),  # read only, so one tensor may stand for all
            lr=o.lr, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay, eps=o.eps, amsgrad=o.amsgrad,
            maximize=o.maximize, grad_scale=scale, found_inf=gate.flag,
        )  # fmt: skip
        publish(gate, params, twins)
    gate.settle(step)


def sgd(lists: Lists, lows: Lows, step: None, o: SGDOptions) -> None:
    """One step of gradient descent."""
    gate = gate_of(lists[0][0].device, o.found)
    if gate is None:
        return
    for part, twins in slices(lists, lows, o.alike):
        params, grads, momentum_buffers = map(list, part)
        ready, scale = true_gradients(params, grads, o.factor, o.alike)
        torch._fused_sgd_(
            params, ready, momentum_buffers, weight_decay=o.weight_decay, momentum=o.momentum, lr=o.lr,
            dampening=o.dampening, nesterov=o.nesterov, maximize=o.maximize,
            is_first_step=o.first and o.momentum != 0, grad_scale=scale, found_inf=gate.flag,
        )  # fmt: skip
        publish(gate, params, twins)


def adagrad(lists: Lists, lows: Lows, step: Tensor, o: AdagradOptions) -> None:
    """One step of Adagrad."""
    gate = gate_of(lists[0][0].device, o.found)
    if gate is None:
        return
    gate.bump(step)
    for part, twins in slices(lists, lows, o.alike):
        params, grads, sums = map(list, part)
        ready, scale = true_gradients(params, grads, o.factor, o.alike)
        torch._fused_adagrad_(
            params, ready, sums, [step] * len(params), lr=o.lr, lr_decay=o.lr_decay, weight_decay=o.weight_decay,
            eps=o.eps, maximize=o.maximize, grad_scale=scale, found_inf=gate.flag,
        )  # fmt: skip
        publish(gate, params, twins)
    gate.settle(step)
