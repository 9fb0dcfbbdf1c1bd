"""LAMB and NovoGrad, which torch.optim does not have: Adam's relatives for large batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import OptimizerError
from ..kernels import LambOptions, NovoGradOptions, ShardSum, global_norm, lamb, novograd
from ..ledger import Bucket, Buckets, Collected
from ..parallel import Agreement, ShardReduction
from ._base import FusedOptimizer


class LAMB(FusedOptimizer):
    """LAMB (You et al. 2020): each tensor's update is scaled by norm of the parameter over norm of the update.

    The arguments are those of Apex's FusedLAMB; `lr`, `betas`, `eps`, `weight_decay` are Adam's. Norms of DTensors are
    those of the whole tensors.

    Args:
        bias_correction: Whether moments are corrected for their start at zero.
        grad_averaging: Whether a new gradient weighs 1 - beta1 in the first moment, else 1.
        adam_w_mode: Whether weight decay goes into the update, else into the gradient.
        max_grad_norm: All gradients are first shrunk so that their common norm is at most this; None: not.
        use_nvlamb: Whether to scale the updates of tensors without weight decay, too.
        master: "float32" keeps masters of 16-bit parameters, None steps them in their own dtype.

    >>> optimizer = preamp.optim.LAMB(model.parameters(), lr=2e-3)
    """

    kept = ("exp_avg", "exp_avg_sq")
    options, kernel = LambOptions, staticmethod(lamb)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        adam_w_mode: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        maximize: bool = False,
        master: str | None = "float32",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "grad_averaging": grad_averaging, "adam_w_mode": adam_w_mode, "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, master)

    def _prepare(self) -> None:
        super()._prepare()
        self._grad_norm: Tensor | None = None
        self._agreed: tuple[Buckets, Agreement] | None = None

    def _before_buckets(self, collected: Collected, factor: Tensor | None) -> None:
        """Compute the norm that `max_grad_norm` limits: that of all groups together."""
        gradients = [gradient for _, own in collected for gradient in own]
        if any(bucket.sharded for bucket, _ in collected):
            buckets = self._buckets[None]
            if self._agreed is None or self._agreed[0] is not buckets:
                params = [param for bucket, _ in collected for param in bucket.params]
                self._agreed = buckets, Agreement(params)
            norm = self._agreed[1].norm(gradients)
        else:
            norm = global_norm(gradients)
        self._grad_norm = norm if factor is None else norm * factor.to(norm.device)

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        super()._advance(bucket, gradients, **more, grad_norm=self._grad_norm, shard_sum=_shard_sum(bucket))


class NovoGrad(FusedOptimizer):
    """NovoGrad (Ginsburg et al. 2019): gradients are normed tensor by tensor before they enter the first moment.

    The arguments are those of Apex's FusedNovoGrad; `lr`, `betas`, `eps`, `weight_decay` are Adam's.

    Args:
        bias_correction: Whether moments are corrected for their start at zero.
        reg_inside_moment: Whether weight decay goes into the first moment, else into the update.
        grad_averaging: Whether a new gradient weighs 1 - beta1 in the first moment, else 1.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude.
        init_zero: Whether the running norm starts from 0, else from the first one.
        master: "float32" keeps masters of 16-bit parameters, None steps them in their own dtype.

    >>> optimizer = preamp.optim.NovoGrad(model.parameters(), lr=1e-2)
    """

    kept = ("exp_avg", "norm")
    options, kernel = NovoGradOptions, staticmethod(novograd)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        maximize: bool = False,
        master: str | None = "float32",
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "reg_inside_moment": reg_inside_moment, "grad_averaging": grad_averaging, "norm_type": norm_type,
            "init_zero": init_zero, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, master)

    def check_options(self, group: dict[str, Any]) -> None:
        """Check the options of a group, the kind of norm among them."""
        super().check_options(group)
        if (norm_type := group["norm_type"]) not in (0, 2):
            raise OptimizerError(f"norm_type={norm_type!r}: write 2 for the L2 norm, or 0 for the largest magnitude")

    def new_state(self, name: str, group: dict[str, Any], param: Parameter, dtype: torch.dtype) -> Tensor:
        """Make a state for the first step: zeros, one number for the norm."""
        if name == "norm":
            return torch.zeros((), dtype=dtype, device=param.device)
        return super().new_state(name, group, param, dtype)

    def state_dtype(self, name: str, param: Parameter) -> torch.dtype:
        """The dtype of a state: float32 for the norm."""
        return torch.float32 if name == "norm" else super().state_dtype(name, param)

    def state_form(self, name: str, param: Tensor) -> torch.Size | int:
        """The shape of a state: one number for the norm."""
        return 1 if name == "norm" else super().state_form(name, param)

    def _advance(self, bucket: Bucket, gradients: list[Tensor], **more: Any) -> None:
        exp_avgs, shown = bucket.storage.states
        norms = torch.stack(list(shown))
        stacked = replace(bucket, storage=replace(bucket.storage, states=(exp_avgs, [norms])))
        super()._advance(stacked, gradients, **more, shard_sum=_shard_sum(bucket))
        torch._foreach_copy_(list(shown), norms.unbind())


def _shard_sum(bucket: Bucket) -> ShardSum | None:
    """What makes norms of shards those of whole tensors; None where there are none."""
    if bucket.sharded and bucket.shard_sum is None:
        bucket.shard_sum = ShardReduction(bucket.params)
    return bucket.shard_sum
