"""Apex's fused optimizers, on preamp's kernels: on any device, with nothing to compile."""

from ._fused import FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer  # not for `import *`: fp16_utils has another
from .fused_adam import FusedAdam

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
