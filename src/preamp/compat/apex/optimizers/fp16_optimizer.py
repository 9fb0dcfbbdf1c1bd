"""FP16_Optimizer, where it was in 2018."""

from ..contrib.optimizers.fp16_optimizer import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
