"""LAMB and NovoGrad: Adam's relatives for large batches, which scale each tensor's update by norms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..multi_tensor import laid_out_like
from . import _layerwise_maths
from ._choice import kernels_take, walks
from ._options import LambOptions, Lows, NovoGradOptions, Whole


def lamb_(
    params: list[Tensor], grads: Sequence[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    lows: Lows, step: Tensor, *, lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
    bias_correction: bool = True, grad_averaging: bool = True, adam_w_mode: bool = True,
    max_grad_norm: float | None = 1.0, use_nvlamb: bool = False, maximize: bool = False,
    factor: Tensor | None = None, found: Tensor | None = None, grad_norm: Tensor | None = None,
    whole: Whole | None = None,
) -> None:  # fmt: skip
    """One step of LAMB (You et al. 2020), in place, with the options of Apex's `FusedLAMB`.

    Gradients are first divided by max(1, their global norm / `max_grad_norm`) (None or 0: not). `grad_norm`: 0-d
    float32, that norm if it is known already (of the true gradients of all groups, say); else it is that of `grads`
    times `factor`. `grad_averaging`: a new gradient weighs 1 - beta1 in the first moment, else 1. `adam_w_mode`:
    weight decay is added to the update, else to the gradient. The update of a tensor is scaled by the trust ratio,
    norm of the parameter over norm of the update, unclipped; 1 where either is 0, and for all tensors without
    weight decay unless `use_nvlamb`. `whole`: where this process has parts of the tensors, what makes sums of squares
    over its parts those of the whole tensors; `grad_norm` is needed then. The rest is as in `adam_`.

    Raises `ValueError` for `whole` and `max_grad_norm` without `grad_norm`.
    """
    if whole is not None and max_grad_norm and grad_norm is None:
        raise ValueError("parts of tensors with max_grad_norm need grad_norm, the norm of all whole gradients together")
    if not params:
        return
    o = LambOptions(
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
        grad_averaging=grad_averaging, adam_w_mode=adam_w_mode, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb,
        grad_norm=grad_norm, whole=whole, maximize=maximize, factor=factor, found=found,
    )  # fmt: skip
    lists = [params, grads, exp_avgs, exp_avg_sqs]
    if not kernels_take(lists) or walks(lists, lows) is not None:
        _layerwise_maths.lamb(lists, lows, step, o)
        return
    from . import _layerwise_triton

    _layerwise_triton.lamb([params, laid_out_like(params, grads), exp_avgs, exp_avg_sqs], lows, step, o)


def novograd_(
    params: list[Tensor], grads: Sequence[Tensor], exp_avgs: list[Tensor], norms: Tensor,
    lows: Lows, step: Tensor, *, lr: float | Tensor,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
    bias_correction: bool = True, grad_averaging: bool = True, reg_inside_moment: bool = False, norm_type: int = 2,
    init_zero: bool = False, maximize: bool = False, factor: Tensor | None = None, found: Tensor | None = None,
    whole: Whole | None = None,
) -> None:  # fmt: skip
    """One step of NovoGrad (Ginsburg et al. 2019), in place, with the options of Apex's `FusedNovoGrad`.

    `norms`: (number of parameters,) float32, the running norm of each tensor's gradient, not its square; what it
    holds before the first step does not matter. With `norm_type` 2 squares of norms are averaged, with 0 the largest
    magnitudes themselves. `init_zero`: the average starts from 0 instead of from the first norm.
    `reg_inside_moment`: weight decay goes into the first moment together with the normed gradient; else the first
    moment is of bare gradients, and norm and weight decay come in when it is applied. `whole`: as in `lamb_`. The rest
    is as in `adam_`.

    Raises `ValueError` for any other `norm_type`.
    """
    if norm_type not in (0, 2):
        raise ValueError(f"norm_type is {norm_type!r}; write 2 for the L2 norm, 0 for the largest magnitude")
    if not params:
        return
    o = NovoGradOptions(
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
        grad_averaging=grad_averaging, reg_inside_moment=reg_inside_moment, norm_type=norm_type, init_zero=init_zero,
        whole=whole, maximize=maximize, factor=factor, found=found,
    )  # fmt: skip
    lists = [params, grads, exp_avgs]
    if not kernels_take(lists) or walks(lists, lows) is not None:
        _layerwise_maths.novograd(lists, norms, lows, step, o)
        return
    from . import _layerwise_triton

    _layerwise_triton.novograd([params, laid_out_like(params, grads), exp_avgs], norms, lows, step, o)
