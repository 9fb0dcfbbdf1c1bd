"""FusedMixedPrecisionLamb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ._base import constructor
from .fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB (You et al. 2020, arXiv:1904.00962) whose learning rate, count, skip and loss scale stay on the device.

    `step`: how many steps were taken before. `reduced_precision_dtype`: parameters of this dtype, torch.float16 or
    torch.bfloat16, get float32 masters, kept in the state under "master". `param_group["lr"]` is a 0-d float32
    tensor and `param_group["step"]` an int32 one of one entry. Under a `GradScaler` gradients are unscaled inside the
    step, and clipped by their true norm. The rest is as in `FusedLAMB`.
    """

    on_device = True

    reduced_precision_dtype: torch.dtype | None

    __init__ = constructor(
        "adam_w_mode", "use_nvlamb", "reduced_precision_dtype",
        lr=1e-3, step=0, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
        adam_w_mode=True, grad_averaging=True, max_grad_norm=1.0, use_nvlamb=False, reduced_precision_dtype=None,
    )  # fmt: skip

    def _begin(self, params: Any, defaults: dict[str, Any], master: str | None = None) -> None:
        super()._begin(params, defaults, "float32")

    @property
    def param_groups_full_precision(self) -> list[dict[str, list[Tensor | None]]]:
        """The masters as they lie in the groups; None where a parameter has none, or has not been stepped yet."""
        return self.masters_by_group()

    def is_mastered(self, param: Parameter) -> bool:
        """Parameters of `reduced_precision_dtype`, and those of which a session keeps masters."""
        return super().is_mastered(param) and (self._lent or param.dtype is self.reduced_precision_dtype)
