"""FusedSGD, which is that of apex.optimizers."""

from ...optimizers import FusedSGD

__all__ = ["FusedSGD"]
