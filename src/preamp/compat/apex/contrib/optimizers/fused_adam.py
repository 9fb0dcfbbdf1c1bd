"""FusedAdam as it was in 2018."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .....kernels import global_norm
from ... import _steps
from ...optimizers._base import Closure, evaluated
from ...optimizers.fused_adam import FusedAdam as _FusedAdam


class FusedAdam(_FusedAdam):
    """AdamW with the arguments, the clipping and the bias correction of Apex's FusedAdam of 2018.

    Bias corrections multiply the learning rate, so that `eps` and weight decay are not corrected. `max_grad_norm`:
    the gradients of each group are clipped to this global norm in the step; 0: they are not. `use_mt` and
    `amp_scale_adjustment` are accepted and make no difference. RuntimeError for `eps_inside_sqrt=True`; the rest is as
    in apex.optimizers.FusedAdam, which makes this one where it gets its arguments.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if eps_inside_sqrt:
            raise RuntimeError(
                f"FusedAdam(eps_inside_sqrt=True) is not here: write FusedAdam(eps={math.sqrt(eps):g}), which is added "
                "to the root and has the same effect on an entry whose gradients are 0"
            )
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay=weight_decay, amsgrad=amsgrad)
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)

    def mend_group(self, group: dict[str, Any]) -> None:
        """As in the class above; Apex of 2018 counted steps by parameter."""
        counts = [int(count) for p in group["params"] if (count := self.state.get(p, {}).get("step")) is not None]
        if counts and "step" not in group:
            group["step"] = max(counts)
        super().mend_group(group)

    @torch.no_grad()
    def step(
        self,
        closure: Closure = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss.

        `grads`: gradients in the place of `.grad`, of any floating dtype; `output_params`: tensors that the stepped
        parameters are written to as well. Each a list of lists by group, or for one group a list. `scale`: what
        gradients are to be divided by. `grad_norms`: the norms of each group's gradients as they are given, where
        they are known. RuntimeError where there are not as many gradients as parameters.
        """
        loss = evaluated(closure)
        groups = self.param_groups
        norms = [None] * len(groups) if grad_norms is None else list(grad_norms)
        each = zip(groups, _by_group(grads, groups), _by_group(output_params, groups), norms, strict=True)
        for group, given, outs, norm in each:
            gradients = [p.grad for p in group["params"]] if given is None else given
            if len(gradients) != len(group["params"]):
                raise RuntimeError(
                    f"FusedAdam.step got {len(gradients)} gradients for {len(group['params'])} parameters of a group: "
                    "write None for parameters without one"
                )
            there = [i for i, gradient in enumerate(gradients) if gradient is not None]
            if given is None:
                self.present(group)  # which complains of what cannot be stepped
            self._advance(group, [group["params"][i] for i in there], [gradients[i] for i in there], scale, norm)
            if outs is not None:
                torch._foreach_copy_(outs, [p.detach() for p in group["params"]])
        return loss

    def _advance(
        self, group: dict[str, Any], params: Sequence[Any], grads: Sequence[Any], scale: float, norm: Any
    ) -> None:
        if not params:
            return
        count = self.count(group)
        beta1, beta2 = group["betas"]
        rate = math.sqrt(1 - beta2**count) / (1 - beta1**count) if group["bias_correction"] else 1.0
        factor = torch.full((), 1.0 / scale, dtype=torch.float32, device=params[0].device)
        limit = group["max_grad_norm"]
        if limit > 0:
            norm = global_norm(grads, device=factor.device) if norm is None else norm
            factor = factor / ((norm * factor + 1e-6) / limit).clamp(min=1.0)
        _steps.adam(
            params, [g if g.dtype is p.dtype else g.to(p.dtype) for g, p in zip(grads, params, strict=True)],
            self.states(params, "exp_avg"), self.states(params, "exp_avg_sq"), step=1, lr=group["lr"] * rate,
            betas=(beta1, beta2), eps=group["eps"], weight_decay=group["weight_decay"], decoupled=True,
            bias_correction=False, factor=factor,
        )  # fmt: skip


def _by_group(given: Any, groups: Sequence[Any]) -> list[Any]:
    """Tensors by group, from a list of lists, or for one group from a list or another iterable."""
    if given is None:
        return [None] * len(groups)
    entries = list(given)
    if entries and isinstance(entries[0], Iterable) and not isinstance(entries[0], Tensor):
        return [list(entry) for entry in entries]
    return [entries]
