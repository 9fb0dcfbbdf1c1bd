"""What code around Apex's kernels asks of autocast."""

from __future__ import annotations

from typing import Any

import torch

from ...tree import cast_floating


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, floating tensors in autocast's dtype for a GPU where it is enabled."""
    if not torch.is_autocast_enabled("cuda"):
        return args
    cast: tuple[Any, ...] = cast_floating(args, torch.get_autocast_dtype("cuda"))
    return cast
