"""FusedLAMB."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....ledger import Bucket
from ....optim import LAMB
from .. import _amp_c
from ._base import ApexOptimizer, constructor


class FusedLAMB(ApexOptimizer, LAMB):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning", arXiv:1904.00962), with Apex's arguments.

    A tensor's Adam update u, plus weight decay, is scaled by |parameter| / |u|; by 1 where either norm is 0, and for
    groups without weight decay unless `use_nvlamb`. First all gradients of all groups are divided by
    max(1, their global norm / `max_grad_norm`); 0 or None: they are not. `grad_averaging`: a new gradient
    weighs 1 - beta1 in the first moment, else 1. `adam_w_mode`: weight decay is part of the update, else of the
    gradient. Parameters may be of several floating dtypes; those of 16 bits have float32 moments. The step counter
    is `param_group["step"]`. Raises RuntimeError for `amsgrad=True` and sparse gradients, ValueError for
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
