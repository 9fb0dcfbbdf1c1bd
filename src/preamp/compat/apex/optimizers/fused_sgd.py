"""FusedSGD."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.optim.optimizer import required

from ....errors import OptimizerError
from .. import _amp_c, _steps
from ._base import ApexOptimizer, constructor


class FusedSGD(ApexOptimizer):
    """Gradient descent with momentum, dampening and Nesterov's look ahead, as `torch.optim.SGD` defines them.

    `lr` must be given, here or in every group. `wd_after_momentum`: weight decay is added to the update instead of to
    the gradient. Parameters may be of several floating dtypes; 16-bit ones are stepped in float32 and rounded once,
    and their "momentum_buffer" is float32. `materialize_master_grads=False` is taken and
    makes no difference: `amp` hands float32 gradients over in any case. The step goes by
    `.grad`, divided by `most_recent_scale` if that is not 1. Raises ValueError for
    hyper-parameters out of range, RuntimeError for sparse gradients.
    """

    wide_states = ("momentum_buffer",)
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

    def _advance(self) -> None:
        for group in self.param_groups:
            fresh: list[Parameter] = []
            going: list[Parameter] = []
            for param in self.present(group)[0]:
                started = self.state.get(param, {}).get("momentum_buffer") is not None
                (going if started or not group["momentum"] else fresh).append(param)
            self._step(group, going, first=False)
            self._step(group, fresh, first=True)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def _step(self, group: dict[str, Any], params: list[Parameter], first: bool) -> None:
        scale = self.most_recent_scale
        inverse = params and scale != 1.0
        factor = torch.full((), 1.0 / scale, dtype=torch.float32, device=params[0].device) if inverse else None
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        _steps.sgd(
            params, [p.grad for p in params if p.grad is not None],
            self.states(params, "momentum_buffer") if group["momentum"] else [], first=first, factor=factor,
            wd_after_momentum=self.wd_after_momentum, **{name: group[name] for name in names},
        )  # fmt: skip
