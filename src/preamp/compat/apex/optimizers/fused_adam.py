"""FusedAdam."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ....formats import LOW_DTYPES
from .. import _amp_c, _steps
from ._base import MASTER, ApexOptimizer, Closure, check_hypers, evaluated, refuse_amsgrad
from ._scaling import scaling_of

OF_2018 = frozenset(("amp_scale_adjustment", "eps_inside_sqrt", "max_grad_norm", "use_mt"))


class FusedAdam(ApexOptimizer):
    """Adam (Kingma and Ba 2015), or by default AdamW (Loshchilov and Hutter 2019), with Apex's arguments.

    `adam_w_mode`: weight decay shrinks the parameter, else it is added to the gradient. Parameters: float32, float16,
    bfloat16 or float64, mixed in a group as they come; 16-bit ones have float32 moments and are stepped in float32.
    `master_weights`: they also keep a float32 master, in the state under "master_param". `capturable`: learning rate
    and step count are tensors, and a `GradScaler`'s flag and scale are read on the device, so that a step can be
    captured in a CUDA graph. The step counter is `param_group["step"]`; moments are "exp_avg" and "exp_avg_sq".
    Raises RuntimeError for `amsgrad=True` and sparse gradients, ValueError for hyper-parameters out of range.
    """

    wide_states = ("exp_avg", "exp_avg_sq", MASTER)
    multi_tensor_adam = staticmethod(_amp_c.multi_tensor_adam)
    own_attributes = ("set_grad_none", "adam_w_mode", "capturable", "master_weights", "_step_supports_amp_scaling")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """With arguments of 2018, the optimizer of 2018, which was imported from this place then."""
        if cls is FusedAdam and not OF_2018.isdisjoint(kwargs):
            from ..contrib.optimizers.fused_adam import FusedAdam as Of2018

            return super().__new__(Of2018)
        return super().__new__(cls)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: Any = False,
    ) -> None:
        refuse_amsgrad(amsgrad, "FusedAdam")
        check_hypers(betas, lr=lr, eps=eps, weight_decay=weight_decay)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = bool(master_weights)  # lists of masters were passed too: their values are the model's
        self._step_supports_amp_scaling = capturable
        defaults = {
            "lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]] | None:
        """The masters as they lie in the groups, or None without `master_weights`."""
        return self.masters_by_group() if self.master_weights else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; with `capturable` the group gets a learning rate on its device."""
        super().add_param_group(param_group)
        self.mend_group(self.param_groups[-1])

    def mend_group(self, group: dict[str, Any]) -> None:
        """Learning rate and step count: tensors on the device if they are to be captured, else numbers."""
        device = group["params"][0].device if group["params"] else None
        if self.capturable:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        if "step" in group:
            group["step"] = self._as_count(group["step"], device)

    def _as_count(self, step: Any, device: torch.device | None) -> Any:
        if not self.capturable:
            return int(step)
        return torch.as_tensor(step, dtype=torch.int32, device=device).reshape(1).clone()

    def wants_master(self, param: Tensor) -> bool:
        """16-bit parameters, with `master_weights`."""
        return self.master_weights and param.dtype in LOW_DTYPES

    @torch.no_grad()
    def step(
        self,
        closure: Closure = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        `grad_scaler`: given by `torch.amp.GradScaler.step` when `capturable`. The other arguments belong to a FusedAdam
        that is long gone: RuntimeError.
        """
        if any(old is not None for old in (grads, output_params, scale, grad_norms)):
            raise RuntimeError(
                "FusedAdam.step() no longer takes grads, output_params, scale or grad_norms, which an Apex of 2018 "
                "did: construct it like torch.optim.Adam, leave the gradients in .grad and call step() without them"
            )
        loss = evaluated(closure)
        factor, found = scaling_of(self, grad_scaler if self.capturable else None)
        for group in self.param_groups:
            if not group["params"]:
                continue
            params = self.present(group)
            number = self._counted(group, found)
            _steps.adam(
                params, [p.grad for p in params if p.grad is not None], self.states(params, "exp_avg"),
                self.states(params, "exp_avg_sq"), step=number, lr=group["lr"], betas=group["betas"],
                eps=group["eps"], weight_decay=group["weight_decay"], decoupled=bool(self.adam_w_mode),
                bias_correction=bool(group["bias_correction"]), factor=factor, found=found,
                masters=self.masters(params) if self.master_weights else None,
            )  # fmt: skip
            self.published(params)
        return loss

    def _counted(self, group: dict[str, Any], found: Tensor | None) -> int | Tensor:
        """The number of this step, which is counted unless it is known, here or on the device, to be skipped."""
        if not self.capturable:
            return self.count(group)
        if "step" not in group:
            group["step"] = self._as_count(0, group["params"][0].device)
        step: Tensor = group["step"]
        number = step + 1
        if found is None:
            step.copy_(number)  # in place: a captured graph has to find it where it was
        else:
            step.add_((found.to(step.device) <= 0).to(step.dtype))
        return number


FusedAdam.__new__.__signature__ = inspect.signature(FusedAdam.__init__)  # type: ignore[attr-defined]
