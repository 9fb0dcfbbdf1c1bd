"""FusedSGD."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import required

from ....optim import SGD
from .. import _amp_c
from ._base import ApexOptimizer, Group, constructor


class FusedSGD(ApexOptimizer, SGD):
    """Gradient descent with momentum, dampening and Nesterov's look ahead, as `torch.optim.SGD` defines them.

    `lr` must be given, here or in every group. `wd_after_momentum`: weight decay is added to the update instead of to
    the gradient. Parameters may be of several floating dtypes; 16-bit ones are stepped in float32 and rounded once,
    and their "momentum_buffer" is float32. `materialize_master_grads=False` is taken and
    makes no difference: `amp` hands float32 gradients over in any case. Raises ValueError for hyper-parameters out of
    range, RuntimeError for sparse gradients.
    """

    counts_by_group = False
    multi_tensor_sgd = staticmethod(_amp_c.multi_tensor_sgd)

    wd_after_momentum: bool

    __init__ = constructor(
        "wd_after_momentum", "materialize_master_grads", "set_grad_none",
        lr=required, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False,
        materialize_master_grads=True, set_grad_none=False,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        self.shrinks = bool(self.wd_after_momentum)
        super()._begin(params, defaults, master)

    def _taken_before(self, group: Group, step: Any) -> None:
        return None
