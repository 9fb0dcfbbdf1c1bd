"""FusedAdam as it was in 2018."""

from ...optimizers.fused_adam import FusedAdam2018 as FusedAdam

__all__ = ["FusedAdam"]
