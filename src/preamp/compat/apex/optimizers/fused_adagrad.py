"""FusedAdagrad."""

from __future__ import annotations

from typing import Any

from ....optim import Adagrad
from ._base import ApexOptimizer, constructor


class FusedAdagrad(ApexOptimizer, Adagrad):
    """Adagrad (Duchi, Hazan and Singer 2011) with Apex's arguments; the sums of squares are the state "sum".

    `adagrad_w_mode`: weight decay shrinks the parameter, else it is added to the gradient. Parameters may be of several
    floating dtypes; those of 16 bits have float32 sums and are stepped in float32. Raises RuntimeError for
    sparse gradients, ValueError for hyper-parameters out of range.
    """

    counts_by_group = False

    adagrad_w_mode: bool

    __init__ = constructor(
        "set_grad_none", "adagrad_w_mode",
        lr=1e-2, eps=1e-10, weight_decay=0.0, set_grad_none=True, adagrad_w_mode=False,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        self.shrinks = bool(self.adagrad_w_mode)
        super()._begin(params, {**defaults, "initial_accumulator_value": 0.0}, master)
