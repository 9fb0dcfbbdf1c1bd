"""What code around Apex's kernels asks of autocast."""

from __future__ import annotations

from typing import Any

import torch

from ...tree import cast_floating


def _get_autocast_dtypes() -> list[torch.dtype]:
    """The 16-bit dtypes that a GPU computes in."""
    bfloat16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return [torch.half, torch.bfloat16] if bfloat16 else [torch.half]


def _get_current_dtype(dtype: torch.dtype | None = None) -> torch.dtype:
    """Autocast's dtype on a GPU where it is enabled, else `dtype`, or torch's default."""
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return dtype or torch.get_default_dtype()


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, floating tensors in autocast's dtype for a GPU where it is enabled."""
    if not torch.is_autocast_enabled("cuda"):
        return args
    cast: tuple[Any, ...] = cast_floating(args, torch.get_autocast_dtype("cuda"))
    return cast
