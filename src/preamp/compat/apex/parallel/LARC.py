"""Layer-wise adaptive rates on top of any optimizer: each gradient is scaled by the size of its parameter.

Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks" (2017): with weights w, gradient g,
weight decay b and trust coefficient t, the layer's rate is

    local = t |w| / (|g| + b |w| + eps),

and the gradient handed to the optimizer is (g + b w) * local. LARC clips: local becomes min(local / lr, 1), so that
no layer moves faster than the optimizer's own rate lets it.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ....errors import OptimizerError
from ....formats import LOW_DTYPES
from ....kernels import l2_norms


def _forwarded(name: str, doc: str) -> property:
    """An attribute of the wrapped optimizer, which may be set."""
    return property(attrgetter(f"optim.{name}"), lambda self, value: setattr(self.optim, name, value), doc=doc)


class LARC:
    """Wraps `optimizer`: `step()` rescales the gradients of every parameter, then lets the optimizer step.

    The optimizer's weight decay moves into the gradient for the duration of the step. A parameter whose norm or
    whose gradient's norm is zero is left as it is. Norms are taken in float32, or float64 for float64 parameters,
    and nothing waits for the device. `.grad` is changed in place. With `clip=False` the local rate multiplies the
    optimizer's own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    param_groups = _forwarded("param_groups", "The optimizer's parameter groups, themselves.")
    state = _forwarded("state", "The optimizer's state, itself.")

    def __getattr__(self, name: str) -> Any:
        """Everything else that is public is the optimizer's: state_dict, zero_grad, add_param_group, defaults, ..."""
        if name.startswith("_") or name == "optim":  # what amp and torch put on an optimizer; while unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        settings = f"trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}"
        return f"LARC({settings}, optimizer={self.optim!r})"

    def step(self) -> None:
        """Rescale the gradients and step. It takes no closure: LARC changes the gradients that a closure would remake.

        OptimizerError for a sparse gradient, before anything is changed.
        """
        self._refuse_sparse()
        decays: list[tuple[dict[str, Any], Any]] = []
        try:
            for group in self.optim.param_groups:
                decay = group.get("weight_decay", 0.0)
                if "weight_decay" in group:
                    decays.append((group, decay))
                    group["weight_decay"] = 0.0 * decay  # a tensor stays a tensor
                self._rescale(group, decay)
            self.optim.step()
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay

    def _refuse_sparse(self) -> None:
        for group in self.optim.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise OptimizerError(
                        f"LARC got a {parameter.grad.layout} gradient for a parameter of shape "
                        f"{tuple(parameter.shape)}: its weight decay would make it dense. Build the embedding with "
                        "sparse=False, or give it an optimizer without LARC."
                    )

    @torch.no_grad()
    def _rescale(self, group: dict[str, Any], decay: Any) -> None:
        """G <- (g + decay * w) * rate for every parameter of a group, one list of tensors per dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for parameters in alike.values():
            self._rescale_alike(parameters, group["lr"], decay)

    def _rescale_alike(self, parameters: list[Tensor], lr: Any, decay: Any) -> None:
        weights = [p.detach() for p in parameters]
        grads = [p.grad.detach() for p in parameters if p.grad is not None]
        weight_norm, grad_norm = _norms(weights), _norms(grads)
        rate = self.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        alive = (weight_norm != 0) & (grad_norm != 0)
        rate = torch.where(alive, rate, 1.0)
        shares = torch.where(alive, decay, torch.zeros_like(rate))
        for grad, weight, one_rate, share in zip(grads, weights, rate.unbind(), shares.unbind(), strict=True):
            grad.addcmul_(weight, share.to(weight.dtype)).mul_(one_rate)


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor in float32 or wider, (tensors,); of 16-bit ones without copying them."""
    if tensors[0].dtype in LOW_DTYPES:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.stack(l2_norms(tensors))
