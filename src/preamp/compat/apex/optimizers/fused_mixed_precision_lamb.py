"""FusedMixedPrecisionLamb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....formats import LOW_DTYPES
from ._base import constructor
from .fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB (You et al. 2020, arXiv:1904.00962) whose learning rate, count, skip and loss scale stay on the device.

    `step`: how many steps were taken before. `reduced_precision_dtype`: parameters of this dtype, torch.float16 or
    torch.bfloat16, get float32 masters, kept in the state under "master_param". `param_group["lr"]` is a 0-d float32
    tensor and `param_group["step"]` an int32 one of one entry. Under a `GradScaler` gradients are unscaled inside the
    step, and clipped by their true norm. The rest is as in `FusedLAMB`.
    """

    _step_supports_amp_scaling = True

    reduced_precision_dtype: torch.dtype | None

    __init__ = constructor(
        "adam_w_mode", "use_nvlamb", "reduced_precision_dtype",
        lr=1e-3, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
        adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False, reduced_precision_dtype=None,
    )  # fmt: skip

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """The masters as they lie in the groups; None where a parameter has none, or has not been stepped yet."""
        return self.masters_by_group()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group gets a learning rate and a count of its own, on its device."""
        super().add_param_group(param_group)
        self.mend_group(self.param_groups[-1])

    def mend_group(self, group: dict[str, Any]) -> None:
        """Learning rate and step count as tensors on the device, shared with no other group."""
        device = group["params"][0].device if group["params"] else None
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device).clone()
        group["step"] = torch.as_tensor(group["step"], dtype=torch.int32, device=device).reshape(1).clone()

    def wants_master(self, param: Tensor) -> bool:
        """Parameters of `reduced_precision_dtype`."""
        return param.dtype is self.reduced_precision_dtype and param.dtype in LOW_DTYPES
