"""Adam and AdamW: on float32 parameters or masters, on split masters, on bfloat16 by stochastic rounding."""

from __future__ import annotations

import torch

from .dispatch import Algorithm, dispatch
from .foreach import Gate, by_torch_fused, descend, gated, gradients_of, root, single
from .storage import AdamOptions, Storage, Tensors


def adam(storage: Storage, gradients: Tensors, o: AdamOptions) -> None:
    """One step of Adam, in place. States: first moments, second moments, and their maxima if `amsgrad`, else empty.

    `gradients`: float16, bfloat16 or float32, of the parameters' shapes; they may come back multiplied by the factor.
    Parameters are float32 (or float64), or 16-bit with gradients and states of their dtype; states of all others are
    float32. With `bits` they are the upper halves of float32 masters, which stay exact to the last bit. With
    `stochastic_rounding` bfloat16 ones are stepped in float32 and rounded up or down with the probabilities that keep
    the expected value, so that updates far below their precision are not lost. The random numbers are a function of
    `seed`, the step number, the tensor's position in the list and the element's position in memory.

    On the CPU the step of float32 parameters is bit for bit `torch.optim.Adam(fused=True)` on float32 gradients
    multiplied by the factor. Where Triton runs, there is one launch for each dtype of gradients, and one that
    computes the few numbers that all of them need.
    """
    dispatch(_ADAM, storage, gradients, o)


@gated
def _adam(storage: Storage, gradients: Tensors, o: AdamOptions, gate: Gate) -> None:
    params, (exp_avgs, exp_avg_sqs, *maxima), (beta1, beta2) = storage.params, storage.states, o.betas
    d = gradients_of(storage, gradients, o)
    p, m, v = gate.draft(params), gate.draft(exp_avgs), gate.draft(exp_avg_sqs)
    if o.weight_decay and o.decoupled_weight_decay:
        torch._foreach_mul_(p, single(1 - gate.rate * o.weight_decay))
    elif o.weight_decay:
        torch._foreach_add_(d, p, alpha=o.weight_decay)
    torch._foreach_lerp_(m, d, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, d, d, 1 - beta2)
    largest = v
    if o.amsgrad:
        largest = gate.draft(maxima[0])
        torch._foreach_maximum_(largest, v)
    below = torch._foreach_sqrt(largest)
    torch._foreach_div_(below, single(root(1 - beta2**gate.count)))
    torch._foreach_add_(below, o.eps)
    torch._foreach_copy_(d, m)  # the gradients' memory is free now
    torch._foreach_div_(d, below)
    descend(p, d, single(gate.rate / (1 - beta1**gate.count)))
    gate.commit((params, p), (exp_avgs, m), (exp_avg_sqs, v), *([(maxima[0], largest)] if o.amsgrad else []))


def _torch_fused(storage: Storage, gradients: Tensors, o: AdamOptions) -> None:
    by_torch_fused(
        storage, gradients, o, torch._fused_adamw_ if o.decoupled_weight_decay else torch._fused_adam_, lists=3,
        beta1=float(o.betas[0]), beta2=float(o.betas[1]), eps=o.eps, amsgrad=o.amsgrad,
    )  # fmt: skip


_ADAM = Algorithm(_adam, "elementwise.adam", ("_fused_adam_", _torch_fused))
