"""What this compatibility layer says of itself: warnings on rank 0, lines on stdout that logs are searched for."""

from __future__ import annotations

import sys
import warnings

import torch.distributed as dist

from ...errors import PreampWarning


class DeprecatedFeatureWarning(FutureWarning):
    """An Apex feature that NVIDIA deprecated, then removed in May 2025; it lives on here."""


def has_group() -> bool:
    """Whether this process belongs to an initialised default process group."""
    return dist.is_available() and dist.is_initialized()


def is_rank_zero() -> bool:
    """Whether this process speaks for its group: rank 0, or no process group at all."""
    return not has_group() or dist.get_rank() == 0


def warn(message: str, category: type[Warning] = PreampWarning) -> None:
    """Warn at the line of the script, which may have come here by way of torch's functions."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("preamp", "torch", "contextlib"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def deprecated_warning(message: str) -> None:
    """Warn with `DeprecatedFeatureWarning`, on rank 0 only."""
    if is_rank_zero():
        warn(message, DeprecatedFeatureWarning)
