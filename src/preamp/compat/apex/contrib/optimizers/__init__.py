"""The fused optimizers of 2018 and 2019, where NVIDIA moved them; older scripts have them from apex.optimizers."""

from ...optimizers import FP16_Optimizer, FusedLAMB, FusedSGD
from ...optimizers.fused_adam import FusedAdam2018 as FusedAdam

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedLAMB", "FusedSGD"]
