"""The name under which Apex kept its CUDA version. Here one class serves every device."""

from __future__ import annotations

from preamp.compat.apex.parallel.sync_batchnorm import SyncBatchNorm
from preamp.compat.apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction

__all__ = ["SyncBatchNorm", "SyncBatchnormFunction"]
