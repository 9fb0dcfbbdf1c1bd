"""FusedAdagrad."""

from __future__ import annotations

from .. import _amp_c, _steps
from ._base import ApexOptimizer, constructor


class FusedAdagrad(ApexOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011) with Apex's arguments; the sums of squares are the state "sum".

    `adagrad_w_mode`: weight decay shrinks the parameter, else it is added to the gradient. Parameters may be of several
    floating dtypes; those of 16 bits have float32 sums and are stepped in float32. Raises RuntimeError for
    sparse gradients, ValueError for hyper-parameters out of range.
    """

    wide_states = ("sum",)
    multi_tensor_adagrad = staticmethod(_amp_c.multi_tensor_adagrad)

    adagrad_w_mode: bool

    __init__ = constructor(
        "set_grad_none", "adagrad_w_mode",
        lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False,
    )  # fmt: skip

    def _advance(self) -> None:
        for group in self.param_groups:
            params, grads = self.present(group)
            options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            _steps.adagrad(params, grads, self.states(params, "sum"), decoupled=bool(self.adagrad_w_mode), **options)
