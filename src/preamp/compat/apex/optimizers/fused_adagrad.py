"""FusedAdagrad."""

from __future__ import annotations

from typing import Any

from ....kernels import AdagradOptions, Tensors, adagrad
from .. import _amp_c
from ._base import ApexOptimizer, Group, Parameters, constructor


class FusedAdagrad(ApexOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011) with Apex's arguments; the sums of squares are the state "sum".

    `adagrad_w_mode`: weight decay shrinks the parameter, else it is added to the gradient. Parameters may be of several
    floating dtypes; those of 16 bits have float32 sums and are stepped in float32. Raises RuntimeError for
    sparse gradients, ValueError for hyper-parameters out of range.
    """

    kernel, options, state_names = staticmethod(adagrad), AdagradOptions, ("sum",)
    multi_tensor_adagrad = staticmethod(_amp_c.multi_tensor_adagrad)

    adagrad_w_mode: bool

    __init__ = constructor(
        "set_grad_none", "adagrad_w_mode",
        lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False,
    )  # fmt: skip

    def step_group(self, group: Group, params: Parameters, grads: Tensors, **more: Any) -> None:
        """Without a count of steps, since the learning rate does not fall with it."""
        self.take(group, params, grads, step=1, shrinks=bool(self.adagrad_w_mode), **more)
