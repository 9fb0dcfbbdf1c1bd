"""The operators of 2018 that toolkits call through `fused_adam_cuda`, on preamp's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import kernels
from . import _amp_c


@torch.no_grad()
def adam(
    p: Tensor, out_p: Tensor, m: Tensor, v: Tensor, g: Tensor, lr: float, beta1: float, beta2: float, eps: float,
    scale: float, step: int, eps_mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """One step of AdamW of 2018, in place, of a parameter `p` with moments `m` and `v`, by the gradient `g / scale`.

    Tensors of one shape; `g` may be 16-bit. `out_p`: gets the stepped parameter in its own dtype, unless it is empty.
    `step`: its number, from 1. Bias corrections multiply the rate. RuntimeError for `eps_mode=0`, eps inside the root.
    """
    if eps_mode == 0:
        raise RuntimeError("fused_adam_cuda.adam(eps_mode=0) is not here: write eps_mode=1, which adds eps to the root")
    factor = torch.full((), 1.0 / scale, dtype=torch.float32, device=p.device)
    step_lists([p], [g], [[m], [v]], factor, lr, (beta1, beta2), eps, step, bool(bias_correction), weight_decay)
    if out_p.numel():
        out_p.copy_(p)


def step_lists(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: _amp_c.Lists, factor: Tensor, lr: Any,
    betas: tuple[float, float], eps: float, step: int, bias_correction: bool, weight_decay: float,
) -> None:  # fmt: skip
    """The same for lists of tensors, by the gradients times `factor`, 0-d float32."""
    beta1, beta2 = betas
    rate = math.sqrt(1 - beta2**step) / (1 - beta1**step) if bias_correction else 1.0
    options = kernels.AdamOptions(
        lr=lr * rate, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=True, factor=factor
    )
    copies = [g.to(p.dtype, copy=True) for g, p in zip(grads, params, strict=True)]
    _amp_c.take(kernels.adam, options, params, copies, states, _amp_c.LATE)


def maybe_cast_mt(chunk_size: int, noop_flag: Tensor, tensor_lists: _amp_c.Lists) -> None:
    """Copy the first of two lists of tensors into the second, of other dtypes; nothing where `noop_flag` is set."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(torch.where(noop_flag.to(target.device) > 0, target, source.to(target.dtype)))
