"""SGD and Adagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import AdagradOptions, SGDOptions, adagrad, sgd
from ..ledger import Bucket
from ._base import FusedOptimizer
from ._loading import check_number
from ._rounded import CountsForChance


class SGD(CountsForChance):
    """Gradient descent with the arguments, groups and state_dict of `torch.optim.SGD`: momentum, dampening, Nesterov.

    `foreach` and `fused` are taken for compatibility. `master`, `rounding` and `seed` are those of `Adam`.

    >>> optimizer = preamp.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    """

    kept = ("momentum_buffer",)
    options, kernel = SGDOptions, staticmethod(sgd)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = "float32",
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, defaults, master, rounding, seed)

    def check_options(self, group: dict[str, Any]) -> None:
        """Check the options of a group: Nesterov's form needs momentum, and no dampening."""
        super().check_options(group)
        momentum, dampening = group["momentum"], group["dampening"]
        check_number("dampening", dampening, low=-float("inf"))
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise OptimizerError(
                f"nesterov=True with momentum={momentum!r} and dampening={dampening!r}: it looks ahead along the "
                "momentum, so it needs momentum above 0 and dampening=0"
            )

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Name the state: the momentum buffer, where there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make a momentum buffer of zeros, which the first step replaces by its gradient."""
        self.unstarted.add(param)
        return super().new_state(name, group, param, dtype)

    def _advance(self, bucket: Bucket, gradients: list[Tensor], found: Tensor | None = None, **more: Any) -> None:
        first = bucket.params[0] in self.unstarted
        if first and found is not None and bucket.group["dampening"] == 0:
            first = False  # zeros times the momentum, plus the gradient: the same, and right if this is skipped
        elif first and found is not None and bool(found):  # only the host can tell the next step that it is the first
            return
        self.unstarted.difference_update(bucket.params)
        super()._advance(bucket, gradients, found=found, **more, first=first)


class Adagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011) with the arguments, groups and state_dict of `torch.optim.Adagrad`.

    Dense gradients only.

    Args:
        master: "float32" keeps masters of 16-bit parameters, None steps them in their own dtype.

    >>> optimizer = preamp.optim.Adagrad(model.parameters(), lr=1e-2)
    """

    kept = ("sum",)
    options, kernel = AdagradOptions, staticmethod(adagrad)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master: str | None = "float32",
    ) -> None:
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
            "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, defaults, master)

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make the sum of squared gradients at its initial value."""
        return torch.full_like(
            param, group["initial_accumulator_value"], dtype=dtype, memory_format=torch.preserve_format
        )
