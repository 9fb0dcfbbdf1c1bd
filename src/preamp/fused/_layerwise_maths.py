"""LAMB and NovoGrad as plain operations over lists: the optimizers that need a norm of each tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..multi_tensor import l2_norms
from ._lists import gate_of, publish
from ._maths import Drafts, commit, descend, draft, gradients_of, number_of, root, single
from ._options import LambOptions, Lists, Lows, NovoGradOptions, Whole


def lamb(lists: Lists, lows: Lows, step: Tensor, o: LambOptions) -> None:
    """One step of LAMB."""
    params, grads, exp_avgs, exp_avg_sqs = lists
    device, (beta1, beta2) = params[0].device, o.betas
    gate = gate_of(device, o.found)
    if gate is None:
        return
    d = gradients_of(params, grads, o)
    p, m, v = draft(gate, params), draft(gate, exp_avgs), draft(gate, exp_avg_sqs)
    gate.bump(step)
    count, rate = number_of(step, device), single(number_of(o.lr, device))
    if o.max_grad_norm:
        norm = total_norm(d) if o.grad_norm is None else o.grad_norm.to(device)
        torch._foreach_div_(d, (norm / o.max_grad_norm).clamp_min(1.0))
    if o.weight_decay and not o.adam_w_mode:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=o.one_beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, 1 - beta2)
    below = torch._foreach_sqrt(v)
    if o.bias_correction:
        torch._foreach_div_(below, single(root(1 - beta2**count)))
    torch._foreach_add_(below, o.eps)
    updates = d  # the gradients' memory is free now
    torch._foreach_copy_(updates, m)
    if o.bias_correction:
        torch._foreach_div_(updates, single(1 - beta1**count))
    torch._foreach_div_(updates, below)
    if o.weight_decay and o.adam_w_mode:
        torch._foreach_add_(updates, p, alpha=o.weight_decay)
    if o.trusts:
        of_params, of_updates = _of_whole([norms(p), norms(updates)], o.whole)
        ratios = torch.where((of_params > 0) & (of_updates > 0), of_params / of_updates, 1.0)
        torch._foreach_mul_(updates, list(ratios.unbind()))
    descend(p, updates, rate)
    commit(gate, (params, p), (exp_avgs, m), (exp_avg_sqs, v))
    gate.settle(step)
    publish(gate, params, lows)


def novograd(lists: Lists, running: Tensor, lows: Lows, step: Tensor, o: NovoGradOptions) -> None:
    """One step of NovoGrad."""
    params, grads, exp_avgs = lists
    device, (beta1, beta2) = params[0].device, o.betas
    gate = gate_of(device, o.found)
    if gate is None:
        return
    d = gradients_of(params, grads, o)
    p, m = draft(gate, params), draft(gate, exp_avgs)
    now = _of_whole([norms(d, o.norm_type)], o.whole, o.norm_type)[0].to(torch.float32)
    before = torch.zeros_like(now) if o.init_zero else now
    before = torch.where(step > 0, running, before)
    if o.norm_type == 2:
        blended = (beta2 * before.square() + (1 - beta2) * now.square()).sqrt()
    else:
        blended = beta2 * before + (1 - beta2) * now
    gate.bump(step)
    count, rate = number_of(step, device), single(number_of(o.lr, device))
    unbiased = blended / single(root(1 - beta2**count)) if o.bias_correction else blended
    below = list((unbiased + o.eps).to(p[0].dtype).unbind())
    if o.reg_inside_moment:
        torch._foreach_div_(d, below)
        if o.weight_decay:
            torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=o.one_beta1)
    updates = d
    torch._foreach_copy_(updates, m)
    if o.bias_correction:
        torch._foreach_div_(updates, single(1 - beta1**count))
    if not o.reg_inside_moment:
        torch._foreach_div_(updates, below)
        if o.weight_decay:
            torch._foreach_add_(updates, p, alpha=o.weight_decay)
    descend(p, updates, rate)
    commit(gate, (params, p), (exp_avgs, m))
    gate.write([running], [blended])
    gate.settle(step)
    publish(gate, params, lows)


def norms(tensors: Drafts, order: int = 2) -> Drafts:
    """The norm of each tensor, 0-d; of order 2, or of any other number the largest magnitude. Of no numbers: 0."""
    if order == 2:
        return l2_norms(tensors)
    return [tensor.abs().amax() if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]


def _of_whole(parts: list[Drafts], whole: Whole | None, order: int = 2) -> list[Tensor]:
    """Norms of whole tensors, (tensors,) each, from `norms` of what lies here."""
    stacked = [torch.stack(one) for one in parts]
    if whole is None:
        return stacked
    numbers = torch.stack(stacked, 1).double()
    found = whole(numbers.square(), False).sqrt() if order == 2 else whole(numbers, True)
    return list(found.to(stacked[0].dtype).unbind(1))


def total_norm(tensors: Drafts) -> Tensor:
    """L2 norm of all tensors together, 0-d."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms(tensors)))
    return total
