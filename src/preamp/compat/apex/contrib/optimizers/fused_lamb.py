"""FusedLAMB, which is that of apex.optimizers."""

from ...optimizers import FusedLAMB

__all__ = ["FusedLAMB"]
