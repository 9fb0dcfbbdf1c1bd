"""The name under which Apex kept its CUDA version. Here one class serves every device."""

from __future__ import annotations

from .sync_batchnorm import SyncBatchNorm
from .sync_batchnorm_kernel import SyncBatchnormFunction

__all__ = ["SyncBatchNorm", "SyncBatchnormFunction"]
