"""FusedSGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ....errors import OptimizerError
from ....kernels import SGDOptions, Tensors, sgd
from .. import _amp_c
from ._base import ApexOptimizer, Group, Parameters, constructor


class FusedSGD(ApexOptimizer):
    """Gradient descent with momentum, dampening and Nesterov's look ahead, as `torch.optim.SGD` defines them.

    `lr` must be given, here or in every group. `wd_after_momentum`: weight decay is added to the update instead of to
    the gradient. Parameters may be of several floating dtypes; 16-bit ones are stepped in float32 and rounded once,
    and their "momentum_buffer" is float32. `materialize_master_grads=False` is taken and
    makes no difference: `amp` hands float32 gradients over in any case. The step goes by
    `.grad`, divided by `most_recent_scale` if that is not 1. Raises ValueError for
    hyper-parameters out of range, RuntimeError for sparse gradients.
    """

    kernel, options, state_names = staticmethod(sgd), SGDOptions, ("momentum_buffer",)
    multi_tensor_sgd = staticmethod(_amp_c.multi_tensor_sgd)

    wd_after_momentum: bool
    most_recent_scale: float

    __init__ = constructor(
        "wd_after_momentum", "materialize_master_grads", "set_grad_none",
        lr=required, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, wd_after_momentum=False,
        materialize_master_grads=True, set_grad_none=False,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any]) -> None:
        momentum, dampening = defaults["momentum"], defaults["dampening"]
        if defaults["nesterov"] and (momentum <= 0 or dampening != 0):
            raise OptimizerError(
                f"nesterov=True with momentum={momentum!r} and dampening={dampening!r}: Nesterov momentum requires a "
                "momentum and zero dampening, since it looks ahead along the momentum"
            )
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        super()._begin(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    def _advance(self, factor: Tensor | None = None, found: Tensor | None = None) -> None:
        super()._advance(factor, found)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False

    def step_group(self, group: Group, params: Parameters, grads: Tensors, **more: Any) -> None:
        """Momentum buffers that are new become the gradient itself."""
        if params and self.most_recent_scale != 1.0:
            device = params[0].device
            more["factor"] = torch.full((), 1.0 / self.most_recent_scale, dtype=torch.float32, device=device)
        started = [self.state.get(param, {}).get("momentum_buffer") is not None for param in params]
        for first in (False, True) if group["momentum"] else (False,):
            own = [i for i, there in enumerate(started) if not group["momentum"] or there != first]
            self.take(
                group, [params[i] for i in own], [grads[i] for i in own], step=None, first=first,
                shrinks=self.wd_after_momentum, **more,
            )  # fmt: skip

    def state_names_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """A buffer where there is momentum."""
        return self.state_names if group["momentum"] else ("",)
