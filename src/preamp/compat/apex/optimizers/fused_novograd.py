"""FusedNovoGrad."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ....formats import LOW_DTYPES
from ....kernels import global_norm
from ....ledger import Bucket
from ....optim import NovoGrad
from ._base import ApexOptimizer, Group, constructor


class FusedNovoGrad(ApexOptimizer, NovoGrad):
    """NovoGrad (Ginsburg et al. 2019, "Stochastic gradient methods with layer-wise adaptive moments for training of
    deep networks", arXiv:1905.11286), with Apex's arguments.

    `norm_type`: 2 for the L2 norm of a tensor's gradient, 0 for its largest magnitude. `init_zero`: the running norm
    starts from 0, else from the first one. `reg_inside_moment`: weight decay goes into the first moment.
    `grad_averaging`: a new gradient weighs 1 - beta1 there, else 1. The first moment is the state "exp_avg", float32
    for 16-bit parameters; the running norm, not its square, is the state "norm", 0-d float32. A state_dict has the
    norms where Apex's has them. Raises RuntimeError for `amsgrad=True`, another `norm_type` and sparse gradients,
    ValueError for hyper-parameters out of range.
    """

    __init__ = constructor(
        "set_grad_none",
        lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False,
        reg_inside_moment=False, grad_averaging=True, norm_type=2, init_zero=False, set_grad_none=True,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        if defaults["norm_type"] not in (0, 2):
            raise RuntimeError(
                "FusedNovoGrad only supports the L2 and the infinity norm, and "
                f"norm_type={defaults['norm_type']!r} is neither: write 2 or 0"
            )
        self.moment_mode = 0 if defaults.pop("reg_inside_moment") else 1
        super()._begin(params, defaults, master)

    def new_state(self, name: str, group: Group, param: Parameter, dtype: torch.dtype) -> Tensor:
        """Zeros; the norm of a gradient that comes when the group's count says that all have started."""
        if name == "norm" and param.grad is not None and group["step"] > 0 and not group["init_zero"]:
            order = 2.0 if group["norm_type"] == 2 else math.inf
            return global_norm([param.grad], order, device=param.device)
        return super().new_state(name, group, param, dtype)

    def _options(self, bucket: Bucket, **more: Any) -> Any:
        return replace(super()._options(bucket, **more), reg_inside_moment=self.moment_mode == 0)

    def state_dict(self) -> dict[str, Any]:
        """As Apex's: the running norms are `param_group["exp_avg_sq"]`, two tensors, in the order of the parameters.

        They are those of the group's 16-bit parameters and of its others that have been stepped. Loading finds them.
        """
        saved = super().state_dict()
        states = {key: dict(row) for key, row in saved["state"].items()}
        for own, group in zip(self.param_groups, saved["param_groups"], strict=True):
            norms: tuple[list[Tensor], list[Tensor]] = ([], [])
            for param, key in zip(own["params"], group["params"], strict=True):
                if "norm" in states.get(key, {}):
                    norms[param.dtype not in LOW_DTYPES].append(states[key].pop("norm"))
            if any(norms):
                group["exp_avg_sq"] = [torch.stack(each) if each else torch.zeros(0) for each in norms]
        return {**saved, "state": states}
