"""The steps as plain operations over lists, for whatever torch has no fused operator for.

Everything is computed in float32 (float64 for float64 parameters). Learning rate and step count are numbers on the
CPU and 0-d tensors elsewhere, so that nothing waits for an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._lists import LOW, Gate, gate_of, publish
from ._options import AdagradOptions, AdamOptions, Lists, Lows, Options, SGDOptions

Drafts = list[Tensor]
Number = Any  # a float, or a 0-d tensor


def draft(gate: Gate, tensors: Sequence[Tensor]) -> Drafts:
    """What a step may work on in place: the tensors themselves where that is safe, else wide copies."""
    if gate.flag is None and tensors and tensors[0].dtype not in LOW:
        return list(tensors)
    return [value.to(wide(value.dtype), copy=True) for value in tensors]


def commit(gate: Gate, *pairs: tuple[Sequence[Tensor], Drafts]) -> None:
    """Write drafts back, unless they are the tensors themselves."""
    for tensors, drafts in pairs:
        if tensors and tensors[0] is not drafts[0]:
            gate.write(tensors, drafts)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in."""
    return torch.float32 if dtype in LOW else dtype


def gradients_of(params: Sequence[Tensor], grads: Sequence[Tensor], o: Options) -> Drafts:
    """Wide copies of the gradients, multiplied by the factor, pointing downhill."""
    dtype = wide(params[0].dtype)
    copies = [grad.to(dtype, copy=True) for grad in grads]
    if o.factor is not None:
        torch._foreach_mul_(copies, o.factor.to(copies[0].device))
    if o.maximize:
        torch._foreach_neg_(copies)
    return copies


def number_of(value: float | Tensor, device: torch.device) -> Number:
    """A learning rate or a count: a float on the CPU, else a 0-d tensor on the device (float64 where there is one)."""
    if device.type == "cpu":
        return float(value)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return value.to(device, dtype) if isinstance(value, Tensor) else value


def root(value: Number) -> Number:
    """Square root of a number."""
    return value.sqrt() if isinstance(value, Tensor) else math.sqrt(value)


def single(value: Number) -> Number:
    """A number as the lists take it: 0-d tensors in float32."""
    return value.to(torch.float32) if isinstance(value, Tensor) else value


def adam(lists: Lists, lows: Lows, step: Tensor, o: AdamOptions) -> None:
    """Adam, or AdamW if decoupled."""
    params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs = lists
    device = params[0].device
    gate = gate_of(device, o.found)
    if gate is None:
        return
    d = gradients_of(params, grads, o)
    p, m, v = draft(gate, params), draft(gate, exp_avgs), draft(gate, exp_avg_sqs)
    gate.bump(step)
    count, rate = number_of(step, device), number_of(o.lr, device)
    if o.weight_decay and o.decoupled:
        torch._foreach_mul_(p, single(1 - rate * o.weight_decay))
    elif o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_lerp_(m, d, 1 - o.beta1)
    torch._foreach_mul_(v, o.beta2)
    torch._foreach_addcmul_(v, d, d, 1 - o.beta2)
    largest = v
    if o.amsgrad:
        largest = draft(gate, max_exp_avg_sqs)
        torch._foreach_maximum_(largest, v)
    below = torch._foreach_sqrt(largest)
    torch._foreach_div_(below, single(root(1 - o.beta2**count)))
    torch._foreach_add_(below, o.eps)
    torch._foreach_copy_(d, m)  # the gradients' memory is free now
    torch._foreach_div_(d, below)
    descend(p, d, single(rate / (1 - o.beta1**count)))
    commit(gate, (params, p), (exp_avgs, m), (exp_avg_sqs, v), *([(max_exp_avg_sqs, largest)] if o.amsgrad else []))
    gate.settle(step)
    publish(gate, params, lows)


def descend(params: Drafts, updates: Drafts, rate: Number) -> None:
    """Subtract `rate` times the updates, which are used up."""
    torch._foreach_mul_(updates, rate)
    torch._foreach_sub_(params, updates)


def sgd(lists: Lists, lows: Lows, step: None, o: SGDOptions) -> None:
    """Gradient descent with momentum."""
    params, grads, momentum_buffers = lists
    gate = gate_of(params[0].device, o.found)
    if gate is None:
        return
    p, d = draft(gate, params), gradients_of(params, grads, o)
    if o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    if o.momentum:
        b = draft(gate, momentum_buffers)
        if o.first:
            torch._foreach_copy_(b, d)
        else:
            torch._foreach_mul_(b, o.momentum)
            torch._foreach_add_(b, d, alpha=1 - o.dampening)
        if o.nesterov:
            torch._foreach_add_(d, b, alpha=o.momentum)
        else:
            torch._foreach_copy_(d, b)
        commit(gate, (momentum_buffers, b))
    descend(p, d, single(number_of(o.lr, params[0].device)))
    commit(gate, (params, p))
    publish(gate, params, lows)


def adagrad(lists: Lists, lows: Lows, step: Tensor, o: AdagradOptions) -> None:
    """Adagrad."""
    params, grads, sums = lists
    device = params[0].device
    gate = gate_of(device, o.found)
    if gate is None:
        return
    p, s, d = draft(gate, params), draft(gate, sums), gradients_of(params, grads, o)
    rate = number_of(o.lr, device) / (1 + number_of(step, device) * o.lr_decay)
    gate.bump(step)
    if o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_addcmul_(s, d, d)
    below = torch._foreach_sqrt(s)
    torch._foreach_add_(below, o.eps)
    torch._foreach_div_(d, below)
    descend(p, d, single(rate))
    commit(gate, (params, p), (sums, s))
    gate.settle(step)
    publish(gate, params, lows)
