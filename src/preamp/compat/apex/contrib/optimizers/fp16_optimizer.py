"""FP16_Optimizer, which is that of apex.optimizers."""

from ...optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
