"""FP16_Optimizer as it was in apex.optimizers, later apex.contrib.optimizers: around a fused optimizer."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor

from .._scaler import LossScaler
from ..fp16_utils.fp16_optimizer import FP16_Optimizer as _FP16_Optimizer


class FP16_Optimizer(_FP16_Optimizer):
    """That of apex.fp16_utils, but gradients are unscaled and judged in `step()`, once for all backward passes.

    `static_loss_scale`: a fixed scale, under which a step is skipped after an overflow as well. `dynamic_loss_scale`: a
    scale from 2**16 on, doubled after 1000 clean steps and halved after an overflow, not below 1;
    `dynamic_loss_args`: other arguments of `amp.scaler.LossScaler`. The optimizer may be any.
    """

    def _make_scaler(self, static: float, dynamic: bool, arguments: dict[str, Any] | None) -> LossScaler:
        if dynamic:
            own = {"scale_window": 1000, "min_loss_scale": 1.0, "max_loss_scale": float("inf")}
            return LossScaler("dynamic", **{**own, **(arguments or {})})
        fixed = float(static)  # one that looks for overflows and stays where it is
        return LossScaler("dynamic", fixed, min_loss_scale=fixed, max_loss_scale=fixed)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Make the gradients of the model and of the masters None, or zero them."""
        super().zero_grad(set_grads_to_None)

    def backward(self, loss: Tensor, update_master_grads: bool = False, retain_graph: bool = False) -> None:
        """The backward pass of the scaled loss; gradients add up until `zero_grad`."""
        super().backward(loss, update_master_grads, retain_graph)

    def step(self) -> Any:  # type: ignore[override]
        """Unscale the gradients, step the masters and round them into the model; after an overflow say so instead."""
        self.update_master_grads()
        return super().step()

    cur_scale = _FP16_Optimizer.loss_scale
    fp32_groups = property(attrgetter("fp32_from_fp16_groups"), doc="The masters of 16-bit parameters, by group.")
