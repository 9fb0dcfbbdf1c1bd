"""Layer-wise adaptive rates on top of any optimizer: each gradient is scaled by the size of its parameter.

Y. You, I. Gitman, B. Ginsburg, "Large Batch Training of Convolutional Networks" (2017): with weights w, gradient g,
weight decay b and trust coefficient t, the layer's rate is

    local = t |w| / (|g| + b |w| + eps),

and the gradient handed to the optimizer is (g + b w) * local. LARC clips: local becomes min(local / lr, 1), so that
no layer moves faster than the optimizer's own rate lets it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....formats import LOW_DTYPES
from ....kernels import l2_norms
from .._masters import forwarded


class LARC:
    """Wraps `optimizer`: `step()` rescales the gradients of every parameter, then lets the optimizer step.

    The optimizer's weight decay moves into the gradient for the duration of the step. A parameter whose norm or
    whose gradient's norm is zero is left as it is. Norms are taken in float32, or float64 for float64 parameters,
    and nothing waits for the device. `.grad` is changed in place. With `clip=False` the local rate multiplies the
    optimizer's own.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    param_groups = forwarded("optim.param_groups", "The optimizer's parameter groups, themselves.")
    state = forwarded("optim.state", "The optimizer's state, itself.")

    def __getattr__(self, name: str) -> Any:
        """Everything else that is public is the optimizer's: state_dict, zero_grad, add_param_group, defaults, ..."""
        if name.startswith("_") or name == "optim":  # what amp and torch put on an optimizer; while unpickling
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.optim, name)

    def step(self) -> None:
        """Rescale the gradients and step. No closure: LARC changes the gradients that it would remake."""
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

    @torch.no_grad()
    def _rescale(self, group: dict[str, Any], decay: Any) -> None:
        """G <- (g + decay * w) * rate for every parameter of a group, one list of tensors per dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for p in group["params"]:
            if p.grad is not None:
                alike.setdefault((p.dtype, p.device), []).append((p.detach(), p.grad.detach()))
        for pairs in alike.values():
            weight_norm, grad_norm = _norms([weight for weight, _ in pairs]), _norms([grad for _, grad in pairs])
            rate = self.trust_coefficient * weight_norm / (grad_norm + decay * weight_norm + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            alive = (weight_norm != 0) & (grad_norm != 0)
            rate = torch.where(alive, rate, 1.0)
            shares = torch.where(alive, decay, torch.zeros_like(rate))
            for (weight, grad), one_rate, share in zip(pairs, rate.unbind(), shares.unbind(), strict=True):
                grad.addcmul_(weight, share.to(weight.dtype)).mul_(one_rate)


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor in float32 or wider, (tensors,); of 16-bit ones without copying them."""
    if tensors[0].dtype in LOW_DTYPES:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return torch.stack(l2_norms(tensors))
