"""Apex's fused optimizers, on preamp's kernels: on any device, with nothing to compile."""

from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer  # not for `import *`: fp16_utils has another
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_lamb import FusedLAMB
from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad
from .fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
