"""FusedAdagrad."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _amp_c, _steps
from ._base import ApexOptimizer


class FusedAdagrad(ApexOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011) with Apex's arguments; the sums of squares are the state "sum".

    `adagrad_w_mode`: weight decay shrinks the parameter, else it is added to the gradient. Parameters may be of several
    floating dtypes; those of 16 bits have float32 sums and are stepped in float32. Raises RuntimeError for
    sparse gradients, ValueError for hyper-parameters out of range.
    """

    wide_states = ("sum",)
    multi_tensor_adagrad = staticmethod(_amp_c.multi_tensor_adagrad)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.set_grad_none = set_grad_none
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def _advance(self) -> None:
        for group in self.param_groups:
            params, grads = self.present(group)
            options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            _steps.adagrad(params, grads, self.states(params, "sum"), decoupled=bool(self.adagrad_w_mode), **options)
