"""LAMB and NovoGrad: Adam's relatives for large batches, which scale each tensor's update by norms."""

from __future__ import annotations

import torch
from torch import Tensor

from .foreach import Gate, descend, gated, gradients_of, root, single
from .norms import l2_norms
from .storage import LambOptions, NovoGradOptions, ShardSum, Storage, Tensors


def lamb(storage: Storage, gradients: Tensors, o: LambOptions) -> None:
    """One step of LAMB, in place. States: first moments, second moments. The rest is as in `adam.adam`.

    Raises `ValueError` for shards of tensors with `max_grad_norm` and no `grad_norm`.
    """
    if o.shard_sum is not None and o.max_grad_norm and o.grad_norm is None:
        raise ValueError("shards of tensors with max_grad_norm need grad_norm, the norm of all gradients together")
    if storage.params:
        _lamb(storage, gradients, o)


def novograd(storage: Storage, gradients: Tensors, o: NovoGradOptions) -> None:
    """One step of NovoGrad, in place. States: first moments, and [norms]. The rest is as in `adam.adam`.

    norms: (number of parameters,) float32, the running norm of each tensor's gradient, not its square; its value
    before the first step does not matter. Raises `ValueError` for a `norm_type` that is neither 2 nor 0.
    """
    if o.norm_type not in (0, 2):
        raise ValueError(f"norm_type is {o.norm_type!r}; write 2 for the L2 norm, 0 for the largest magnitude")
    if storage.params:
        _novograd(storage, gradients, o)


@gated
def _lamb(storage: Storage, gradients: Tensors, o: LambOptions, gate: Gate) -> None:
    params, (exp_avgs, exp_avg_sqs), (beta1, beta2) = storage.params, storage.states, map(float, o.betas)
    d = gradients_of(storage, gradients, o)
    p, m, v = gate.draft(params), gate.draft(exp_avgs), gate.draft(exp_avg_sqs)
    if o.max_grad_norm:
        norm = torch.linalg.vector_norm(torch.stack(_norms(d))) if o.grad_norm is None else o.grad_norm
        torch._foreach_div_(d, (norm.to(d[0].device) / o.max_grad_norm).clamp_min(1.0))
    if o.weight_decay and not o.adam_w_mode:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_mul_(m, beta1)
    torch._foreach_add_(m, d, alpha=o.one_beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, 1 - beta2)
    below = torch._foreach_sqrt(v)
    if o.bias_correction:
        torch._foreach_div_(below, single(root(1 - beta2**gate.count)))
    torch._foreach_add_(below, o.eps)
    updates = d  # the gradients' memory is free now
    torch._foreach_copy_(updates, m)
    if o.bias_correction:
        torch._foreach_div_(updates, single(1 - beta1**gate.count))
    torch._foreach_div_(updates, below)
    if o.weight_decay and o.adam_w_mode:
        torch._foreach_add_(updates, p, alpha=o.weight_decay)
    if o.trusts:
        of_params, of_updates = _of_whole([_norms(p), _norms(updates)], o.shard_sum)
        ratios = torch.where((of_params > 0) & (of_updates > 0), of_params / of_updates, 1.0)
        torch._foreach_mul_(updates, list(ratios.unbind()))
    descend(p, updates, single(gate.rate))
    gate.commit((params, p), (exp_avgs, m), (exp_avg_sqs, v))


@gated
def _novograd(storage: Storage, gradients: Tensors, o: NovoGradOptions, gate: Gate) -> None:
    params, (exp_avgs, (running,)), (beta1, beta2) = storage.params, storage.states, map(float, o.betas)
    d = gradients_of(storage, gradients, o)
    p, m = gate.draft(params), gate.draft(exp_avgs)
    now = _of_whole([_norms(d, o.norm_type)], o.shard_sum, o.norm_type)[0].to(torch.float32)
    before = torch.zeros_like(now) if o.init_zero else now
    before = torch.where(torch.as_tensor(gate.count > 1, device=now.device), running, before)
    if o.norm_type == 2:
        blended = (beta2 * before.square() + (1 - beta2) * now.square()).sqrt()
    else:
        blended = beta2 * before + (1 - beta2) * now
    unbiased = blended / single(root(1 - beta2**gate.count)) if o.bias_correction else blended
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
        torch._foreach_div_(updates, single(1 - beta1**gate.count))
    if not o.reg_inside_moment:
        torch._foreach_div_(updates, below)
        if o.weight_decay:
            torch._foreach_add_(updates, p, alpha=o.weight_decay)
    descend(p, updates, single(gate.rate))
    gate.commit((params, p), (exp_avgs, m))
    gate.write([running], [blended])


def _norms(tensors: list[Tensor], order: int = 2) -> list[Tensor]:
    """The norm of each tensor, 0-d: for order 2 the L2 norm, else the largest magnitude. Without entries: 0."""
    if order == 2:
        return l2_norms(tensors)
    return [tensor.abs().amax() if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]


def _of_whole(parts: list[list[Tensor]], shard_sum: ShardSum | None, order: int = 2) -> list[Tensor]:
    """Norms of whole tensors, (tensors,) each, from the `_norms` of this process's parts."""
    stacked = [torch.stack(one) for one in parts]
    if shard_sum is None:
        return stacked
    numbers = torch.stack(stacked, 1).double()
    found = shard_sum(numbers.square(), False).sqrt() if order == 2 else shard_sum(numbers, True)
    return list(found.to(stacked[0].dtype).unbind(1))
