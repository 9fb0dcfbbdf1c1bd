"""FusedSGD, FusedAdagrad, FusedNovoGrad, FusedLAMB and FusedMixedPrecisionLamb."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import required

from ....kernels import global_norm
from ....ledger import Bucket
from ....optim import LAMB, SGD, Adagrad, NovoGrad
from .. import _amp_c
from ._base import ApexOptimizer, Group, constructor


class FusedSGD(ApexOptimizer, SGD):
    """Gradient descent with momentum, dampening and Nesterov's look ahead, as `torch.optim.SGD` defines them.

    `lr` must be given, here or in every group. Parameters may be of several floating dtypes; 16-bit ones are stepped in
    float32 and rounded once, and their "momentum_buffer" is float32. `materialize_master_grads=False` is taken and
    makes no difference: `amp` hands float32 gradients over in any case. Raises ValueError for hyper-parameters out of
    range and sparse gradients, RuntimeError for `wd_after_momentum=True`.
    """

    counts_by_group = False
    multi_tensor_sgd = staticmethod(_amp_c.multi_tensor_sgd)

    __init__ = constructor(
        "wd_after_momentum", "materialize_master_grads", "set_grad_none",
        lr=required, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False,
        materialize_master_grads=True, set_grad_none=False,
    )  # fmt: skip

    def _taken_before(self, group: Group, step: Any) -> None:
        return None


class FusedAdagrad(ApexOptimizer, Adagrad):
    """Adagrad (Duchi, Hazan and Singer 2011) with Apex's arguments; the sums of squares are the state "sum".

    Weight decay is added to the gradient. Parameters may be of several floating dtypes; those of 16 bits have float32
    sums and are stepped in float32. Raises RuntimeError for `adagrad_w_mode=True`, ValueError for sparse gradients and
    hyper-parameters out of range.
    """

    counts_by_group = False

    __init__ = constructor(
        "set_grad_none", "adagrad_w_mode",
        lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        super()._begin(params, {**defaults, "initial_accumulator_value": 0.0}, master)


class FusedNovoGrad(ApexOptimizer, NovoGrad):
    """NovoGrad (Ginsburg et al. 2019, "Stochastic gradient methods with layer-wise adaptive moments for training of
    deep networks", arXiv:1905.11286), with Apex's arguments.

    `norm_type`: 2 for the L2 norm of a tensor's gradient, 0 for its largest magnitude. `init_zero`: the running norm
    starts from 0, else from the first one. `reg_inside_moment`: weight decay goes into the first moment.
    `grad_averaging`: a new gradient weighs 1 - beta1 there, else 1. The first moment is the state "exp_avg", float32
    for 16-bit parameters; the running norm, not its square, is the state "norm", 0-d float32; loading finds it where
    Apex saved it. Raises RuntimeError for `amsgrad=True`, ValueError for sparse gradients and hyper-parameters out of
    range.
    """

    __init__ = constructor(
        "set_grad_none",
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
        reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True,
    )  # fmt: skip

    def new_state(self, name: str, group: Group, param: Parameter, dtype: torch.dtype) -> Tensor:
        """Zeros; the norm of a gradient that comes when the group's count says that all have started."""
        if name == "norm" and param.grad is not None and group["step"] > 0 and not group["init_zero"]:
            order = 2.0 if group["norm_type"] == 2 else math.inf
            return global_norm([param.grad], order, device=param.device)
        return super().new_state(name, group, param, dtype)


class FusedLAMB(ApexOptimizer, LAMB):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning", arXiv:1904.00962), with Apex's arguments.

    A tensor's Adam update u, plus weight decay, is scaled by |parameter| / |u|; by 1 where either norm is 0, and for
    groups without weight decay unless `use_nvlamb`. First all gradients of all groups are divided by
    max(1, their global norm / `max_grad_norm`); 0 or None: they are not. `grad_averaging`: a new gradient
    weighs 1 - beta1 in the first moment, else 1. `adam_w_mode`: weight decay is part of the update, else of the
    gradient. Parameters may be of several floating dtypes; those of 16 bits have float32 moments. The step counter
    is `param_group["step"]`. Raises RuntimeError for `amsgrad=True`, ValueError for sparse gradients and
    hyper-parameters out of range.
    """

    multi_tensor_lamb = staticmethod(_amp_c.multi_tensor_lamb)

    adam_w_mode: bool
    use_nvlamb: bool

    __init__ = constructor(
        "adam_w_mode", "set_grad_none", "use_nvlamb",
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
        adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False,
    )  # fmt: skip

    def _options(self, bucket: Bucket, **more: Any) -> Any:
        own = {"adam_w_mode": bool(self.adam_w_mode), "use_nvlamb": bool(self.use_nvlamb)}
        return replace(super()._options(bucket, **more), **own)


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB (You et al. 2020, arXiv:1904.00962) whose learning rate, count, skip and loss scale stay on the device.

    `step`: how many steps were taken before. `reduced_precision_dtype`: parameters of this dtype, torch.float16 or
    torch.bfloat16, get float32 masters, kept in the state under "master". `param_group["lr"]` is a 0-d float32
    tensor and `param_group["step"]` an int32 one of one entry. Under a `GradScaler` gradients are unscaled inside the
    step, and clipped by their true norm. The rest is as in `FusedLAMB`.
    """

    on_device = True

    reduced_precision_dtype: torch.dtype | None

    __init__ = constructor(
        "adam_w_mode", "use_nvlamb", "reduced_precision_dtype",
        lr=1e-3, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
        adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False, reduced_precision_dtype=None,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        super()._begin(params, defaults, "float32")

    def is_mastered(self, param: Parameter) -> bool:
        """Parameters of `reduced_precision_dtype`, and those of which a session keeps masters."""
        return super().is_mastered(param) and (self._lent or param.dtype is self.reduced_precision_dtype)
